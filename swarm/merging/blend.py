"""What one outer step with one partner would give, for any share of it, so that the gate can try before anything is taken.

layers whose factors are near ──▶ the outer step, factor by factor
layers that drifted apart ──────▶ the product of both, back in the own rank; slow weights and momentum begin anew there
"""

import math
from collections.abc import Mapping
from statistics import fmean

from torch import Tensor

from swarm.adapters.product_merge import LowRank, Merged, drift, merge_products
from swarm.merging.outer_optimizer import OuterOptimizer, partner_weight

_A = ".lora_A"


class Blend:
    """Of the own snapshot and one partner's weights, clipped already. `of` changes nothing, `take` takes the step."""

    def __init__(
        self,
        outer: OuterOptimizer,
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
        """Mean over layers; those whose products cancel are left out."""

    def weight(self, share: float) -> float:
        """Part of the partner in the mean of both."""
        return share * partner_weight(self._lag)

    def of(self, share: float) -> Merged:
        """The weights after the step, and the layers that were merged as products."""
        stepped = self._outer.preview(self._fast, self._partner, self._lag, share)
        return self._with_products(stepped, share)

    def take(self, share: float) -> Merged:
        """As `of`, and the outer step is taken."""
        merged = self._with_products(self._outer.step(self._fast, self._partner, self._lag, share), share)
        self._outer.adopt({name: merged.tensors[name] for name in merged.reset_names})
        return merged

    def _with_products(self, stepped: dict[str, Tensor], share: float) -> Merged:
        weight = self.weight(share)
        if not self.apart or weight == 0:
            return Merged(stepped)
        both = [LowRank(self._fast, self._scaling), LowRank(self._partner, self._scaling)]
        rank = len(self._fast[self.apart[0] + _A])
        products = merge_products(both, [1 - weight, weight], rank, self._scaling, like=self._fast, layers=self.apart)
        return Merged({**stepped, **products.tensors}, products.truncation)
