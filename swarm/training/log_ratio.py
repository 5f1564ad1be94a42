"""Differences of log-probabilities that stay finite, whatever stands at masked places."""

import torch
from torch import Tensor

_LOG_LIMIT = 20.0
"""|log ratio| beyond it is cut: e^20 is far outside every clip range and cap, and stays finite in float32."""


def masked_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log numerator - log denominator [B, T], within ±20; 0 without gradient where `mask` is 0, even at inf and nan."""
    return torch.where(mask > 0, numerator - denominator, 0.0).clamp(-_LOG_LIMIT, _LOG_LIMIT)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens [B, 1] of values [B, T] that are 0 where masked; 0 for a row without tokens."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
