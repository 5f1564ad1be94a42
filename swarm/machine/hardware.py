"""Detects the hardware of this machine without torch, and chooses the policy that fits it."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.machine.memory import machine_memory


@dataclass(frozen=True, slots=True)
class Hardware:
    cpu_cores: int
    memory_gib: float
    gpu_name: str
    """Empty where there is no GPU."""
    gpu_memory_gib: float

    @property
    def summary(self) -> str:
        gpu = f"{self.gpu_name} with {self.gpu_memory_gib:.0f} GiB" if self.gpu_name else "no GPU"
        return f"{self.cpu_cores} CPU cores, {self.memory_gib:.0f} GiB of memory, {gpu}"


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A base that fits, and the reason."""

    base: str
    quantization: str
    why: str
    groups_per_round: int
    max_new_tokens: int
    lr: float


def detect() -> Hardware:
    """Detect CPU, memory, NVIDIA GPUs and Apple silicon. A missing tool counts as a missing GPU."""
    memory_gib = machine_memory().total / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name, gpu_gib = _nvidia_gpu()
    if not name and platform.system() == "Darwin" and platform.machine() == "arm64":
        name, gpu_gib = "Apple GPU (MPS)", memory_gib * 0.7
    return Hardware(cpu_cores=cores, memory_gib=memory_gib, gpu_name=name, gpu_memory_gib=gpu_gib)


_SMALLEST_HUB_CHOICE = PolicyChoice(
    "Qwen/Qwen2.5-0.5B-Instruct",
    "none",
    why="0.5B in bfloat16 takes about 1 GiB",
    groups_per_round=8,
    max_new_tokens=256,
    lr=2e-5,
)
_CHOICES = (
    (
        22.0,
        PolicyChoice(
            "Qwen/Qwen2.5-7B-Instruct",
            "4bit",
            why="7B in 4 bit takes about 6 GiB; the rest is for answers",
            groups_per_round=16,
            max_new_tokens=512,
            lr=1e-5,
        ),
    ),
    (
        11.0,
        PolicyChoice(
            "Qwen/Qwen2.5-3B-Instruct",
            "4bit",
            why="3B in 4 bit takes about 2.5 GiB",
            groups_per_round=8,
            max_new_tokens=512,
            lr=1e-5,
        ),
    ),
    (
        7.0,
        PolicyChoice(
            "Qwen/Qwen2.5-1.5B-Instruct",
            "4bit",
            why="1.5B in 4 bit takes about 1.5 GiB",
            groups_per_round=8,
            max_new_tokens=384,
            lr=2e-5,
        ),
    ),
    (3.5, _SMALLEST_HUB_CHOICE),
    (
        0.0,
        PolicyChoice(
            "bundled",
            "none",
            why="the bundled policy learns on any CPU in minutes",
            groups_per_round=8,
            max_new_tokens=24,
            lr=1e-3,
        ),
    ),
)
"""(GiB of GPU memory that it needs, choice), the largest first."""


def choose_policy(hardware: Hardware, allowed: Sequence[str] = ()) -> PolicyChoice:
    """Choose the largest base that leaves room for rollouts and training; without a GPU the bundled tiny policy.

    `allowed` are the bases to choose among, empty for any. Where none of them is known to fit, the first one is chosen,
    with the settings known for it, or those of a small model.
    """
    for gpu_memory_gib, choice in _CHOICES:
        if hardware.gpu_memory_gib >= gpu_memory_gib and (not allowed or choice.base in allowed):
            return choice
    known = {choice.base: choice for _, choice in _CHOICES}
    why = f"not known to fit into {hardware.summary}"
    return replace(known.get(allowed[0], _SMALLEST_HUB_CHOICE), base=allowed[0], why=why)


def _nvidia_gpu() -> tuple[str, float]:
    """Return (name, GiB) of the first NVIDIA GPU that the driver reports, or ("", 0)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "", 0.0
    try:
        asked = subprocess.run(
            [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        name, mebibytes = asked.stdout.splitlines()[0].rsplit(",", 1)
        return name.strip(), float(mebibytes) / 1024
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return "", 0.0
