"""Checks of this machine that need no network: software, identity, disk, memory, descriptors, clock, membership of a silo."""

import errno
import importlib.metadata
import importlib.util
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from swarm.config import Config
from swarm.diagnostics.check_result import CheckResult, ok, problem, warning
from swarm.errors import SwarmError
from swarm.machine.child_python import install_from_clone, pip_install
from swarm.machine.memory import machine_memory
from swarm.machine.node_folder import NodeFolder
from swarm.network.own_ports import try_port
from swarm.network.tcp_address import TcpAddress
from swarm.observability.status_file import read_status
from swarm.records import identity as identities
from swarm.silo.membership import Membership
from swarm.silo.silo_transport import check_folder, open_membership

_DAY_S = 86_400.0
_WARN_DAYS = 7


def check_membership(config: Config, clock: Callable[[], float] = time.time) -> CheckResult:
    """For a configuration with `swarm.silo_owner`. Raises nothing."""
    folder = NodeFolder(config.node.dir, config.node.identity)
    request = f"`swarm silo request --dir {folder.path}` prints what the owner needs for an invitation"
    try:
        check_folder(folder)
        if identities.is_encrypted(folder.identity):
            return ok(
                "silo", f"{folder.path} has a membership; starting the node opens it with the identity's passphrase"
            )
        identity = identities.load(folder.identity)
        membership = open_membership(config.swarm.silo_owner, config.swarm_id, identity, folder, clock)
    except SwarmError as error:
        return problem("silo", str(error), request)
    return _told(membership, identity.peer_id, clock(), request)


def _told(membership: Membership, peer_id: str, now: float, request: str) -> CheckResult:
    members = membership.roll.members if membership.roll else ()
    entries = [member for member in members if member.peer_id == peer_id]
    ends = [entry.until for entry in (*entries, membership.own_grant) if entry is not None]
    days = (max(ends) - now) / _DAY_S
    roll = (
        f"{len(members)} on the roll of epoch {membership.keys.epoch}" if members else "no roll yet: members bring it"
    )
    said = f"member for {days:.0f} more days; {roll}"
    return (
        ok("silo", said) if days > _WARN_DAYS else warning("silo", said, f"ask the owner for a longer one; {request}")
    )


_PACKAGES = ("hivemind", "torch", "transformers", "peft", "bitsandbytes", "cryptography")
_OLDEST_PYTHON = (3, 11)
_LOW_DISK_GIB, _NO_DISK_GIB = 5.0, 0.5
_LOW_MEMORY_GIB = 1.5
_MIN_DESCRIPTORS = 1024
"""A daemon with 512 connections needs one each, and a node has streams and files on top."""
_MIN_DAEMON_DESCRIPTORS = 4096
"""Connections that say nothing take one each until they time out; at 1024 they leave too few for honest ones."""
_DAEMON_TIMEOUT_S = 10


def check_machine(config: Config) -> Iterable[CheckResult]:
    """All of them, one after the other; a check that fails is a finding."""
    folder = NodeFolder(config.node.dir, config.node.identity)
    checks: list[Callable[[], CheckResult]] = [
        check_python,
        check_packages,
        lambda: check_identity(folder),
        lambda: check_disk(folder.path),
        check_memory,
        check_descriptors,
        check_clock_service,
    ]
    if config.network.backend == "hivemind":
        checks.append(check_daemon)
    if config.network.backend != "off":
        checks.append(lambda: check_ports(config.network.listen, is_running=is_running(folder)))
    for check in checks:
        yield check()


def check_python() -> CheckResult:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < _OLDEST_PYTHON:
        return problem("python", text, "uv python install 3.11")
    return ok("python", text)


def check_packages() -> CheckResult:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        lock = "requirements-torch.lock" if missing == ["torch"] else "requirements.lock"
        return problem("packages", f"missing: {', '.join(missing)}", install_from_clone(lock))
    return ok("packages", ", ".join(found))


