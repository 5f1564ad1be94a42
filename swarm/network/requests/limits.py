"""Limits on the requests and bytes that one peer, and all peers together, may take of this node.

admit ── place ── charge (per peer, per node) ── leave
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Self

from swarm.config import NetworkSection
from swarm.limits.connection_slots import ConnectionSlots, NoPlace
from swarm.limits.token_bucket import TokenBucket
from swarm.network.transport import RequestRefused

PEER_SHARE = 4
"""A peer may hold one in this many of the places,"""
MIN_PLACES_PER_PEER = 2
"""but at least this many."""
BURST_S = 2.0
"""Seconds of its rate that a peer may use at once."""
MAX_WAIT_S = 5.0
"""A response that would wait longer for upload is refused, since its reader would give up."""
MAX_REMEMBERED_PEERS = 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Rates of the network section; 0 is no limit. The rates per peer do not apply to `unlimited_peers`."""

    requests_per_peer_per_s: float = 0.0
    upload_bytes_per_peer_per_s: float = 0.0
    max_upload_bytes_per_s: float = 0.0
    response_bytes_in_flight: int = 64 << 20
    unlimited_peers: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: NetworkSection) -> Self:
        return cls(
            requests_per_peer_per_s=config.requests_per_peer_per_s,
            upload_bytes_per_peer_per_s=config.upload_bytes_per_peer_per_s,
            max_upload_bytes_per_s=config.max_upload_bytes_per_s,
            response_bytes_in_flight=config.response_bytes_in_flight,
            unlimited_peers=frozenset(config.unlimited_peers),
        )


NO_LIMITS = RequestLimits()


class _Peer:
    """What is remembered of one caller."""

    __slots__ = ("num_conversations", "num_places", "requests", "upload")

    def __init__(self, limits: RequestLimits, now: float) -> None:
        self.num_conversations = 0
        self.num_places = 0
        requests, upload = limits.requests_per_peer_per_s, limits.upload_bytes_per_peer_per_s
        self.requests = TokenBucket(requests, max(1.0, BURST_S * requests), now)
        self.upload = TokenBucket(upload, BURST_S * upload, now)


class GaveWay(Exception):
    """The place of a request was needed for a caller of another network."""


@asynccontextmanager
async def giving_way() -> AsyncIterator[Callable[[], None]]:
    """Yield a function that ends the context with GaveWay."""
    scope = asyncio.timeout(None)
    try:
        async with scope:
            yield lambda: scope.reschedule(asyncio.get_running_loop().time())
    except TimeoutError:
        if scope.expired():
            raise GaveWay from None
        raise


NetworkOf = Callable[[str], str]
"""peer id -> the network at which it was seen; empty where that is not known."""


class CallerTable:
    """Places, rates and bytes of the callers of one node. Raises RequestRefused ("busy", "rate") above the limits.

    New identities cost nothing. So when all places are in use, the network with most callers gives one up for another
    network.
    """

    def __init__(self, limits: RequestLimits, max_concurrent: int, network_of: NetworkOf = lambda peer_id: "") -> None:
        self._limits = limits
        self._network_of = network_of
        self._max_places_per_peer = max(MIN_PLACES_PER_PEER, max_concurrent // PEER_SHARE)
        self._places = ConnectionSlots(max_concurrent)
        self._conversations = ConnectionSlots(2 * max_concurrent)
        self._bytes_in_flight = 0
        self._upload = TokenBucket(limits.max_upload_bytes_per_s, limits.max_upload_bytes_per_s, now=0.0)
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    @contextmanager
    def conversation(self, peer_id: str, now: float, leave: Callable[[], None]) -> Iterator[bool]:
        """Open a conversation, and yield whether the caller is answered: above twice the places even refusals cost too
        much.

        `leave` is called when the conversation has to make room for another, and must end it soon. The same holds for
        `place`.
        """
        peer = self._peer(peer_id, now)
        peer.num_conversations += 1
        try:
            with ExitStack() as stack:
                is_welcome = peer.num_conversations <= 2 * self._max_places_per_peer
                try:
                    if is_welcome:
                        stack.enter_context(self._conversations.hold(self._network_of(peer_id), leave))
                except NoPlace:
                    is_welcome = False
                yield is_welcome
        finally:
            peer.num_conversations -= 1

    @contextmanager
    def place(self, peer_id: str, now: float, leave: Callable[[], None]) -> Iterator[None]:
        """Hold a place for one request. Raises RequestRefused."""
        peer = self._peer(peer_id, now)
        if peer.num_places >= self._max_places_per_peer:
            raise RequestRefused("busy")
        if not peer.requests.try_take(1, now):
            raise RequestRefused("rate")
        with ExitStack() as stack:
            try:
                stack.enter_context(self._places.hold(self._network_of(peer_id), leave))
            except NoPlace:
                raise RequestRefused("busy") from None
            peer.num_places += 1
            try:
                yield
            finally:
                peer.num_places -= 1

    def begin_response(self, peer_id: str, num_bytes: int, now: float) -> None:
        """Reserve memory and upload for a response, until `end_response`. Raises RequestRefused."""
        is_full = self._bytes_in_flight + num_bytes > self._limits.response_bytes_in_flight
        if (is_full and self._bytes_in_flight > 0) or self._upload.wait_s(now) > MAX_WAIT_S:
            raise RequestRefused("busy")
        if self._peers[peer_id].upload.wait_s(now) > MAX_WAIT_S:
            raise RequestRefused("rate")
        self._bytes_in_flight += num_bytes

    def end_response(self, num_bytes: int) -> None:
        self._bytes_in_flight -= num_bytes

    def charge(self, peer_id: str, num_bytes: int, now: float) -> float:
        """Count bytes that are about to be sent. Returns the seconds to wait first."""
        return max(self._peers[peer_id].upload.take(num_bytes, now), self._upload.take(num_bytes, now))

    def _peer(self, peer_id: str, now: float) -> _Peer:
        peer = self._peers.get(peer_id)
        if peer is None:
            self._forget_the_idle()
            limits = NO_LIMITS if peer_id in self._limits.unlimited_peers else self._limits
            peer = self._peers[peer_id] = _Peer(limits, now)
        self._peers.move_to_end(peer_id)
        return peer

    def _forget_the_idle(self) -> None:
        """Drop the caller that was idle longest. Callers in a conversation stay; the places bound their number."""
        if len(self._peers) < MAX_REMEMBERED_PEERS:
            return
        for peer_id, peer in self._peers.items():
            if peer.num_conversations == 0 and peer.num_places == 0:
                del self._peers[peer_id]
                return
