"""Finds the addresses of a peer that is known only by its id, by asking connected peers.

    DHT reply of P names X ─ a call to X fails ─→ ask P, then others (`swarm/addresses/1`) ─→ connect to X ─→ call again

The daemon has a DHT of its own that could answer the same question. But its service also accepts an unlimited number of
provider records from anybody. So no node offers it: the daemon runs as a client, which answers nobody.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TYPE_CHECKING

import msgpack

from swarm.errors import NetworkError, RequestError
from swarm.limits.bounded_maps import BoundedMap
from swarm.limits.token_bucket import TokenBucket
from swarm.network.peers.dialling import MAX_ADDRESSES_PER_PEER, Addresses, dialable
from swarm.network.transport import RequestRefused
from swarm.records.identity import is_peer_id

if TYPE_CHECKING:
    from swarm.network.hivemind.session import HivemindSession

logger = logging.getLogger(__name__)

ADDRESSES_PROTOCOL = "swarm/addresses/1"
MAX_ASKED_PEERS = 20
MAX_ADDRESSES_REQUEST_BYTES = 64 * MAX_ASKED_PEERS + 8
MAX_ADDRESSES_RESPONSE_BYTES = 8 * 1024
ASK_TIMEOUT_S = 2.0
_NUM_OTHERS_ASKED = 2
"""Connected peers that are asked besides the one that named the peer."""
_PAUSE_S = 10.0
"""A peer that could not be found is not searched again within this time."""
MAX_IN_VAIN = 8
"""Number of questions to one peer that may lead nowhere,"""
_IN_VAIN_PER_S = 1 / 30
"""and the rate at which more are allowed. Failing dials are few, and shared by all that this node searches."""
_LIST_AGE_S = 0.25
"""How long the list of connected peers is reused. Decoding it takes 15 ms for 400 peers."""
_LISTENING_AGE_S = 30.0
"""How long the listening addresses of a connected peer are reused."""
_LOOKUPS_PER_S, _MAX_LOOKUPS = 40.0, 80.0
"""Rate and burst at which the daemon is asked for them, whoever wants to know."""
_MAX_REMEMBERED = 4096

Ask = Callable[[str, bytes], Awaitable[bytes]]
"""(peer id, request) -> response of its `swarm/addresses/1`. Raises RequestError."""
ChooseAddresses = Callable[[str, Iterable[str]], Addresses]
"""(peer id, addresses that others claim for it) -> those to dial now."""


class SessionSlot:
    """Holds the session of one transport, which its supervisor replaces."""

    def __init__(self) -> None:
        self.current: HivemindSession | None = None
        """None before the start, after the end, and while a broken session is being replaced."""


class PeerRouting:
    """The addresses of peers that one node knows or can ask for. It runs on the node's event loop."""

    def __init__(
        self,
        sessions: SessionSlot,
        ask: Ask,
        rng: random.Random,
        choose: ChooseAddresses = dialable,
    ) -> None:
        """`choose` decides which addresses are dialled."""
        self._sessions = sessions
        self._ask = ask
        self._rng = rng
        self._choose = choose
        self._announced: BoundedMap[str, Addresses] = BoundedMap(_MAX_REMEMBERED)
        self._named_by: BoundedMap[str, str] = BoundedMap(_MAX_REMEMBERED)
        self._looked_at: BoundedMap[str, float] = BoundedMap(_MAX_REMEMBERED)
        self._searches: dict[str, asyncio.Task[bool]] = {}
        self._connected: frozenset[str] = frozenset()
        self._listed_at = -math.inf
        self._listing = asyncio.Lock()
        self._listening: BoundedMap[str, tuple[float, Addresses]] = BoundedMap(_MAX_REMEMBERED)
        self._lookups = TokenBucket(_LOOKUPS_PER_S, _MAX_LOOKUPS, now=0.0)
        self._in_vain: BoundedMap[str, TokenBucket] = BoundedMap(_MAX_REMEMBERED)
        """{peer that was asked: how many more questions may lead nowhere}"""

    def learn(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Remember the addresses that a peer has announced in a signed record."""
        if announced := dialable(peer_id, addresses):
            self._announced[peer_id] = announced

    def named(self, by: str, peer_ids: Iterable[str]) -> None:
        """Remember that one peer has named others, so that it is asked first where they are."""
        for peer_id in peer_ids:
            self._named_by[peer_id] = by

    async def answer(self, caller: str, request: bytes) -> bytes:
        """Answer a request for addresses: of peers that are connected to this node, or have announced them."""
        wanted = _peer_ids(request)
        found: dict[str, list[str]] = {}
        session = self._sessions.current
        if session is not None:
            with contextlib.suppress(NetworkError):  # then with what was announced
                connected = wanted & await self._list(session)
                found = {one: list(addresses) for one, addresses in (await self._look_up(session, connected)).items()}
        for peer_id in wanted:
            found[peer_id] = found.get(peer_id) or list(self._announced.get(peer_id, ()))
        packed = msgpack.packb({peer_id: addresses for peer_id, addresses in found.items() if addresses})
        assert packed is not None, "packb returns bytes"
        return packed

    async def _list(self, session: "HivemindSession") -> frozenset[str]:
        """Return the peers that were connected a moment ago. Raises NetworkError."""
        loop = asyncio.get_running_loop()
        async with self._listing:
            if loop.time() - self._listed_at > _LIST_AGE_S:
                self._connected = frozenset(await session.peers())
                self._listed_at = loop.time()
            return self._connected

    async def _look_up(self, session: "HivemindSession", connected: Iterable[str]) -> dict[str, Addresses]:
        """Return the listening addresses of these peers that are known, or that the daemon may be asked for now."""
        now, found, unknown = asyncio.get_running_loop().time(), dict[str, Addresses](), list[str]()
        for peer_id in connected:
            known_at, addresses = self._listening.get(peer_id, (-math.inf, ()))
            if now - known_at <= _LISTENING_AGE_S:
                found[peer_id] = addresses
            elif self._lookups.try_take(1, now):
                unknown.append(peer_id)
        for peer_id, listening in (await session.listening_addresses(unknown)).items() if unknown else ():
            if addresses := dialable(peer_id, listening):  # else the peer may still tell the daemon
                found[peer_id] = addresses
                self._listening[peer_id] = now, addresses
        return found

    async def reach(self, peer_id: str) -> bool:
        """Connect to a peer that a call did not reach. Returns whether there is a new connection.

        Raises nothing. Callers that search for the same peer at the same time share one search.
        """
        search = self._searches.get(peer_id)
        if search is None:
            now = asyncio.get_running_loop().time()
            if now - self._looked_at.get(peer_id, -_PAUSE_S) < _PAUSE_S or not is_peer_id(peer_id):
                return False
            search = self._searches[peer_id] = asyncio.create_task(self._search(peer_id))
            search.add_done_callback(lambda _: self._searches.pop(peer_id, None))
        return await asyncio.shield(search)

    async def _search(self, peer_id: str) -> bool:
        session = self._sessions.current
        if session is None:
            return False
        try:
            connected = await self._list(session)
        except NetworkError:
            return False
        if peer_id in connected:
            return False  # then a missing address is not the cause
        is_found = await self._connect(session, peer_id, self._announced.get(peer_id, ()))
        for source in self._sources(peer_id, connected, session.neighbors):
            if is_found:
                break
            is_found = await self._follow(session, source, peer_id)
        if is_found:
            self._looked_at.pop(peer_id, None)
            self._listed_at = -math.inf
        else:
            self._looked_at[peer_id] = asyncio.get_running_loop().time()
        return is_found

    def _sources(self, peer_id: str, connected: Collection[str], neighbors: Collection[str]) -> list[str]:
        """Return the peers to ask: the one that named it, and random ones that host the index, as those know many."""
        others = sorted((set(connected) & set(neighbors)) - {peer_id})
        chosen = self._rng.sample(others, min(_NUM_OTHERS_ASKED, len(others)))
        namer = self._named_by.get(peer_id)
        return list(dict.fromkeys([namer, *chosen] if namer is not None and namer in connected else chosen))

    async def _follow(self, session: "HivemindSession", source: str, peer_id: str) -> bool:
        """Ask one peer and dial what it says, unless its answers led nowhere too often. Returns whether the peer was
        there.
        """
        loop = asyncio.get_running_loop()
        allowed = self._in_vain.get(source) or TokenBucket(_IN_VAIN_PER_S, MAX_IN_VAIN - 1, loop.time())
        if allowed.wait_s(loop.time()) > 0:
            return False
        self._in_vain[source] = allowed
        addresses = await self._ask_for(source, peer_id)
        is_found = addresses is not None and await self._connect(session, peer_id, addresses)
        if not is_found and addresses != ():  # an honest peer may know nothing of another
            allowed.take(1, loop.time())
        return is_found

    async def _ask_for(self, source: str, peer_id: str) -> Addresses | None:
        """Return the addresses that a peer names; None where it does not answer, or not with addresses."""
        request = msgpack.packb([peer_id])
        assert request is not None, "packb returns bytes"
        try:
            return _read_addresses(await self._ask(source, request), peer_id)
        except RequestError as error:
            logger.debug("%s does not know the address of %s: %s", source, peer_id, error)
            return None

    async def _connect(self, session: "HivemindSession", peer_id: str, claimed: Iterable[str]) -> bool:
        addresses = self._choose(peer_id, claimed)
        return bool(addresses) and await session.connect(peer_id, addresses)


def _peer_ids(request: bytes) -> set[str]:
    """Raises RequestRefused."""
    try:
        wanted = msgpack.unpackb(request, max_array_len=MAX_ASKED_PEERS, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        raise RequestRefused("malformed") from None
    if not isinstance(wanted, list) or not all(isinstance(one, str) and is_peer_id(one) for one in wanted):
        raise RequestRefused("malformed")
    return set(wanted)


def _read_addresses(response: bytes, peer_id: str) -> Addresses:
    """Return the addresses of one peer in an answer. Raises RequestError for a malformed one."""
    try:
        found = msgpack.unpackb(response, max_array_len=MAX_ADDRESSES_PER_PEER, max_map_len=MAX_ASKED_PEERS)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        raise RequestError("a peer must answer with addresses in msgpack, got something else", "damaged") from None
    addresses = found.get(peer_id, []) if isinstance(found, dict) else []
    if not isinstance(addresses, list) or not all(isinstance(one, str) for one in addresses):
        raise RequestError("a peer must answer with addresses as text, got something else", "damaged")
    return dialable(peer_id, addresses)
