"""What AdamW keeps beside each tensor that it trains, as checkpoints, drivers and stages hand it to each other.

The fused step reads and writes as many numbers of each moment as its parameter has, whatever the moment's own size is. So
moments of another size would not be an error there, but foreign memory overwritten.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarm.adapters.adapter_state import is_finite_float

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""Two of the parameter's shape, and a number."""


def moments_of(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Tensor]]:
    """{parameter: {kind: tensor}} from {"kind:parameter": tensor}; a parameter has all of MOMENTS, or none.

    Raises ValueError for all that AdamW cannot have over parameters of these shapes.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition(":")
        if kind not in MOMENTS or name not in shapes:
            raise ValueError(f"optimizer state must be of AdamW and of what is trained here, got {key[:80]!r}")
        shape = () if kind == "step" else tuple(shapes[name])
        if tuple(value.shape) != shape or not is_finite_float(value):
            raise ValueError(f"{key[:80]!r} must be finite numbers of shape {shape}, got another tensor")
        if kind != "exp_avg" and bool((value < 0).any()):
            raise ValueError(f"second moments and step counts must be at least 0, got less at {key[:80]!r}")
        found.setdefault(name, {})[kind] = value
    odd = next((name for name, kinds in found.items() if len(kinds) < len(MOMENTS)), None)
    if odd is not None:
        raise ValueError(f"optimizer state of a tensor must be {', '.join(MOMENTS)}, got only some at {odd[:80]!r}")
    return found


def placed(kinds: Mapping[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """Copies of the moments of one parameter, on its device and of its type."""
    dtypes = {kind: torch.float32 if kind == "step" else parameter.dtype for kind in kinds}
    return {kind: value.to(parameter.device, dtypes[kind], copy=True) for kind, value in kinds.items()}
