"""Advantages of sibling rollouts: how much better each answer is than its group."""

import torch
from torch import Tensor

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
