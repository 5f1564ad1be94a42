"""Decides which addresses a node dials, since a stranger can announce anybody's address, and stores the known peers.

    presence, identify ── claimed ──▶ believed ──▶ contacts ──▶ take ──▶ one dial
    open connections ──── seen ──────────┘                       │
                            └── clears the failures of a dial ───┘

The file of known peers lets a node find the swarm again when every configured peer is gone.
"""

import functools
import ipaddress
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from swarm.config import NetworkSection
from swarm.limits.bounded_maps import BoundedMap, FairMap
from swarm.machine.safe_files import read_file, replace_file
from swarm.network.peers.surroundings import local_addresses
from swarm.network.tcp_address import TcpAddress, parse_setting, parsed
from swarm.records.identity import is_peer_id

logger = logging.getLogger(__name__)


PEERS_FILE = "peers.json"
MAX_PEERS = 64
MAX_ADDRESSES_PER_PEER = 4
MAX_AGE_S = 7 * 24 * 3600.0
"""A peer that was not seen for this long is forgotten."""
MAX_FILE_BYTES = 1 << 17

Addresses = tuple[str, ...]
"""Multiaddresses of one peer, without its id."""


class StoredPeer(BaseModel):
    """One peer in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer_id: str
    addresses: Addresses
    last_seen: FiniteFloat
    """Seconds since the epoch."""


class _PeerFile(BaseModel):
    version: Literal[1] = 1
    peers: Annotated[tuple[StoredPeer, ...], Field(max_length=MAX_PEERS)] = ()


def dialable(peer_id: str, addresses: Iterable[str]) -> Addresses:
    """Return the addresses at which a peer can be dialled, in order, without its id, at most MAX_ADDRESSES_PER_PEER."""
    chosen: dict[str, None] = {}
    for address in parsed(addresses):
        if address.port != 0 and not address.is_wildcard and address.peer_id in (None, peer_id):
            chosen[address.transport] = None
    return tuple(chosen)[:MAX_ADDRESSES_PER_PEER]


def read_peers(path: Path, now: float) -> dict[str, StoredPeer]:
    """Return {peer id: peer} of those seen in the last week; empty, with a warning, where the file is damaged."""
    try:
        peers = _PeerFile.model_validate_json(read_file(path, MAX_FILE_BYTES)).peers
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        cause = f"{error.error_count()} errors in it" if isinstance(error, ValidationError) else error
        logger.warning("cannot read the stored peers, starting without them: %s: %s", path, cause)
        return {}
    found: dict[str, StoredPeer] = {}
    for peer in peers:
        addresses = dialable(peer.peer_id, peer.addresses)
        last_seen = min(peer.last_seen, now)  # a clock that was wrong must not keep a peer forever
        if addresses and is_peer_id(peer.peer_id) and now - last_seen < MAX_AGE_S:
            found[peer.peer_id] = StoredPeer(peer_id=peer.peer_id, addresses=addresses, last_seen=last_seen)
    return found


def write_peers(path: Path, peers: Mapping[str, StoredPeer]) -> None:
    """Write the whole file or nothing. A failure is only logged."""
    try:
        replace_file(path, _PeerFile(peers=tuple(peers.values())).model_dump_json(indent=1))
    except OSError as error:
        logger.warning("cannot store the known peers: %s", error)


MAX_CLAIMED = 64
"""Addresses of one peer that are processed; the rest is ignored."""
FIRST_PAUSE_S = 5.0
PAUSE_GROWTH = 2.0
MAX_PAUSE_S = 600.0
"""A host and port that did not answer is not dialled for 5 s, 10 s, 20 s and so on up to 600 s, whoever announces it. Where a
whole swarm restarts, four dials fall into the first half minute."""
FIRST_PROVEN_PAUSE_S = 2.0
MAX_PROVEN_PAUSE_S = 15.0
"""Where this node has reached a peer before, it tries that peer again after 2 s, 4 s, 8 s and then 15 s: one that changes its
role is away for a moment, and may be the only one that can be dialled."""
WINDOW_S = 600.0
MAX_FAILURES_PER_HOST = 8
"""Dials to one public IP address that may fail within WINDOW_S, at all ports together."""
MAX_FAILURES_PER_GROUP = 24
"""Dials to one /24 (IPv6: /48) that may fail within WINDOW_S."""
MAX_FAILURES = 64
"""Dials to all addresses together that may fail within FAILURES_WINDOW_S."""
FAILURES_WINDOW_S = 60.0
_MIN_PORT = 1024
_HTTPS_PORT = 443
"""The one lower port that a stranger may announce: some networks let nothing else through."""
_MAX_REMEMBERED = 4096
_MAX_SEEN_PER_PEER = 8
_PRIVATE = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"))
)
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")


class Reach(IntEnum):
    """From where an address can be reached, and how far the swarm of a node extends."""

    MACHINE = 0
    PRIVATE = 1
    PUBLIC = 2


def reach_of(host: str) -> Reach | None:
    """Return the reach of an IP address; None where no node can be, such as multicast, link-local or documentation."""
    ip = ipaddress.ip_address(host)
    if ip.is_loopback:
        return Reach.MACHINE
    if any(ip in network for network in _PRIVATE):
        return Reach.PRIVATE
    is_public = ip.is_global and not (ip.is_multicast or ip.is_reserved)
    if isinstance(ip, ipaddress.IPv6Address):  # some of its ranges contain IPv4 addresses, private ones among them
        is_public = is_public and ip in _PUBLIC_IPV6 and ip.sixtofour is None and ip.teredo is None
    return Reach.PUBLIC if is_public else None


def network_at(address: TcpAddress) -> str:
    """The network of a peer at that address: a public /24 or /48, a private host, a host name, or a relay."""
    is_ip = address.kind in ("ip4", "ip6")
    is_public = is_ip and reach_of(address.host) is Reach.PUBLIC
    return address.relay_id or (group_of(address.host) if is_public else address.host)


def group_of(host: str) -> str:
    """Return the /24 or /48 of an IP address."""
    return str(ipaddress.ip_network(f"{host}/{48 if ':' in host else 24}", strict=False))


class Dialling:
    """Decides which addresses a node dials, and how often. It belongs to one node and its event loop."""

    def __init__(
        self,
        listen: Sequence[TcpAddress] = (),
        announce: Sequence[TcpAddress] = (),
        configured: Sequence[TcpAddress] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        own_hosts: Callable[[], Iterable[str]] = local_addresses,
    ) -> None:
        """`configured` are addresses in the user's settings, each of which names a peer. They are always dialled.

        `own_hosts` returns the IP addresses of this machine.
        """
        self._configured = tuple(configured)
        self._clock = clock
        self._own_hosts = own_hosts
        self.reach = _reach_of_swarm(listen, announce, configured, own_hosts=own_hosts)
        """How far the swarm extends, as far as this node can tell. It grows when a peer is seen farther away."""
        self._seen: FairMap[str, BoundedMap[TcpAddress, None]] = FairMap(_MAX_REMEMBERED)
        """{peer id: addresses with port 0, the latest last}; the owner is the network at which the peer was seen last.
        """
        self._failures = _Failures(clock)

    @classmethod
    def of(cls, config: NetworkSection, own_hosts: Callable[[], Iterable[str]] = local_addresses) -> Self:
        """Make it from the settings. Raises ConfigError for a malformed address."""
        configured = (*parse_setting("initial_peers", config.initial_peers), *parse_setting("relays", config.relays))
        announce = (
            *parse_setting("announce", config.announce),
            *parse_setting("gossip_announce", config.gossip_announce),
        )
        return cls(parse_setting("listen", config.listen), announce, configured, own_hosts=own_hosts)

    def see(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Note the remote addresses of connections on which a peer has proven its identity."""
        for address in _parsed(addresses):
            if address.kind not in ("ip4", "ip6"):
                continue
            self._failures.answered(peer_id, address)
            place = TcpAddress(address.kind, address.host, 0, relay_id=address.relay_id)
            places = self._seen.get(peer_id) or BoundedMap[TcpAddress, None](_MAX_SEEN_PER_PEER)
            places[place] = None
            self._seen.add(network_at(place), peer_id, places)
            if self.reach is not Reach.PUBLIC and self._is_outside(address):
                self.reach = Reach.PUBLIC

    def answered(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Note that a peer other than the one that was dialled is said to have answered there, so the dial did not
        fail.

        Whoever listens there may lie about being `peer_id`, so that peer does not count as seen.
        """
        for address in _parsed(addresses):
            self._failures.answered(peer_id, address)

    def seen_at(self, peer_id: str) -> Addresses:
        """Return multiaddresses with port 0 at which a peer was seen on connections; empty for a peer never connected."""
        return tuple(address.transport for address in self._seen.get(peer_id) or ())

    def network_of(self, peer_id: str) -> str:
        """Return the public /24 or /48, the private host or the relay at which a peer was seen last; empty if never
        connected.
        """
        places = self._seen.get(peer_id)
        return network_at(next(reversed(places))) if places else ""

    def believed(self, peer_id: str, claimed: Iterable[str]) -> Addresses:
        """Return those of the claimed addresses that may be dialled, the most trustworthy first.

        Public addresses must be of one /24 (IPv6: /48). Private ones are believed only in a private swarm, or where the
        peer was seen at that very address. Host names are believed only for the peer that the settings name with them.
        """
        addresses = [address for address in _parsed(claimed) if self._is_believed(peer_id, address)]
        if (
            self.reach is Reach.PRIVATE and len(addresses) > 1
        ):  # container bridges have the same address on all machines
            own_hosts = frozenset(self._own_hosts())
            addresses.sort(key=lambda address: address.host in own_hosts)
        addresses.sort(key=lambda address: not self._is_configured(peer_id, address))
        addresses.sort(key=lambda address: not self._was_seen(peer_id, address))
        chosen: dict[str, None] = {}
        groups: dict[str, str] = {}
        for address in addresses:
            is_claim = not (self._is_configured(peer_id, address) or self._was_seen(peer_id, address))
            if is_claim and reach_of(address.host) is Reach.PUBLIC:
                group = group_of(address.host)
                if groups.setdefault(address.kind, group) != group:
                    continue
            chosen[address.transport] = None
        return tuple(chosen)[:MAX_ADDRESSES_PER_PEER]

    def take(self, peer_id: str, claimed: Iterable[str]) -> Addresses:
        """Return the addresses to dial now: the configured ones, and the first of the others that may be tried again.

        A dial counts as failed until the peer is seen at that address.
        """
        addresses = [TcpAddress.parse(text) for text in self.believed(peer_id, claimed)]
        configured = [address for address in addresses if self._is_configured(peer_id, address)]
        others = (address for address in addresses if address not in configured)
        due = next((address for address in others if self._failures.admit(peer_id, address)), None)
        if due is not None:
            self._failures.begin(peer_id, due)
            configured.append(due)
        return tuple(address.transport for address in configured)

    def forget_failures(self) -> None:
        """Forget all failures: this machine has slept or is in another network."""
        self._failures = _Failures(self._clock)

    def _is_outside(self, address: TcpAddress) -> bool:
        """Whether a peer seen at that address is on the internet, and not on this machine beside it."""
        is_public = address.relay_id is None and reach_of(address.host) is Reach.PUBLIC
        return is_public and address.host not in frozenset(self._own_hosts())

    def _is_believed(self, peer_id: str, address: TcpAddress) -> bool:
        if address.peer_id not in (None, peer_id) or address.port == 0:
            return False
        if self._is_configured(peer_id, address):
            return True
        if address.kind not in ("ip4", "ip6") or not may_be_named(address.port):
            return False
        reach = reach_of(address.host)
        if reach is None:
            return False
        return reach >= self.reach or (reach is Reach.PRIVATE and self._was_seen(peer_id, address))

    def _is_configured(self, peer_id: str, address: TcpAddress) -> bool:
        if address.relay_id is not None:  # another port of that host may lead to something other than the relay
            relay = TcpAddress(address.kind, address.host, address.port, peer_id=address.relay_id)
            return relay in self._configured
        named = (peer_id, address.kind, address.host)
        return any((one.peer_id, one.kind, one.host) == named for one in self._configured)

    def _was_seen(self, peer_id: str, address: TcpAddress) -> bool:
        """Whether this node had a connection to or from that host on which the peer (or its relay) proved its identity."""
        places = self._seen.get(address.relay_id or peer_id)
        return places is not None and TcpAddress(address.kind, address.host, 0) in places


def may_be_named(port: int) -> bool:
    """Whether a stranger may have this port dialled. Ports below 1024 belong to other services, such as SSH and mail."""
    return port >= _MIN_PORT or port == _HTTPS_PORT


@dataclass(slots=True)
class _Pause:
    num_failures: int = 0
    due_at: float = -math.inf


class _Failures:
    """Remembers dials that nobody answered: by host and port, by host, by address group, and in total.

    A circuit counts for its relay, which is the other end of the TCP connection.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pauses: BoundedMap[tuple[str, str], _Pause] = BoundedMap(_MAX_REMEMBERED)
        """{(peer id that was reached there, or empty; host and port): pause}."""
        self._recent: BoundedMap[str, deque[float]] = BoundedMap(_MAX_REMEMBERED)
        """{host or group, or "" for all: times of failed dials}."""

    def admit(self, peer_id: str, address: TcpAddress) -> bool:
        now, key = self._clock(), self._key(peer_id, address)
        pause = self._pauses.get(key)
        if pause is not None and now < pause.due_at:
            return False
        return bool(key[0]) or all(self._count(key, now, span_s) < limit for key, limit, span_s in _bounds(address))

    def begin(self, peer_id: str, address: TcpAddress) -> None:
        now, key = self._clock(), self._key(peer_id, address)
        pause = self._pauses.get_or_add(key, _Pause)
        bounds_s = (FIRST_PROVEN_PAUSE_S, MAX_PROVEN_PAUSE_S) if key[0] else (FIRST_PAUSE_S, MAX_PAUSE_S)
        pause.due_at = now + min(bounds_s[0] * PAUSE_GROWTH ** min(pause.num_failures, 8), bounds_s[1])
        pause.num_failures += 1
        if not key[0]:
            for name, limit, _ in _bounds(address):
                self._recent.get_or_add(name, functools.partial(deque[float], maxlen=limit)).append(now)

    def answered(self, peer_id: str, address: TcpAddress) -> None:
        key = self._key(peer_id, address)
        if self._pauses.pop(key, None) is None:  # this node did not dial it: the connection came from there
            return
        self._pauses[address.relay_id or peer_id, key[1]] = _Pause()
        if not key[0]:
            for name, _, _ in _bounds(address):
                if self._recent.get(name):
                    self._recent[name].pop()

    def _key(self, peer_id: str, address: TcpAddress) -> tuple[str, str]:
        name, place = address.relay_id or peer_id, f"{address.host} {address.port}"
        return (name, place) if (name, place) in self._pauses else ("", place)

    def _count(self, key: str, now: float, span_s: float) -> int:
        return sum(now - then < span_s for then in self._recent.get(key, ()))


def _bounds(address: TcpAddress) -> list[tuple[str, int, float]]:
    """Return (name, failures, seconds) of each limit that a dial counts against. Nodes of a testbed share one address."""
    bounds = [("", MAX_FAILURES, FAILURES_WINDOW_S)]
    if address.kind in ("ip4", "ip6") and reach_of(address.host) is Reach.PUBLIC:
        bounds.append((address.host, MAX_FAILURES_PER_HOST, WINDOW_S))
        bounds.append((group_of(address.host), MAX_FAILURES_PER_GROUP, WINDOW_S))
    return bounds


def _parsed(addresses: Iterable[str]) -> list[TcpAddress]:
    """Parse at most MAX_CLAIMED addresses; malformed ones are skipped."""
    return parsed(islice(addresses, MAX_CLAIMED))


def _reach_of_swarm(
    listen: Sequence[TcpAddress],
    announce: Sequence[TcpAddress],
    configured: Sequence[TcpAddress],
    own_hosts: Callable[[], Iterable[str]],
) -> Reach:
    """Return what the settings say of the swarm: where its bootstrap peers are, and where this node announces itself.

    Where they name no such address, a node on loopback is for its machine alone; any other is judged by the addresses
    of its machine. Host names say nothing; the addresses that are seen behind them will.
    """
    named = [address for address in (*announce, *configured) if address.kind in ("ip4", "ip6")]
    if named:
        return max((reach for one in named if (reach := reach_of(one.host)) is not None), default=Reach.PUBLIC)
    if not configured and listen and all(address.is_loopback for address in listen):
        return Reach.MACHINE
    found = [reach for host in own_hosts() if (reach := reach_of(host)) is not None]
    return max((Reach.PRIVATE, *found))
