"""The adapter as plain tensors under stable names: what is checkpointed, exchanged and exported.

Names are those inside the base model, such as `model.layers.0.self_attn.q_proj.lora_A`: equal on every node of a
lineage, whatever wrappers the model is in.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from swarm.errors import CheckpointError

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def adapter_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(stable name, parameter) of every LoRA factor of a peft model, in the model's order."""
    for name, parameter in model.base_model.model.named_parameters():
        if ".lora_A.default." in name or ".lora_B.default." in name:
            yield name.replace(".default.weight", ""), parameter


def read_adapter(model: Any) -> dict[str, Tensor]:
    """Copies of all factors on the CPU."""
    return {name: parameter.detach().to("cpu", copy=True).contiguous() for name, parameter in adapter_parameters(model)}


def write_adapter(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite all factors. Raises CheckpointError, before anything changes, where names, shapes or values misfit."""
    parameters = dict(adapter_parameters(model))
    check_adapter(tensors, {name: parameter.shape for name, parameter in parameters.items()})
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def check_adapter(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raise CheckpointError for missing, extra or misshapen tensors, and for what float32 holds as no finite number."""
    odd = sorted(set(shapes).symmetric_difference(tensors))
    if odd:
        raise CheckpointError(
            "an adapter must have exactly the layers of policy.lora.targets, got a difference at "
            f"{odd[0]}; use the same base and targets"
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
    """Whether it holds real numbers in 16 to 64 bits that float32, which adapters are in, holds as finite ones."""
    return tensor.dtype in _FLOATS and bool(torch.isfinite(tensor.float()).all())


def adapter_norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all factors."""
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))
