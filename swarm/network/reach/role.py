"""The role of a node in the network: reachable by everyone, behind a router, or alone on its machine."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from swarm.config import NetworkSection
from swarm.machine.safe_files import read_file, replace_file
from swarm.network.peers.dialling import MAX_AGE_S
from swarm.network.tcp_address import CIRCUIT, TcpAddress, parsed

logger = logging.getLogger(__name__)

_RELAY_MAX_RESERVATIONS = 256
_RELAY_MAX_CIRCUITS_PER_PEER = 16
_RELAY_BUFFER_BYTES = 64 * 1024
"""Bytes per circuit and direction. The daemon's default of 16 MiB would let 60 circuits fill 2 GB."""
RELAY_MAX_BYTES = 1 << 30
"""Bytes per circuit and direction: a few adapters. libp2p's limit, 128 KiB, ends every transfer."""
_RELAY_TIME_LIMIT = "30m"


@dataclass(frozen=True, slots=True)
class Role:
    """How the libp2p daemon and the DHT node of one session are started."""

    is_full: bool
    """Reachable: the node hosts index entries and helps others to find peers. Otherwise it is a client of such nodes.
    """
    is_local: bool = False
    """Listens on loopback only: no routers, no relays."""
    relays: tuple[str, ...] = ()
    """Multiaddresses of relays that hold a reservation for a client."""
    serves_relay: bool = False
    punches_holes: bool = True
    gossips: bool = False
    """The daemon runs its own pubsub."""

    @property
    def is_relay(self) -> bool:
        """Whether it carries circuits between peers that cannot dial each other."""
        return self.is_full and self.serves_relay and not self.is_local

    def daemon_flags(self) -> list[str]:
        """Return the daemon's flags for routing, reachability and relays."""
        # As a server of its own DHT the daemon would store any number of records of strangers. As a client it answers
        # nobody, and still reports where connected peers listen; `peers.peer_routing` does the rest.
        basics = ["-dhtClient=1"]
        if self.gossips:
            basics += ["-pubsub=1", "-gossipsubHeartbeatInterval=1s", "-gossipsubHeartbeatInitialDelay=100ms"]
        if self.is_local:
            return [*basics, "-autonat=0", "-relay=0"]
        flags = [
            *basics,
            f"-autonat={int(self.punches_holes)}",  # the daemon has one switch for AutoNAT's service and hole punching
            "-relay=1",  # also needed to reach others through one
            "-forceReachabilityPublic=1" if self.is_full else "-forceReachabilityPrivate=1",
        ]
        if self.is_relay:
            return [
                *flags,
                "-relayService=1",
                f"-relayMaxReservations={_RELAY_MAX_RESERVATIONS}",
                f"-relayMaxCircuits={_RELAY_MAX_CIRCUITS_PER_PEER}",
                f"-relayBufferSize={_RELAY_BUFFER_BYTES}",
                f"-relayDataLimit={RELAY_MAX_BYTES}",
                f"-relayTimeLimit={_RELAY_TIME_LIMIT}",
            ]
        flags.append("-relayService=0")
        if not self.is_full and self.relays:
            # Without discovery the daemon asks the named relays at once; with it only after a quarter of a minute.
            flags += ["-autoRelay=1", "-relayDiscovery=0", f"-trustedRelays={','.join(self.relays)}"]
        return flags

    @property
    def daemon_environment(self) -> dict[str, str]:
        """Environment variables of the daemon, in addition to the inherited ones.

        Of the two relays that a daemon starts (`start_relay`), ours stays more often on a single processor: 31 of 40
        times instead of 18. It relays 57 MB/s there.
        """
        return {"GOMAXPROCS": "1"} if self.is_relay else {}


_REOPEN_INTERVAL_S = 60.0


