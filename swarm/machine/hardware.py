"""Detects the hardware of this machine without torch, chooses the policy that fits it, and writes a configuration for both."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
class Gpu:
    """An NVIDIA GPU of this machine."""

    number: int
    """As `nvidia-smi` numbers them."""
    uuid: str
    """Names it for CUDA_VISIBLE_DEVICES, whatever order CUDA counts in."""
    name: str
    memory_gib: float


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
    first = next(iter(nvidia_gpus()), None)
    name, gpu_gib = (first.name, first.memory_gib) if first else ("", 0.0)
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


def nvidia_gpus(visible: str | None = None) -> list[Gpu]:
    """Return the NVIDIA GPUs that the driver reports, in its order; none where its tool is missing or fails.

    `visible`: the value of CUDA_VISIBLE_DEVICES, if it is set, which leaves only the GPUs that it names.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        asked = subprocess.run(
            [tool, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        found = [_parse_gpu(line) for line in asked.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    if visible is None:
        return found
    names = [part.strip() for part in visible.split(",") if part.strip()]
    return [gpu for gpu in found if any(name == str(gpu.number) or _is_uuid(name, gpu) for name in names)]


def _is_uuid(name: str, gpu: Gpu) -> bool:
    """Whether `name` is the UUID of the GPU or its beginning, which CUDA takes as well."""
    return name.startswith("GPU-") and gpu.uuid.startswith(name)


def _parse_gpu(line: str) -> Gpu:
    """A name may hold a comma. Raises ValueError."""
    number, uuid, rest = line.split(",", 2)
    name, mebibytes = rest.rsplit(",", 1)
    return Gpu(int(number), uuid.strip(), name.strip(), float(mebibytes) / 1024)


_CONFIG_OF_NEW_NODE = """# Written by `swarm init` for this machine: {summary}.
# Every setting and its meaning: `swarm config schema`. Try it: `swarm run {path} --dry-run`.

[node]
dir = {folder}                     # identity, checkpoints, logs and metrics of this node
duty_cycle = 1.0                     # 0.5 leaves half of the machine's time to you

[swarm]
name = "{name}"                      # nodes of equal name and tasks find each other

[network]
listen = ["/ip4/0.0.0.0/tcp/0"]      # name a port here to forward it in your router
initial_peers = []                   # addresses of nodes to join through, from a friend or a bootstrap peer

[policy]
base = "{base}"                      # {why}
quantization = "{quantization}"

[rollouts]
groups_per_round = {groups_per_round}
max_new_tokens = {max_new_tokens}

[training]
lr = {lr:g}
"""


def hardware_config(hardware: Hardware, choice: PolicyChoice, folder: Path, name: str) -> str:
    """TOML with comments for a node in `folder`, in the swarm `name`. Checked: raises ConfigError for a bad name."""
    import tomllib

    from swarm.config import parse

    text = _CONFIG_OF_NEW_NODE.format(
        summary=hardware.summary, folder=json.dumps(str(folder)), path=folder / "node.toml", name=name,
        base=choice.base, why=choice.why, quantization=choice.quantization, groups_per_round=choice.groups_per_round,
        max_new_tokens=choice.max_new_tokens, lr=choice.lr,
    )  # fmt: skip
    parse(tomllib.loads(text))
    return text
