"""The adapter folded into the weights for as long as answers are sampled, and out again without a trace.

    adapted layer  W x + s·B(A x)   ── while sampling ──▶   plain layer  (W + s·B·A) x

Three small products and peft's bookkeeping per layer and token cost a small model most of its time. The trained layers
themselves are untouched: plain ones stand in their places, so leaving gives back the same objects, bit for bit. Only a
float32 base is folded; in 16 bits the sum would round away updates that the unfolded adapter keeps.
"""

from typing import Any, Self

import torch
from torch import nn

from swarm.policy.lora import adapted_layers
from swarm.policy.policy import Policy


class MergedLayers:
    """Context manager: inside, `policy.model` runs on folded weights; they are computed anew for each policy version."""

    def __init__(self, policy: Policy, max_bytes: int | None = None) -> None:
        """Folds nothing where the plain layers would take more than `max_bytes`."""
        modules = dict(policy.model.base_model.model.named_modules())
        self._places: list[tuple[nn.Module, str, Any, nn.Linear]] = []
        foldable = [(name, layer) for name, layer in adapted_layers(policy.model) if _is_foldable(layer.base_layer)]
        needed = sum(layer.base_layer.weight.nbytes for _, layer in foldable)
        if max_bytes is not None and needed > max_bytes:
            return
        for name, layer in foldable:
            parent, _, child = name.rpartition(".")
            self._places.append((modules[parent], child, layer, _like(layer.base_layer)))

    @property
    def num_layers(self) -> int:
        """Adapted layers that can be folded."""
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Memory of the plain layers."""
        return sum(plain.weight.nbytes for _, _, _, plain in self._places)

    def __enter__(self) -> Self:
        for parent, child, layer, plain in self._places:
            with torch.no_grad():
                factor_a, factor_b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                torch.addmm(
                    layer.base_layer.weight, factor_b, factor_a, alpha=layer.scaling["default"], out=plain.weight.data
                )
            setattr(parent, child, plain)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for parent, child, layer, _ in self._places:
            setattr(parent, child, layer)


def _is_foldable(base: nn.Module) -> bool:
    return type(base) is nn.Linear and base.weight.dtype == torch.float32


def _like(base: nn.Linear) -> nn.Linear:
    plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(torch.empty_like(base.weight), requires_grad=False)
    plain.bias = base.bias
    return plain.eval()
