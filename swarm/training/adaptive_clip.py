"""Clip bounds that keep good answers at half of the update or more (BAPO, 2510.18927).

Stale batches hold more bad answers than good ones, and the fixed range cuts the likely-again good ones first: the
update becomes mostly a pushing down, and entropy goes with it. So the bounds of the ratio are raised: c_low from .6
to .8, which leaves out bad answers that are already unlikely, then c_high from 1.2 to 2, which lets good ones grow.
"""

import torch
from torch import Tensor

_STEP = 0.05
BOUNDS: tuple[tuple[float, float], ...] = tuple(
    [(round(0.6 + _STEP * i, 2), 1.2) for i in range(5)] + [(0.8, round(1.2 + _STEP * i, 2)) for i in range(1, 17)]
)
"""(c_low, c_high) in the order in which they are tried."""


class AdaptiveClip:
    """The bounds for the next optimizer step, chosen on the ratios of the last one."""

    def __init__(self) -> None:
        self.notch = 0
        """Index into BOUNDS; the whole state."""

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
