"""The policy-gradient step: groups in, a moved adapter out.

    groups ─▶ advantages, scales ─▶ micro-batches ─┬▶ log-probs ─▶ r = π/π_old, w = π_old/μ ─▶ loss ─▶ backward ─┐
                                                   └────────────── gradients add up ────────────────────────────┤
                            next inner epoch ◀─ AdamW ◀─ lr · √(ESS/B) ◀─ clip ◀─ finite? ◀─────────────────────┘

A step is all or nothing: it is applied, or the adapter and the optimizer stay bitwise what they were. A large batch may be
split into several steps.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swarm.adapters.adapter_state import adapter_parameters, read_adapter, write_adapter
from swarm.config import TrainingSection
from swarm.errors import CheckpointError, TrainingError
from swarm.policy.counter_noise import derive_seed
from swarm.policy.logprobs import TokenLogprobs, token_logprobs
from swarm.policy.policy import Policy
from swarm.training.adaptive_clip import AdaptiveClip
from swarm.training.effective_sample_size import lr_factor
from swarm.training.micro_batch import MicroBatch, micro_batches, training_sequences
from swarm.training.policy_loss import ClipRange, Logprobs, policy_loss
from swarm.training.staleness import token_staleness
from swarm.training.step_report import StepReport, StepSums
from swarm.training.training_group import TrainingGroup

_KL_SAMPLE_STRIDE = 16
_KL_SAMPLE_STEPS = 4
"""Where the loss does not need the KL to the base, it is estimated at one answer in 16, once in four steps."""


class _Frozen(NamedTuple):
    """What stays fixed over the inner epochs of one micro-batch, where it is needed."""

    old: Tensor | None  # [B, T] log π_old
    base: Tensor | None  # [B, T] log-probs of the base, the policy with its adapter switched off
    has_base: Tensor | None  # [B, 1]


class Trainer:
    """Trains the adapter of `policy` with AdamW."""

    def __init__(
        self,
        config: TrainingSection,
        policy: Policy,
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
        self._parameters = dict(adapter_parameters(policy.model))
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=config.lr, weight_decay=config.weight_decay, fused=policy.device.type != "mps"
        )
        lora_dropout = policy.config.lora.dropout > 0
        self._trains_in_train_mode = lora_dropout or policy.config.gradient_checkpointing
        policy.model.eval()
        self._needs_frozen_pass = config.inner_epochs > 1 or lora_dropout
        self._adaptive_clip = AdaptiveClip()
        self.num_skipped_steps = 0
        """Steps that were not applied since the first start."""

    def step(self, batch: Sequence[TrainingGroup]) -> StepReport:
        """`inner_epochs` optimizer steps on each part of `batch`; raises `policy.version` by those applied.

        Parts are of at most `groups_per_step` groups and take every n-th one, so that own groups and those of others mix.
        To a later part the earlier ones are off-policy data like any other, weighed by the correction.

        A part without a usable token, without a gradient to follow, or with a non-finite loss or gradient is skipped
        and counted. Raises TrainingError for a group without reward differences, and if a step that should move the
        adapter did not.
        """
        num_parts = max(1, math.ceil(len(batch) / (self._config.groups_per_step or max(len(batch), 1))))
        parts = [self._step(batch[first::num_parts]) for first in range(num_parts)]
        return parts[0] if num_parts == 1 else StepReport.of_parts(parts)

    def _step(self, batch: Sequence[TrainingGroup]) -> StepReport:
        sequences = training_sequences(batch, self._config, self._max_new_tokens, self._stop)
        if not sequences:
            self.num_skipped_steps += 1
            return StepReport.skip("no answer that takes part in the loss", lr=self._lr())
        size = self._config.micro_batch_sequences
        parts = list(micro_batches(sequences, size, self._policy.device))
        frozen = [self._frozen_logprobs(part) for part in parts]
        staleness = token_staleness(sequences, self._policy.version)
        reports: list[StepReport] = []
        for _ in range(self._config.inner_epochs):
            reports.append(self._inner_step(parts, frozen))
            if reports[-1].skipped:
                break
        return StepReport.mean(reports, adapter_norm=self._adapter_norm(), staleness=staleness)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """({"adapter": …, "optimizer": …} tensors on the CPU, JSON-able rest), all that `restore` needs."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                moments[f"{key}:{name}"] = value.detach().to("cpu", copy=True).contiguous()
        rest = {
            "policy_version": self._policy.version,
            "num_skipped_steps": self.num_skipped_steps,
            "adaptive_clip_notch": self._adaptive_clip.notch,
            "policy_lineage": self._policy.lineage.policy,
        }
        return {"adapter": read_adapter(self._policy.model), "optimizer": moments}, rest

    def restore(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Continue from what `state` gave. Raises CheckpointError if it belongs to another base or adapter shape."""
        if state["policy_lineage"] != self._policy.lineage.policy:
            raise CheckpointError(
                f"a checkpoint must come from policy lineage {self._policy.lineage.policy}, got "
                f"{state['policy_lineage']}; restore policy.base and policy.lora, or start in a new node.dir"
            )
        write_adapter(self._policy.model, tensors["adapter"])
        self._optimizer.state.clear()
        for key, value in tensors["optimizer"].items():
            kind, _, name = key.partition(":")
            if name not in self._parameters:
                raise CheckpointError(
                    f"optimizer state must belong to adapter tensors, got {name}; start in a new node.dir"
                )
            parameter = self._parameters[name]
            self._optimizer.state[parameter][kind] = value.to(parameter.device, copy=True)
        self._policy.version = state["policy_version"]
        self.num_skipped_steps = state["num_skipped_steps"]
        self._adaptive_clip.notch = state.get("adaptive_clip_notch", 0)  # absent in checkpoints of older versions

    def reset_moments(self, names: Iterable[str]) -> None:
        """Forget AdamW's moments and step count of some adapter tensors, after a merge that turned their basis."""
        for name in names:
            self._optimizer.state.pop(self._parameters[name], None)

    def _inner_step(self, parts: list[MicroBatch], frozen: list[_Frozen]) -> StepReport:
        """Accumulate the gradient of all parts, then apply it once or not at all."""
        sums = StepSums()
        self._optimizer.zero_grad(set_to_none=True)
        with self._training_mode():
            for part, fixed in zip(parts, frozen, strict=True):
                self._loss(part, fixed, sums).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm).item()
        lr = self._lr()
        if self._config.lr_by_ess:
            lr *= lr_factor(sums.ess_fraction, len(sums.log_weights))
        reason = sums.why_not_applicable(grad_norm)
        if reason:
            self.num_skipped_steps += 1
        else:
            self._apply(lr)
            if self._config.adaptive_clip:
                self._adaptive_clip.choose(sums.bound_pulls)
        self._optimizer.zero_grad(set_to_none=True)
        return sums.report(grad_norm=grad_norm, lr=lr, skip_reason=reason)

    def _apply(self, lr: float) -> None:
        # watch one factor that has a gradient, B before A as B starts at zero: any change shows there, however small lr
        # is
        watched = next((p for p in reversed(self._parameters.values()) if p.grad is not None and p.grad.any()), None)
        before = None if watched is None else watched.detach().clone()
        if watched is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._policy.version += 1
        if watched is None or before is None or torch.equal(before, watched):
            raise TrainingError(
                f"a step with advantages and lr > 0 must move the adapter, got no change at lr {lr:g}; "
                "raise training.lr, and check that nothing froze or detached the adapter"
            )

    def _loss(self, part: MicroBatch, frozen: _Frozen, sums: StepSums) -> Tensor:
        """This part's share of the batch's loss; its statistics are added to `sums`."""
        result = self._logprobs(part, with_entropy=True)
        # without a frozen pass π_old is the policy itself: r = 1 with the gradient of log π
        old = result.logprobs.detach() if frozen.old is None else frozen.old
        logprobs = Logprobs(result.logprobs, old, frozen.base, frozen.has_base, result.mask)
        terms = policy_loss(part, logprobs, self._config, self._clip_range())
        loss = (terms.loss * result.mask * part.scales).sum()
        assert result.entropy is not None
        sums.add(loss, terms, result.mask, result.entropy)
        if self._config.adaptive_clip:
            sums.add_bound_pulls(terms, part.scales, result.mask, self._config.clip_delta)
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
        old = self._logprobs(part).logprobs if self._needs_frozen_pass else None
        rows = self._kl_rows(len(part.sequences))
        if not rows:
            return _Frozen(old, None, None)
        chosen = part._replace(sequences=[part.sequences[row] for row in rows])
        with self._policy.model.disable_adapter():
            some = self._logprobs(chosen).logprobs  # [rows, shorter or equal T]
        base = torch.zeros_like(part.behaviour)
        base[rows, : some.shape[1]] = some
        has_base = torch.zeros_like(part.advantages)
        has_base[rows] = 1
        return _Frozen(old, base, has_base)

    def _kl_rows(self, num_answers: int) -> list[int]:
        """All answers where the loss holds the KL; else, to watch it, a few of every fourth step."""
        if self._config.kl_coef:
            return list(range(num_answers))
        step = self._policy.version // self._config.inner_epochs
        return [] if step % _KL_SAMPLE_STEPS else list(range(0, num_answers, _KL_SAMPLE_STRIDE))

    def _adapter_norm(self) -> float:
        norms = [parameter.detach().float().norm() for parameter in self._parameters.values()]
        return torch.stack(norms).norm().item()

    def _logprobs(self, part: MicroBatch, with_entropy: bool = False) -> TokenLogprobs:
        return token_logprobs(
            self._policy.model,
            part.sequences,
            self._policy.pad_token_id,
            self._temperature,
            with_entropy,
            share_prompts=not self._policy.config.gradient_checkpointing,
        )

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        """Train mode where dropout or checkpointing needs it; dropout masks depend on the step, not on global state."""
        if not self._trains_in_train_mode:
            yield
            return
        device = self._policy.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed("dropout", self._policy.config.lora.init_seed, self._policy.version))
            self._policy.model.train()
            try:
                yield
            finally:
                self._policy.model.eval()

    def _lr(self) -> float:
        """Linear warm-up to `lr`; step 0 already moves."""
        return self._config.lr * min(1.0, (self._policy.version + 1) / max(self._config.warmup_steps, 1))
