"""Finds copies: a group that another author, or the same one, has sent before is rejected.

Each author has its own streams of tasks (`owns_stream`). Where two authors send the same task reference, the author that does not
own the stream took it from the other. The same prompt may also come up in two streams, and short answers to it may be equal by
chance. There only answers count that are too unlikely to be repeated by chance, judged by the log-probs that both authors claim;
the smaller claim is used, so that nobody is blamed because of invented numbers. Since a copy may arrive first, nothing shows
which of the two is the original: the later group is left out, which is a hint against both authors and proves nothing. Names cost
nothing, and any number of them may repeat an honest author's answers, so such hints count once against each body.

Common tasks (`CommonStreams`) belong to nobody: many authors answer each of them, and short answers are equal by chance. There
an answer that two groups share surprises less the more answers they have to compare. Long answers are not equal by chance,
whatever the later author claims about them. An author that sends the same answers to a common task twice repeats itself as
elsewhere.
"""

import hashlib
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.limits.bounded_maps import BoundedMap
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import RolloutGroup, TaskRef

MIN_SHARED = 0.5
"""A group is a copy if at least this part of its answers is in another group of the same task."""
MIN_SURPRISE_NATS = 40.0
"""Two groups on the same prompt are too alike if their shared answers are this unlikely together.

E^-40 never happens by chance.
"""
_MIN_SHARED_TOKENS = 128
"""On a common task a group is a copy if at least half of its answers are in an earlier one, and these have so many tokens."""
_MAX_PROMPTS = 4096
_GROUPS_PER_PROMPT = 8


@dataclass(slots=True, eq=False)
class _Body:
    """What the groups of one body have in common."""

    author: str
    is_blamed: bool = False
    """Whether a hint has been counted against its author for a group that another author sent, too."""


@dataclass(frozen=True, slots=True)
class _Seen:
    body: _Body
    task: TaskRef
    is_own_stream: bool
    is_common: bool
    """Whether the task is one that all nodes draw."""
    is_original: bool
    """Whether the group is known to be original, as this node sampled or checked it."""
    answers: tuple[bytes, ...]
    """Sorted fingerprints of the texts, repeated ones too."""
    surprise: dict[bytes, float]
    """{fingerprint: -log-prob in nats, as claimed, of the likeliest time it was sampled}"""
    num_tokens: dict[bytes, int]
    """{fingerprint: number of tokens}"""


