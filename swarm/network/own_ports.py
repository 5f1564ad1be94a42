"""The TCP ports that a node listens on. A node takes only free ports, and the same ones again at its next start.

Other nodes store the addresses of a node. With a new port at every start these would soon be useless.
"""

import errno
import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.errors import NetworkError
from swarm.machine.safe_files import read_file, replace_file
from swarm.network.tcp_address import TcpAddress

logger = logging.getLogger(__name__)

PORTS_FILE = "ports.json"
_MAX_ADDRESSES = 16
_MAX_FILE_BYTES = 1 << 14

PortUse = Literal["listen", "gossip"]
"""What listens there: requests and the index, or gossip."""
_Listened = Annotated[tuple[str, ...], Field(max_length=_MAX_ADDRESSES)]


class _PortsFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    listen: _Listened = ()
    gossip: _Listened = ()


def try_port(address: TcpAddress) -> None:
    """Raise OSError where something listens on the address already, or where it is not an address of this machine."""
    family = socket.AF_INET6 if address.kind == "ip6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run may still be open
        probe.bind((address.host, address.port))


def check_port_is_free(address: TcpAddress) -> None:
    """Raise NetworkError where another program listens on the address.

    The daemon would silently share the port with another daemon, and each would then get half the callers.
    """
    if address.port == 0:
        return
    try:
        try_port(address)
    except OSError as error:
        fix = "set network.listen to an address of this machine, such as /ip4/0.0.0.0/tcp/PORT"
        if error.errno == errno.EADDRINUSE:
            fix = "stop the other program, or set another port in network.listen"
        reason = error.strerror or str(error)
        raise NetworkError(f"network.listen must be free, got {address}: {reason.lower()}; {fix}") from None


class OwnPorts:
    """Ports of one node at its last start. It raises nothing: a port that is no longer free is replaced by another."""

    def __init__(self, path: Path | None = None) -> None:
        """`path` is the file that stores them; None stores nothing."""
        self._path = path
        self._stored: dict[PortUse, tuple[TcpAddress, ...]] = {"listen": (), "gossip": ()}
        if path is not None:
            self._stored |= _read(path)

    def reuse(self, use: PortUse, wanted: Sequence[TcpAddress]) -> tuple[TcpAddress, ...]:
        """Return `wanted` with the ports of the last start in place of port 0, where they are free."""
        pairs = zip(wanted, self.last(use, wanted), strict=True)
        return tuple(last if last == address or _is_free(last) else address for address, last in pairs)

    def last(self, use: PortUse, wanted: Sequence[TcpAddress]) -> tuple[TcpAddress, ...]:
        """Return `wanted` with the ports of the last start in place of port 0, whether they are free or not."""
        left = list(self._stored[use])
        found = []
        for address in wanted:
            stored = next((one for one in left if replace(one, port=0) == address), None)
            if stored is not None:
                left.remove(stored)
            found.append(stored or address)
        return tuple(found)

    def store(self, use: PortUse, wanted: Sequence[TcpAddress], actual: Sequence[TcpAddress]) -> None:
        """Store the ports that the system chose for port 0. `actual` is `wanted` in the same order, with the real
        ports.
        """
        pairs = zip(wanted, actual, strict=True)
        chosen = tuple(now for before, now in pairs if before.port == 0 and now.port != 0)[:_MAX_ADDRESSES]
        if self._path is None or not chosen or chosen == self._stored[use]:
            return
        self._stored[use] = chosen
        listen, gossip = (tuple(map(str, self._stored[name])) for name in ("listen", "gossip"))
        content = _PortsFile(listen=listen, gossip=gossip)
        try:
            replace_file(self._path, content.model_dump_json(indent=1))
        except OSError as error:
            logger.warning("cannot store the ports; the next start will use others: %s", error)


def _is_free(address: TcpAddress) -> bool:
    try:
        try_port(address)
    except OSError as error:
        logger.info("port %d of the last start is not available, using another: %s", address.port, error)
        return False
    return True


def _read(path: Path) -> dict[PortUse, tuple[TcpAddress, ...]]:
    """Read the file. The result is empty, with a warning, where the file is damaged."""
    try:
        content = _PortsFile.model_validate_json(read_file(path, _MAX_FILE_BYTES))
        return {"listen": _addresses(content.listen), "gossip": _addresses(content.gossip)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        cause = f"{error.error_count()} errors in it" if isinstance(error, ValidationError) else error
        logger.warning("cannot read the ports of the last start, using others: %s: %s", path, cause)
        return {}


def _addresses(texts: Sequence[str]) -> tuple[TcpAddress, ...]:
    """Raises ValueError."""
    found = tuple(map(TcpAddress.parse, texts))
    if not all(one.kind in ("ip4", "ip6") and one.port and one.transport == str(one) for one in found):
        raise ValueError("it holds an address that cannot be listened on")
    return found
