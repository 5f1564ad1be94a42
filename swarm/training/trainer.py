"""The policy-gradient step: groups in, a moved adapter out.

    groups ─▶ advantages, scales ─▶ micro-batches ─┬▶ log-probs ─▶ r = π/π_old, w = π_old/μ ─▶ loss ─▶ backward ─┐
                                                   └────────────── gradients add up ────────────────────────────┤
                            next inner epoch ◀─ AdamW ◀─ lr · √(ESS/N) ◀─ clip ◀─ finite? ◀─────────────────────┘

A step is all or nothing: it is applied, or the adapter and the optimizer stay bitwise what they were. A large batch may be
split into several steps.
"""

import math
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swarm.config import TrainingSection
from swarm.errors import CheckpointError, PipelineError
from swarm.observability.tracing import Facts, traced
from swarm.policy.logprobs import TokenLogprobs
from swarm.policy.micro_batch_size import TokenSequence
from swarm.policy.policy import TextPolicy
from swarm.training.advantages import batch_advantages, configured_advantage, turn_advantages
from swarm.training.corrections import configured_correction
from swarm.training.experience import TrainingGroup
from swarm.training.losses import lr_factor
from swarm.training.micro_batch import MicroBatch, micro_batches, training_sequences
from swarm.training.policy_loss import AdaptiveClip, ClipRange, Logprobs, policy_loss
from swarm.training.policy_optimizer import AdapterTensors, PolicyOptimizer
from swarm.training.step_report import StepReport, StepSums, token_staleness

_KL_SAMPLE_STRIDE = 16
_KL_SAMPLE_STEPS = 4
"""Where the loss does not need the KL to the base, it is estimated at one answer in 16, once in four steps."""


class _Frozen(NamedTuple):
    """Log-probs of one micro-batch that stay fixed over its inner epochs; None where they are not needed."""

    old: Tensor | None  # [B, T] log π_old
    base: Tensor | None  # [B, T] log-probs of the base, the policy with its adapter switched off
    has_base: Tensor | None  # [B, 1]


def _facts(report: StepReport, _: "Trainer", batch: Sequence[TrainingGroup]) -> Facts:
    return {"groups": len(batch), "skipped": report.skipped}


