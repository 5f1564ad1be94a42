"""What a hostile partner sends in place of its adapter."""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from swarm.experiments.merging.population import Adapter
from swarm.merging.adapter_wire import LARGEST_WEIGHT, decode_adapter, encode_adapter
from swarm.types import Snapshot

_BF16_NAN = b"\xc0\x7f"


def lie(
    kind: str, snapshot: Snapshot, start: Adapter, slow: Mapping[str, Tensor], noise: torch.Generator
) -> Snapshot | None:
    """`kind`: one of `arms.ATTACKS`; a poisoner sends what it has learned, which is the lie. None where nothing is sent.

    `snapshot`, in bf16, is the liar's own, `slow` its slow weights, `start` the lineage's.
    """
    if kind == "silent":
        return None
    if kind == "poison":
        return snapshot
    if kind == "nan":
        return dataclasses.replace(snapshot, payload=_BF16_NAN * (len(snapshot.payload) // 2))
    shapes = {name: tuple(tensor.shape) for name, tensor in start.items()}
    fast = decode_adapter(snapshot.payload, shapes, "bf16", start)
    makers: dict[str, Callable[[str], Tensor]] = {
        "random": lambda name: torch.randn(fast[name].shape, generator=noise) * fast[name].std(),
        "sign-flip": lambda name: 2 * slow[name] - fast[name],
        "x100": lambda name: slow[name] + 100 * (fast[name] - slow[name]),
    }
    told = {name: makers[kind](name).clamp(-LARGEST_WEIGHT / 2, LARGEST_WEIGHT / 2) for name in fast}
    return dataclasses.replace(snapshot, payload=encode_adapter(told, "bf16", start))
