"""How large weights and moments of a stage can be, from what the driver itself gave and ordered.

One step of AdamW moves a weight by at most STEP_REACH times the learning rate, and gradients are clipped by their norm. So
the driver knows a bound for every number that a stage hands out, without knowing a single gradient: a stage cannot
put numbers into a checkpoint that no training gives.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from swarm.errors import StageReplyError
from swarm.pipeline.order_bytes import StageState
from swarm.pipeline.stage_optimizer import RECOVERED_LR_FACTOR

STEP_REACH = 7.3
"""Most of |m̂| / √v̂ in Adam with β = (0.9, 0.999): (1 − β₁) / √((1 − β₂)(1 − β₁²/β₂)) by Cauchy and Schwarz."""
_SLACK = 1.001
"""For rounding in float32."""


class StateBounds:
    """The largest magnitude of each tensor of an adapter, over all stages of one crew."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Of a fresh adapter: A is uniform in ±1/√inputs, and B is zero."""
        self._weights = {name: 1 / math.sqrt(s[1]) if name.endswith(".lora_A") else 0.0 for name, s in shapes.items()}
        self._moments = dict.fromkeys(shapes, 0.0)  # of gradients; second moments are squares of them
        self._reach = 0.0

    def given(self, state: StageState | tuple[Mapping[str, Mapping[str, Tensor]], Mapping[str, float]]) -> None:
        """The driver is about to write these weights and moments into a stage, which may keep the old ones if that fails."""
        tensors, _ = state
        for name, value in tensors["adapter"].items():
            self._weights[name] = max(self._weights[name], _largest(value) - self._reach)
        for key, value in tensors["optimizer"].items():
            kind, _, name = key.partition(":")
            if kind != "step":
                largest = _largest(value) if kind == "exp_avg" else math.sqrt(_largest(value))
                self._moments[name] = max(self._moments[name], largest)

    def stepped(self, lr: float, max_grad_norm: float) -> None:
        """A step with gradients that are clipped to `max_grad_norm` is ordered."""
        self._reach += STEP_REACH * RECOVERED_LR_FACTOR * lr
        self._moments = {name: max(largest, max_grad_norm) for name, largest in self._moments.items()}

    def check(self, state: StageState) -> None:
        """Raises StageReplyError for weights or moments that the steps so far cannot have given."""
        tensors, _ = state
        for name, value in tensors["adapter"].items():
            _check(name, value, self._weights[name] + self._reach)
        for key, value in tensors["optimizer"].items():
            kind, _, name = key.partition(":")
            if kind != "step":
                _check(key, value, self._moments[name] ** (1 if kind == "exp_avg" else 2))


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def _check(name: str, value: Tensor, bound: float) -> None:
    largest = _largest(value)
    if not largest <= bound * _SLACK + 1e-6:
        raise StageReplyError(f"{name} must be within ±{bound:.3g} after the steps so far, got {largest:.3g}")