class Trainer:
    """Trains the adapter of `policy`; `steps` has its gradients and its optimizer. It belongs to the compute thread."""

    def __init__(
        self,
        config: TrainingSection,
        policy: TextPolicy,
        steps: PolicyOptimizer,
        *,
        temperature: float,
        max_new_tokens: int,
        stop: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._policy = policy
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._stop = tuple(stop)
        self._steps = steps
        configured_advantage(config)  # what cannot be loaded is an error here rather than at the first step
        configured_correction(config)
        self._needs_frozen_pass = config.inner_epochs > 1 or policy.config.lora.dropout > 0
        self._adaptive_clip = AdaptiveClip()
        self.num_skipped_steps = 0
        """Number of steps since the first start that were not applied."""

    @traced("train_step", _facts)
    def step(self, batch: Sequence[TrainingGroup]) -> StepReport:
        """`inner_epochs` optimizer steps on each part of `batch`; raises `policy.version` by those applied.

        Parts are of at most `groups_per_step` groups and take every n-th one, so that own groups and those of others mix.
        For a later part the policy has moved already, so its answers are off-policy data, which the correction weighs.

        A part without a usable token, without a gradient to follow, or with a non-finite loss or gradient is skipped
        and counted. Raises TrainingError for a group without reward differences, and if a step that should move the
        adapter did not.
        """
        num_parts = max(1, math.ceil(len(batch) / (self._config.groups_per_step or max(len(batch), 1))))
        values = batch_advantages(batch, self._config)  # of the whole batch, which some forms normalise over
        of_answers = iter(zip(values, turn_advantages(batch, self._config, values), strict=True))
        by_group = [list(islice(of_answers, len(group.group.rollouts))) for group in batch]
        parts = [
            self._step(batch[first::num_parts], list(chain.from_iterable(by_group[first::num_parts])))
            for first in range(num_parts)
        ]
        return parts[0] if num_parts == 1 else StepReport.of_parts(parts)

    def _step(
        self, batch: Sequence[TrainingGroup], advantages: Sequence[tuple[float | None, tuple[float, ...]]]
    ) -> StepReport:
        """`advantages`: of each answer, and of its turns."""
        sequences = training_sequences(
            batch,
            self._config,
            self._max_new_tokens,
            self._stop,
            advantages=[value for value, _ in advantages],
            by_turn=[turns for _, turns in advantages],
            policy_version=self._policy.version,
        )
        if not sequences:
            self.num_skipped_steps += 1
            return StepReport.skip("no answer that takes part in the loss", lr=self._lr())
        parts = list(
            micro_batches(
                sequences,
                self._policy.device,
                max_sequences=self._config.micro_batch_sequences,
                max_tokens=self._policy.micro_batch_tokens,
                max_separate_tokens=self._policy.max_separate_tokens,
            )
        )
        frozen = [self._frozen_logprobs(part) for part in parts]
        staleness = token_staleness(sequences, self._policy.version)
        reports: list[StepReport] = []
        for _ in range(self._config.inner_epochs):
            reports.append(self._inner_step(parts, frozen))
            if reports[-1].skipped:
                break
        return StepReport.mean(reports, adapter_norm=self._steps.adapter_norm(), staleness=staleness)

    def state(self) -> tuple[AdapterTensors, dict[str, Any]]:
        """({"adapter": …, "optimizer": …} tensors on the CPU, the rest for JSON): everything that `restore` needs."""
        rest = {
            "policy_version": self._policy.version,
            "num_skipped_steps": self.num_skipped_steps,
            "adaptive_clip_notch": self._adaptive_clip.notch,
            "policy_lineage": self._policy.lineage.policy,
        }
        return self._steps.state(), rest

    def restore(self, tensors: AdapterTensors, state: dict[str, Any]) -> None:
        """Continue from a `state`. Raises CheckpointError if it belongs to another base or adapter shape."""
        if not self._policy.lineage.has_name(state["policy_lineage"]):
            raise CheckpointError(
                f"a checkpoint must come from policy lineage {self._policy.lineage.policy}, got "
                f"{state['policy_lineage']}; restore policy.base and policy.lora, or start in a new node.dir"
            )
        self._steps.restore(tensors, state["policy_version"])
        self.num_skipped_steps = state["num_skipped_steps"]
        self._adaptive_clip.notch = state.get("adaptive_clip_notch", 0)  # absent in checkpoints of older versions

    def _inner_step(self, parts: list[MicroBatch], frozen: list[_Frozen]) -> StepReport:
        """Accumulate the gradient of all parts, then apply it once or not at all."""
        sums = StepSums()

        def loss_of(index: int, result: TokenLogprobs) -> Tensor:
            return self._loss(parts[index], frozen[index], result, sums)

        try:
            grad_norm = self._steps.accumulate([part.sequences for part in parts], loss_of, self._temperature)
        except PipelineError as failure:  # a stage was lost or refused: drop the batch, not the run
            self.num_skipped_steps += 1
            return StepReport.skip(str(failure), lr=self._lr())
        lr = self._lr()
        if self._config.lr_by_ess:
            lr *= lr_factor(sums.ess_fraction, sums.num_answers)
        reason = sums.why_not_applicable(grad_norm)
        if reason:
            self.num_skipped_steps += 1
        else:
            self._steps.apply(lr)
            if self._config.adaptive_clip:
                self._adaptive_clip.choose(sums.bound_pulls)
        self._steps.drop()
        return sums.report(grad_norm=grad_norm, lr=lr, skip_reason=reason)

    def _loss(self, part: MicroBatch, frozen: _Frozen, result: TokenLogprobs, sums: StepSums) -> Tensor:
        """This part's share of the batch's loss; its statistics are added to `sums`."""
        # without a frozen pass π_old is the policy itself: r = 1 with the gradient of log π
        old = result.logprobs.detach() if frozen.old is None else frozen.old
        mask = result.mask * part.is_trained
        logprobs = Logprobs(result.logprobs, old, frozen.base, frozen.has_base, mask)
        terms = policy_loss(part, logprobs, self._config, self._clip_range())
        loss = (terms.loss * mask * part.scales).sum()
        assert result.entropy is not None
        sums.add(loss, terms, mask, result.entropy)
        if self._config.adaptive_clip:
            sums.add_bound_pulls(terms, part.scales, mask, self._config.clip_delta)
        return loss

    def _clip_range(self) -> ClipRange:
        config = self._config
        adaptive = self._adaptive_clip
        if config.adaptive_clip:
            return ClipRange(adaptive.clip_low, adaptive.clip_high)
        if config.ratio == "sequence":
            return ClipRange(config.sequence_clip_low, config.sequence_clip_high)
        return ClipRange(config.clip_low, config.clip_high)

    @torch.no_grad()
    def _frozen_logprobs(self, part: MicroBatch) -> _Frozen:
        old = self._logprobs(part.sequences) if self._needs_frozen_pass else None
        rows = self._kl_rows(len(part.sequences))
        if not rows:
            return _Frozen(old, None, None)
        chosen = [part.sequences[row] for row in rows]
        some = self._logprobs(chosen, without_adapter=True)  # [rows, shorter or equal T]
        base = torch.zeros_like(part.behaviour)
        base[rows, : some.shape[1]] = some
        has_base = torch.zeros_like(part.advantages)
        has_base[rows] = 1
        return _Frozen(old, base, has_base)

    def _kl_rows(self, num_answers: int) -> list[int]:
        """All answers where the loss has a KL term; else, to watch the KL, a few of every fourth step."""
        if self._config.kl_coef:
            return list(range(num_answers))
        step = self._policy.version // self._config.inner_epochs
        return [] if step % _KL_SAMPLE_STEPS else list(range(0, num_answers, _KL_SAMPLE_STRIDE))

    def _logprobs(self, sequences: Sequence[TokenSequence], *, without_adapter: bool = False) -> Tensor:
        return self._policy.token_logprobs(sequences, self._temperature, without_adapter=without_adapter).logprobs

    def _lr(self) -> float:
        """Linear warm-up to `lr`; step 0 already moves."""
        return self._config.lr * min(1.0, (self._policy.version + 1) / max(self._config.warmup_steps, 1))
