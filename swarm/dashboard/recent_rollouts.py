"""The latest groups that a person can read on the page: own, admitted and rejected ones, each kind in its own ring.

compute thread ─ own ─────────────┐
admission ─ admitted, refused ────┴─▶ texts cut ─▶ ring ─▶ `newest`, which adds the prompts
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.dashboard.shown import shown_text
from swarm.records.codec import decode_body
from swarm.records.identity import peer_name
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import Header, Rollout, RolloutGroup, TaskRef

MAX_GROUPS = 24
"""Of each kind."""
_MAX_ANSWERS = 8
_MAX_ANSWER_CHARS = 1200
_MAX_PROMPT_CHARS = 3000
_MAX_OPENED_BYTES = 128 << 10
_OPEN_INTERVAL_S = 1.0
"""A flood of bad bodies is not opened a second time only to be shown."""


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """One group, or a body that could not be opened, with its texts cut."""

    number: int
    time_s: float
    kind: str
    """own, admitted or refused."""
    author: str
    reason: str
    """Why it was refused, or left out: a value of Rejection."""
    detail: str
    task: TaskRef | None
    policy_version: int
    answers: tuple[tuple[str, float], ...]
    """(text, reward); the reward of a refused one is what its author claims."""
    num_answers: int

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
            "answers": [{"text": text, "reward": reward} for text, reward in self.answers],
            "num_answers": self.num_answers,
        }


class RecentRollouts:
    """Safe from any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._prompt_of: Callable[[TaskRef], str | None] = _no_prompt
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._rings: dict[str, deque[ShownGroup]] = {
            kind: deque(maxlen=MAX_GROUPS) for kind in ("own", "admitted", "refused")
        }
        self._opened_at = 0.0
        self._prompts: dict[int, str | None] = {}
        """By the number of the group; each is built once, which may take a tenth of a second."""

    def show_prompts(self, prompt_of: Callable[[TaskRef], str | None]) -> None:
        """Rebuild prompts with `prompt_of` from now on, when somebody reads. Groups have no prompt until the tasks are loaded."""
        self._prompt_of = prompt_of

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

    def newest(self) -> list[dict[str, Any]]:
        """All of them, newest first, with their prompts. Takes a while: not on a loop."""
        with self._lock:
            kept = sorted((one for ring in self._rings.values() for one in ring), key=lambda one: -one.number)
        known = self._prompts
        prompts = {one.number: known[one.number] if one.number in known else self._prompt(one.task) for one in kept}
        self._prompts = prompts
        return [one.as_dict(prompts[one.number]) for one in kept]

    def _prompt(self, task: TaskRef | None) -> str | None:
        prompt = self._prompt_of(task) if task else None
        return None if prompt is None else shown_text(prompt, _MAX_PROMPT_CHARS)

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
        answers = tuple((shown_text(_conversation(r), _MAX_ANSWER_CHARS), r.reward) for r in rollouts[:_MAX_ANSWERS])
        task = group.task if group else header.groups[0].task if header and header.groups else None
        version = group.policy_version if group else header.policy_version if header else 0
        with self._lock:
            number = next(self._numbers)
            shown = ShownGroup(
                number, self._clock(), kind, author, reason, detail, task, version, answers, len(rollouts)
            )
            self._rings[kind].append(shown)

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


def _conversation(rollout: Rollout) -> str:
    """The answer; of an episode all answers with the replies between them."""
    return "\n".join([*(f"{turn.text}\n← {turn.reply}" for turn in rollout.turns), rollout.text])


def _no_prompt(task: TaskRef) -> str | None:
    return None