def check_daemon() -> CheckResult:
    """Run the libp2p daemon. hivemind has it for Linux and macOS on x86-64 and ARM; only this shows whether it works here."""
    spec = importlib.util.find_spec("hivemind")
    places = spec.submodule_search_locations if spec else None
    if not places:
        return problem("daemon", "the package hivemind is missing", pip_install("'hivemind>=1.1.12,<1.2'"))
    binary = Path(places[0]) / "hivemind_cli" / "p2pd"
    fix = f"{pip_install('--force-reinstall --no-deps hivemind')}, or set network.backend to libp2p"
    try:
        ran = subprocess.run([binary, "-help"], capture_output=True, text=True, timeout=_DAEMON_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return problem("daemon", f"the libp2p daemon does not run: {error}", fix)
    if "-hostAddrs" not in ran.stderr + ran.stdout:
        return problem("daemon", f"the libp2p daemon ended with code {ran.returncode}", fix)
    return ok("daemon", f"the libp2p daemon runs ({binary.stat().st_size / 2**20:.0f} MiB)")


def check_identity(folder: NodeFolder) -> CheckResult:
    if not folder.identity.exists() and not folder.has_key_elsewhere:
        return ok("identity", f"none in {folder.path} yet; the first start makes one")
    if identities.is_encrypted(folder.identity):
        return ok("identity", f"{folder.identity} is encrypted; starting the node takes its passphrase")
    try:
        identity = identities.load(folder.identity)
    except SwarmError as error:
        return problem("identity", str(error), f"chmod 600 {folder.identity}, or restore it from your backup")
    return ok("identity", f"{identity.peer_name} ({identity.peer_id})")


def is_running(folder: NodeFolder) -> bool:
    """Whether a node runs in this folder, as far as its status file says."""
    try:
        return read_status(folder.status).is_alive
    except SwarmError:
        return False


def check_disk(path: Path) -> CheckResult:
    """Room for checkpoints and pool, and whether the folder can be made and written."""
    existing = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    free_gib = shutil.disk_usage(existing).free / 2**30
    text = f"{free_gib:.1f} GiB free at {existing}"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        return problem("disk", f"{existing} cannot be written: {why}", "set node.dir to a folder of your own")
    fix = "set node.dir to a disk with room, or lower checkpoint.keep"
    if free_gib < _NO_DISK_GIB:
        return problem("disk", text, fix)
    return warning("disk", text, fix) if free_gib < _LOW_DISK_GIB else ok("disk", text)


def check_memory() -> CheckResult:
    memory = machine_memory()
    text = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of memory available"
    if memory.available / 2**30 < _LOW_MEMORY_GIB:
        return warning("memory", text, "end other programs, or set policy.base to a smaller model")
    return ok("memory", text)


def check_descriptors() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {soft} open files, and {hard} for the libp2p daemon"  # which raises its own limit as far as it may
    if soft >= _MIN_DESCRIPTORS and (hard >= _MIN_DAEMON_DESCRIPTORS or hard == resource.RLIM_INFINITY):
        return ok("files", text)
    if 0 < hard < _MIN_DAEMON_DESCRIPTORS:
        return warning("files", text, f"raise the hard limit to {_MIN_DAEMON_DESCRIPTORS} (LimitNOFILE of the service)")
    return warning("files", text, f"ulimit -n {min(4096, hard) if hard > 0 else 4096}")


def check_clock_service() -> CheckResult:
    """Whether the system keeps its clock by NTP, as far as timedatectl says."""
    tool = shutil.which("timedatectl")
    if tool is None:
        return ok("clock service", "this system does not say whether it synchronises its clock")
    try:
        said = subprocess.run(
            [tool, "show", "--property=NTPSynchronized", "--value"],
            capture_output=True, text=True, timeout=5, check=False,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    if said == "no":
        return warning("clock service", "the clock is not synchronised", "sudo timedatectl set-ntp true")
    return ok("clock service", "synchronised by NTP" if said == "yes" else "timedatectl gives no answer here")


def check_ports(listen: Iterable[str], *, is_running: bool = False) -> CheckResult:
    """Whether the addresses of network.listen can be bound. `is_running`: by the node itself, they need not be free."""
    for text in listen:
        try:
            address = TcpAddress.parse(text)
        except ValueError as error:
            return problem("port", f"network.listen {text!r}: {error}", "set network.listen to /ip4/0.0.0.0/tcp/PORT")
        try:
            try_port(address)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            if is_running and error.errno == errno.EADDRINUSE:
                return ok("port", f"{text} is in use; the node of this folder is running")
            who = f"ss -ltnp 'sport = :{address.port}'"
            return problem("port", f"{text}: {reason}", f"{who} shows who has it; or set another network.listen")
    return ok(
        "port",
        ", ".join(f"{text} takes any free port" if text.endswith("/tcp/0") else f"{text} is free" for text in listen),
    )
