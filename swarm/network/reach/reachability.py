"""Finds out whether other nodes can dial this node, which decides whether it hosts a part of the index.

    asker: hello → (swarm time, address at which I am seen)       dial PORT → dialled back, yes or no
    peer:  the address comes from its own list of connections, never from the request: nobody can have a third party
           dialled; `dial_back` accepts only the asker's own signature at that address

The protocol is `swarm/reach/1`; docs/protocol.md has the bytes. `swarm doctor` also measures clocks and bandwidth with
it. `IndexOutage` says what is missing while no host of the index can be reached.
"""

import asyncio
import ipaddress
import logging
import math
import os
import random
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from swarm.errors import RequestError
from swarm.network.peers.dialling import Reach, group_of, may_be_named, network_at, reach_of
from swarm.network.reach.dial_back import answers_as
from swarm.network.tcp_address import TcpAddress, parsed
from swarm.network.transport import RequestRefused
from swarm.observability.plain_text import counted, none_answers

logger = logging.getLogger(__name__)

REACH_PROTOCOL = "swarm/reach/1"
MAX_REACH_REQUEST_BYTES = 5
MAX_TEST_BYTES = 1 << 20
DIAL_TIMEOUT_S = 4.0
ASK_TIMEOUT_S = 8.0
NUM_WITNESSES = 5
"""Number of peers asked at a time. Two of them must have dialled back where two answer."""

_HELLO, _DIAL, _BYTES = 0, 1, 2
_WINDOW_S = 60.0
_PER_PEER = {_HELLO: 20, _DIAL: 4, _BYTES: 4}
_PER_PLACE = {_HELLO: 150, _DIAL: 4, _BYTES: 8}
"""Limit for all identities at one host (of IPv6: in one /48), which otherwise could use up the answers for all."""
_GLOBAL = {_HELLO: 600, _DIAL: 30, _BYTES: 20}
"""Answers per minute by kind of request."""

ObservedAddresses = Callable[[str], Awaitable[Sequence[str]]]
"""peer id -> multiaddresses at which this node sees the peer."""
Ask = Callable[[str, bytes], Awaitable[bytes]]
"""(peer id, request) -> response of `swarm/reach/1`; raises RequestError."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """A peer's answer to `hello`."""

    time_s: float
    """The peer's swarm time."""
    host: str
    """The IP address at which it sees this node; empty where they are connected through a relay."""


def hello_request() -> bytes:
    return struct.pack(">B", _HELLO)


def dial_request(port: int) -> bytes:
    return struct.pack(">BH", _DIAL, port)


def bytes_request(num_bytes: int) -> bytes:
    return struct.pack(">BI", _BYTES, num_bytes)


def read_greeting(response: bytes) -> Greeting:
    """Raises RequestError for a malformed one."""
    try:
        (time_s,) = struct.unpack_from(">d", response)
        host = response[8:].decode("ascii")
        if not math.isfinite(time_s) or "%" in host:  # a scope behind the address may be any text
            raise ValueError
        if host:
            ipaddress.ip_address(host)
    except (struct.error, ValueError):
        raise RequestError(f"a greeting must be a time and an address, got {response[:64]!r}") from None
    return Greeting(time_s, host)


async def _dial_back(peer_id: str, host: str, port: int) -> bool:
    return await answers_as(peer_id, host, port, timeout_s=DIAL_TIMEOUT_S)


class _Answered(NamedTuple):
    at: float
    kind: int
    peer_id: str
    place: str


class ReachService:
    """Answers `swarm/reach/1`, within strict limits per peer and for all peers."""

    def __init__(
        self,
        observed: ObservedAddresses,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        dial: Callable[[str, str, int], Awaitable[bool]] = _dial_back,
    ) -> None:
        """`clock` gives swarm time, which may jump; `monotonic` does not.

        `dial` returns whether the peer (peer id) itself answers at a host and port.
        """
        self._observed = observed
        self._clock = clock
        self._monotonic = monotonic
        self._dial = dial
        self._answered: deque[_Answered] = deque()  # within the last minute

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        """Answer a request. Raises RequestRefused."""
        kind, argument = _parsed(request)
        self._check(kind, peer_id)
        host = _direct_host(await self._observed(peer_id))
        place = group_of(host) if ":" in host else host
        self._check(kind, peer_id, place)
        self._answered.append(_Answered(self._monotonic(), kind, peer_id, place))
        if kind == _BYTES:
            return os.urandom(argument)
        if kind == _HELLO:
            return struct.pack(">d", self._clock()) + host.encode()
        if not host or not _may_be_dialled(host):
            raise RequestRefused("your address is not known here")
        if not may_be_named(argument):
            raise RequestRefused("a port below 1024 is not dialled, except 443")
        return bytes([await self._dial(peer_id, host, argument)])

    def _check(self, kind: int, peer_id: str, place: str | None = None) -> None:
        """Raise RequestRefused where a peer, its host, or all peers have used up the answers of this kind."""
        now = self._monotonic()
        while self._answered and self._answered[0].at <= now - _WINDOW_S:
            self._answered.popleft()
        same_kind = [one for one in self._answered if one.kind == kind]
        num_of_peer = sum(one.peer_id == peer_id for one in same_kind)
        num_at_place = sum(one.place == place for one in same_kind)
        is_too_many = num_of_peer >= _PER_PEER[kind] or num_at_place >= _PER_PLACE[kind]
        if is_too_many or len(same_kind) >= _GLOBAL[kind]:
            raise RequestRefused("too many of these per minute")


