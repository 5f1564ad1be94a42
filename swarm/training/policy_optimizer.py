"""Gradients and optimizer of the adapter: the contract for the trainer, and AdamW for an adapter in this process.

`LocalOptimizer` has the weights on this machine, `PipelineOptimizer` (in `swarm/pipeline`) on several.
"""

# torch is annotated in part:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor

from swarm.adapters.adapter_state import adapter_parameters, moments_of, placed, read_adapter, write_adapter
from swarm.config import TrainingSection
from swarm.errors import CheckpointError, TrainingError
from swarm.policy.counter_noise import derive_seed
from swarm.policy.logprobs import TokenLogprobs, TokenSequence
from swarm.policy.policy import Policy

LossOf = Callable[[int, TokenLogprobs], Tensor]
"""(number of the part, log-probs [B, T] with entropy) → its share of the loss of the batch, a scalar."""
AdapterTensors = dict[str, dict[str, Tensor]]
"""{"adapter": weights, "optimizer": moments as "kind:name"}, on the CPU."""


class PolicyOptimizer(Protocol):
    """Adds up gradients over the parts of a batch, then applies the batch or drops it without a trace."""

    def accumulate(self, parts: Sequence[Sequence[TokenSequence]], loss_of: LossOf, temperature: float) -> float:
        """Norm of the gradient of the sum of all losses, before clipping; not finite where the gradient is not.

        Raises PipelineError where a batch cannot be computed for now; it is forgotten then.
        """
        ...

    def apply(self, lr: float) -> None:
        """One optimizer step; raises `policy.version`. Raises TrainingError where it would not move the adapter."""
        ...

    def drop(self) -> None:
        """Drop the batch; nothing happens where it was applied."""
        ...

    def adapter_norm(self) -> float | None:
        """L2 norm of all adapter weights; None where gathering them costs too much."""
        ...

    def read(self) -> dict[str, Tensor]:
        """A copy of all adapter weights on the CPU, by name."""
        ...

    def write(self, weights: Mapping[str, Tensor], turned: Iterable[str] = ()) -> None:
        """Replace all adapter weights between two batches; the version stays.

        AdamW's moments and step count stay too, but for tensors `turned`, whose basis is another one now.
        """
        ...

    def state(self) -> AdapterTensors:
        """Everything that `restore` needs beside the policy's version."""
        ...

    def restore(self, tensors: AdapterTensors, version: int) -> None:
        """Continue from `state` at `version`. Raises CheckpointError for tensors of another adapter."""
        ...


class LocalOptimizer:
    """See `PolicyOptimizer`."""

    def __init__(self, config: TrainingSection, policy: Policy) -> None:
        self._max_grad_norm = config.max_grad_norm
        self._policy = policy
        self._parameters = dict(adapter_parameters(policy.model))
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=config.lr, weight_decay=config.weight_decay, fused=policy.device.type != "mps"
        )
        self._has_dropout = policy.config.lora.dropout > 0
        policy.model.eval()

    def accumulate(self, parts: Sequence[Sequence[TokenSequence]], loss_of: LossOf, temperature: float) -> float:
        """See `PolicyOptimizer`."""
        self.drop()
        with self._training_mode():
            for index, part in enumerate(parts):
                loss_of(index, self._policy.token_logprobs(part, temperature, with_entropy=True)).backward()
        return torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._max_grad_norm).item()

    def apply(self, lr: float) -> None:
        """See `PolicyOptimizer`."""
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

    def drop(self) -> None:
        """See `PolicyOptimizer`."""
        self._optimizer.zero_grad(set_to_none=True)

    def adapter_norm(self) -> float:
        """See `PolicyOptimizer`."""
        norms: list[Tensor] = [parameter.detach().float().norm() for parameter in self._parameters.values()]
        return cast(Tensor, torch.stack(norms).norm()).item()

    def read(self) -> dict[str, Tensor]:
        """See `PolicyOptimizer`."""
        return read_adapter(self._policy.model)

    def write(self, weights: Mapping[str, Tensor], turned: Iterable[str] = ()) -> None:
        """See `PolicyOptimizer`."""
        write_adapter(self._policy.model, weights)
        self.reset_moments(turned)

    def reset_moments(self, names: Iterable[str]) -> None:
        """Reset AdamW's moments and step count of some tensors."""
        for name in names:
            self._optimizer.state.pop(self._parameters[name], None)

    def state(self) -> AdapterTensors:
        """See `PolicyOptimizer`."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                moments[f"{key}:{name}"] = value.detach().to("cpu", copy=True).contiguous()
        return {"adapter": read_adapter(self._policy.model), "optimizer": moments}

    def restore(self, tensors: AdapterTensors, version: int) -> None:
        """See `PolicyOptimizer`."""
        try:
            moments = moments_of(tensors["optimizer"], {name: one.shape for name, one in self._parameters.items()})
        except ValueError as error:
            raise CheckpointError(f"{error}; take an earlier checkpoint, or start in a new node.dir") from None
        write_adapter(self._policy.model, tensors["adapter"])
        self._optimizer.state.clear()
        for name, kinds in moments.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = placed(kinds, parameter)
        self._policy.version = version

    @contextmanager
    def _training_mode(self) -> Generator[None, None, None]:
        """Train mode where there is dropout, whose masks depend on the step and not on global state."""
        if not self._has_dropout:
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
