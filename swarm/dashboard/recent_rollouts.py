"""The latest groups that a person can read and search on the page: own, admitted and rejected ones, each kind in its own ring.

compute thread ─ own ─────────────┐
admission ─ admitted, refused ────┴─▶ texts cut ─▶ ring ─▶ `page`, which searches, and adds the prompts
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarm.dashboard.shown import shown_text
from swarm.records.codec import decode_body
from swarm.records.identity import peer_name
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import Header, Rollout, RolloutGroup, TaskRef

KINDS = ("own", "admitted", "refused")
MAX_GROUPS = 100
"""Of each kind, ..."""
MAX_CHARS = 1 << 20
"""... and characters of their answers."""
PAGE_GROUPS = 20
MAX_FIND_CHARS = 100
_MAX_ANSWERS = 8
_MAX_PARTS = 12
_MAX_ANSWER_CHARS = 1200
_MAX_PROMPT_CHARS = 3000
_MAX_READ_CHARS = 1 << 16
"""Of an answer, in which its final answer is looked for."""
_MAX_FINAL_CHARS = 200
_MAX_OPENED_BYTES = 128 << 10
_OPEN_INTERVAL_S = 1.0
"""A flood of bad bodies is not opened a second time only to be shown."""
_PROMPTS_S = 1.0
"""How long prompts are built for one page or search."""


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """One answer, or one episode, with its texts cut."""

    parts: tuple[tuple[str, str], ...]
    """(who speaks, text): policy, user or tool; "left out" where the middle of a long episode is missing."""
    reward: float
    """Of a refused group, what its author claims."""
    signals: dict[str, float]
    final: str | None
    """What the verifier reads; "" where it finds nothing; None: all of it."""
    tokens: int
    is_cut: bool
    """Whether it reached the token limit, or ended by a stop string."""


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """One group, or a body that could not be opened."""

    number: int
    time_s: float
    kind: str
    """One of KINDS."""
    author: str
    reason: str
    """Why it was refused, or left out: a value of Rejection."""
    detail: str
    task: TaskRef | None
    policy_version: int
    answers: tuple[ShownAnswer, ...]
    num_answers: int

    @property
    def num_chars(self) -> int:
        return sum(len(text) for answer in self.answers for _, text in answer.parts)

    def holds(self, text: str, prompt: str) -> bool:
        """Whether `text`, in small letters, is in anything that a reader sees of it."""
        source = self.task.source if self.task else ""
        told = (source, peer_name(self.author), self.author, self.reason, prompt)
        return any(text in one.casefold() for one in told) or any(
            text in one.casefold() for answer in self.answers for _, one in answer.parts
        )

    def as_dict(self, prompt: str | None) -> dict[str, Any]:
        task = self.task
        return {
            "number": self.number,
            "time_s": self.time_s,
            "kind": self.kind,
            "author": self.author,
            "name": peer_name(self.author),
            "reason": self.reason,
            "detail": self.detail,
            "source": shown_text(task.source, 80) if task else "",
            "task": f"{task.seed}/{task.index}" if task else "",
            "policy_version": self.policy_version,
            "prompt": prompt,
            "answers": [asdict(answer) for answer in self.answers],
            "num_answers": self.num_answers,
        }


class RecentRollouts:
    """Safe from any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._prompt_of: Callable[[TaskRef], str | None] = _no_prompt
        self._final_of: Callable[[str, str], str | None] = _no_final
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._rings: dict[str, deque[ShownGroup]] = {kind: deque(maxlen=MAX_GROUPS) for kind in KINDS}
        self._chars: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._opened_at = 0.0
        self._prompts: dict[int, str | None] = {}
        """By the number of the group; each is built once, which may take a tenth of a second."""

    def explain(
        self, prompt_of: Callable[[TaskRef], str | None], final_of: Callable[[str, str], str | None] | None = None
    ) -> None:
        """From now on rebuild prompts with `prompt_of`, when somebody reads, and find in the text of an answer to a task of a
        source what its verifier reads with `final_of`. Groups have neither until the tasks are loaded."""
        self._prompt_of, self._final_of = prompt_of, final_of or _no_final

    @property
    def last_number(self) -> int:
        with self._lock:
            return max((ring[-1].number for ring in self._rings.values() if ring), default=0)

    def own(self, groups: Sequence[RolloutGroup]) -> None:
        """Groups of this node's round."""
        for group in groups[-MAX_GROUPS:]:
            self._add("own", group.author, "" if group.has_reward_variance else Rejection.NO_SIGNAL.value, "", group)

    def admitted(self, groups: Sequence[RolloutGroup]) -> None:
        """Groups of one body, with recomputed rewards; those without signal are not trained on."""
        for group in groups[-MAX_GROUPS:]:
            kind, reason = ("admitted", "") if group.has_reward_variance else ("refused", Rejection.NO_SIGNAL.value)
            self._add(kind, group.author, reason, "", group)

    def refused(self, header: Header, error: InvalidRecord, body: bytes | None) -> None:
        """A body that was turned away; None where none came. Its first group is shown, where it can be read."""
        detail = shown_text(str(error).partition(": ")[2], 200)
        self._add("refused", header.author, error.reason.value, detail, self._first_group(header, body), header)

    def page(self, kind: str = "", find: str = "", page: int = 0) -> dict[str, Any]:
        """Groups of a kind, "" for all, that hold the text `find`, the newest first: {"groups": at most PAGE_GROUPS of them,
        "found", "page", "pages", "unread": those whose prompt there was no time to build, so that it was not searched}.

        It takes up to `_PROMPTS_S`, and a tenth of a second more: not for a loop.
        """
        deadline = time.monotonic() + _PROMPTS_S
        with self._lock:
            kept = [one for name, ring in self._rings.items() if kind in ("", name) for one in ring]
            numbers = {one.number for ring in self._rings.values() for one in ring}
            self._prompts = {n: prompt for n, prompt in list(self._prompts.items()) if n in numbers}
        kept.sort(key=lambda one: -one.number)
        wanted, unread = find.strip().casefold()[:MAX_FIND_CHARS], 0
        if wanted:
            unread = sum(not self._has_prompt(one, deadline) for one in kept)
            kept = [one for one in kept if one.holds(wanted, self._prompts.get(one.number) or "")]
        pages = max(1, -(-len(kept) // PAGE_GROUPS))
        page = min(max(page, 0), pages - 1)
        chosen = kept[page * PAGE_GROUPS : (page + 1) * PAGE_GROUPS]
        for one in chosen:
            self._has_prompt(one, deadline)
        groups = [one.as_dict(self._prompts.get(one.number)) for one in chosen]
        return {"groups": groups, "found": len(kept), "page": page, "pages": pages, "unread": unread}

    def _has_prompt(self, group: ShownGroup, deadline: float) -> bool:
        """Whether its prompt is known, or was built before the deadline."""
        if group.number not in self._prompts:
            if time.monotonic() >= deadline:
                return False
            prompt = self._prompt_of(group.task) if group.task else None
            self._prompts[group.number] = None if prompt is None else shown_text(prompt, _MAX_PROMPT_CHARS)
        return True

    def _add(
        self,
        kind: str,
        author: str,
        reason: str,
        detail: str,
        group: RolloutGroup | None,
        header: Header | None = None,
    ) -> None:
        rollouts = group.rollouts if group else ()
        task = group.task if group else header.groups[0].task if header and header.groups else None
        answers = tuple(self._shown(task.source if task else "", one) for one in rollouts[:_MAX_ANSWERS])
        version = group.policy_version if group else header.policy_version if header else 0
        with self._lock:
            number, ring = next(self._numbers), self._rings[kind]
            shown = ShownGroup(
                number, self._clock(), kind, author, reason, detail, task, version, answers, len(rollouts)
            )
            self._chars[kind] += shown.num_chars
            while len(ring) == MAX_GROUPS or (ring and self._chars[kind] > MAX_CHARS):
                self._chars[kind] -= ring.popleft().num_chars
            ring.append(shown)

    def _shown(self, source: str, rollout: Rollout) -> ShownAnswer:
        final = self._final_of(source, rollout.text) if len(rollout.text) <= _MAX_READ_CHARS else None
        return ShownAnswer(
            parts=_parts(rollout),
            reward=rollout.reward,
            signals={shown_text(name, 80): value for name, value in rollout.signals[:_MAX_PARTS]},
            final=None if final is None else shown_text(final, _MAX_FINAL_CHARS),
            tokens=len(rollout.token_ids),
            is_cut=not rollout.finished,
        )

    def _first_group(self, header: Header, body: bytes | None) -> RolloutGroup | None:
        now = self._clock()
        with self._lock:
            if body is None or len(body) > _MAX_OPENED_BYTES or 0 <= now - self._opened_at < _OPEN_INTERVAL_S:
                return None
            self._opened_at = now
        try:
            return decode_body(body, header.author, header.lineage, header.policy_version)[0]
        except InvalidRecord:
            return None


def _parts(rollout: Rollout) -> tuple[tuple[str, str], ...]:
    """Who said what; of a long episode the first and the last turns."""
    said = [part for turn in rollout.turns for part in (("policy", turn.text), (str(turn.role), turn.reply))]
    said.append(("policy", rollout.text))
    if len(said) > _MAX_PARTS:
        half = _MAX_PARTS // 2
        said = [*said[:half], ("left out", f"{len(said) - 2 * half} turns"), *said[-half:]]
    chars = _MAX_ANSWER_CHARS // len(said)
    return tuple((who, _without_middle(text, chars)) for who, text in said)


def _without_middle(text: str, max_chars: int) -> str:
    """Beginning and end of a long text: reasoning ends with its answer."""
    if len(text) <= max_chars:
        return shown_text(text, max_chars)
    head, tail = text[: max_chars // 2], text[-(max_chars // 2) :]
    left_out = f" … {len(text) - len(head) - len(tail)} characters … "
    return f"{shown_text(head, max_chars)}{left_out}{shown_text(tail, max_chars)}"


def _no_prompt(task: TaskRef) -> str | None:
    return None


def _no_final(source: str, text: str) -> str | None:
    return None