def _parsed(request: bytes) -> tuple[int, int]:
    """Return (kind, argument). Raises RequestRefused."""
    if request == hello_request():
        return _HELLO, 0
    if len(request) == 3 and request[0] == _DIAL and (port := int.from_bytes(request[1:], "big")):
        return _DIAL, port
    if len(request) == 5 and request[0] == _BYTES and (size := int.from_bytes(request[1:], "big")) <= MAX_TEST_BYTES:
        return _BYTES, size
    raise RequestRefused("malformed")


def _direct_host(addresses: Sequence[str]) -> str:
    """Return the IP address of the first direct connection; empty where all connections use relays."""
    for address in parsed(addresses):
        if address.relay_id is None and address.kind in ("ip4", "ip6"):
            return address.host
    return ""


def _may_be_dialled(host: str) -> bool:
    """Return whether the address means the same here and there. A proxy or tunnel in front of this node may share
    others.
    """
    return reach_of(host) in (Reach.PRIVATE, Reach.PUBLIC)


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one peer found out about this node."""

    host: str
    """The IP address at which it sees this node."""
    port: int | None
    """The port at which it dialled back successfully; None where it could not."""

    @property
    def is_public(self) -> bool:
        return ipaddress.ip_address(self.host).is_global


@dataclass(frozen=True, slots=True)
class ReachabilityResult:
    """Whether others can dial this node, and where; None where no peer could tell."""

    is_reachable: bool | None
    address: TcpAddress | None = None


def interleaved_by_network(connected: Mapping[str, Sequence[str]], rng: random.Random) -> list[str]:
    """Return connected peers, {peer id: addresses at which they are seen}, in the order in which to ask them.

    The order is random, with one peer of each network first: identities of one machine must not be all witnesses.
    """
    num_before: Counter[str] = Counter()
    ranks: dict[str, int] = {}
    for peer_id in rng.sample(sorted(connected), len(connected)):
        seen_at = parsed(connected[peer_id])
        network = network_at(seen_at[0]) if seen_at else ""
        ranks[peer_id] = num_before[network]
        num_before[network] += 1
    return sorted(ranks, key=lambda peer_id: ranks[peer_id])


async def look_from_outside(ask: Ask, peer_ids: Sequence[str], ports: Sequence[int]) -> ReachabilityResult:
    """Let peers dial the ports of this node. Raises nothing: a peer that does not answer is no witness."""
    answers = await asyncio.gather(*(_ask_one(ask, peer_id, ports) for peer_id in peer_ids[:NUM_WITNESSES]))
    return conclude([answer for answer in answers if answer is not None])


def conclude(sightings: Sequence[Sighting]) -> ReachabilityResult:
    """Return reachable if two peers dialled back where two answer, and no majority failed to.

    If any of them sees this node at a public address, only those count: a neighbour in the same home proves nothing
    about the world outside.
    """
    counted = [one for one in sightings if one.is_public] or sightings
    if not counted:
        return ReachabilityResult(None)
    proofs = Counter((one.host, one.port) for one in counted if one.port is not None)
    num_proofs = proofs.total()
    if num_proofs < min(2, len(counted)) or num_proofs < len(counted) - num_proofs:
        return ReachabilityResult(False)
    ((host, port), _) = proofs.most_common(1)[0]
    assert port is not None
    return ReachabilityResult(True, TcpAddress("ip6" if ":" in host else "ip4", host, port))


async def _ask_one(ask: Ask, peer_id: str, ports: Sequence[int]) -> Sighting | None:
    try:
        host = read_greeting(await ask(peer_id, hello_request())).host
        if not host or ipaddress.ip_address(host).is_loopback:
            return None  # connected through a relay, or on one machine: that peer cannot tell
        for port in ports:
            if await ask(peer_id, dial_request(port)) == b"\x01":
                return Sighting(host, port)
    except RequestError:
        return None
    return Sighting(host, None)


PROBE_INTERVAL_S = 1800.0
_FIRST_RETRY_S = 15.0
_RETRY_GROWTH = 2.0
_CONFIRM_AFTER_S = 60.0
HURRY_INTERVAL_S = 60.0
"""Longest pause between two looks while no host of the index can be reached, or no peer could tell."""
_NUM_FAILURES_TO_DEMOTE = 2
"""A reachable node loses its part of the index only after this many failed checks."""


class ReachabilityWatch:
    """What this node knows of its reachability, which `look` updates."""

    def __init__(
        self,
        setting: Literal["auto", "public", "private"],
        *,
        is_local: bool,
        has_known_peers: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_local`: the node listens on loopback only, so every node of its swarm can reach it."""
        self.is_reachable = setting == "public" or is_local or (setting == "auto" and not has_known_peers)
        self.proven: TcpAddress | None = None
        """The address at which peers reached this node last."""
        self._is_open = setting == "auto" and not is_local
        self._clock = clock
        self._addresses: frozenset[str] = frozenset()
        self._due_at = -float("inf")
        self._looked_at = -float("inf")
        self._retry_s = _FIRST_RETRY_S
        self._num_failures = 0

    def is_due(self, addresses: Sequence[str]) -> bool:
        """Return whether to look now. A change of `addresses`, those of this node at present, makes it due."""
        if not self._is_open:
            return False
        own = frozenset(address for address in addresses if "/p2p-circuit" not in address)
        if own != self._addresses:
            self._addresses, self._due_at, self._retry_s = own, self._clock(), _FIRST_RETRY_S
        return self._clock() >= self._due_at

    def resume(self, address: TcpAddress | None) -> None:
        """Take this node for reachable until it is asked, as it was at `address` before it was started again.

        Where all nodes of a swarm start at once, somebody must host the index before anybody can be asked.
        """
        if self._is_open and address is not None:
            self.is_reachable, self.proven = True, address

    def hurry(self) -> None:
        """Look again a minute after the last look at the latest: this node is needed as a host of the index."""
        if not self.is_reachable:
            self._due_at = min(self._due_at, self._looked_at + HURRY_INTERVAL_S)

    async def look(self, ask: Ask, peer_ids: Sequence[str], ports: Sequence[int]) -> bool:
        """Ask peers. Returns whether the reachability or the address of this node has changed.

        With nobody to ask the look stays due, so the first peer that connects is asked at once.
        """
        if not peer_ids:
            return False
        self._looked_at = self._clock()
        finding = await look_from_outside(ask, peer_ids, ports)
        if finding.is_reachable:
            self._num_failures, self._retry_s = 0, _FIRST_RETRY_S
            self._due_at = self._clock() + PROBE_INTERVAL_S
            has_moved = self.proven is not None and self.proven != finding.address
            self.proven = finding.address
            return self._set(True) or has_moved
        self._due_at = self._clock() + self._retry_s
        self._retry_s = min(self._retry_s * _RETRY_GROWTH, PROBE_INTERVAL_S)
        if finding.is_reachable is None:  # nobody could tell
            self._due_at = min(self._due_at, self._clock() + HURRY_INTERVAL_S)
            return False
        self._num_failures += 1
        if self.is_reachable and self._num_failures < _NUM_FAILURES_TO_DEMOTE:
            self._due_at = self._clock() + _CONFIRM_AFTER_S
            return False
        self.proven = None
        return self._set(False)

    def _set(self, is_reachable: bool) -> bool:
        has_changed, self.is_reachable = is_reachable != self.is_reachable, is_reachable
        return has_changed


