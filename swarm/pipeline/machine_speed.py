"""How fast this machine passes micro-batches through a layer: what layers are assigned by."""

import time
from pathlib import Path

import torch

from swarm.config import LoraSection
from swarm.pipeline.architecture import StagePart
from swarm.pipeline.stage_model import load_stage

_ROWS, _COLUMNS = 8, 64
_PASSES = 3


def layers_per_s(folder: Path, lora: LoraSection, device: torch.device, dtype: torch.dtype) -> float:
    """Forward and backward passes of one layer per second, the fastest of three after one to warm up."""
    model = load_stage(folder, StagePart(0, 1, False, False), lora=lora, device=device, dtype=dtype)
    states = torch.zeros(_ROWS, _COLUMNS, model.width, device=device)
    fastest_s = float("inf")
    for _ in range(1 + _PASSES):
        started_s = time.perf_counter()
        leaf = states.clone().requires_grad_()
        model.run(leaf).float().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    return 1 / fastest_s
