"""Finds where a peer can be reached of which this node knows the id alone: it asks peers that it is connected to.

    DHT reply of P names X ─ a call to X fails ─→ ask P, then others (`swarm/addresses/1`) ─→ connect to X ─→ call again

The daemon has a DHT of its own that would answer the same question. Its service also takes provider records from anybody,
without a bound on their number, so no node offers it: the daemon runs as a client of it, which answers nobody.
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
"""A peer that could not be found is not looked for again within this time."""
MAX_IN_VAIN = 8
"""So often a peer may say nothing, or addresses that lead nowhere ..."""
_IN_VAIN_PER_S = 1 / 30
"""... and once more in so long: dials that fail are few, and are shared by all that this node looks for."""
_LIST_AGE_S = 0.25
"""For so long the list of connected peers answers questions; to decode it takes 15 ms where there are 400."""
_LISTENING_AGE_S = 30.0
"""For so long it is remembered where a connected peer says that it listens."""
_LOOKUPS_PER_S, _MAX_LOOKUPS = 40.0, 80.0
"""How often the daemon is asked for that, over time and at once, whoever wants to know."""
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
    """The addresses of peers, as far as one node knows or can ask. It runs on the node's loop."""

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
        """{peer that was asked: how often that may still be in vain}"""

    def learn(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Remember what a peer has announced, signed, of itself."""
        if announced := dialable(peer_id, addresses):
            self._announced[peer_id] = announced

    def named(self, by: str, peer_ids: Iterable[str]) -> None:
        """Remember that one peer has named others: it is the first to be asked where they are."""
        for peer_id in peer_ids:
            self._named_by[peer_id] = by

    async def answer(self, caller: str, request: bytes) -> bytes:
        """A request handler: where the peers are that are connected to this node, or have announced it themselves."""
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
        """The connected peers, a moment ago. Raises NetworkError."""
        loop = asyncio.get_running_loop()
        async with self._listing:
            if loop.time() - self._listed_at > _LIST_AGE_S:
                self._connected = frozenset(await session.peers())
                self._listed_at = loop.time()
            return self._connected

    async def _look_up(self, session: "HivemindSession", connected: Iterable[str]) -> dict[str, Addresses]:
        """Where these peers listen, as far as that is known or the daemon may be asked now."""
        now, found, unknown = asyncio.get_running_loop().time(), dict[str, Addresses](), list[str]()
        for peer_id in connected:
            known_at, addresses = self._listening.get(peer_id, (-math.inf, ()))
            if now - known_at <= _LISTENING_AGE_S:
                found[peer_id] = addresses
            elif self._lookups.try_take(1, now):
                unknown.append(peer_id)
        for peer_id, listening in (await session.listening_addresses(unknown)).items() if unknown else ():
            if addresses := dialable(peer_id, listening):  # else it may tell in a moment
                found[peer_id] = addresses
                self._listening[peer_id] = now, addresses
        return found

    async def reach(self, peer_id: str) -> bool:
        """Connect to a peer that a call did not reach; whether there is a connection now that was not there before.

        Raises nothing. Callers that look for the same peer at the same time share one search.
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
            return False  # it is not an address that was missing
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
        """Whom to ask: the peer that named it, and others by chance that host the index, as they know many."""
        others = sorted((set(connected) & set(neighbors)) - {peer_id})
        chosen = self._rng.sample(others, min(_NUM_OTHERS_ASKED, len(others)))
        namer = self._named_by.get(peer_id)
        return list(dict.fromkeys([namer, *chosen] if namer is not None and namer in connected else chosen))

    async def _follow(self, session: "HivemindSession", source: str, peer_id: str) -> bool:
        """Ask one peer and go where it says, unless that was in vain too often; whether the peer was there."""
        loop = asyncio.get_running_loop()
        allowed = self._in_vain.get(source) or TokenBucket(_IN_VAIN_PER_S, MAX_IN_VAIN - 1, loop.time())
        if allowed.wait_s(loop.time()) > 0:
            return False
        self._in_vain[source] = allowed
        addresses = await self._ask_for(source, peer_id)
        is_found = addresses is not None and await self._connect(session, peer_id, addresses)
        if not is_found and addresses != ():  # to know nothing of a peer harms nobody
            allowed.take(1, loop.time())
        return is_found

    async def _ask_for(self, source: str, peer_id: str) -> Addresses | None:
        """The addresses that a peer names; None where it does not answer, or not with addresses."""
        request = msgpack.packb([peer_id])
        assert request is not None, "packb returns bytes"
        try:
            return _read_addresses(await self._ask(source, request), peer_id)
        except RequestError as error:
            logger.debug("%s does not say where %s is: %s", source, peer_id, error)
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
    """What an answer says of one peer. Raises RequestError for a malformed one."""
    try:
        found = msgpack.unpackb(response, max_array_len=MAX_ADDRESSES_PER_PEER, max_map_len=MAX_ASKED_PEERS)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        raise RequestError("a peer must answer with addresses in msgpack, got something else", "damaged") from None
    addresses = found.get(peer_id, []) if isinstance(found, dict) else []
    if not isinstance(addresses, list) or not all(isinstance(one, str) for one in addresses):
        raise RequestError("a peer must answer with addresses as text, got something else", "damaged")
    return dialable(peer_id, addresses)
