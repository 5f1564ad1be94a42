"""The terms of the loss of one micro-batch: ratio, clip, correction and KL, as the config combines them.

    log π, log π_old ─▶ r by level ─▶ clip ─┐
    log π_old, log μ ─▶ w ─▶ correction ────┴─▶ token loss [B, T] (+ kl_coef · KL)

The trainer multiplies by mask and scales, sums and goes backward.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from swarm.config import WEIGHING_CORRECTIONS, TrainingSection
from swarm.training.corrections import correction_weights, opsm, truncated_weights
from swarm.training.effective_sample_size import sequence_log_weights
from swarm.training.log_ratio import masked_log_ratio
from swarm.training.losses import clipped_loss, kl_to_reference
from swarm.training.micro_batch import MicroBatch
from swarm.training.ratios import policy_ratio


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
    """1 at answer tokens; what stands elsewhere never matters."""


class LossTerms(NamedTuple):
    """Terms per token [B, T]; all but `loss` without gradient."""

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor
    pull: Tensor
    """Advantage times the correction's factor: its sign and size before the clip."""
    kl: Tensor
    """Estimate of KL(π ‖ base), 0 where the base's log-probs are unknown."""
    base_known: Tensor
    """Mask of tokens with log-probs of the base."""
    sampler_distance: Tensor
    """½ (log π - log μ)², 0 where μ is unknown: estimates their KL, and no single log-prob can blow it up."""
    sampler_known: Tensor
    """Mask of tokens with log μ."""
    log_weights: Tensor
    """[B] log of each answer's weight, for ESS."""


def policy_loss(part: MicroBatch, logprobs: Logprobs, config: TrainingSection, clip: ClipRange) -> LossTerms:
    """Token terms of `part`; the caller multiplies `loss` by mask and scales, and sums."""
    new, old, mask = logprobs.new, logprobs.old, logprobs.mask
    comparable, known = mask * part.is_comparable, mask * part.has_behaviour
    log_weights = masked_log_ratio(old, part.behaviour, comparable)
    start = old
    if config.ratio_reference == "sampler":  # r = π/μ instead of r · w
        start = torch.where(comparable > 0, part.behaviour, old)
    ratio = policy_ratio(masked_log_ratio(new, start, mask), mask, config.ratio)
    clipped = clipped_loss(ratio, part.advantages, clip_low=clip.low, clip_high=clip.high, clip_delta=config.clip_delta)
    to_sampler = masked_log_ratio(new.detach(), part.behaviour, known)
    factors = correction_weights(log_weights, mask, config.correction, config.correction_cap)
    if config.correction not in WEIGHING_CORRECTIONS and config.ratio_reference == "start":
        factors = factors * torch.where(part.is_replay > 0, truncated_weights(log_weights, config.correction_cap), 1.0)
    if config.correction.endswith("opsm"):
        factors = factors * opsm(to_sampler, mask, part.advantages, config.opsm_limit_nats)
    loss, kl, base_known = clipped.loss * factors, torch.zeros_like(new), torch.zeros_like(mask)
    if logprobs.base is not None and logprobs.has_base is not None:
        base_known = mask * logprobs.has_base
        kl = kl_to_reference(new, logprobs.base, base_known)
    if config.kl_coef:
        loss = loss + config.kl_coef * kl
    return LossTerms(
        loss=loss,
        ratio=ratio.detach(),
        is_clipped=clipped.is_clipped,
        pull=factors * part.advantages,
        kl=kl.detach(),
        base_known=base_known,
        sampler_distance=to_sampler.square() / 2,
        sampler_known=known,
        log_weights=sequence_log_weights(log_weights, factors, mask, config.correction_cap),
    )
