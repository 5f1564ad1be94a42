"""Averaging LoRA adapters of different layers: by what they add to the base, B·A, and not factor by factor.

Factors of two layers start from different A, so their averages multiply to something that neither layer does: half of the
product would be cross terms. The average of the products has twice the rank; its best approximation of the old rank comes
from the QR of the stacked factors and the SVD of a small core, without ever forming an output × input matrix.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_START_ROW_NORM = 1 / math.sqrt(3)
"""Norm of a row of A at the start of a lineage: uniform in ±1/√inputs."""


def average_products(pairs: Sequence[tuple[Tensor, Tensor]], shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(B [d, r], A [r, k]) with B·A the nearest of rank r to Σ share · B·A of `pairs`; in float64.

    Rows of A are orthogonal and as long as at the start of a lineage, and the rest is in B. So a direction without content
    has B zero and A not, as a fresh adapter has, and can still be learnt.
    """
    rank = pairs[0][1].shape[0]
    stacked_b = torch.cat([b.double() * share for (b, _), share in zip(pairs, shares, strict=True)], dim=1)  # [d, 2r]
    stacked_a = torch.cat([a.double() for _, a in pairs], dim=0)  # [2r, k]
    left, core_b = torch.linalg.qr(stacked_b)
    right, core_a = torch.linalg.qr(stacked_a.T)
    u, values, v = torch.linalg.svd(core_b @ core_a.T, full_matrices=False)
    kept = min(rank, len(values))
    b = stacked_b.new_zeros(stacked_b.shape[0], rank)
    a = stacked_a.new_zeros(rank, stacked_a.shape[1])
    b[:, :kept] = left @ u[:, :kept] * values[:kept] / _START_ROW_NORM
    a[:kept] = (right @ v[:kept].T).T * _START_ROW_NORM
    return b.to(pairs[0][0].dtype), a.to(pairs[0][1].dtype)
