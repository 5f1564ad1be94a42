"""The adapter and its optimizer state as plain tensors under stable names, for checkpoints, exchange and export.

Names are those inside the base model, such as `model.layers.0.self_attn.q_proj.lora_A`. They are equal on every node of a
lineage, whatever wraps the model.

`moments_of` checks what AdamW stores for each trained tensor. The fused step accesses as many numbers of each moment as its
parameter has, whatever the moment's own size is: a moment of another size would not be an error there, but would corrupt
memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarm.errors import CheckpointError

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def adapter_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (stable name, parameter) of every LoRA factor of a peft model, in the model's order."""
    for name, parameter in model.base_model.model.named_parameters():
        if ".lora_A.default." in name or ".lora_B.default." in name:
            yield name.replace(".default.weight", ""), parameter


def read_adapter(model: Any) -> dict[str, Tensor]:
    """Return copies of all factors on the CPU."""
    return {name: parameter.detach().to("cpu", copy=True).contiguous() for name, parameter in adapter_parameters(model)}


def write_adapter(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite all factors. Raises CheckpointError, before anything changes, where names, shapes or values do not fit."""
    parameters = dict(adapter_parameters(model))
    check_adapter(tensors, {name: parameter.shape for name, parameter in parameters.items()})
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def check_adapter(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raises CheckpointError for missing, extra or misshapen tensors, and for values that are not finite in float32."""
    different = sorted(set(shapes).symmetric_difference(tensors))
    if different:
        raise CheckpointError(
            "an adapter must have exactly the layers of policy.lora.targets, got a difference at "
            f"{different[0]}; use the same base and targets"
        )
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise CheckpointError(
                f"adapter tensor {name} must have shape {tuple(shapes[name])}, got {tuple(tensor.shape)}; "
                "set the policy.lora.rank it was made with"
            )
        if not is_finite_float(tensor):
            raise CheckpointError(
                f"adapter tensor {name} must be finite numbers in float32, got {tensor.dtype} with others; "
                "take an earlier one"
            )


def is_finite_float(tensor: Tensor) -> bool:
    """Whether it holds real numbers in 16 to 64 bits that stay finite in float32, the format of adapters."""
    return tensor.dtype in _FLOATS and bool(torch.isfinite(tensor.float()).all())


def adapter_norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all factors."""
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))


MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""Two moments of the parameter's shape, and the number of steps."""


def moments_of(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Tensor]]:
    """Return {parameter: {kind: tensor}} from {"kind:parameter": tensor}; a parameter has all of MOMENTS or none.

    Raises ValueError for anything that AdamW cannot have over parameters of these shapes.
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
    incomplete = next((name for name, kinds in found.items() if len(kinds) < len(MOMENTS)), None)
    if incomplete is not None:
        raise ValueError(
            f"optimizer state of a tensor must be {', '.join(MOMENTS)}, got only some at {incomplete[:80]!r}"
        )
    return found


def placed(kinds: Mapping[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """Return copies of the moments of one parameter, on its device and in its dtype."""
    dtypes = {kind: torch.float32 if kind == "step" else parameter.dtype for kind in kinds}
    return {kind: value.to(parameter.device, dtypes[kind], copy=True) for kind, value in kinds.items()}
