"""Pieces of the policy loss: per-token terms [B, T], and the weights that add them up.

Every aggregation is a sum of token terms times one scale per sequence. So a batch may be cut into micro-batches
anywhere: their losses add up to the loss of the whole, and so do their gradients.

Differences of log-probabilities stay finite, whatever stands at masked places. The ratio r of the loss is computed from
log r per token, by name of `training.ratio`; all levels are 1 where the policy has not moved. The effective sample size says
what part of its tokens a step really learns from, and how far it should go (after VCPO, 2602.17616).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


def truncated_weights(log_weights: Tensor, cap: float) -> Tensor:
    """min(w, C) per token."""
    return log_weights.exp().clamp(max=cap)


def ess_weights(log_weights: Tensor, factors: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Weight of each token in the effective sample size [B, T]: min(w, C), and 0 where the correction drops the token.

    They are weights of tokens, since these are what the loss weighs. The product over an answer would fall with its length from
    rounding alone. The cap is there because one outlier, which no correction lets through in full, would otherwise hide all
    other tokens. `log_weights` and `factors` (of the correction) are [B, T].
    """
    return torch.where((mask > 0) & (factors > 0), truncated_weights(log_weights, cap), 0.0)


def ess_fraction(weight_sum: float, square_sum: float, num_tokens: float) -> float:
    """ESS / N = (Σ w)² / (N Σ w²) over the N tokens of a step; 1 for no tokens, 0 if all were dropped.

    1 means fresh data; near 1/N a single token makes the step.
    """
    if num_tokens == 0:
        return 1.0
    return weight_sum**2 / (num_tokens * square_sum) if square_sum else 0.0


def lr_factor(ess: float, num_answers: int) -> float:
    """sqrt(ESS / N): with fewer effective tokens the gradient is noisier and the step shorter. Never below 1/√B for B answers."""
    return math.sqrt(min(1.0, max(ess, 1.0 / max(num_answers, 1))))


_LOG_LIMIT = 20.0
"""|log ratio| beyond it is cut: e^20 is far outside every clip range and cap, and stays finite in float32."""


def masked_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log numerator - log denominator [B, T], within ±20; 0 without gradient where `mask` is 0, even at inf and nan."""
    return torch.where(mask > 0, numerator - denominator, 0.0).clamp(-_LOG_LIMIT, _LOG_LIMIT)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens [B, 1] of values [B, T] that are 0 where masked; 0 for a row without tokens."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def policy_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """[B, T] -> [B, T]. `log_ratio` is 0 where masked (see `masked_log_ratio`)."""
    if level == "sequence":
        return sequence_ratio(log_ratio, mask)
    if level == "minpro":
        return minpro_ratio(log_ratio, mask)
    return log_ratio.exp()


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """s = exp(mean_t log r), the same for every token of an answer (GSPO, 2507.18071)."""
    return masked_mean(log_ratio, mask).exp().expand_as(log_ratio)


def minpro_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """r_t · min_{j<t} r_j, the smallest ratio of the prefix in place of its product (MinPRO, 2601.22718).

    The prefix is a weight without gradient: otherwise one early token would be pushed once for every later one.
    """
    none = torch.full_like(log_ratio[:, :1], torch.inf)
    before = torch.where(mask > 0, log_ratio.detach(), torch.inf)[:, :-1]
    lowest = torch.cat([none, before], dim=1).cummin(dim=1).values  # inf: no token before
    return (log_ratio + torch.where(lowest.isinf(), 0.0, lowest)).exp()


class ClippedLoss(NamedTuple):
    """Terms [B, T] of the clipped loss."""

    loss: Tensor
    is_clipped: Tensor
    """Whether the token's gradient is cut to zero."""


def clipped_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, clip_delta: float
) -> ClippedLoss:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A); where A < 0 the first r is at most delta.

    Asymmetric range from DAPO (2503.14476), two-sided clip from INTELLECT-2 (2505.07291): without the cap one unlikely
    token of a bad answer can outweigh the batch. `ratio` r [B, T], `advantages` [B, 1] or [B, T].
    """
    is_bad = advantages < 0
    free = torch.where(is_bad, ratio.clamp(max=clip_delta), ratio) * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    cut_if_bad = (ratio < 1 - clip_low) | (ratio > max(clip_delta, 1 + clip_high))
    is_clipped = torch.where(is_bad, cut_if_bad, (ratio > 1 + clip_high) & (advantages > 0))
    return ClippedLoss(-torch.minimum(free, clipped), is_clipped)


def kl_to_reference(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, importance: Tensor | float = 1.0
) -> Tensor:
    """Estimate of KL(π ‖ π_ref) per token [B, T] whose gradient estimates that of the KL; never negative, 0 where masked.

    The value is ρ (e^d - d - 1), the k3 estimator, with d = log π_ref - log π and `importance` ρ = π / μ of the policy μ that
    drew the token. The gradient is that of ρ·k3 with ρ = π / μ differentiated too: -ρ d ∇log π (2506.09477, 2510.01555). The
    plain gradient of k3, (1 - e^d) ∇log π, would be that of the forward KL(π_ref ‖ π).
    """
    difference = masked_log_ratio(reference_logprobs, logprobs.detach(), mask)
    zero_with_gradient = torch.where(mask > 0, logprobs - logprobs.detach(), 0.0)
    return importance * (difference.exp() - difference - 1 - difference * zero_with_gradient)


def sequence_scales(num_tokens: Tensor, kind: str, max_new_tokens: int, weights: Tensor | None = None) -> Tensor:
    """What each sequence's token sum is multiplied by, [B]; by name of `training.aggregation`.

    `num_tokens` [B] counts the tokens that take part; 0 for a sequence that is left out. `weights` [B] > 0: as how many
    sequences each counts, one by default.
    dapo: 1 / all tokens. grpo: 1 / (its own tokens · sequences that take part). dr_grpo: 1 / (all sequences ·
    max_new_tokens), a constant, so that neither short answers nor left-out ones change the weight of the others.
    """
    counts = num_tokens.to(torch.float64)
    weights = torch.ones_like(counts) if weights is None else weights.to(torch.float64)
    if kind == "dr_grpo":
        return weights / (weights.sum() * max_new_tokens)
    if kind == "grpo":
        total = weights[counts > 0].sum()
        return weights / (counts.clamp(min=1) * (total if total > 0 else 1.0))
    total = (weights * counts).sum()
    return weights / (total if total > 0 else 1.0)
