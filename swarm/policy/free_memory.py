"""What is left of the memory of a device."""

import torch

from swarm.machine_memory import machine_memory


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return machine_memory().available