ADVISE_AFTER_S = 20.0
"""An outage that is shorter is nobody's concern: nodes restart."""


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What a node sees of its swarm at one moment."""

    has_host: bool
    """Whether a host of the index answers, or this node is one."""
    num_connected: int
    num_known: int
    """Peers that are configured or remembered."""
    was_dialled: bool = True
    """Whether a peer has shown that this node can be dialled, or nobody needs to show it."""
    is_one_machine: bool = False
    """The swarm is on one machine, where every peer can be dialled."""

    @property
    def lack(self) -> str:
        """What is missing, and what a person can do; empty where nothing is."""
        if self.num_connected == 0 and self.num_known:
            is_seen, remedy = ", and none has dialled this node", "forward the TCP port of one node on its router, "
            return (
                f"{none_answers(self.num_known)}{'' if self.was_dialled else is_seen}: start a "
                f"bootstrap peer again, {'' if self.was_dialled else remedy}or add the address of a running node to "
                "network.initial_peers"
            )
        if self.has_host or self.num_connected == 0 or self.is_one_machine:
            return ""
        return (
            f"no bootstrap peer answers and no peer can be dialled: connected only to {counted(self.num_connected, 'peer')}"
            ", none of which others find; start a bootstrap peer, or forward the TCP port of one node"
        )


class IndexOutage:
    """The outage of one node. It runs on the node's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = math.inf
        self._lack = ""
        self._is_logged = False

    def note(self, surveyed: Surveyed) -> None:
        """Take in what the node sees now, and log what it lacks, once."""
        self._lack = surveyed.lack
        self._since = min(self._since, self._clock()) if self._lack else math.inf
        self._is_logged = self._is_logged and bool(self._lack)
        if self.advice() and not self._is_logged:
            logger.warning("%s", self._lack)
            self._is_logged = True

    def advice(self) -> tuple[str, ...]:
        """Return at most one line; none in the first ADVISE_AFTER_S."""
        return (self._lack,) if self._lack and self._clock() - self._since >= ADVISE_AFTER_S else ()
