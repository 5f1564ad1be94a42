"""Computes the terms of the loss of one micro-batch: ratio, clip, correction and KL, combined as the settings say.

    log π, log π_old ─▶ r by level ─▶ clip ─┐
    log π_old, log μ ─▶ w ─▶ correction ────┴─▶ token loss [B, T] (+ kl_coef · KL)

The trainer multiplies by mask and scales, sums, and computes the gradient.

The adaptive clip chooses bounds that keep good answers at half of the update or more (BAPO, 2510.18927). Stale batches have
more bad answers than good ones, and a fixed range cuts the good ones first: the update then mostly lowers probabilities, and
entropy falls with them. So the bounds of the ratio are raised: c_low from .6 to .8, which leaves out bad answers that are
already unlikely, then c_high from 1.2 to 2, which lets good ones grow.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from swarm.config import TrainingSection
from swarm.extensions.points import CORRECTIONS, WEIGHS
from swarm.training.corrections import OffPolicyTokens, configured_correction
from swarm.training.losses import (
    clipped_loss,
    ess_weights,
    kl_to_reference,
    masked_log_ratio,
    policy_ratio,
    truncated_weights,
)
from swarm.training.micro_batch import MicroBatch

_STEP = 0.05
BOUNDS: tuple[tuple[float, float], ...] = tuple(
    [(round(0.6 + _STEP * i, 2), 1.2) for i in range(5)] + [(0.8, round(1.2 + _STEP * i, 2)) for i in range(1, 17)]
)
"""(c_low, c_high) in the order in which they are tried."""


class AdaptiveClip:
    """The bounds for the next optimizer step, chosen on the ratios of the last one."""

    def __init__(self) -> None:
        self.notch = 0
        """Index into BOUNDS. It is the whole state."""

    @property
    def clip_low(self) -> float:
        return 1 - BOUNDS[self.notch][0]

    @property
    def clip_high(self) -> float:
        return BOUNDS[self.notch][1] - 1

    def choose(self, pulls: Tensor) -> None:
        """Take the first bounds under which the positive share is at least one half, else the first with the largest.

        `pulls` [len(BOUNDS), 2] is the sum of `bound_pulls` over a step. Bounds that would change nothing are not raised.
        """
        total = pulls.sum(-1)
        shares = torch.where(total > 0, pulls[:, 0] / total.clamp(min=torch.finfo(pulls.dtype).tiny), 0.5)
        reached = (shares >= 0.5).nonzero()
        self.notch = int(reached[0]) if len(reached) else int((shares == shares.max()).nonzero()[0])


def bound_pulls(ratio: Tensor, pull: Tensor, mask: Tensor, clip_delta: float) -> Tensor:
    """[len(BOUNDS), 2]: size of the gradient from tokens with positive and with negative advantage under each bounds.

    `ratio` [B, T]; `pull` [B, T] is advantage times all weights of the token. The gradient of r·A by log π is r·A
    where the clip leaves it, else 0.
    """
    inside = mask > 0
    ratios, pulls = ratio.detach()[inside].double(), pull.detach()[inside].double()  # [N]
    low, high = torch.tensor(BOUNDS, dtype=torch.float64, device=ratio.device).T[:, :, None]  # [bounds, 1] each
    good = (ratios * pulls.clamp(min=0)) * (ratios <= high)
    bad = (ratios * (-pulls).clamp(min=0)) * ((ratios >= low) & (ratios <= high.clamp(min=clip_delta)))
    return torch.stack([good.sum(-1), bad.sum(-1)], dim=-1)


class ClipRange(NamedTuple):
    """The ratio may move in [1 - low, 1 + high]."""

    low: float
    high: float


class Logprobs(NamedTuple):
    """Log-probabilities of the micro-batch's tokens, [B, T] each."""

    new: Tensor
    """log π, with gradient."""
    old: Tensor
    """log π_old, without."""
    base: Tensor | None
    """log π of the base, where it was computed."""
    has_base: Tensor | None
    """[B, 1] which answers it was computed for."""
    mask: Tensor
    """1 at answer tokens; values elsewhere have no effect."""


class LossTerms(NamedTuple):
    """Terms per token [B, T]. Only `loss` has a gradient."""

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor
    pull: Tensor
    """Advantage times the correction's factor: direction and size of the update before the clip."""
    kl: Tensor
    """Estimate of KL(π ‖ base), weighted by min(π / μ, C); 0 where the base's log-probs are unknown."""
    base_known: Tensor
    """Mask of tokens with log-probs of the base."""
    sampler_distance: Tensor
    """½ (log π - log μ)², 0 where μ is unknown: estimates their KL, and no single log-prob can blow it up."""
    sampler_known: Tensor
    """Mask of tokens with log μ."""
    fresh: Tensor
    """Mask of own tokens of the current policy version, whose μ is π but for rounding between engine and trainer."""
    ess_weights: Tensor
    """Weight of each token in the effective sample size; 0 where it is dropped."""


def policy_loss(part: MicroBatch, logprobs: Logprobs, config: TrainingSection, clip: ClipRange) -> LossTerms:
    """Terms per token of `part`. The caller multiplies `loss` by mask and scales, and sums. Raises ConfigError for parameters
    that the correction does not take."""
    new, old, mask = logprobs.new, logprobs.old, logprobs.mask
    comparable, known = mask * part.is_comparable, mask * part.has_behaviour
    log_weights = masked_log_ratio(old, part.behaviour, comparable)
    start = old
    if config.ratio_reference == "sampler":  # r = π/μ instead of r · w
        start = torch.where(comparable > 0, part.behaviour, old)
    ratio = policy_ratio(masked_log_ratio(new, start, mask), mask, config.ratio)
    clipped = clipped_loss(ratio, part.advantages, clip_low=clip.low, clip_high=clip.high, clip_delta=config.clip_delta)
    to_sampler = masked_log_ratio(new.detach(), part.behaviour, known)
    tokens = OffPolicyTokens(log_weights, to_sampler, mask, part.advantages)
    factors = configured_correction(config).factors(tokens, config)
    if not CORRECTIONS.has_trait(config.correction, WEIGHS) and config.ratio_reference == "start":
        factors = factors * torch.where(part.is_replay > 0, truncated_weights(log_weights, config.correction_cap), 1.0)
    loss, kl, base_known = clipped.loss * factors, torch.zeros_like(new), torch.zeros_like(mask)
    if logprobs.base is not None and logprobs.has_base is not None:
        base_known = mask * logprobs.has_base
        # π/μ where μ is usable, else π/π_old
        importance = truncated_weights(masked_log_ratio(new.detach(), old, mask) + log_weights, config.correction_cap)
        kl = kl_to_reference(new, logprobs.base, base_known, importance)
    if config.kl_coef:
        loss = loss + config.kl_coef * kl
    is_fresh = torch.arange(mask.shape[1], device=mask.device) >= part.fresh_from
    return LossTerms(
        loss=loss,
        ratio=ratio.detach(),
        is_clipped=clipped.is_clipped,
        pull=factors * part.advantages,
        kl=kl.detach(),
        base_known=base_known,
        sampler_distance=to_sampler.square() / 2,
        sampler_known=known,
        fresh=known * is_fresh,
        ess_weights=ess_weights(log_weights.masked_fill(is_fresh, 0.0), factors, mask, config.correction_cap),
    )
