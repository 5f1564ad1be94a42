"""The optimizer of one stage: AdamW over the stage's parameters, with a gradient that is clipped over all stages.

Parameters that several stages hold (a tied head, replicas of the ends) get the sum of all holders' gradients, so every
holder computes the same step and the copies stay bitwise equal.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from swarm.adapters.adapter_state import moments_of, placed
from swarm.errors import PipelineError
from swarm.pipeline.commands import CommitCommand

RECOVERED_LR_FACTOR = 1.1
"""Factor of a rebuilt stage's learning rate (2506.15461); losing the stage again does not raise it further."""


class StageOptimizer:
    """Holds weights, moments and version of one stage."""

    def __init__(
        self, trainable: Mapping[str, nn.Parameter], layer_prefix: str, weight_decay: float, *, fused: bool
    ) -> None:
        self.version = 0
        """Number of applied steps."""
        self._trainable = dict(trainable)
        self._lr_factor = 1.0
        layers = [parameter for name, parameter in trainable.items() if name.startswith(layer_prefix)]
        ends = [parameter for name, parameter in trainable.items() if not name.startswith(layer_prefix)]
        # ends may have copies in other stages, and a raised learning rate here would make them differ
        groups = [{"params": group} for group in (layers, ends)]
        # AdamW refuses an empty list, but a stage without trainable parameters takes part as well
        self._optimizer = (
            torch.optim.AdamW(groups, lr=0.0, weight_decay=weight_decay, fused=fused) if trainable else None
        )

    def gradient(self, shared: Iterable[str]) -> tuple[float, dict[str, Tensor]]:
        """Return (squared norm of the other gradients, shared gradients); norms are added in float64, as over stages."""
        names = set(shared)
        unknown = sorted(names - set(self._trainable))
        if unknown:
            raise PipelineError(f"shared parameters must be ones that the stage trains, got {unknown[0]}")
        squares = [
            parameter.grad.float().norm().double().square()
            for name, parameter in self._trainable.items()
            if name not in names and parameter.grad is not None
        ]
        total = math.fsum(square.item() for square in squares) if squares else 0.0
        return total, {name: self._gradient_of(name) for name in sorted(names)}

    def apply(self, command: CommitCommand) -> None:
        """Take one step. Raises PipelineError, before anything changes, for shared gradients that do not fit."""
        for name, total in command.shared_gradients.items():
            if name not in self._trainable or total.shape != self._trainable[name].shape:
                raise PipelineError(f"a shared gradient must fit its parameter, got another at {name}; drop the batch")
        for name, total in command.shared_gradients.items():
            parameter = self._trainable[name]
            parameter.grad = total.to(parameter, copy=True)
        for parameter in self._trainable.values():
            if parameter.grad is not None:
                parameter.grad.mul_(command.scale)
        if self._optimizer is not None:
            for group, factor in zip(self._optimizer.param_groups, (self._lr_factor, 1.0), strict=True):
                group["lr"] = command.lr * factor
            self._optimizer.step()
        self.version += 1

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self._trainable.values():
            parameter.grad = None

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, int | float]]:
        """Return ({"adapter": weights, "optimizer": moments}, rest) under the names of the trainer's checkpoint."""
        weights = {name: _on_cpu(parameter) for name, parameter in self._trainable.items()}
        moments = {
            f"{key}:{name}": _on_cpu(value)
            for name, parameter in self._trainable.items()
            for key, value in (self._optimizer.state.get(parameter, {}) if self._optimizer else {}).items()
        }
        return {"adapter": weights, "optimizer": moments}, {
            "policy_version": self.version,
            "lr_factor": self._lr_factor,
        }

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], rest: Mapping[str, int | float]) -> None:
        """Continue from a `state`."""
        moments, lr_factor = self._by_name(tensors["optimizer"]), float(rest["lr_factor"])
        if not 0 < lr_factor <= RECOVERED_LR_FACTOR + 1e-5:
            raise PipelineError(f"the learning rate factor must be in (0, {RECOVERED_LR_FACTOR}], got {lr_factor}")
        self._write(tensors["adapter"])
        self._set_moments(moments)
        self.version = int(rest["policy_version"])
        self._lr_factor = lr_factor

    def recover(self, weights: Mapping[str, Tensor], version: int, moments: Mapping[str, Tensor]) -> None:
        """Write rebuilt weights with a raised learning rate of the layers, and only the given moments."""
        named = self._by_name(moments)
        self._write(weights)
        self._set_moments(named)
        self.version = version
        self._lr_factor = RECOVERED_LR_FACTOR

    def _by_name(self, moments: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return {name: {kind: tensor}} from {"kind:name": tensor}. Raises PipelineError for unknown parameters."""
        try:
            return moments_of(moments, {name: parameter.shape for name, parameter in self._trainable.items()})
        except ValueError as error:
            raise PipelineError(str(error)) from None

    def _set_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        if self._optimizer is not None:
            self._optimizer.state.clear()
            for name, kinds in moments.items():
                parameter = self._trainable[name]
                self._optimizer.state[parameter] = placed(kinds, parameter)

    def _gradient_of(self, name: str) -> Tensor:
        parameter = self._trainable[name]
        return _on_cpu(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        odd = sorted(set(weights).symmetric_difference(self._trainable))
        if odd:
            raise PipelineError(f"weights of a stage must be exactly what it trains, got a difference at {odd[0]}")
        for name, value in weights.items():
            if value.shape != self._trainable[name].shape or not bool(torch.isfinite(value).all()):
                raise PipelineError(f"weights of a stage must be finite and of its shapes; {name} is not")
        with torch.no_grad():
            for name, value in weights.items():
                self._trainable[name].copy_(value)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
