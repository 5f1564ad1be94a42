"""Decides what counts as a success of a task source, by the node's own answers.

A group's advantages only compare its own answers. Where an author leaves the right ones out, the least wrong answer of such
a group has the largest advantage, with every reward true. So an answer of another node is a good example only if it is as
good as what this node finds itself in most groups:

    own groups ─ best reward of each, by source ─▶ quantile = success level ┬─▶ groups of others without a success: not stored,
                                                                           │   and held against their author
                                                                           └─▶ their other answers: no positive advantage
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from swarm.types import RolloutGroup

_WINDOW_GROUPS = 64


class SuccessLevel(NamedTuple):
    """What is expected of the groups of one task source."""

    reward: float = 0.0
    """The lowest reward that counts as a success."""
    lack: float = 0.0
    """Part of the own groups without a success: an honest author like this node has as many."""


ANY_REWARD = SuccessLevel()
"""The level of a source for which no own answer earned a reward yet: any answer of others may teach something."""


class SuccessLevels:
    """Success levels of one node, from the newest 64 own groups of each source. Belongs to the thread that trains."""

    def __init__(self, quantile: float) -> None:
        """`quantile`: of the best rewards of own groups; with 0 there are no levels."""
        self._quantile = quantile
        self._bests: dict[str, deque[float]] = {}

    def observe_own(self, groups: Iterable[RolloutGroup]) -> None:
        """Note the best reward of each own group. A group whose rewards are all 0 says nothing about what can be reached."""
        for group in groups:
            best = max(rollout.reward for rollout in group.rollouts)
            if best > 0:
                self._bests.setdefault(group.task.source, deque(maxlen=_WINDOW_GROUPS)).append(best)

    def snapshot(self) -> dict[str, SuccessLevel]:
        """{source: level}, which never changes any more and so may be read from any thread."""
        if not self._quantile:
            return {}
        return {source: _level(bests, self._quantile) for source, bests in self._bests.items()}

    def state(self) -> dict[str, list[float]]:
        """The best rewards by source, for a checkpoint."""
        return {source: list(bests) for source, bests in self._bests.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        self._bests = {source: deque(bests, maxlen=_WINDOW_GROUPS) for source, bests in state.items()}


def has_success(group: RolloutGroup, level: SuccessLevel) -> bool:
    """Whether an answer of the group reaches the level of its source."""
    return any(rollout.reward >= level.reward for rollout in group.rollouts)


def _level(bests: Sequence[float], quantile: float) -> SuccessLevel:
    """Between two values the lower one counts, so at least the part 1 - `quantile` of the own groups reaches it."""
    reward = sorted(bests)[int(quantile * (len(bests) - 1))]
    return SuccessLevel(reward, sum(best < reward for best in bests) / len(bests))
