"""The policy-gradient step: groups in, a moved adapter out.

    groups ─▶ advantages, scales ─▶ micro-batches ─┬▶ log-probs ─▶ r = π/π_old, w = π_old/μ ─▶ loss ─▶ backward ─┐
                                                   └────────────── gradients add up ────────────────────────────┤
                                              next inner epoch ◀─ AdamW ◀─ clip ◀─ finite? ◀────────────────────┘

A step is all or nothing: it is applied, or the adapter and the optimizer stay bitwise what they were.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from swarm.adapters.adapter_state import adapter_parameters, read_adapter, write_adapter
from swarm.config import TrainingSection
from swarm.errors import CheckpointError, TrainingError
from swarm.policy.counter_noise import derive_seed
from swarm.policy.logprobs import TokenLogprobs, token_logprobs
from swarm.policy.policy import Policy
from swarm.training.corrections import correction_weights, log_importance
from swarm.training.losses import clipped_loss, kl_to_reference
from swarm.training.micro_batch import MicroBatch, micro_batches, training_sequences
from swarm.training.step_report import StepReport, StepSums
from swarm.training.training_group import TrainingGroup


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
        self.num_skipped_steps = 0
        """Steps that were not applied since the first start."""

    def step(self, batch: Sequence[TrainingGroup]) -> StepReport:
        """One training step of `inner_epochs` optimizer steps on `batch`; raises `policy.version` by those applied.

        A step without a usable token, without a gradient to follow, or with a non-finite loss or gradient is skipped
        and counted. Raises TrainingError for a group without reward differences, and if a step that should move the
        adapter did not.
        """
        sequences = training_sequences(batch, self._config, self._max_new_tokens, self._stop)
        if not sequences:
            self.num_skipped_steps += 1
            return StepReport.skip("no answer that takes part in the loss", lr=self._lr())
        size = self._config.micro_batch_sequences
        parts = list(micro_batches(sequences, size, self._policy.device))
        frozen = [self._frozen_logprobs(part) for part in parts]
        reports: list[StepReport] = []
        for _ in range(self._config.inner_epochs):
            reports.append(self._inner_step(parts, frozen))
            if reports[-1].skipped:
                break
        return StepReport.mean(reports)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """({"adapter": …, "optimizer": …} tensors on the CPU, JSON-able rest), all that `restore` needs."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                moments[f"{key}:{name}"] = value.detach().to("cpu", copy=True).contiguous()
        rest = {
            "policy_version": self._policy.version,
            "num_skipped_steps": self.num_skipped_steps,
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

    def _inner_step(self, parts: list[MicroBatch], frozen: list[tuple[Tensor | None, Tensor | None]]) -> StepReport:
        """Accumulate the gradient of all parts, then apply it once or not at all."""
        lr = self._lr()
        sums = StepSums()
        self._optimizer.zero_grad(set_to_none=True)
        with self._training_mode():
            for part, (old, reference) in zip(parts, frozen, strict=True):
                self._loss(part, old, reference, sums).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm).item()
        reason = sums.why_not_applicable(grad_norm)
        if reason:
            self.num_skipped_steps += 1
        else:
            self._apply(lr)
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

    def _loss(self, part: MicroBatch, old: Tensor | None, reference: Tensor | None, sums: StepSums) -> Tensor:
        """This part's share of the batch's loss; its statistics are added to `sums`."""
        result = self._logprobs(part, with_entropy=True)
        if old is None:  # π_old is the policy itself: r = 1 with the gradient of log π
            old = result.logprobs.detach()
        log_weights = log_importance(old, part.behaviour, result.mask * part.has_behaviour)
        weights = correction_weights(log_weights, result.mask, self._config.correction, self._config.correction_cap)
        config = self._config
        terms = clipped_loss(
            result.logprobs,
            old,
            part.advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            clip_delta=config.clip_delta,
        )
        token_loss = terms.loss * weights
        kl = None
        if reference is not None:
            kl = kl_to_reference(result.logprobs, reference)
            token_loss = token_loss + config.kl_coef * kl
        loss = (token_loss * result.mask * part.scales).sum()
        sums.add(loss, result, terms, weights * part.advantages, kl)
        sums.log_weights += log_weights.sum(-1)[part.has_behaviour[:, 0] > 0].tolist()
        return loss

    @torch.no_grad()
    def _frozen_logprobs(self, part: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        """(log π_old, log π_base) [B, T] where needed; the base is the policy with its adapter switched off."""
        old = self._logprobs(part).logprobs if self._needs_frozen_pass else None
        if self._config.kl_coef == 0:
            return old, None
        with self._policy.model.disable_adapter():
            return old, self._logprobs(part).logprobs

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
