"""Checks of `swarm join --check`: whether this machine can take part in a swarm. They need no torch.

`dial_findings` and `hub_findings` ask the peers to join through and the model hub; the others open no connection.
"""

import asyncio
import importlib.util
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from swarm.config import Config, NetworkSection, PolicySection, TasksSection
from swarm.diagnostics.check_result import CheckResult, note, ok, problem
from swarm.errors import SwarmError
from swarm.machine.hardware import Hardware
from swarm.machine.memory import machine_memory
from swarm.observability.plain_text import counted, size

_NODE_GIB = 1.0
"""Checkpoints, pool and logs of a node."""
_WORKING_ROOM = 1.5
"""Memory in use over the weights alone: activations, caches, adapter and its optimizer."""
_BYTES_PER_PARAMETER = {"8bit": 1.1, "4bit": 0.65}
_MAX_HEADER_BYTES = 100 << 20


def machine_findings(config: Config, hardware: Hardware) -> Iterator[CheckResult]:
    """Findings about this machine for a node of `config`, the cheap ones first."""
    yield ok("hardware", hardware.summary)
    yield from _base(config, hardware)
    yield from _quantization(config.policy, hardware)
    yield _disk("disk", config.node.dir, _NODE_GIB)
    yield from _network(config.network)
    yield note("clock", f"it is {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC here; keep it within a few seconds")


def tried(about: str, done: str, step: Callable[[], object]) -> CheckResult:
    """`done` where the step returns; its SwarmError as a problem."""
    try:
        step()
    except SwarmError as error:
        return problem(about, str(error))
    return ok(about, done)


def task_findings(tasks: TasksSection, *, is_silo: bool = False) -> Iterator[CheckResult]:
    """Whether the tasks work here. A data set that is not here is not downloaded for that, and in a silo at no time."""
    from swarm.manifest.joining import check_tasks
    from swarm.tasks.data_sets.source import is_at_hand

    remote = [one for one in tasks.sources if one.kind == "dataset" and not is_at_hand(one)]
    for source in remote:
        name = source.source_name
        if is_silo:
            text = f"a silo downloads nothing, and {source.hub} is not here; give --task-file {name}=PATH with a copy"
            yield problem(f"data {name}", text)
            continue
        yield note(
            f"data {name}",
            f"{source.hub} is not here and is downloaded at the start, at most {tasks.max_data_gib:g} GiB for all "
            f"data sets (tasks.max_data_gib), then compared with SHA-256 {source.sha256}",
        )
    here = tuple(one for one in tasks.sources if one not in remote)
    if here:
        text = f"all {len(here)} work here" if not remote else f"the other {len(here)} work here"
        yield tried("tasks", text, lambda: check_tasks(tasks.model_copy(update={"sources": here})))


def unchecked_downloads(config: Config, *, has_asked_hub: bool) -> list[str]:
    """Names of the base and the data sets that a start would fetch. `has_asked_hub`: for the base, see `hub_findings`."""
    from swarm.policy.base_folder import base_at_hand
    from swarm.tasks.data_sets.source import is_at_hand

    policy = config.policy
    is_open = not has_asked_hub and base_at_hand(policy.base, policy.revision) is None
    sets = [one.hub for one in config.tasks.sources if one.kind == "dataset" and not is_at_hand(one)]
    return [policy.base, *sets] if is_open else sets


def _base(config: Config, hardware: Hardware) -> Iterator[CheckResult]:
    from swarm.manifest.joining import check_base_at_hand
    from swarm.policy.base_folder import base_at_hand, cache_folder, locate_base, names_folder, weight_files

    policy = config.policy
    folder = base_at_hand(policy.base, policy.revision)
    num_parameters = _count_parameters(folder) if folder else _parameters_by_name(policy.base)
    if folder is not None:
        yield ok("base", f"{policy.base} is here: {folder}")
    elif names_folder(policy.base, policy.revision):
        yield tried("base", "", lambda: weight_files(locate_base(policy.base, policy.revision)))
    elif config.swarm.silo_owner:
        yield tried("base", "", lambda: check_base_at_hand(config))
    else:
        size = f"about {num_parameters * 2 / 2**30:.1f} GiB by its name, " if num_parameters else ""
        bound = f"at most {policy.max_download_gib:g} GiB (policy.max_download_gib)"
        yield note("base", f"{policy.base} is not here and is downloaded at the start, {size}{bound}")
        if num_parameters:
            yield _disk("download", cache_folder(), num_parameters * 2 / 2**30)
    yield _memory(policy, num_parameters, hardware, has_gpu=bool(hardware.gpu_name) and config.node.device != "cpu")


def _memory(policy: PolicySection, num_parameters: float | None, hardware: Hardware, *, has_gpu: bool) -> CheckResult:
    if not num_parameters:
        return note("memory", f"the size of {policy.base} is not known before it is here")
    is_half = policy.dtype in ("bfloat16", "float16") or (policy.dtype == "auto" and has_gpu)
    bytes_each = _BYTES_PER_PARAMETER.get(policy.quantization, 2.0 if is_half else 4.0)
    need_gib = num_parameters * bytes_each * _WORKING_ROOM / 2**30
    have_gib = hardware.gpu_memory_gib if has_gpu else machine_memory().available / 2**30
    text = f"about {size(need_gib * 2**30)} for {_parameters(num_parameters)}, {have_gib:.0f} GiB on the " + (
        "GPU" if has_gpu else "machine, free"
    )
    if need_gib <= have_gib:
        return ok("memory", text)
    return problem("memory", f"{text}; set policy.quantization = 4bit or a smaller policy.base")


