"""Corrections of the loss for tokens that another policy sampled: factors from the importance weight w = π_old / μ per token.

μ is the policy that sampled (its log-probs came with the rollout), π_old the own policy at the start of the step. Own answers
that waited, or that several policy versions sampled, are treated as those of others. Factors carry no gradient.

A correction is one class here, or in a file of its own, and one line in `swarm/extensions/points.py`; its trait `WEIGHS` says
that it multiplies by w.
"""

import math
from abc import ABC, abstractmethod
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from swarm.config import Section, TrainingSection
from swarm.extensions.points import CORRECTIONS
from swarm.training.losses import masked_mean, truncated_weights


class OffPolicyTokens(NamedTuple):
    """What a correction knows of one micro-batch of B answers with at most T tokens."""

    log_weights: Tensor
    """[B, T] log w = log π_old - log μ; 0 where masked and where μ is unknown."""
    to_sampler: Tensor
    """[B, T] log π - log μ with the policy as it is now; 0 where masked and where μ is unknown."""
    mask: Tensor
    """[B, T] 1 at answer tokens."""
    advantages: Tensor
    """[B, 1], or [B, T] where turns have their own"""


class Correction(ABC):
    """One form of the correction. Where w = 1 at all tokens, and the policy has not moved, every factor is 1."""

    @abstractmethod
    def factors(self, tokens: OffPolicyTokens, config: TrainingSection) -> Tensor:
        """[B, T] what each token's loss is multiplied by: finite, never negative."""


class NoCorrection(Correction):
    """1 for every token."""

    def factors(self, tokens: OffPolicyTokens, config: TrainingSection) -> Tensor:
        return torch.ones_like(tokens.log_weights)


class Truncated(Correction):
    """min(w, C) per token (truncated importance sampling)."""

    def factors(self, tokens: OffPolicyTokens, config: TrainingSection) -> Tensor:
        return truncated_weights(tokens.log_weights, config.correction_cap)


class Banded(Correction):
    """w where 1/C <= w <= C, 0 for tokens outside (IcePop, 2510.18855)."""

    def factors(self, tokens: OffPolicyTokens, config: TrainingSection) -> Tensor:
        is_inside = tokens.log_weights.abs() <= math.log(config.correction_cap)
        return torch.where(is_inside, tokens.log_weights.exp(), 0.0)


class SequenceMask(Correction):
    """1 for answers with exp(mean_t log w) in [1/C, C], 0 for the others."""

    def factors(self, tokens: OffPolicyTokens, config: TrainingSection) -> Tensor:
        is_inside = masked_mean(tokens.log_weights, tokens.mask).abs() <= math.log(config.correction_cap)
        return is_inside.to(tokens.log_weights.dtype).expand_as(tokens.log_weights)


class Opsm(Correction):
    """0 for answers with A < 0 and mean_t(log μ - log π) > limit, 1 for the others (2512.02556).

    A bad answer that the policy would hardly write teaches it nothing, and pushing it down further has no bottom.
    """

    def factors(self, tokens: OffPolicyTokens, config: TrainingSection) -> Tensor:
        is_far = -masked_mean(tokens.to_sampler, tokens.mask) > config.opsm_limit_nats
        is_kept = ~((tokens.advantages < 0) & is_far)
        return is_kept.to(tokens.to_sampler.dtype).expand_as(tokens.to_sampler)


class TruncatedOpsm(Correction):
    """`Truncated`, and 0 for what `Opsm` drops."""

    def factors(self, tokens: OffPolicyTokens, config: TrainingSection) -> Tensor:
        return Truncated().factors(tokens, config) * Opsm().factors(tokens, config)


class ShapedParameters(Section):
    """`correction_parameters` of shaped+opsm."""

    half_weight: Annotated[float, Field(gt=0, le=1)] = 0.1
    """γ: the importance weight at which a good answer counts about half. The largest weight is 1 + γ."""


class ShapedOpsm(Correction):
    """w (1 + γ) / (w + γ) for tokens with A > 0, min(w, C) for the others, and 0 for what `Opsm` drops.

    min(w, C) turns a foreign group into an estimate of the own policy's gradient, in which a success that the own policy hardly
    ever finds counts hardly at all. The shaped weight keeps it, and is bounded (policy shaping of LUFFY, 2504.14945).
    """

    Parameters = ShapedParameters

    def __init__(self, parameters: ShapedParameters) -> None:
        self._half_weight = parameters.half_weight

    def factors(self, tokens: OffPolicyTokens, config: TrainingSection) -> Tensor:
        half = self._half_weight
        weights = tokens.log_weights.exp()
        shaped = weights * (1 + half) / (weights + half)
        kept = torch.where(tokens.advantages > 0, shaped, truncated_weights(tokens.log_weights, config.correction_cap))
        return kept * Opsm().factors(tokens, config)


class SequenceMaskOpsm(Correction):
    """0 for what either of `SequenceMask` and `Opsm` drops."""

    def factors(self, tokens: OffPolicyTokens, config: TrainingSection) -> Tensor:
        return SequenceMask().factors(tokens, config) * Opsm().factors(tokens, config)


def configured_correction(config: TrainingSection) -> Correction:
    """The correction that `training.correction` names. Raises ConfigError for parameters that it does not take."""
    return CORRECTIONS.make(config.correction, config.correction_parameters, "training.correction_parameters")
