"""One node per GPU of this machine: `swarm run --gpus all`.

    GPUs ─ a configuration for each ─ own folder, identity, ports, GPU ─▶ Testbed ─▶ swarm run gpu-0.toml --supervised
                                                                            └──────▶ swarm dashboard, one page over all

A node that crashes is started again by its supervisor. Ctrl-C or SIGTERM ends all in good order.
"""

import json
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from swarm.config import Config
from swarm.errors import ConfigError, SwarmError
from swarm.machine.child_python import swarm_command
from swarm.machine.hardware import Gpu
from swarm.machine.stop_signals import DEADLINE_S
from swarm.observability.http_server import http_address
from swarm.observability.plain_text import counted
from swarm.testbeds.profiles import NodePlan
from swarm.testbeds.testbed import NodeProcess, Testbed

_GRACE_S = DEADLINE_S + 2
"""A node ends within that deadline by itself."""
_FIRST_PORT = 8400
_LAST_PORT = 9400
_PORT = re.compile(r"(?<=/tcp/)[0-9]+")
_LISTENERS = ("listen", "gossip_listen", "announce", "gossip_announce")


@dataclass(frozen=True, slots=True)
class GpuNodes:
    """The nodes of one machine before they start."""

    folder: Path
    plans: Sequence[NodePlan]
    page: tuple[str, int] | None
    """Host and port of the page over all nodes; None where nodes serve no page."""


