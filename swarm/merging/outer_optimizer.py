"""The outer step of merging without an all-reduce: NoLoCo (arXiv 2506.10911) with momentum from the node's own training only.

    θ_i after H inner steps ──▶ δ ← α·δ + β·(θ_i − φ) ──▶ φ ← φ + δ + w·(θ_j − θ_i) ──▶ θ_i ← φ
                                                          no partner: w = 0

φ are the slow weights, θ the fast ones, δ the momentum, and w is the part of the partner, at most ½. The paper puts the mean of
θ_i and θ_j into δ. A partner then acts on every later step, even after the gate has refused it, so a partner acts here once, on
the step that the gate has tried, and nothing of it stays in δ.

`Blend` computes an outer step with one partner for any share of it, so that the gate can try shares before one is applied:

layers whose factors are close ──▶ the outer step, factor by factor
layers that drifted apart ───────▶ the product of both, back in the own rank; slow weights and momentum are reset there
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from swarm.adapters.adapter_state import check_adapter
from swarm.adapters.product_merge import LowRank, Merged, drift, merge_products
from swarm.config import largest_stable_beta
from swarm.errors import ConfigError, MergeError

Adapter = dict[str, Tensor]
"""Name → factor, as `adapter_state.read_adapter` gives it."""


@dataclass(frozen=True)
class AdapterOrigin:
    """Where all adapters of a lineage begin."""

    lineage: str
    """32 hex digits: `Lineage.policy`."""
    scaling: float
    """alpha / rank."""
    weights: Adapter
    """Before any training. Not to be written to."""


MAX_LAG = 4
"""A partner that is more outer steps behind has no weight."""


class OuterOptimizer:
    """Slow weights and momentum of one replica, in float32 on the CPU.

    `start` are the weights that training begins from; `beta` is the outer learning rate. Raises ConfigError for a `beta` that
    `largest_stable_beta` does not allow.
    """

    def __init__(self, alpha: float, beta: float, start: Mapping[str, Tensor]) -> None:
        bound = largest_stable_beta(alpha)
        if not (0 <= alpha < 1 and 0 < beta < bound):
            raise ConfigError(
                f"merging.beta must be in (0, {bound:.3g}) with merging.alpha {alpha:g} in [0, 1), got {beta:g}: "
                "outer steps would overshoot; lower merging.alpha or merging.beta"
            )
        self._alpha = alpha
        self._beta = beta
        self._slow = _copies(start)
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self._slow.items()}
        self.num_steps = 0
        """Outer steps taken, with or without a partner: the difference between two replicas is their lag."""

    @property
    def slow(self) -> Mapping[str, Tensor]:
        """φ, the weights after the last outer step. Not to be written to."""
        return self._slow

    def step(
        self,
        fast: Mapping[str, Tensor],
        partner: Mapping[str, Tensor] | None,
        partner_lag: int = 0,
        share: float = 1.0,
    ) -> Adapter:
        """One outer step from `fast`, the snapshot that was sent; returns the new weights.

        `partner` are the partner's fast weights, None to step alone. `partner_lag` is how many outer steps the partner
        is behind (less than 0: ahead, which counts as 0); `share` in [0, 1] is the part of its weight that it gets.
        Raises MergeError, before anything changes, where names or shapes differ from the start's.
        """
        new, momentum = self._stepped(fast, partner, partner_lag, share)
        self._slow, self._momentum = new, momentum
        self.num_steps += 1
        return _copies(new)

    def preview(
        self,
        fast: Mapping[str, Tensor],
        partner: Mapping[str, Tensor] | None,
        partner_lag: int = 0,
        share: float = 1.0,
    ) -> Adapter:
        """Compute the weights that `step` would return, without taking the step, for the gate."""
        return self._stepped(fast, partner, partner_lag, share)[0]

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace some slow weights and reset their momentum, as after a product merge, which changes the basis of factors."""
        for name, tensor in tensors.items():
            self._check(name, tensor)
            self._slow[name] = tensor.detach().to("cpu", torch.float32, copy=True)
            self._momentum[name] = torch.zeros_like(self._slow[name])

    def state(self) -> tuple[dict[str, Adapter], dict[str, Any]]:
        """({"slow_weights": …, "outer_momentum": …} tensors, JSON-able rest), all that `restore` needs."""
        return (
            {"slow_weights": _copies(self._slow), "outer_momentum": _copies(self._momentum)},
            {"outer_steps": self.num_steps},
        )

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave. Raises CheckpointError if it belongs to another adapter shape."""
        shapes = {name: tensor.shape for name, tensor in self._slow.items()}
        slow, momentum = tensors.get("slow_weights", {}), tensors.get("outer_momentum", {})
        check_adapter(slow, shapes)
        check_adapter(momentum, shapes)
        self._slow, self._momentum = _copies(slow), _copies(momentum)
        self.num_steps = int(state["outer_steps"])

    def _stepped(
        self, fast: Mapping[str, Tensor], partner: Mapping[str, Tensor] | None, partner_lag: int, share: float
    ) -> tuple[Adapter, Adapter]:
        weight = 0.0 if partner is None else share * partner_weight(partner_lag)
        self._check_all(fast)
        if partner is not None:
            self._check_all(partner)
        slow: Adapter = {}
        momentum: Adapter = {}
        for name, phi in self._slow.items():
            own = fast[name].detach().to("cpu", torch.float32)
            momentum[name] = self._alpha * self._momentum[name] + self._beta * (own - phi)
            slow[name] = phi + momentum[name]
            if partner is not None and weight > 0:  # a partner without weight must not reach us through 0 · NaN either
                slow[name] = slow[name] + weight * (partner[name].detach().to("cpu", torch.float32) - own)
        return slow, momentum

    def _check_all(self, tensors: Mapping[str, Tensor]) -> None:
        different = sorted(set(self._slow).symmetric_difference(tensors))
        if different:
            raise MergeError(
                f"an outer step needs the adapter's own tensors, got a difference at {different[0]}; use the same policy.lora"
            )
        for name, tensor in tensors.items():
            self._check(name, tensor)

    def _check(self, name: str, tensor: Tensor) -> None:
        if name not in self._slow or tensor.shape != self._slow[name].shape:
            raise MergeError(
                f"tensor {name} must be one of the adapter's and of its shape, got {tuple(tensor.shape)}; "
                "use the same policy.lora"
            )


class Blend:
    """Blends the node's snapshot with one partner's clipped weights. `preview` computes the result, `apply` takes the step."""

    def __init__(
        self,
        outer: OuterOptimizer,
        *,
        fast: Mapping[str, Tensor],
        partner: Mapping[str, Tensor],
        lag: int,
        scaling: float,
        drift_threshold: float,
    ) -> None:
        """`scaling`: alpha / rank of the adapter."""
        self._outer = outer
        self._fast = fast
        self._partner = partner
        self._lag = lag
        self._scaling = scaling
        by_layer = drift(fast, partner)
        self.apart = [layer for layer, value in by_layer.items() if value > drift_threshold]
        """Layers that are merged as products."""
        finite = [value for value in by_layer.values() if math.isfinite(value)]
        self.drift = fmean(finite) if finite else 0.0
        """Mean drift over layers; layers whose products cancel are left out."""

    def weight(self, share: float) -> float:
        """The partner's part in the mean of both."""
        return share * partner_weight(self._lag)

    def preview(self, share: float) -> Merged:
        """Compute the weights after the step, and the layers merged as products; nothing is changed."""
        stepped = self._outer.preview(self._fast, self._partner, self._lag, share)
        return self._with_products(stepped, share)

    def apply(self, share: float) -> Merged:
        """Return the same as `preview`, and take the outer step."""
        merged = self._with_products(self._outer.step(self._fast, self._partner, self._lag, share), share)
        self._outer.adopt({name: merged.tensors[name] for name in merged.reset_names})
        return merged

    def _with_products(self, stepped: dict[str, Tensor], share: float) -> Merged:
        weight = self.weight(share)
        if not self.apart or weight == 0:
            return Merged(stepped)
        both = [LowRank(self._fast, self._scaling), LowRank(self._partner, self._scaling)]
        rank = len(self._fast[f"{self.apart[0]}.lora_A"])
        products = merge_products(both, [1 - weight, weight], rank, self._scaling, like=self._fast, layers=self.apart)
        return Merged({**stepped, **products.tensors}, products.truncation)


def partner_weight(lag: int) -> float:
    """½/√(1 + lag) for a partner that is `lag` outer steps behind, 0 above MAX_LAG. A partner that is ahead counts as level."""
    return 0.0 if lag > MAX_LAG else 0.5 / math.sqrt(1 + max(lag, 0))


def carry_over(new: Mapping[str, Tensor], snapshot: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> Adapter:
    """Add the training since `snapshot` to the merged weights: new + (current − snapshot)."""
    return {name: tensor + (current[name].to(tensor) - snapshot[name].to(tensor)) for name, tensor in new.items()}


def _copies(tensors: Mapping[str, Tensor]) -> Adapter:
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}
