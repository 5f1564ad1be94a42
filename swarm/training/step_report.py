"""Reports what one training step did, for logs and metrics, from sums over its micro-batches."""

# torch is annotated in part:
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from swarm.training.losses import ess_fraction
from swarm.training.micro_batch import TrainingSequence
from swarm.training.policy_loss import BOUNDS, LossTerms, bound_pulls


class Staleness(NamedTuple):
    """How many policy versions ago the own tokens of a step were sampled; None where it has none."""

    mean: float | None
    max: int | None


def token_staleness(sequences: Sequence[TrainingSequence], policy_version: int) -> Staleness:
    """Mean and maximum over the own tokens that take part, at the policy version before the step.

    Exact per token, also in answers that several versions sampled. Others count their own versions, not ours.
    """
    segments = [segment for sequence in sequences for segment in sequence.segments]
    if not segments:
        return Staleness(None, None)
    ages = [(policy_version - version, num_tokens) for version, num_tokens in segments]
    num_tokens = sum(num for _, num in ages)
    return Staleness(sum(age * num for age, num in ages) / num_tokens, max(age for age, _ in ages))


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one training step did: means over the tokens that took part, averaged over inner epochs."""

    loss: float
    grad_norm: float
    """Global norm before clipping."""
    clip_fraction: float
    """Share of tokens whose gradient the clip cut to zero."""
    entropy: float
    """Entropy of the policy at the sampled positions, in nats."""
    ess_fraction: float
    """Effective sample size over number of tokens; the earliest sign of stale data."""
    kl: float | None
    """Estimated KL to the base, in nats per token; from a few answers of every fourth step when training.kl_coef is 0."""
    sampler_kl: float | None
    """Estimated KL between the policy and those that sampled, in nats per token; None where log-probs are unknown."""
    engine_kl: float | None
    """The same of own tokens that this policy version sampled: what engine and trainer differ in. None without such tokens."""
    mean_ratio: float
    """Mean of r."""
    num_tokens: int
    """Answer tokens that took part in the loss."""
    lr: float
    """Learning rate as applied, after warm-up and back-off."""
    adapter_norm: float | None = None
    """L2 norm of all adapter weights after the step; None where they are on other machines."""
    staleness_mean: float | None = None
    """Mean of the policy versions since each own token of the step was sampled, replayed ones included."""
    staleness_max: int | None = None
    """The same of the stalest own token."""
    skip_reason: str = ""
    """Why the step was not applied; empty when it was."""

    @property
    def skipped(self) -> bool:
        return bool(self.skip_reason)

    def row(self, *, is_filtered: bool = False) -> dict[str, float | str | None]:
        """Columns of the metrics row; without tokens there was nothing to measure.

        `is_filtered`: whether answers were drawn from less than the whole policy, which sets engine and trainer apart on purpose.
        """
        if self.num_tokens == 0:
            return {"train/lr": self.lr, "train/skip_reason": self.skip_reason}
        return {
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/clip_fraction": self.clip_fraction,
            "train/entropy": self.entropy,
            "train/ess_fraction": self.ess_fraction,
            "train/kl": self.kl,
            "train/sampler_kl": self.sampler_kl,
            "train/engine_kl": None if is_filtered else self.engine_kl,
            "train/adapter_norm": self.adapter_norm,
            "train/staleness_mean": self.staleness_mean,
            "train/staleness_max": self.staleness_max,
            "train/lr": self.lr,
            "train/skip_reason": self.skip_reason,
        }

    @staticmethod
    def skip(reason: str, *, lr: float) -> "StepReport":
        """Report of a step that had nothing to compute."""
        return StepReport(0.0, 0.0, 0.0, 0.0, 1.0, None, None, None, 1.0, 0, lr, skip_reason=reason)

    @staticmethod
    def mean(reports: Sequence["StepReport"], *, adapter_norm: float | None, staleness: Staleness) -> "StepReport":
        """One report for the inner epochs of one step; the last epoch decides whether the step was skipped."""

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
            sampler_kl=reports[0].sampler_kl,  # later epochs have moved on purpose
            engine_kl=reports[0].engine_kl,
            mean_ratio=average([report.mean_ratio for report in reports]),
            num_tokens=last.num_tokens,
            lr=last.lr,
            adapter_norm=adapter_norm,
            staleness_mean=staleness.mean,
            staleness_max=staleness.max,
            skip_reason=last.skip_reason,
        )

    @staticmethod
    def of_parts(reports: Sequence["StepReport"]) -> "StepReport":
        """One report for the parts of one batch: means weighted by tokens. Skipped only if all parts were."""
        done = [report for report in reports if not report.skipped]
        if not done:
            return reports[-1]

        def mean(values: Iterable[float | None]) -> float | None:
            known = [(value, r.num_tokens) for value, r in zip(values, done, strict=True) if value is not None]
            return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None

        means = {name: mean(getattr(report, name) for report in done) for name in _MEANS}
        oldest = [report.staleness_max for report in done if report.staleness_max is not None]
        return replace(
            done[-1],  # rate and norm at the end
            **means,
            num_tokens=sum(report.num_tokens for report in done),
            staleness_max=max(oldest, default=None),
        )


_MEANS = (
    "loss", "grad_norm", "clip_fraction", "entropy", "ess_fraction", "kl", "sampler_kl", "engine_kl", "mean_ratio",
    "staleness_mean",
)  # fmt: skip


@dataclass(slots=True)
class StepSums:
    """Running sums over the micro-batches of one optimizer step."""

    loss: float = 0.0
    num_tokens: float = 0.0
    num_clipped: float = 0.0
    entropy: float = 0.0
    ratio: float = 0.0
    kl: float = 0.0
    num_base_known: float = 0.0
    sampler_distance: float = 0.0
    num_sampler_known: float = 0.0
    engine_distance: float = 0.0
    num_fresh: float = 0.0
    signal: float = 0.0
    """Sum of |weight · advantage| over unclipped tokens: 0 means there is no direction to move in."""
    num_answers: int = 0
    ess_weight: float = 0.0
    """Sum of the tokens' weights in the effective sample size."""
    ess_square: float = 0.0
    """Sum of their squares."""
    bound_pulls: Tensor = field(default_factory=lambda: torch.zeros(len(BOUNDS), 2, dtype=torch.float64))
    """Gradient from good and from bad answers under each clip bounds; filled where `training.adaptive_clip` is on."""

    @torch.no_grad()
    def add(self, loss: Tensor, terms: LossTerms, mask: Tensor, entropy: Tensor) -> None:
        """Add one micro-batch; `entropy` is [B, T]."""
        free = mask * (~terms.is_clipped)
        self.loss += loss.item()
        self.num_tokens += mask.sum().item()
        self.num_clipped += (mask * terms.is_clipped).sum().item()
        self.ratio += (mask * terms.ratio).sum().item()
        self.signal += (free * terms.pull.abs()).sum().item()
        self.entropy += (mask * entropy).sum().item()
        self.sampler_distance += terms.sampler_distance.sum().item()
        self.num_sampler_known += terms.sampler_known.sum().item()
        self.engine_distance += (terms.fresh * terms.sampler_distance).sum().item()
        self.num_fresh += terms.fresh.sum().item()
        self.num_answers += len(mask)
        self.ess_weight += terms.ess_weights.sum().item()
        self.ess_square += terms.ess_weights.square().sum().item()
        self.kl += terms.kl.sum().item()
        self.num_base_known += terms.base_known.sum().item()

    def add_bound_pulls(self, terms: LossTerms, scales: Tensor, mask: Tensor, clip_delta: float) -> None:
        """Add one micro-batch's pulls, weighted as in the loss."""
        self.bound_pulls += bound_pulls(terms.ratio, terms.pull * scales, mask, clip_delta).cpu()

    @property
    def ess_fraction(self) -> float:
        return ess_fraction(self.ess_weight, self.ess_square, self.num_tokens)

    def why_not_applicable(self, grad_norm: float) -> str:
        """Reason to leave the adapter as it is, or an empty string."""
        if not math.isfinite(self.loss) or not math.isfinite(grad_norm):
            return "loss or gradient is not finite"
        if self.signal == 0 and grad_norm == 0:
            return "every token is clipped or outside the correction's range"
        return ""

    def report(self, *, grad_norm: float, lr: float, skip_reason: str) -> StepReport:
        """The report of the step, from the sums."""
        count = max(self.num_tokens, 1.0)
        return StepReport(
            loss=self.loss,
            grad_norm=grad_norm,
            clip_fraction=self.num_clipped / count,
            entropy=self.entropy / count,
            ess_fraction=self.ess_fraction,
            kl=_mean_or_none(self.kl, self.num_base_known),
            sampler_kl=_mean_or_none(self.sampler_distance, self.num_sampler_known),
            engine_kl=_mean_or_none(self.engine_distance, self.num_fresh),
            mean_ratio=self.ratio / count,
            num_tokens=int(self.num_tokens),
            lr=lr,
            skip_reason=skip_reason,
        )


def _mean_or_none(total: float, count: float) -> float | None:
    return total / count if count else None
