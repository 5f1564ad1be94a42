"""What is left of the memory of a device."""

from pathlib import Path

import psutil
import torch

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    try:  # a container may have less than the machine
        limit = (_CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        return available if limit == "max" else min(available, max(int(limit) - used, 0))
    except (OSError, ValueError):
        return available
