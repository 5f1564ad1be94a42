"""What one training step did, for logs and metrics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm.policy.logprobs import TokenLogprobs
from swarm.training.corrections import ess_fraction
from swarm.training.losses import ClippedLoss


@dataclass(frozen=True, slots=True)
class StepReport:
    """Means over the tokens that took part, averaged over inner epochs."""

    loss: float
    grad_norm: float
    """Global norm before clipping."""
    clip_fraction: float
    """Share of tokens whose gradient the clip cut to zero."""
    entropy: float
    """Of the policy at the sampled positions, in nats."""
    ess_fraction: float
    """Effective sample size over number of sequences that came with log-probs; the earliest sign of stale data."""
    kl: float | None
    """Estimated KL to the base, in nats per token; None when training.kl_coef is 0."""
    mean_ratio: float
    """Mean of π / π_old."""
    num_tokens: int
    """Answer tokens that took part in the loss."""
    lr: float
    skip_reason: str = ""
    """Why the step was not applied; empty when it was."""

    @property
    def skipped(self) -> bool:
        return bool(self.skip_reason)

    @staticmethod
    def skip(reason: str, *, lr: float) -> "StepReport":
        """Report of a step that had nothing to compute."""
        return StepReport(0.0, 0.0, 0.0, 0.0, 1.0, None, 1.0, 0, lr, reason)

    @staticmethod
    def mean(reports: Sequence["StepReport"]) -> "StepReport":
        """One report for the inner epochs of one step; the last one tells whether it ended early."""

        def average(values: list[float]) -> float:
            return sum(values) / len(values)

        last = reports[-1]
        return StepReport(
            loss=average([report.loss for report in reports]),
            grad_norm=average([report.grad_norm for report in reports]),
            clip_fraction=average([report.clip_fraction for report in reports]),
            entropy=average([report.entropy for report in reports]),
            ess_fraction=last.ess_fraction,
            kl=None if last.kl is None else average([report.kl or 0.0 for report in reports]),
            mean_ratio=average([report.mean_ratio for report in reports]),
            num_tokens=last.num_tokens,
            lr=last.lr,
            skip_reason=last.skip_reason,
        )


@dataclass(slots=True)
class StepSums:
    """Running sums over the micro-batches of one optimizer step."""

    loss: float = 0.0
    num_tokens: float = 0.0
    num_clipped: float = 0.0
    entropy: float = 0.0
    ratio: float = 0.0
    kl: float | None = None
    signal: float = 0.0
    """Sum of |weight · advantage| over unclipped tokens: 0 means there is no direction to move in."""
    log_weights: list[float] = field(default_factory=list)
    """Per sequence with log-probs: log of the product of its tokens' importance weights."""

    def add(self, loss: Tensor, result: TokenLogprobs, terms: ClippedLoss, pull: Tensor, kl: Tensor | None) -> None:
        """Add one micro-batch; `pull` is weight · advantage, [B, T]."""
        with torch.no_grad():
            mask = result.mask
            free = mask * (~terms.is_clipped)
            self.loss += loss.item()
            self.num_tokens += mask.sum().item()
            self.num_clipped += (mask * terms.is_clipped).sum().item()
            self.ratio += (mask * terms.ratio).sum().item()
            self.signal += (free * pull.abs()).sum().item()
            if result.entropy is not None:
                self.entropy += result.entropy.sum().item()
            if kl is not None:
                self.kl = (self.kl or 0.0) + (mask * kl).sum().item()

    def why_not_applicable(self, grad_norm: float) -> str:
        """Reason to leave the adapter as it is, or an empty string."""
        if not math.isfinite(self.loss) or not math.isfinite(grad_norm):
            return "loss or gradient is not finite"
        if self.signal == 0 and grad_norm == 0:
            return "every token is clipped or outside the correction's range"
        return ""

    def report(self, *, grad_norm: float, lr: float, skip_reason: str) -> StepReport:
        """Means of the sums."""
        count = max(self.num_tokens, 1.0)
        return StepReport(
            loss=self.loss,
            grad_norm=grad_norm,
            clip_fraction=self.num_clipped / count,
            entropy=self.entropy / count,
            ess_fraction=ess_fraction(torch.tensor(self.log_weights)),
            kl=None if self.kl is None else self.kl / count,
            mean_ratio=self.ratio / count,
            num_tokens=int(self.num_tokens),
            lr=lr,
            skip_reason=skip_reason,
        )