class ReservationWatch:
    """Notices that a relay is back and holds no reservation of this node any more.

    libp2p asks a relay that failed once again only after an hour; a new daemon asks at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._had_reservation = False
        self._was_lost = False
        self._reopened_at = -math.inf

    def needs_new_daemon(self, *, has_reservation: bool, is_relay_connected: bool) -> bool:
        """Take in what is there now. Returns True once after each loss, when a relay is connected again."""
        self._was_lost = not has_reservation and (self._was_lost or self._had_reservation or not is_relay_connected)
        self._had_reservation = has_reservation
        is_too_soon = self._clock() - self._reopened_at < _REOPEN_INTERVAL_S
        if not self._was_lost or not is_relay_connected or is_too_soon:
            return False
        self._was_lost, self._reopened_at = False, self._clock()
        return True


def addresses_from_daemon(
    reported: Iterable[str], relays: Iterable[str], connected: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return this node's addresses among those that its daemon reports.

    The daemon passes on whatever a relay claims as its addresses: those of third parties, of kinds that no node uses,
    and so many that others find no place in the presence. So of a circuit only the relay's id counts, and the address
    is one at which this node itself reaches that relay. `relays` is as in `Role`, `connected` is {peer id: addresses at
    which it is seen}.
    """
    addresses = parsed(reported)
    own = [address.transport for address in addresses if address.relay_id is None]
    reserved = {address.relay_id for address in addresses}
    for relay in map(TcpAddress.parse, relays):
        if relay.peer_id is not None and relay.peer_id in reserved:
            ways = [relay]
            if relay.kind not in ("ip4", "ip6"):  # the name is looked up only by nodes that have it in their settings
                ways += [way for way in parsed(connected.get(relay.peer_id, ())) if way.relay_id is None]
            own += [f"{way.transport}/p2p/{relay.peer_id}{CIRCUIT}" for way in ways]
    return tuple(dict.fromkeys(own))


def role_of(
    config: NetworkSection, listen: Sequence[TcpAddress], relays: Sequence[TcpAddress], *, is_reachable: bool
) -> Role:
    """Return the role that follows from the settings and the known reachability. Each of `relays` names a peer."""
    return Role(
        is_full=is_reachable,
        is_local=all(address.is_loopback for address in listen),
        relays=tuple(str(relay) for relay in relays if relay.relay_id is None),
        serves_relay=config.serve_relay,
        punches_holes=config.hole_punching,
        gossips=config.gossip == "daemon",
    )


REACHED_FILE = "reached.json"
_MAX_FILE_BYTES = 1 << 12
_MAX_HOSTS = 64


class _ReachedFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    address: Annotated[str, Field(max_length=64)]
    hosts: Annotated[tuple[str, ...], Field(max_length=_MAX_HOSTS)]
    found_at: float


class LastReached:
    """Where peers dialled this node last, for its next start. It raises nothing."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        """`path` is the file; None stores nothing."""
        self._path = path
        self._clock = clock

    def read(self, ports: Collection[int], hosts: Collection[str]) -> TcpAddress | None:
        """Return the address if it is at most a week old, and of this machine as it is now: its ports and addresses."""
        if self._path is None:
            return None
        try:
            stored = _ReachedFile.model_validate_json(read_file(self._path, _MAX_FILE_BYTES))
            address = TcpAddress.parse(stored.address)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning(
                "cannot read where this node was dialled last, asking peers again: %s: %s", self._path, error
            )
            return None
        is_fresh = 0 <= self._clock() - stored.found_at < MAX_AGE_S
        is_here = address.port in ports and set(stored.hosts) == set(hosts)
        return address if is_fresh and is_here and address.kind in ("ip4", "ip6") else None

    def write(self, address: TcpAddress | None, hosts: Collection[str]) -> None:
        """Store the address; with None, which means that this node cannot be dialled, forget it."""
        if self._path is None:
            return
        try:
            if address is None:
                self._path.unlink(missing_ok=True)
                return
            content = _ReachedFile(
                address=address.transport, hosts=tuple(sorted(hosts))[:_MAX_HOSTS], found_at=self._clock()
            )
            replace_file(self._path, content.model_dump_json(indent=1))
        except OSError as error:
            logger.warning("cannot store where this node was dialled: %s", error)
