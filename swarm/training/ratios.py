"""The ratio r of the policy loss, from log r per token; by name of `training.ratio`.

All levels are equal where the policy has not moved: r = 1.
"""

import torch
from torch import Tensor

from swarm.training.log_ratio import masked_mean


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
