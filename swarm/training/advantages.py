"""Advantages of sibling rollouts: how much better each answer is than its group.

The advantage of every answer of a batch, for one reward per answer or several.
"""

# torch is annotated in part:
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarm.config import TrainingSection
from swarm.errors import TrainingError
from swarm.training.experience import TrainingGroup

_EPSILON = 1e-6


def advantages(rewards: Tensor, kind: str) -> Tensor:
    """[G] -> [G] from one reward per rollout; 0 if all are equal. Formulas by name of `training.advantage`."""
    return {"grpo": grpo, "dr_grpo": dr_grpo, "median": median}[kind](rewards)


def grpo(rewards: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6), with the sample standard deviation (n - 1) as in DeepSeekMath (2402.03300)."""
    return _normalised(rewards)


def dr_grpo(rewards: Tensor) -> Tensor:
    """R - mean; without the division hard and easy tasks are not weighted up (Dr. GRPO, 2503.20783)."""
    return rewards - rewards.mean()


def median(rewards: Tensor) -> Tensor:
    """R - median (MC-GRPO, 2601.22582): one lucky answer does not shift the others.

    For G + 1 rollouts, G even, one of them is the median: its advantage is 0 and the batch leaves it out. The paper's
    division by the median absolute deviation is left out: on binary rewards that is 0, and advantages would explode.
    """
    return rewards - rewards.quantile(0.5)


def gdpo(signals: Tensor, weights: Tensor) -> Tensor:
    """Several reward signals [S, G], weights [S] -> [G]: each normalised on its own, then the weighted sum (2601.05242).

    So a signal with a small range counts as much as its weight says. The batch is then normalised by `gdpo_batch`.
    """
    return (weights[:, None] * _normalised(signals)).sum(0)


def gdpo_batch(values: Tensor) -> Tensor:
    """[N] -> [N]: (A - mean) / (std + 1e-6) over all answers of the batch: its scale does not depend on the signals."""
    return _normalised(values)


def _normalised(values: Tensor) -> Tensor:
    """Along the last dimension; exactly 0 where all values are equal, which rounding of the mean would not give."""
    deviations = values - values.mean(-1, keepdim=True)
    is_flat = values.amax(-1, keepdim=True) == values.amin(-1, keepdim=True)
    return torch.where(is_flat, 0.0, deviations / (values.std(-1, keepdim=True) + _EPSILON))


def batch_advantages(batch: Sequence[TrainingGroup], config: TrainingSection) -> list[float | None]:
    """One per rollout, group after group; None for those that take no part: the median rollout, and answers of other nodes
    that are better than their siblings and still no success (`TrainingGroup.success_level`).

    Raises TrainingError for a group without reward differences, unless such groups are wanted.
    """
    for group in batch if config.filter_groups else ():
        _check_signal(group)
    if config.advantage == "gdpo":
        signalled = [gdpo(*_signals(group, config.signal_weights)) for group in batch]
        values: list[float | None] = [*gdpo_batch(torch.cat(signalled)).tolist()]
    else:
        values = [value for group in batch for value in _group_advantages(group, config.advantage)]
    is_example = [rollout.reward >= group.success_level for group in batch for rollout in group.group.rollouts]
    return [
        None if value is not None and value > 0 and not may_be_followed else value
        for value, may_be_followed in zip(values, is_example, strict=True)
    ]


def _group_advantages(group: TrainingGroup, kind: str) -> list[float | None]:
    values: list[float | None] = [*advantages(_rewards(group), kind).tolist()]
    if kind == "median" and 0.0 in values:
        values[_median_rollout(group, values)] = None
    return values


def _median_rollout(group: TrainingGroup, values: Sequence[float | None]) -> int:
    """Of the rollouts with advantage 0 the first by its tokens, so that the order of siblings does not matter."""
    at_median = [index for index, value in enumerate(values) if value == 0]
    return min(at_median, key=lambda index: group.group.rollouts[index].token_ids)


def _signals(group: TrainingGroup, weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """([S, G] values, [S] weights) by name; a group without named signals has one, its reward."""
    named = [dict(rollout.signals) or {"reward": rollout.reward} for rollout in group.group.rollouts]
    names = sorted({name for signals in named for name in signals})
    values = [[signals.get(name, 0.0) for signals in named] for name in names]
    of_task = dict(group.signal_weights)
    chosen = [weights.get(name, of_task.get(name, 1.0)) for name in names]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(chosen, dtype=torch.float64)


def _check_signal(group: TrainingGroup) -> None:
    if not group.group.has_signal:
        task, rewards = group.group.task, _rewards(group)
        raise TrainingError(
            f"a training group must have differing rewards, got {rewards[0].item():g} for all {len(rewards)} rollouts "
            f"of {task.source}/{task.seed}/{task.index}; drop groups without signal before training"
        )


def _rewards(group: TrainingGroup) -> Tensor:
    return torch.tensor([rollout.reward for rollout in group.group.rollouts], dtype=torch.float64)
