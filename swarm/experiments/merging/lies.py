"""What a hostile partner sends in place of its adapter."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from swarm.experiments.merging.population import Adapter


def lie(kind: str, fast: Adapter, slow: Mapping[str, Tensor], noise: torch.Generator) -> Adapter | None:
    """`kind`: one of `arms.ATTACKS`; a poisoner sends what it has learned, which is the lie. None where nothing is sent."""
    if kind == "silent":
        return None
    if kind == "poison":
        return fast
    makers: dict[str, Callable[[str], Tensor]] = {
        "random": lambda name: torch.randn(fast[name].shape, generator=noise) * fast[name].std(),
        "sign-flip": lambda name: 2 * slow[name] - fast[name],
        "x100": lambda name: slow[name] + 100 * (fast[name] - slow[name]),
        "nan": lambda name: torch.full_like(fast[name], torch.nan),
    }
    return {name: makers[kind](name) for name in fast}
