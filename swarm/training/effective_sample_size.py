"""How many answers a step really learns from, and how far it should go on so many (VCPO, 2602.17616)."""

import math

import torch
from torch import Tensor


def sequence_log_weights(log_weights: Tensor, factors: Tensor, mask: Tensor, cap: float) -> Tensor:
    """log of each answer's weight [B]: min(Π_t w_t, C), and 0 (-inf) for an answer of which the correction keeps nothing.

    Cut at C, because one outlier, which no correction lets through in full, would otherwise hide all other answers.
    `log_weights` and `factors` (of the correction) are [B, T]; log w is 0 where the sampler's log-probs are unknown.
    """
    total = log_weights.sum(-1).clamp(max=math.log(cap))
    is_dropped = torch.where(mask > 0, factors, 0.0).sum(-1) == 0
    return total.masked_fill(is_dropped, -torch.inf)


def ess_fraction(log_weights: Tensor) -> float:
    """ESS / B = (Σ w_i)² / (B Σ w_i²) over log w_i [B]; 1 for no answers, 0 if all were dropped.

    1 means fresh data; near 1/B a single answer makes the step.
    """
    if log_weights.numel() == 0:
        return 1.0
    largest = log_weights.double().max()
    if largest == -torch.inf:
        return 0.0
    weights = (log_weights.double() - largest).exp()  # the largest is 1: no overflow
    return (weights.sum().square() / weights.square().sum() / weights.numel()).item()


def lr_factor(ess: float, num_answers: int) -> float:
    """sqrt(min(1, ESS/B)): with fewer effective answers the gradient is noisier and the step shorter. Never below 1/√B."""
    return math.sqrt(min(1.0, max(ess, 1.0 / max(num_answers, 1))))
