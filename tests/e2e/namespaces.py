"""Small networks of Linux network namespaces: hosts on one public segment, home routers that masquerade, bad lines.

    with Network() as net:                              # needs root; everything it made is gone at the end
        relay = net.public_host()                       # 11.0.0.2 on the public segment
        home = net.home()                               # a router at 11.0.0.3 and a host 192.168.1.2 behind it
        far = net.public_host(is_degradable=True)
        far.degrade(delay_ms=200, loss_percent=20)
        subprocess.Popen([*home.host.enter, sys.executable, ...])

The public segment carries addresses that libp2p takes for public ones; no packet of it leaves the machine, since the
namespaces have no route to anywhere else.
"""

import os
import random
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.e2e.slow_line import SlowLine

_PUBLIC = "11.0.0"
_COMMAND_TIMEOUT_S = 10


def missing_capability() -> str | None:
    """Why networks cannot be built on this machine; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "iptables"):
        if shutil.which(tool) is None:
            return f"the command {tool} is not installed (packages iproute2 and iptables)"
    name = f"sw-{uuid.uuid4().hex[:8]}"
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"this machine permits no network namespaces: {error.stderr.strip()}"
    try:
        _run("ip", "netns", "exec", name, "iptables", "-t", "nat", "-S")
    except subprocess.CalledProcessError as error:
        return f"iptables has no nat table here: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "delete", name)
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace with one line (veth) to its segment."""

    namespace: str
    address: str
    device: str
    """Name of its end of the line, inside the namespace."""
    line: SlowLine | None = None
    """Only of a host that was made degradable."""

    @property
    def enter(self) -> list[str]:
        """What to put before a command so that it runs here."""
        return ["ip", "netns", "exec", self.namespace]

    def run(self, *command: str) -> str:
        return _run(*self.enter, *command)

    def degrade(self, *, delay_ms: float = 0.0, loss_percent: float = 0.0) -> None:
        """Make the line late and lossy, in each direction; a second call replaces the first."""
        assert self.line is not None, "made without is_degradable"
        self.line.delay_s, self.line.loss = delay_ms / 1e3, loss_percent / 100

    def set_line(self, *, is_up: bool) -> None:
        """Cut or restore the line. Nothing but the public segment is reachable afterwards: default routes go with it."""
        self.run("ip", "link", "set", self.device, "up" if is_up else "down")


@dataclass(frozen=True, slots=True)
class Home:
    """A host with a private address behind a router that lets nobody in."""

    router: Host
    host: Host


class Network:
    """Owns the namespaces it makes, under names that nobody else uses. A context manager."""

    def __init__(self, seed: int = 0) -> None:
        """`seed` decides which frames bad lines lose."""
        self._rng = random.Random(seed)
        self._lines: list[SlowLine] = []
        self._prefix = f"sw-{uuid.uuid4().hex[:6]}"
        self._names: list[str] = []
        self._num_public = 0
        self._num_homes = 0
        self._switch = self._namespace("switch")
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces, and with them their devices and rules. Idempotent."""
        while self._lines:
            self._lines.pop().close()
        while self._names:
            subprocess.run(["ip", "netns", "delete", self._names.pop()], capture_output=True, check=False)

    def public_host(self, *, is_degradable: bool = False) -> Host:
        """A host on the public segment, reachable by everyone who has a way there."""
        self._num_public += 1
        number = self._num_public
        name, address, line = self._namespace(f"p{number}"), f"{_PUBLIC}.{number + 1}", None
        if is_degradable:
            line = SlowLine((name, "wan"), (self._switch, f"p{number}"), random.Random(self._rng.random()))
            self._lines.append(line)
        else:
            peer = ["peer", "name", f"p{number}", "netns", self._switch]
            _run("ip", "-n", name, "link", "add", "wan", "type", "veth", *peer)
        _run("ip", "-n", self._switch, "link", "set", f"p{number}", "master", "br0", "up")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wan")
        _run("ip", "-n", name, "link", "set", "wan", "up")
        return Host(name, address, "wan", line)

    def home(self, *, forwarded_port: int | None = None, is_degradable: bool = False) -> Home:
        """A router on the public segment and a host behind it; `forwarded_port` (TCP) is let in to the host."""
        self._num_homes += 1
        number = self._num_homes
        router, inside = self.public_host(is_degradable=is_degradable), f"192.168.{number}"
        name, address = self._namespace(f"h{number}"), f"{inside}.2"
        _run("ip", "-n", name, "link", "add", "lan", "type", "veth", "peer", "name", "lan", "netns", router.namespace)
        for namespace, own in ((name, address), (router.namespace, f"{inside}.1")):
            _run("ip", "-n", namespace, "address", "add", f"{own}/24", "dev", "lan")
            _run("ip", "-n", namespace, "link", "set", "lan", "up")
        _run("ip", "-n", name, "route", "add", "default", "via", f"{inside}.1")
        router.run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        router.run("iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "wan", "-j", "MASQUERADE")
        if forwarded_port is not None:
            rule = ["-i", "wan", "-p", "tcp", "--dport", str(forwarded_port), "-j", "DNAT", "--to-destination", address]
            router.run("iptables", "-t", "nat", "-A", "PREROUTING", *rule)
            router.run("iptables", "-A", "FORWARD", "-i", "wan", "-p", "tcp", "-d", address, "-j", "ACCEPT")
        for rule in (["-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT"], ["-j", "DROP"]):
            # Also at the router itself, as home routers do: a refusal would end the attempt to punch a hole.
            for chain in ("FORWARD", "INPUT"):
                router.run("iptables", "-A", chain, "-i", "wan", *rule)
        return Home(router, Host(name, address, "lan"))

    def _namespace(self, suffix: str) -> str:
        name = f"{self._prefix}-{suffix}"
        _run("ip", "netns", "add", name)
        self._names.append(name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        return name


def _run(*command: str) -> str:
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
        ).stdout  # the output of a command that fails is in the error
    except FileNotFoundError as error:
        raise subprocess.CalledProcessError(127, command, stderr=str(error)) from None
