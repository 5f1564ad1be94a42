"""Importance corrections for tokens that another policy sampled: factors of the loss, from w = π_old / μ per token.

μ is the policy that sampled (its log-probs came with the rollout), π_old the own policy at the start of the step.
Own answers that waited, or that several policy versions sampled, are treated as those of others. Factors carry no
gradient.
"""

import math

import torch
from torch import Tensor

from swarm.training.log_ratio import masked_mean


def correction_weights(log_weights: Tensor, mask: Tensor, kind: str, cap: float) -> Tensor:
    """Factor [B, T] from log w, which is 0 where masked; by name of `training.correction`."""
    if kind.startswith("tis"):
        return truncated_weights(log_weights, cap)
    if kind == "icepop":
        return banded_weights(log_weights, cap)
    if kind.startswith("sequence_mask"):
        return sequence_mask(log_weights, mask, cap)
    return torch.ones_like(log_weights)


def truncated_weights(log_weights: Tensor, cap: float) -> Tensor:
    """tis: min(w, C) per token (truncated importance sampling)."""
    return log_weights.exp().clamp(max=cap)


def banded_weights(log_weights: Tensor, cap: float) -> Tensor:
    """icepop: w where 1/C <= w <= C, 0 for tokens outside (2510.18855)."""
    return torch.where(log_weights.abs() <= math.log(cap), log_weights.exp(), 0.0)


def sequence_mask(log_weights: Tensor, mask: Tensor, cap: float) -> Tensor:
    """1 for answers with exp(mean_t log w) in [1/C, C], 0 for the others."""
    inside = masked_mean(log_weights, mask).abs() <= math.log(cap)
    return inside.to(log_weights.dtype).expand_as(log_weights)


def opsm(log_ratio: Tensor, mask: Tensor, advantages: Tensor, limit_nats: float) -> Tensor:
    """0 for answers with A < 0 and mean_t(log μ - log π) > limit, 1 for the others (2512.02556); [B, T].

    A bad answer that the policy would hardly write teaches it nothing, and pushing it down further has no bottom.
    `log_ratio` [B, T] is log π - log μ with the policy as it is now, 0 where μ is unknown; `advantages` [B, 1].
    """
    is_far = -masked_mean(log_ratio, mask) > limit_nats
    return (~((advantages < 0) & is_far)).to(log_ratio.dtype).expand_as(log_ratio)