def _parameters(count: float) -> str:
    """Such as `0.87 M parameters` or `1.5 B parameters`."""
    return f"{count / 1e9:.2g} B parameters" if count >= 1e8 else f"{count / 1e6:.2g} M parameters"


def _quantization(policy: PolicySection, hardware: Hardware) -> Iterator[CheckResult]:
    if policy.quantization == "none":
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        text = f"policy.quantization = {policy.quantization} needs bitsandbytes; pip install bitsandbytes, or set none"
        yield problem("bitsandbytes", text)
    elif not hardware.gpu_name:
        yield note("bitsandbytes", f"{policy.quantization} without a GPU is slow")
    else:
        yield ok("bitsandbytes", f"{policy.quantization} on {hardware.gpu_name}")


def _network(network: NetworkSection) -> Iterator[CheckResult]:
    from swarm.diagnostics.machine import check_daemon
    from swarm.network.own_ports import check_port_is_free
    from swarm.network.tcp_address import parse_setting

    for package in dict.fromkeys((network.backend, network.gossip)):
        if package in ("hivemind", "libp2p"):
            yield _package(package)
    if network.backend == "hivemind":
        yield check_daemon()

    def check_listen() -> None:
        for address in parse_setting("listen", network.listen):
            check_port_is_free(address)

    yield tried("listen", ", ".join(network.listen), check_listen)
    peers = tried(
        "bootstrap", f"{counted(len(network.initial_peers), 'peer')} to join through", lambda: _parse_peers(network)
    )
    no_peers = note("bootstrap", "no peer to join through: this node would wait until others find it")
    yield peers if network.initial_peers else no_peers


def _package(name: str) -> CheckResult:
    if importlib.util.find_spec(name) is not None:
        return ok(name, "the network library is installed")
    return problem(name, f"the network needs the package {name}; pip install {name}")


def _parse_peers(network: NetworkSection) -> None:
    from swarm.network.tcp_address import parse_setting

    parse_setting("initial_peers", network.initial_peers)


def _disk(about: str, folder: Path, need_gib: float) -> CheckResult:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free_gib = shutil.disk_usage(existing).free / 2**30
    text = f"{free_gib:.1f} GiB free in {existing}, {need_gib:.1f} needed"
    return ok(about, text) if free_gib >= need_gib else problem(about, text)


def _count_parameters(folder: Path) -> float | None:
    """From the headers of the weight files; None for files that are not safetensors."""
    from swarm.policy.base_folder import weight_files

    total = 0
    try:
        for path in weight_files(folder):
            total += sum(math.prod(shape) for shape in _tensor_shapes(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return float(total)


def _tensor_shapes(path: Path) -> Iterable[list[int]]:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise ValueError("no safetensors file")
        header = json.loads(file.read(header_bytes))
    return [facts["shape"] for name, facts in header.items() if name != "__metadata__"]


def _parameters_by_name(base: str) -> float | None:
    """`Qwen2.5-1.5B-Instruct` says 1.5e9; None where the name says nothing."""
    match = re.search(r"(?<![A-Za-z0-9.])(\d{1,4}(?:\.\d{1,3})?)([BbMm])(?![A-Za-z0-9])", base)
    return float(match[1]) * (1e9 if match[2] in "Bb" else 1e6) if match else None


def dial_findings(network: NetworkSection) -> Iterator[CheckResult]:
    """One finding per peer; silent ones are a problem only where no one answers."""
    try:
        answered = asyncio.run(_connected(network))
    except SwarmError as error:
        yield problem("dial", str(error))
        return
    silent = note if answered else problem
    for address in network.initial_peers:
        has_answered = address.rpartition("/p2p/")[2] in answered
        yield ok("dial", f"{address} answers") if has_answered else silent("dial", f"{address} does not answer")


def hub_findings(policy: PolicySection) -> Iterator[CheckResult]:
    """How large the base is by the list of the hub, unless it is here. Asks the hub."""
    from swarm.policy.base_folder import base_at_hand, check_size, download_bytes

    if base_at_hand(policy.base, policy.revision) is not None:
        return
    try:
        num_bytes = download_bytes(policy.base, policy.revision)
        check_size(policy.base, num_bytes, policy.max_download_gib)
    except SwarmError as error:
        yield problem("hub", str(error))
    else:
        yield ok("hub", f"{policy.base} is a download of {size(num_bytes)}")


async def _connected(network: NetworkSection) -> set[str]:
    """Peer ids that proved to be who the addresses name."""
    from swarm.network.make_transport import make_transport
    from swarm.records.identity import SEED_BYTES, Identity

    wanted = {address.rpartition("/p2p/")[2] for address in network.initial_peers}
    quiet = network.model_copy(
        update={"listen": ("/ip4/127.0.0.1/tcp/0",), "announce": (), "reachability": "private", "gossip": "off"}
    )
    with tempfile.TemporaryDirectory(prefix="swarm-dial-") as folder:
        transport = make_transport(quiet, Identity(os.urandom(SEED_BYTES)), Path(folder))
        assert transport is not None, "a node that joins has a network"
        try:
            await transport.start()
            return wanted & set(await transport.connected_peers())
        finally:
            await transport.stop()
