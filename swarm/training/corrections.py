"""Importance corrections for tokens that another policy sampled: weights from w = π_old / μ, per token.

μ is the policy that sampled (its log-probs came with the rollout), π_old the own policy at the start of the step.
Weights carry no gradient.
"""

import torch
from torch import Tensor

_LOG_LIMIT = 20.0
"""|log w| beyond it is cut: e^20 is far outside every cap, and stays finite in float32."""


def log_importance(old_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log w [B, T], 0 where masked."""
    return (old_logprobs - behaviour_logprobs).clamp(-_LOG_LIMIT, _LOG_LIMIT) * mask


def correction_weights(log_weights: Tensor, mask: Tensor, kind: str, cap: float) -> Tensor:
    """Factor [B, T] of the policy loss. Formulas by name of `training.correction`."""
    if kind == "tis":
        return truncated_weights(log_weights, cap)
    if kind == "sequence_mask":
        return sequence_mask(log_weights, mask, cap)
    return torch.ones_like(log_weights)


def truncated_weights(log_weights: Tensor, cap: float) -> Tensor:
    """min(w, C) per token (truncated importance sampling)."""
    return log_weights.exp().clamp(max=cap)


def sequence_mask(log_weights: Tensor, mask: Tensor, cap: float) -> Tensor:
    """1 for sequences with exp(mean_t log w) in [1/C, C], 0 for the others."""
    mean = log_weights.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    inside = mean.abs() <= torch.tensor(cap, dtype=mean.dtype).log()
    return inside.to(log_weights.dtype).expand_as(log_weights)


def ess_fraction(log_weights: Tensor) -> float:
    """ESS / B = (Σ w_i)² / (B Σ w_i²) over the sequence weights w_i = Π_t w_t (VCPO, 2602.17616); 1 for no sequences.

    `log_weights` [B] are sums over tokens. 1 means fresh data; near 1/B a single sequence makes the step.
    """
    if log_weights.numel() == 0:
        return 1.0
    weights = (log_weights.double() - log_weights.double().max()).exp()  # the largest is 1: no overflow
    return (weights.sum().square() / weights.square().sum() / weights.numel()).item()
