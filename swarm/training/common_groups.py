"""Brings the answers of several nodes to one common task together, so that each group is compared with all of them.

    own groups, groups of others ─ note ─▶ rewards by task and author ─ siblings ─▶ the baseline of a group
    groups without signal ─ hold ─▶ wait for answers of others ─ take_ready ─▶ batch

A hard task gives most nodes a group in which every answer failed. On a common task such a group teaches something as soon as
another author's group holds a success.

Only answers count whose rewards this node has computed itself. Headers also tell how many answers of a group failed where the
body is not read; nobody can check such a count, so it has no influence on any baseline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.training.replay import group_from, group_state
from swarm.types import RolloutGroup, TaskRef

_KEPT_ROUNDS = 16
"""Answers are remembered, and groups wait, for so many rounds: others may take some times as long for a round."""
_MAX_TASKS = 256
_MAX_AUTHORS = 16
"""Groups of one task that are compared, the first ones to come in."""
_MAX_WAITING = 32
"""Own groups that wait, and as many of others."""


@dataclass(slots=True)
class _CommonTask:
    """What is known of one task."""

    since: int
    """Round in which its first group came in."""
    is_own: bool = False
    """Whether this node has answered it."""
    rewards: dict[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """By author, in ascending order."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    group: RolloutGroup
    is_own: bool
    since: int


class CommonGroups:
    """The groups on common tasks of the last rounds. It belongs to the compute thread.

    It is part of every checkpoint, but for groups of others that wait: like the pool they are a cache, and their token ids may be
    those of another tokenizer.
    """

    def __init__(self) -> None:
        self._round = 0
        self._tasks: dict[TaskRef, _CommonTask] = {}  # oldest first
        self._waiting: list[_Waiting] = []  # oldest first

    def begin_round(self) -> None:
        """Forget what came in too many rounds ago."""
        self._round += 1
        oldest = self._round - _KEPT_ROUNDS
        self._tasks = {ref: task for ref, task in self._tasks.items() if task.since > oldest}
        self._waiting = [one for one in self._waiting if one.since > oldest]

    def note(self, group: RolloutGroup, *, is_own: bool) -> None:
        """Remember the rewards of a group on a common task. Of each author the first group of a task counts."""
        task = self._tasks.setdefault(group.task, _CommonTask(self._round))
        task.is_own |= is_own
        if group.author not in task.rewards and (is_own or len(task.rewards) < _MAX_AUTHORS):
            task.rewards[group.author] = tuple(sorted(rollout.reward for rollout in group.rollouts))
        if len(self._tasks) > _MAX_TASKS:  # tasks that only others have answered cost nothing to invent
            others = (ref for ref, one in self._tasks.items() if not one.is_own)
            del self._tasks[next(others, next(iter(self._tasks)))]

    def siblings(self, group: RolloutGroup) -> tuple[float, ...]:
        """Rewards of the answers of other authors to the group's task; empty where there are none.

        Of each author at most as many count as the group has answers, so that nobody gains by sending more.
        """
        task = self._tasks.get(group.task)
        if task is None:
            return ()
        most = max(2, len(group.rollouts))
        others = [rewards for author, rewards in task.rewards.items() if author != group.author]
        return tuple(rewards[place] for rewards in others for place in spread(len(rewards), most))

    def forget(self, group: RolloutGroup) -> None:
        """Take back the note of another author's group, as it turned out that nothing of it is trained on."""
        task = self._tasks.get(group.task)
        if task is not None:
            task.rewards.pop(group.author, None)

    def has_signal(self, group: RolloutGroup) -> bool:
        """Whether the rewards of the group and of its siblings differ."""
        return len({*(rollout.reward for rollout in group.rollouts), *self.siblings(group)}) > 1

    def hold(self, group: RolloutGroup, *, is_own: bool) -> None:
        """Let a group without signal wait for answers of others, once. Where too many wait, the oldest goes."""
        if any((one.group.task, one.group.author) == (group.task, group.author) for one in self._waiting):
            return
        self._waiting.append(_Waiting(group, is_own, self._round))
        alike = [one for one in self._waiting if one.is_own == is_own]
        if len(alike) > _MAX_WAITING:
            self._waiting.remove(alike[0])

    def take_ready(self, count: int, *, is_own: bool) -> list[RolloutGroup]:
        """Up to `count` groups that have signal now, the oldest first; they wait no longer."""
        ready = [one for one in self._waiting if one.is_own == is_own and self.has_signal(one.group)][: max(0, count)]
        taken = {id(one) for one in ready}
        self._waiting = [one for one in self._waiting if id(one) not in taken]
        return [one.group for one in ready]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for JSON."""
        return {
            "round": self._round,
            "tasks": [
                {
                    "task": [ref.source, ref.config_digest, ref.seed, ref.index],
                    "since": task.since,
                    "is_own": task.is_own,
                    "rewards": {author: list(rewards) for author, rewards in task.rewards.items()},
                }
                for ref, task in self._tasks.items()
            ],
            "waiting": [
                {"group": group_state(one.group), "is_own": True, "since": one.since}
                for one in self._waiting
                if one.is_own
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; an empty one, as of an older version, knows nothing."""
        self._round = state.get("round", 0)
        self._tasks = {
            TaskRef(*saved["task"]): _CommonTask(
                saved["since"], saved["is_own"], {author: tuple(found) for author, found in saved["rewards"].items()}
            )
            for saved in state.get("tasks", [])
        }
        self._waiting = [
            _Waiting(group_from(saved["group"]), saved["is_own"], saved["since"]) for saved in state.get("waiting", [])
        ]


def spread(num_answers: int, most: int) -> Sequence[int]:
    """Places of at most `most` (>= 2) of the answers, at even distances, the first and the last among them."""
    if num_answers <= most:
        return range(num_answers)
    step = (num_answers - 1) / (most - 1)
    return [round(number * step) for number in range(most)]