def choose_gpus(text: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that `text` names among those of the machine: `all`, or numbers as of nvidia-smi. Raises ConfigError."""
    if not gpus:
        raise ConfigError(
            "--gpus needs an NVIDIA GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves visible, got none on this "
            "machine; install the driver, or leave --gpus out to run one node"
        )
    if text == "all":
        return list(gpus)
    by_number = {str(gpu.number): gpu for gpu in gpus}
    wanted = [part.strip() for part in text.split(",")]
    if len(set(wanted)) < len(wanted) or not all(one in by_number for one in wanted):
        raise ConfigError(
            f"--gpus must be all, or numbers of GPUs with commas between them, each once, got {text!r}; this machine has "
            + ", ".join(f"{gpu.number} ({gpu.name})" for gpu in gpus)
        )
    return [by_number[one] for one in wanted]


def plan_gpu_nodes(gpus: Sequence[Gpu], config_of: Callable[[Gpu], Config]) -> GpuNodes:
    """A node for each of `gpus`, in folders within the `node.dir` of its configuration. Raises ConfigError."""
    configs = [config_of(gpu) for gpu in gpus]
    first = configs[0]
    _check_can_be_many(first)
    ports = _free_ports(first, 1 + len(gpus)) if first.observability.http else [0] * (1 + len(gpus))
    threads = max(1, len(os.sched_getaffinity(0)) // len(gpus)) if hasattr(os, "sched_getaffinity") else None
    plans = [
        _plan(gpu, _own(config, gpu, index=index, http_port=port, threads=threads))
        for index, (gpu, config, port) in enumerate(zip(gpus, configs, ports[1:], strict=True))
    ]
    page = (first.observability.http_host, ports[0]) if first.observability.http else None
    return GpuNodes(first.node.dir, plans, page)


def run_gpu_nodes(nodes: GpuNodes, console: Console, *, fresh: bool = False) -> None:
    """Run all until their end, Ctrl-C or SIGTERM. No process is left. Raises SwarmError where one did not end well."""

    def command_of(plan: NodePlan, address: str | None) -> list[str]:
        peers = [] if address is None else ["--network.initial_peers", json.dumps([address])]
        again = ["--fresh"] if fresh else []
        return swarm_command("run", str(plan.config_path), "--supervised", *again, *peers)

    swarm = Testbed(nodes.plans, console, command_of, grace_s=_GRACE_S, beside=_start_page(nodes, console))
    try:
        swarm.run(f"{counted(len(nodes.plans), 'node')} in {nodes.folder}")
    except KeyboardInterrupt:
        console.print(f"all nodes have ended; the same command resumes {nodes.folder}", highlight=False)
    states = {view.name: view.state for view in swarm.views()}
    if failed := [f"{name}: {state}" for name, state in states.items() if state not in ("done", "stopped", "waiting")]:
        raise SwarmError(
            f"{counted(len(failed), 'node')} failed: {'; '.join(failed)}; logs are in {nodes.folder}/gpu-*/logs"
        )


def _check_can_be_many(config: Config) -> None:
    """Raises ConfigError for what only one node can have."""
    reasons = {
        "node.identity": config.node.identity is not None,
        "policy.pipeline.machines": config.policy.pipeline.is_on,
        "swarm.silo_owner": bool(config.swarm.silo_owner),
    }
    if found := [key for key, is_set in reasons.items() if is_set]:
        raise ConfigError(
            f"--gpus makes an identity for each node, so {found[0]} must not be set; start each node by itself, with "
            "CUDA_VISIBLE_DEVICES and a node.dir of its own"
        )


def _own(config: Config, gpu: Gpu, *, index: int, http_port: int, threads: int | None) -> Config:
    """`config` with what no two nodes of a machine may share. A device that is set stays."""
    device = "cuda" if config.node.device == "auto" else config.node.device
    node = {"dir": config.node.dir / f"gpu-{gpu.number}", "threads": config.node.threads or threads, "device": device}
    return config.model_copy(
        update={
            "node": config.node.model_copy(update=node),
            "network": config.network.model_copy(update=_shifted(config, index)),
            "observability": config.observability.model_copy(update={"http_port": http_port}),
        }
    )


def _shifted(config: Config, index: int) -> dict[str, tuple[str, ...]]:
    """Addresses of node `index`: ports that are set are followed by those of the next node; port 0 is a free one."""
    addresses = {name: getattr(config.network, name) for name in _LISTENERS}
    used = [int(port) for name in addresses for text in addresses[name] for port in _PORT.findall(text) if int(port)]
    step = index * (max(used) - min(used) + 1) if used else 0
    if used and max(used) + step > 65535:
        raise ConfigError(
            f"ports of network.listen must leave room for those of all nodes, got {max(used)} + {step}; set lower ones"
        )

    def move(text: str) -> str:
        return _PORT.sub(lambda found: str(int(found[0]) + step) if int(found[0]) else found[0], text, count=1)

    return {name: tuple(move(text) for text in texts) for name, texts in addresses.items()}


def _plan(gpu: Gpu, config: Config) -> NodePlan:
    return NodePlan(config.node.dir.name, gpu.name, config, {"CUDA_VISIBLE_DEVICES": gpu.uuid})


def _free_ports(config: Config, count: int) -> list[int]:
    """Ports of the page and of the nodes, the same ones again at the next start where they are free.

    observability.http_port, if it is set, is the page's: whether that is free is found out by the page itself.
    """
    host, wanted = config.observability.http_host, config.observability.http_port
    found = [wanted] if wanted else []
    for port in range(_FIRST_PORT, _LAST_PORT):
        if len(found) < count and port != wanted and _is_free(host, port):
            found.append(port)
    if len(found) < count:
        raise ConfigError(
            f"observability.http_host must have {count} free ports from {_FIRST_PORT} on, got {len(found)} on {host}; "
            "set observability.http = false, or end other programs"
        )
    return found


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _start_page(nodes: GpuNodes, console: Console) -> dict[str, NodeProcess]:
    if nodes.page is None:
        return {}
    host, port = nodes.page
    targets = [http_address(host, plan.config.observability.http_port) for plan in nodes.plans]
    command = swarm_command("dashboard", "--host", host, "--port", str(port), *targets)
    console.print(f"all nodes on {http_address(host, port)}", highlight=False)
    return {"page": NodeProcess(nodes.folder / "page", command)}
