"""Whose answers these are: a group that another author, or the same one, has sent before is turned away.

Authors have streams of tasks of their own (`owns_stream`), so two of them meet the same reference only if one took it from the
other, and then it is the one whose stream it is not. The same prompt may come up in two streams, and short answers to it may be
the same by nature: there only what chance does not bring counts, by the log-probs that both authors claim. Taking the smaller
claim means that nobody is blamed by what another invented. Which of the two took it from the other nothing tells, as a copy may
come first: the later group is left out, and it is no proof against either, only a hint against both. Names cost nothing, and any
number of them may repeat what an honest author sent, so such hints count once against each body.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.limits.bounded_maps import LatestMap
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import RolloutGroup, TaskRef

MIN_SHARED = 0.5
"""Part of a group's answers that are those of another group of the same task, and make it a copy."""
MIN_SURPRISE_NATS = 40.0
"""Of the different answers that two groups on the same prompt share: e^-40 is no chance, however many pairs there are."""
_MAX_PROMPTS = 4096
_GROUPS_PER_PROMPT = 8


@dataclass(slots=True, eq=False)
class _Body:
    """What the groups that came in together have in common."""

    author: str
    is_blamed: bool = False
    """Whether its author was told of for a group that another one sent, too."""


@dataclass(frozen=True, slots=True)
class _Seen:
    body: _Body
    task: TaskRef
    is_own_stream: bool
    is_original: bool
    """Whether nobody else can have written it: this node did, or knows it to be in order."""
    answers: tuple[bytes, ...]
    """Sorted fingerprints of the texts, repeated ones too."""
    surprise: dict[bytes, float]
    """{fingerprint: -log-prob in nats, as claimed, of the likeliest time it was sampled}"""


class CopyWatch:
    """Over the groups of the last 4096 prompts, at most 8 of each. Safe from any thread."""

    def __init__(
        self,
        owns_stream: Callable[[str, int], bool],
        blame: Callable[[str, Rejection], object] = lambda author, reason: None,
    ) -> None:
        """`owns_stream`: (author, task seed) -> whether the stream is its own. `blame`: told of authors whose groups were
        taken before it showed that they were copies (COPIED), and of both authors where it does not show whose the answers
        are (REPLAY)."""
        self._owns_stream = owns_stream
        self._blame = blame
        self._lock = threading.Lock()
        self._seen: LatestMap[str, deque[_Seen]] = LatestMap(_MAX_PROMPTS)

    def __len__(self) -> int:
        """Prompts that are remembered."""
        return len(self._seen)

    def note(self, groups: Sequence[RolloutGroup]) -> None:
        """Own groups, or others that are known to be in order."""
        with self._lock:
            for group in groups:
                self._remember(group.prompt_digest, self._described(group, _Body(group.author), is_original=True))

    def take(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        """Remember the groups of one body; those that are no copies, each once.

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
            raise InvalidRecord(Rejection.REPLAY, "answers that others have sent before")
        if len(kept) < len(groups):
            self._blame(body.author, Rejection.REPLAY)
        return tuple(group for group, _ in kept)

    def _alike(self, digest: str, group: _Seen) -> frozenset[_Body]:
        """Bodies of others with these answers, where either author may have taken them from the other."""
        return frozenset(seen.body for seen in self._seen.get(digest) or () if self._is_alike(group, seen))

    def _is_alike(self, group: _Seen, earlier: _Seen) -> bool:
        """Whether both are one and nothing tells whose. Raises InvalidRecord where `group` is surely a copy, or a repetition."""
        is_same_task = _is_same_task(group, earlier)
        if group.body.author == earlier.body.author:
            if is_same_task:
                raise InvalidRecord(Rejection.REPLAY, "answers that it has sent before")
        elif is_same_task and not group.is_own_stream:
            raise InvalidRecord(Rejection.COPIED, f"a task of another's stream with answers of {earlier.body.author}")
        elif is_same_task and not earlier.is_own_stream:
            self._blame(earlier.body.author, Rejection.COPIED)
        elif _surprise(group, earlier) >= MIN_SURPRISE_NATS:
            if earlier.is_original:
                raise InvalidRecord(Rejection.COPIED, f"answers of {earlier.body.author}, which chance does not repeat")
            return True
        return False

    def _described(self, group: RolloutGroup, body: _Body, *, is_original: bool = False) -> _Seen:
        surprise: dict[bytes, float] = {}
        answers = []
        for rollout in group.rollouts:
            text = hashlib.blake2b(rollout.text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            nats = -sum(rollout.logprobs)
            surprise[text] = min(nats, surprise.get(text, nats))
            answers.append(text)
        is_own = self._owns_stream(group.author, group.task.seed)
        return _Seen(body, group.task, is_own, is_original, tuple(sorted(answers)), surprise)

    def _remember(self, digest: str, group: _Seen) -> None:
        of_prompt = self._seen.get(digest) or deque(maxlen=_GROUPS_PER_PROMPT)
        of_prompt.append(group)
        self._seen.put(digest, of_prompt)


def _is_same_task(group: _Seen, earlier: _Seen) -> bool:
    """And most of the answers."""
    return group.task == earlier.task and _shared(group, earlier) >= MIN_SHARED


def _shared(group: _Seen, earlier: _Seen) -> float:
    """Part of the group's answers, counted as often as they are in both."""
    common = sum(min(group.answers.count(text), earlier.answers.count(text)) for text in set(group.answers))
    return common / len(group.answers)


def _surprise(group: _Seen, earlier: _Seen) -> float:
    """Nats of the different answers in both, by the smaller claim of the two authors."""
    return sum(min(nats, earlier.surprise[text]) for text, nats in group.surprise.items() if text in earlier.surprise)
