"""The device and the number format in which the policy runs, and the free memory of a device."""

import torch

from swarm.errors import PolicyError
from swarm.machine.memory import machine_memory


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return machine_memory().available


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Choose a device; `auto` prefers CUDA, then MPS, then CPU. Raises PolicyError for one that is absent or busy."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, is_there in present.items() if is_there)
    kind = name.partition(":")[0]
    if not present.get(kind, False):
        there = ", ".join(device for device, is_there in present.items() if is_there)
        raise PolicyError(f"node.device must be present on this machine ({there}), got {name}; set node.device = auto")
    device = torch.device(name)
    try:
        torch.empty(1, device=device)  # the first use of a GPU in a process, and no memory to speak of
    except RuntimeError as error:  # torch.OutOfMemoryError among them: other processes left nothing
        raise PolicyError(_busy(device, error)) from None
    return device


def _busy(device: torch.device, error: RuntimeError) -> str:
    reason = str(error.args[0] if error.args else error).partition("\n")[0]
    return (
        f"{device} must be free for this process, got: {reason}; see with nvidia-smi who uses it, end that or take another "
        "by CUDA_VISIBLE_DEVICES, or set node.device = cpu"
    )


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Choose a dtype; `auto` is bfloat16 on CUDA devices that compute it natively and float32 elsewhere."""
    if name != "auto":
        return _DTYPES[name]
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32