class CopyWatch:
    """Remembers the groups of the last 4096 prompts, at most 8 of each. Safe from any thread."""

    def __init__(
        self,
        owns_stream: Callable[[str, int], bool],
        blame: Callable[[str, Rejection], object] = lambda author, reason: None,
        *,
        is_common: Callable[[TaskRef], bool] = lambda task: False,
    ) -> None:
        """`owns_stream`: (author, task seed) -> whether the stream is its own. `is_common`: whether all nodes draw a task.

        `blame`: called for an author whose accepted group proves to be a copy (COPIED), and for both authors where nothing shows
        which group is the original (REPLAY).
        """
        self._owns_stream = owns_stream
        self._is_common = is_common
        self._blame = blame
        self._lock = threading.Lock()
        self._seen: BoundedMap[str, deque[_Seen]] = BoundedMap(_MAX_PROMPTS)

    def __len__(self) -> int:
        """The number of prompts that are remembered."""
        return len(self._seen)

    def note(self, groups: Sequence[RolloutGroup]) -> None:
        """Remember own groups, or others that are known to be original."""
        with self._lock:
            for group in groups:
                self._remember(group.prompt_digest, self._described(group, _Body(group.author), is_original=True))

    def take(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        """Remember the groups of one body, and return those that are no copies, each once.

        Raises InvalidRecord with COPIED, and REPLAY where the author repeats itself or nothing is left.
        """
        body = _Body(groups[0].author)
        described = [(group, self._described(group, body)) for group in groups]
        with self._lock:
            alike = [self._alike(group.prompt_digest, seen) for group, seen in described]
            kept: list[tuple[RolloutGroup, _Seen]] = []
            for (group, seen), earlier in zip(described, alike, strict=True):
                if not earlier and not any(_is_same_task(seen, before) for _, before in kept):
                    kept.append((group, seen))
                    self._remember(group.prompt_digest, seen)
            to_blame = [one for one in frozenset().union(*alike) if not one.is_blamed]
            for one in to_blame:
                one.is_blamed = True
        for one in to_blame:
            self._blame(one.author, Rejection.REPLAY)
        if not kept:
            raise InvalidRecord(Rejection.REPLAY, "answers that other authors have sent before")
        if len(kept) < len(groups):
            self._blame(body.author, Rejection.REPLAY)
        return tuple(group for group, _ in kept)

    def _alike(self, digest: str, group: _Seen) -> frozenset[_Body]:
        """The bodies of other authors with these answers, where either author may have copied the other."""
        return frozenset(seen.body for seen in self._seen.get(digest) or () if self._is_alike(group, seen))

    def _is_alike(self, group: _Seen, earlier: _Seen) -> bool:
        """Whether one is a copy of the other and nothing shows which. Raises InvalidRecord where `group` surely is the copy."""
        is_same_task = _is_same_task(group, earlier)
        if group.body.author == earlier.body.author:
            if is_same_task:
                raise InvalidRecord(Rejection.REPLAY, "answers that it has sent before")
        elif is_same_task and not group.is_common and not group.is_own_stream:
            raise InvalidRecord(Rejection.COPIED, f"a task of another's stream with answers of {earlier.body.author}")
        elif is_same_task and not group.is_common and not earlier.is_own_stream:
            self._blame(earlier.body.author, Rejection.COPIED)
        elif is_same_task and group.is_common and _shares_long_answers(group, earlier):
            raise InvalidRecord(Rejection.REPLAY, f"long answers to a common task that {earlier.body.author} has sent")
        elif _surprise(group, earlier) >= MIN_SURPRISE_NATS:
            if earlier.is_original:
                raise InvalidRecord(Rejection.COPIED, f"answers of {earlier.body.author}, which chance does not repeat")
            return True
        return False

    def _described(self, group: RolloutGroup, body: _Body, *, is_original: bool = False) -> _Seen:
        surprise: dict[bytes, float] = {}
        num_tokens: dict[bytes, int] = {}
        answers = []
        for rollout in group.rollouts:
            written = "\x1e".join(rollout.answers)
            text = hashlib.blake2b(written.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            nats = -sum(rollout.logprobs)
            surprise[text] = min(nats, surprise.get(text, nats))
            num_tokens[text] = len(rollout.token_ids)
            answers.append(text)
        is_own, is_common = self._owns_stream(group.author, group.task.seed), self._is_common(group.task)
        return _Seen(body, group.task, is_own, is_common, is_original, tuple(sorted(answers)), surprise, num_tokens)

    def _remember(self, digest: str, group: _Seen) -> None:
        of_prompt = self._seen.get(digest) or deque(maxlen=_GROUPS_PER_PROMPT)
        of_prompt.append(group)
        self._seen[digest] = of_prompt


def _is_same_task(group: _Seen, earlier: _Seen) -> bool:
    """Whether both groups have the same task and share most of their answers."""
    return group.task == earlier.task and _shared(group, earlier) >= MIN_SHARED


def _shared(group: _Seen, earlier: _Seen) -> float:
    """The part of the group's answers that the earlier one has, too; repeated answers count as often as both have them."""
    common = sum(min(group.answers.count(text), earlier.answers.count(text)) for text in set(group.answers))
    return common / len(group.answers)


def _surprise(group: _Seen, earlier: _Seen) -> float:
    """The surprise in nats of the different answers that both have, by the smaller claim of the two authors.

    On a common task log(G G') is taken off each, for the G G' pairs of answers that may be equal. Otherwise 64 answers each, of
    148 equally likely ones, would share 18 and look like a copy at 90 nats.
    """
    chance = math.log(len(group.answers) * len(earlier.answers)) if group.is_common else 0.0
    shared = [min(nats, earlier.surprise[text]) for text, nats in group.surprise.items() if text in earlier.surprise]
    return sum(max(0.0, nats - chance) for nats in shared) if group.is_common else sum(shared)


def _shares_long_answers(group: _Seen, earlier: _Seen) -> bool:
    """Whether both have several different answers that are long. On a common task nobody owns the stream, and who copies may
    claim that its answers surprise nobody, but cannot claim that they are short."""
    shared = [num for text, num in group.num_tokens.items() if text in earlier.num_tokens]
    return len(shared) > 1 and sum(shared) >= _MIN_SHARED_TOKENS
