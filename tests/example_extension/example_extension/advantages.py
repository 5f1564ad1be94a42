"""The rank of an answer in place of its reward."""

from torch import Tensor

from swarm.config import PositiveFloat, Section
from swarm.training.advantages import Advantage, GroupRewards


class RankParameters(Section):
    """`training.advantage_parameters`."""

    scale: PositiveFloat = 1.0
    """Advantage of an answer that is better than all others."""


class Rank(Advantage):
    """scale · (answers that it beats − answers that beat it) / (G − 1), whatever the distances between rewards."""

    Parameters = RankParameters

    def __init__(self, parameters: RankParameters) -> None:
        self._scale = parameters.scale

    def of_group(self, group: GroupRewards) -> Tensor:
        rewards = group.rewards
        beaten = (rewards[:, None] > rewards).sum(1) - (rewards[:, None] < rewards).sum(1)  # [G]
        return self._scale * beaten.to(rewards.dtype) / max(len(rewards) - 1, 1)
