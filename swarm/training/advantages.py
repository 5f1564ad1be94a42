"""Advantages: how much better each answer is than the other answers of its group.

    rewards or signals of a group ─▶ of_group [G] ─▶ all groups of a batch ─▶ of_batch [N] ─▶ one number per answer, or none

An advantage is one class here, or in a file of its own, and one line in `swarm/extensions/points.py`.
"""

# torch is annotated in part:
# pyright: reportUnknownMemberType=false

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.config import TrainingSection
from swarm.errors import TrainingError
from swarm.extensions.points import ADVANTAGES
from swarm.training.experience import TrainingGroup

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What an advantage knows of one group of G answers."""

    rewards: Tensor
    """[G], in [0, 1], float64."""
    signals: Tensor
    """[S, G] values of the reward signals; the rewards alone where the task has no named signals."""
    signal_weights: Tensor
    """[S]"""
    token_ids: tuple[tuple[int, ...], ...]
    """[G] tokens of the answers, to choose between equal ones in a way that does not depend on their order."""


class Advantage(ABC):
    """One form of the advantage. It keeps nothing from one batch to the next."""

    is_centred: ClassVar[bool] = True
    """Whether the advantages of a group add up to 0; the contract test of advantages checks it."""
    uses_signals: ClassVar[bool] = False
    """Whether it reads `signals`. Those of stored groups are then computed again, which takes time."""

    @abstractmethod
    def of_group(self, group: GroupRewards) -> Tensor:
        """[G] finite advantages; nan for an answer that takes no part in the loss."""

    def of_batch(self, values: Tensor) -> Tensor:
        """[N] -> [N]: what becomes of all advantages of a batch together. By default they stay as they are."""
        return values


class Grpo(Advantage):
    """(R - mean) / (std + 1e-6), with the sample standard deviation (n - 1) as in DeepSeekMath (2402.03300)."""

    def of_group(self, group: GroupRewards) -> Tensor:
        return normalised(group.rewards)


class DrGrpo(Advantage):
    """R - mean; without the division hard and easy tasks are not weighted up (Dr. GRPO, 2503.20783)."""

    def of_group(self, group: GroupRewards) -> Tensor:
        return group.rewards - group.rewards.mean()


class Median(Advantage):
    """R - median (MC-GRPO, 2601.22582): one lucky answer does not shift the others.

    For G + 1 rollouts, G even, one of them is the median: its advantage is 0 and the batch leaves it out. The paper's
    division by the median absolute deviation is left out: on binary rewards that is 0, and advantages would explode.
    """

    is_centred: ClassVar[bool] = False

    def of_group(self, group: GroupRewards) -> Tensor:
        values = group.rewards - group.rewards.quantile(0.5)
        at_median = [int(place) for place in (values == 0).nonzero().flatten()]
        if at_median:  # the first by its tokens, so that the order of siblings does not matter
            values[min(at_median, key=group.token_ids.__getitem__)] = torch.nan
        return values


class Gdpo(Advantage):
    """Each reward signal is normalised on its own, then the weighted sum over the whole batch (GDPO, 2601.05242).

    So a signal with a small range counts as much as its weight says, and the scale of a batch does not depend on the signals.
    """

    uses_signals: ClassVar[bool] = True

    def of_group(self, group: GroupRewards) -> Tensor:
        return (group.signal_weights[:, None] * normalised(group.signals)).sum(0)

    def of_batch(self, values: Tensor) -> Tensor:
        return normalised(values)


def normalised(values: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-6) along the last dimension; exactly 0 where all values are equal, whatever their mean rounds to."""
    deviations = values - values.mean(-1, keepdim=True)
    is_flat = values.amax(-1, keepdim=True) == values.amin(-1, keepdim=True)
    return torch.where(is_flat, 0.0, deviations / (values.std(-1, keepdim=True) + _EPSILON))


def configured_advantage(config: TrainingSection) -> Advantage:
    """The advantage that `training.advantage` names. Raises ConfigError where it cannot be loaded."""
    return ADVANTAGES.make(config.advantage, config.advantage_parameters, "training.advantage_parameters")


def batch_advantages(batch: Sequence[TrainingGroup], config: TrainingSection) -> list[float | None]:
    """The advantage of each rollout, group after group; None for those that take no part: what the advantage leaves out, and
    answers of other nodes that are better than their siblings and still no success (`TrainingGroup.success_level`).

    Raises TrainingError for a group without reward differences, unless such groups are wanted.
    """
    for group in batch if config.filter_groups else ():
        _check_variance(group)
    if not batch:
        return []
    advantage = configured_advantage(config)
    of_groups = [advantage.of_group(_group_rewards(group, config.signal_weights)) for group in batch]
    values = [float(value) for value in advantage.of_batch(torch.cat(of_groups))]
    num_answers = sum(len(group.group.rollouts) for group in batch)
    if len(values) != num_answers:
        raise TrainingError(
            f"advantage {config.advantage} must give one number per answer, got {len(values)} for {num_answers} answers; "
            "fix its `of_group`"
        )
    is_example = [rollout.reward >= group.success_level for group in batch for rollout in group.group.rollouts]
    return [
        None if value != value or (value > 0 and not may_be_followed) else value
        for value, may_be_followed in zip(values, is_example, strict=True)
    ]


def _group_rewards(group: TrainingGroup, weights: Mapping[str, float]) -> GroupRewards:
    """Signals are ordered by name; `weights` override those of the task."""
    rollouts = group.group.rollouts
    named = [dict(rollout.signals) or {"reward": rollout.reward} for rollout in rollouts]
    names = sorted({name for signals in named for name in signals})
    of_task = dict(group.signal_weights)
    return GroupRewards(
        rewards=_float64([rollout.reward for rollout in rollouts]),
        signals=_float64([[signals.get(name, 0.0) for signals in named] for name in names]),
        signal_weights=_float64([weights.get(name, of_task.get(name, 1.0)) for name in names]),
        token_ids=tuple(rollout.token_ids for rollout in rollouts),
    )


def _float64(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _check_variance(group: TrainingGroup) -> None:
    if not group.group.has_reward_variance:
        task, rollouts = group.group.task, group.group.rollouts
        raise TrainingError(
            f"a training group must have differing rewards, got {rollouts[0].reward:g} for all {len(rollouts)} rollouts "
            f"of {task.source}/{task.seed}/{task.index}; drop groups without signal before training"
        )
