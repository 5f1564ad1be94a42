"""The index for light nodes: a full peer stores and searches for them (`swarm/index/1`).

    light node ── [store, key, subkey, value, expires at] ──> full peer ── DHT          answer: [stored]
               ── [load, key] ───────────────────────────> full peer ── DHT          answer: {subkey: value}

The full peer is not trusted: entries are signed by their authors, and the light node validates what it receives. A full
peer can only withhold entries, so a light node asks several. The light node is not trusted either: one small request
makes the full peer ask many others, which limit its calls. So the searches for all light nodes together stay far below
that limit.
"""

import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgpack

from swarm.errors import RequestError
from swarm.limits.bounded_maps import BoundedMap
from swarm.limits.token_bucket import TokenBucket
from swarm.network.index_entry import (
    MAX_ENTRIES_PER_KEY,
    MAX_KEY_BYTES,
    MAX_SUBKEY_BYTES,
    MAX_VALUE_BYTES,
    IndexRule,
    check_entry,
)
from swarm.network.requests.limits import NO_LIMITS, CallerTable, GaveWay, NetworkOf, giving_way
from swarm.network.transport import RequestRefused

INDEX_PROTOCOL = "swarm/index/1"
MAX_INDEX_REQUEST_BYTES = MAX_KEY_BYTES + MAX_SUBKEY_BYTES + MAX_VALUE_BYTES + 64
MAX_INDEX_RESPONSE_BYTES = 1 << 20
INDEX_TIMEOUT_S = 5.0
"""How long a peer waits for one answer."""
SEARCHES_PER_S = 20.0
"""Searches in the DHT per second for all light nodes together."""
SEARCHES_PER_PEER_PER_S = 5.0
"""Searches in the DHT per second for one light node."""
BURST_S = 4.0
MAX_SEARCHES = 16
"""Searches that may run at the same time. A peer may run a quarter of them: it chooses the key, so it can make one take long."""
_MAX_REMEMBERED_PEERS = 1024
_STORE, _LOAD = 0, 1
_ENTRY_OVERHEAD_BYTES = 8
T = TypeVar("T")


def store_request(key: str, subkey: str, value: bytes, expires_at: float) -> bytes:
    return _pack([_STORE, key, subkey, value, float(expires_at)])


def load_request(key: str) -> bytes:
    return _pack([_LOAD, key])


def read_stored(response: bytes) -> bool:
    """Raises RequestError for a malformed answer."""
    match _unpacked(response):
        case bool(is_stored):
            return is_stored
    raise RequestError("an index peer must answer yes or no, got something else", "damaged")


def read_loaded(response: bytes) -> dict[str, bytes]:
    """Raises RequestError for a malformed answer. The entries still have to be validated."""
    entries = _unpacked(response)
    if not isinstance(entries, dict) or len(entries) > MAX_ENTRIES_PER_KEY:
        raise RequestError("an index peer must answer with entries, got something else", "damaged")
    return {key: value for key, value in entries.items() if isinstance(key, str) and isinstance(value, bytes)}


class ServedIndex(Protocol):
    """The index that a peer offers to others. See `transport.Transport`."""

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool: ...

    async def load(self, key: str) -> dict[str, bytes]: ...


class IndexGateway:
    """The side of the peer that is asked: a request handler that uses the index that this node offers."""

    def __init__(
        self,
        index: ServedIndex,
        rule: IndexRule,
        *,
        network_of: NetworkOf = lambda peer_id: "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rule` decides which entries are stored, since replicas would hold invalid ones against this node.

        `network_of` names the network of a peer. Networks share the searches when as many run as may.
        """
        self._index = index
        self._rule = rule
        self._monotonic = monotonic
        self._allowed = TokenBucket(SEARCHES_PER_S, BURST_S * SEARCHES_PER_S, monotonic())
        self._allowed_to: BoundedMap[str, TokenBucket] = BoundedMap(_MAX_REMEMBERED_PEERS)
        self._places = CallerTable(NO_LIMITS, MAX_SEARCHES, network_of)

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        try:
            fields = msgpack.unpackb(request)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
            raise RequestRefused("malformed") from None
        match fields:
            case [0, str(key), str(subkey), bytes(value), float(expires_at)] if math.isfinite(expires_at):
                try:
                    check_entry(key, subkey, value)
                    store = partial(self._store, peer_id, (key, subkey, value), expires_at)
                    return _pack(await self._search(peer_id, store))
                except ValueError:
                    raise RequestRefused("invalid entry") from None
            case [1, str(key)] if len(key.encode()) <= MAX_KEY_BYTES:
                return _packed_within_bound(await self._search(peer_id, partial(self._index.load, key)))
        raise RequestRefused("malformed")

    async def _store(self, peer_id: str, entry: tuple[str, str, bytes], expires_at: float) -> bool:
        key, subkey, value = entry
        if self._rule.judge(key, subkey, value, claimed_end=expires_at, sender=peer_id) is None:
            return False
        return await self._index.store(key, subkey, value, expires_at=expires_at)

    async def _search(self, peer_id: str, search: Callable[[], Awaitable[T]]) -> T:
        """Run a search for a peer, and count it against the rates. Raises RequestRefused."""
        now = self._monotonic()
        rates = (
            self._allowed,
            self._allowed_to.get_or_add(
                peer_id, lambda: TokenBucket(SEARCHES_PER_PEER_PER_S, BURST_S * SEARCHES_PER_PEER_PER_S, now)
            ),
        )
        if any(rate.wait_s(now, 1) > 0 for rate in rates):
            raise RequestRefused("rate")
        try:
            async with giving_way() as leave:
                with self._places.place(peer_id, now, leave):
                    for rate in rates:
                        rate.take(1, now)
                    return await search()
        except GaveWay:
            raise RequestRefused("busy") from None


def _packed_within_bound(entries: dict[str, bytes]) -> bytes:
    """Pack as many entries as a response may hold. Readers ask again, and ask others."""
    chosen, num_bytes = {}, 16
    for subkey, value in entries.items():
        num_bytes += len(subkey.encode()) + len(value) + _ENTRY_OVERHEAD_BYTES
        if num_bytes > MAX_INDEX_RESPONSE_BYTES:
            break
        chosen[subkey] = value
    return _pack(chosen)


def _pack(fields: Any) -> bytes:
    packed = msgpack.packb(fields)
    assert packed is not None, "packb returns bytes"
    return packed


def _unpacked(response: bytes) -> Any:
    try:
        return msgpack.unpackb(response, max_array_len=0, max_map_len=MAX_ENTRIES_PER_KEY, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        raise RequestError("an index peer must answer in msgpack, got something else", "damaged") from None
