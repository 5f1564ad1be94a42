"""Advantages: how much better each answer is than the other answers of its group.

    rewards or signals of a group ─▶ of_group [G] ─▶ all groups of a batch ─▶ of_batch [N] ─▶ one number per answer, or none

On a common task, which several nodes have answered, `of_group` gets the answers of all of them that this node has verified
(`TrainingGroup.siblings`), and the group takes its part of what comes out. What others have sampled does not depend on this
group's answers, so comparing with its mean adds no bias, also where groups were left out.

An advantage is one class here, or in a file of its own, and one line in `swarm/extensions/points.py`.
"""

# torch is annotated in part:
# pyright: reportUnknownMemberType=false

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from swarm.config import Section, TrainingSection
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
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    """[G][turns] rewards of the turns of each answer; empty where a form does not read them."""
    states: tuple[tuple[str, ...], ...] = ()
    """[G][turns] what identifies the environment's situation before each turn."""


class Advantage(ABC):
    """One form of the advantage. It keeps nothing from one batch to the next."""

    is_centred: ClassVar[bool] = True
    """Whether the advantages of a group add up to 0; the contract test of advantages checks it."""
    uses_signals: ClassVar[bool] = False
    """Whether it reads `signals`. Those of stored groups are then computed again, which takes time."""

    uses_turns: ClassVar[bool] = False
    """Whether `of_turns` gives the turns of an episode advantages of their own. Those of stored groups are replayed then."""

    @abstractmethod
    def of_group(self, group: GroupRewards) -> Tensor:
        """[G] finite advantages; nan for an answer that takes no part in the loss."""

    def of_others(self, rewards: Tensor, baseline: float) -> Tensor:
        """[G] advantages of answers of another node, compared with the reward in (0, 1) that own ones usually earn.

        (R - V) / sqrt(V (1 - V)), the deviation of a reward that is 0 or 1, so that the scale is that of `normalised`; at
        most √(G - 1), which is the largest that a group of G answers gives. A baseline of one's own is from SPO (2509.13232).
        """
        largest = math.sqrt(max(len(rewards) - 1, 1))
        return ((rewards - baseline) / math.sqrt(baseline * (1 - baseline))).clamp(-largest, largest)

    def of_batch(self, values: Tensor) -> Tensor:
        """[N] -> [N]: what becomes of all advantages of a batch together. By default they stay as they are."""
        return values

    def of_turns(self, group: GroupRewards) -> list[Tensor]:
        """[G] tensors [turns]: what is added to the advantage of an answer at the tokens of each of its turns."""
        return [torch.zeros(len(rewards)) for rewards in group.turn_rewards]


class Grpo(Advantage):
    """(R - mean) / (std + 1e-6), with the sample standard deviation (n - 1) as in DeepSeekMath (2402.03300)."""

    def of_group(self, group: GroupRewards) -> Tensor:
        return normalised(group.rewards)


class DrGrpo(Advantage):
    """R - mean; without the division hard and easy tasks are not weighted up (Dr. GRPO, 2503.20783)."""

    def of_group(self, group: GroupRewards) -> Tensor:
        return group.rewards - group.rewards.mean()

    def of_others(self, rewards: Tensor, baseline: float) -> Tensor:
        return rewards - baseline


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


class GigpoParameters(Section):
    """`advantage_parameters` of gigpo."""

    discount: Annotated[float, Field(gt=0, le=1)] = 0.95
    """γ, by which a reward counts less for each turn before it."""
    step_weight: Annotated[float, Field(ge=0)] = 1.0
    """ω, the weight of the advantage among turns from equal states."""


class Gigpo(Advantage):
    """A_E + ω A_S (GiGPO, 2505.10978): (R - mean) / std of the episode, and the same of its turn's discounted return.

    A turn is compared with all turns of the group that began in the same state of the environment, whatever led there; a state
    that came up once says nothing. For tasks of one answer it is grpo.
    """

    Parameters = GigpoParameters
    uses_turns: ClassVar[bool] = True

    def __init__(self, parameters: GigpoParameters) -> None:
        self._parameters = parameters

    def of_group(self, group: GroupRewards) -> Tensor:
        return normalised(group.rewards)

    def of_turns(self, group: GroupRewards) -> list[Tensor]:
        returns = [discounted_returns(rewards, self._parameters.discount) for rewards in group.turn_rewards]
        by_state: dict[str, list[tuple[int, int]]] = {}
        for answer, states in enumerate(group.states):
            for turn, state in enumerate(states):
                by_state.setdefault(state, []).append((answer, turn))
        found = [torch.zeros(len(rewards), dtype=torch.float64) for rewards in group.turn_rewards]
        for places in by_state.values():
            if len(places) > 1:
                values = normalised(_float64([returns[answer][turn] for answer, turn in places]))
                for (answer, turn), value in zip(places, values, strict=True):
                    found[answer][turn] = self._parameters.step_weight * value
        return found


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Σ_{k >= t} γ^(k - t) r_k for each turn t."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


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
    of_groups = [_of_group(advantage, group, config.signal_weights) for group in batch]
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


def _of_group(advantage: Advantage, group: TrainingGroup, weights: Mapping[str, float]) -> Tensor:
    """[G] advantages of one group, over all answers to its task that are known."""
    given = _group_rewards(group, weights)
    if group.baseline is not None:
        return advantage.of_others(given.rewards, group.baseline)
    # signals of other nodes are never sent
    is_pooled = group.siblings and not (advantage.uses_signals and any(one.signals for one in group.group.rollouts))
    return (
        advantage.of_group(_pooled(given, group.siblings))[: len(given.rewards)]
        if is_pooled
        else advantage.of_group(given)
    )


def _pooled(group: GroupRewards, siblings: Sequence[float]) -> GroupRewards:
    """A group with the answers of others to its task behind its own. Their rewards alone are known."""
    rewards = torch.cat([group.rewards, _float64(siblings)])
    return GroupRewards(rewards, rewards[None], torch.ones(1).double(), (*group.token_ids, *[()] * len(siblings)))


def turn_advantages(
    batch: Sequence[TrainingGroup], config: TrainingSection, values: Sequence[float | None]
) -> list[tuple[float, ...]]:
    """The advantage of each turn of each rollout, given those of the rollouts; empty where all turns have the rollout's.

    An answer of another node that is no success (`TrainingGroup.success_level`) has no turn with a positive one.
    """
    advantage = configured_advantage(config)
    rollouts = [(group, rollout) for group in batch for rollout in group.group.rollouts]
    if not advantage.uses_turns:
        return [()] * len(rollouts)
    added = [turns for group in batch for turns in advantage.of_turns(_group_rewards(group, config.signal_weights))]
    found: list[tuple[float, ...]] = []
    for (group, rollout), value, turns in zip(rollouts, values, added, strict=True):
        most = math.inf if rollout.reward >= group.success_level else 0.0
        is_episode = value is not None and len(turns) > 1
        found.append(
            tuple(min(most, value + float(turn)) for turn in turns) if is_episode and value is not None else ()
        )
    return found


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
        turn_rewards=tuple(rollout.turn_rewards or (rollout.reward,) for rollout in rollouts),
        states=tuple(rollout.states or ("",) for rollout in rollouts),
    )


def _float64(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _check_variance(group: TrainingGroup) -> None:
    if not group.has_signal:
        task, rollouts = group.group.task, group.group.rollouts
        raise TrainingError(
            f"a training group must have differing rewards, got {rollouts[0].reward:g} for all {len(rollouts)} rollouts "
            f"of {task.source}/{task.seed}/{task.index}; drop groups without signal before training"
        )
