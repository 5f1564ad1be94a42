"""The policy loss: per-token terms [B, T], and the weights that add them up.

Every aggregation is a sum of token terms times one scale per sequence. So a batch may be cut into micro-batches
anywhere: their losses add up to the loss of the whole, and so do their gradients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from swarm.training.log_ratio import masked_log_ratio


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


def kl_to_reference(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k3 estimate of KL(π ‖ π_ref) per token: exp(d) - d - 1 with d = log π_ref - log π; never negative; 0 where masked."""
    difference = masked_log_ratio(reference_logprobs, logprobs, mask)
    return difference.exp() - difference - 1


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
