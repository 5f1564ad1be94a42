"""What a call to or from a peer's DHT may carry, and how often a peer may call.

Imports hivemind: only `index_guard` may import this module.

hivemind 1.1.12 answers every call and decodes every reply as they come. So that a stranger cannot hold up the loop:
- calls are counted per peer, by number and by bytes in both directions, before they are decoded;
- each key that a call names counts as a call, since each costs a sort of the routing table;
- a reply names peers by ids of a sane length (base58 of a long one takes quadratic time);
- a node has the place in the DHT that follows from its peer id: else a peer could be wherever it likes, and name others
  at the places of honest ones;
- a dictionary is decoded flat: 4 MiB of nested empty lists would take 240 MB;
- entries wait before they are checked where the checks of others have taken too much time (`IndexRule`).
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import msgpack

from swarm.limits.bounded_maps import BoundedMap
from swarm.limits.token_bucket import TokenBucket
from swarm.network.hivemind.daemon_control import forget_when_cancelled
from swarm.network.hivemind.index_storage import IndexEntries
from swarm.network.hivemind.parts import (
    DHTID,
    DHTProtocol,
    DictionaryDHTValue,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    dht_pb2,
)
from swarm.network.index_entry import MAX_ENTRIES_PER_KEY, IndexRule
from swarm.network.transport import Admits, everybody

CALLS_PER_PEER_PER_S = 100.0
STORED_BYTES_PER_PEER_PER_S = 256 * 1024.0
RETURNED_BYTES_PER_PEER_PER_S = 4 * 1024 * 1024.0
BURST_S = 10.0
"""What a peer may do at once: its rates over this time; a node that joins is handed whole keys."""
MAX_CALL_BYTES = 8 * 1024
"""Anything but a store: about 370 keys."""
MAX_STORE_WAIT_S = 2.0
"""A store that would wait longer for its turn to be checked is refused; its caller waits for 3 s."""
MAX_REMEMBERED_CALLERS = 1024
MAX_PEER_ID_BYTES = 64
MAX_NEIGHBORS = 64
"""Of one key in a reply; hivemind sends 20."""
_DICTIONARY_CODE = 0x50
_messages: Any = dht_pb2  # protobuf makes its classes while it runs
_REQUESTS: dict[str, Any] = {
    "DHTProtocol.rpc_ping": _messages.PingRequest,
    "DHTProtocol.rpc_store": _messages.StoreRequest,
    "DHTProtocol.rpc_find": _messages.FindRequest,
}

giver: ContextVar[str | None] = ContextVar("giver", default=None)
"""The peer that sent the entries that hivemind has validated in this context; None where they are this node's own."""

T = TypeVar("T")
UnaryHandler = Callable[[bytes, PeerID], Awaitable[bytes]]


def node_id_of(peer_id: bytes) -> bytes:
    """The one place in the DHT of a peer, by its id in binary; the same over restarts."""
    return DHTID.generate(source=peer_id).to_bytes()


async def from_giver(peer: PeerID, work: Awaitable[T]) -> T:
    """Await `work`, in which hivemind validates what `peer` has sent."""
    name = giver.set(peer.to_base58())
    try:
        return await work
    finally:
        giver.reset(name)


class CallRefused(Exception):
    """Answers the caller with an error."""


class _Caller:
    __slots__ = ("calls", "returned", "stored")

    def __init__(self, now: float) -> None:
        self.calls = TokenBucket(CALLS_PER_PEER_PER_S, BURST_S * CALLS_PER_PEER_PER_S, now)
        self.stored = TokenBucket(STORED_BYTES_PER_PEER_PER_S, 4 * BURST_S * STORED_BYTES_PER_PEER_PER_S, now)
        self.returned = TokenBucket(RETURNED_BYTES_PER_PEER_PER_S, BURST_S * RETURNED_BYTES_PER_PEER_PER_S, now)


class CallLimits:
    """Limits on the calls that peers make of this node's DHT."""

    def __init__(self, rule: IndexRule, admits: Admits = everybody) -> None:
        """`admits`: whose calls are answered. `rule`: by which the entries in them are checked."""
        self._admits = admits
        self._rule = rule
        self.refused: Counter[str] = Counter()
        """Calls that were refused, by reason: rate, busy, oversize, malformed, stranger."""
        self._callers: BoundedMap[PeerID, _Caller] = BoundedMap(MAX_REMEMBERED_CALLERS)

    def install(self, client: Any) -> None:
        """Into hivemind's client of the daemon: the DHT's handlers there, and those that are added later."""
        handlers, add = client.control.unary_handlers, client.add_unary_handler
        for name in handlers:
            handlers[name] = self.limited(name, handlers[name], client)

        async def add_limited(name: str, handler: UnaryHandler, *args: Any, **options: Any) -> None:
            await add(name, self.limited(name, handler, client), *args, **options)

        client.add_unary_handler = add_limited

    def limited(self, name: str, handler: UnaryHandler, client: Any) -> UnaryHandler:
        """`handler` behind these limits; unchanged where it is none of the DHT's."""
        if name not in _REQUESTS:
            return handler

        async def answer(request: bytes, peer_id: PeerID) -> bytes:
            forget_when_cancelled(client.control)
            caller = self._admit(name, request, peer_id)
            if name.endswith("rpc_store"):
                if self._rule.wait_s() > MAX_STORE_WAIT_S:
                    raise self._refusal("busy")
                await self._rule.turn()
            response = await from_giver(peer_id, handler(request, peer_id))
            caller.returned.take(len(response), _now())
            return response

        return answer

    def _admit(self, name: str, request: bytes, peer_id: PeerID) -> _Caller:
        if not self._admits(peer_id.to_base58(), "index"):
            raise self._refusal("stranger")
        now = _now()
        caller = self._callers.get_or_add(peer_id, lambda: _Caller(now))
        if caller.calls.wait_s(now) > 0 or caller.returned.wait_s(now) > 0:
            raise self._refusal("rate")
        if not name.endswith("rpc_store") and len(request) > MAX_CALL_BYTES:
            raise self._refusal("oversize")
        if not caller.stored.try_take(len(request), now):
            raise self._refusal("rate")
        call = _REQUESTS[name].FromString(request)
        caller.calls.take(1 if name.endswith("rpc_ping") else max(1, len(call.keys)), now)
        if call.peer.node_id not in (b"", node_id_of(peer_id.to_bytes())):  # none: a client that hosts nothing
            raise self._refusal("malformed")
        return caller

    def _refusal(self, reason: str) -> CallRefused:
        self.refused[reason] += 1
        return CallRefused(reason)


class CheckedStub:
    """Calls one peer's DHT and looks at the replies before hivemind does. Raises ValueError: hivemind expects errors."""

    def __init__(
        self,
        stub: Any,
        peer_id: PeerID,
        reach: Callable[[], Awaitable[bool]],
        turn: Callable[[], Awaitable[None]],
    ) -> None:
        """`reach` connects to the peer where a call did not reach it, and says whether that has worked.

        `turn` waits until the entries of another reply may be checked.
        """
        self._stub = stub
        self._turn = turn
        self._node_id = node_id_of(peer_id.to_bytes())
        self._reach = reach

    async def rpc_ping(self, request: Any, timeout: float | None = None) -> Any:
        return await self._call(self._stub.rpc_ping, request, timeout)

    async def rpc_store(self, request: Any, timeout: float | None = None) -> Any:
        return await self._call(self._stub.rpc_store, request, timeout)

    async def _call(self, call: Callable[..., Awaitable[Any]], request: Any, timeout: float | None) -> Any:
        """One time-out for all of it: else whoever names peers that are nowhere would hold up those who look for them."""
        async with asyncio.timeout(timeout):
            try:
                return self._checked_sender(await call(request, timeout=timeout))
            except (P2PDaemonError, P2PHandlerError):
                if not await self._reach():
                    raise
                return self._checked_sender(await call(request, timeout=timeout))

    def _checked_sender(self, response: Any) -> Any:
        if response.peer.node_id not in (b"", self._node_id):
            raise ValueError("a reply names its sender by the id of another node")
        return response

    async def rpc_find(self, request: Any, timeout: float | None = None) -> Any:
        response = await self._call(self._stub.rpc_find, request, timeout)
        for result in response.results:
            if max(len(result.nearest_node_ids), len(result.nearest_peer_ids)) > MAX_NEIGHBORS:
                raise ValueError(f"a reply must name at most {MAX_NEIGHBORS} neighbours")
            if any(not 0 < len(peer_id) <= MAX_PEER_ID_BYTES for peer_id in result.nearest_peer_ids):
                raise ValueError("a reply names a peer by an id of another length")
            if result.type not in _messages.ResultType.values():
                raise ValueError("a reply is of an unknown type")  # of which hivemind would log an error
            named = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False)
            true = [(node_id, peer_id) for node_id, peer_id in named if node_id == node_id_of(peer_id)]
            result.nearest_node_ids[:] = [node_id for node_id, _ in true]
            result.nearest_peer_ids[:] = [peer_id for _, peer_id in true]
        if any(result.value for result in response.results):
            await self._turn()
        return response


class FlatSerializer:
    """hivemind's serializer, as far as the index needs it, for bytes of strangers: no lists in lists."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        """hivemind's own refuses subclasses, such as `IndexEntries` and the values in it."""
        if not isinstance(value, DictionaryDHTValue):
            return DHTProtocol.serializer.dumps(value)
        rows = [[subkey, item.value, item.expiration_time] for subkey, item in value.items()]
        packed: Any = msgpack.packb([value.maxsize, value.latest_expiration_time, rows])
        whole: Any = msgpack.packb(msgpack.ExtType(_DICTIONARY_CODE, packed))
        return whole

    @staticmethod
    def loads(data: bytes) -> object:
        """A scalar or IndexEntries, not judged yet. Raises ValueError (msgpack's errors are such) for anything else."""
        value = msgpack.unpackb(data, raw=False, max_array_len=0, max_map_len=0)
        if not isinstance(value, msgpack.ExtType):
            return value
        if value.code != _DICTIONARY_CODE:
            raise ValueError(f"an index value must be a dictionary or a scalar, got type {value.code}")
        return _dictionary(value.data)


def _dictionary(data: bytes) -> IndexEntries:
    """[size limit, latest expiration, [[subkey, value, expiration], ...]]: the first two are the peer's own business."""
    unpacker = msgpack.Unpacker(raw=False, max_array_len=0, max_map_len=0, max_buffer_size=len(data) or 1)
    unpacker.feed(data)
    try:
        if unpacker.read_array_header() != 3:
            raise ValueError("a dictionary must have 3 parts")
        unpacker.skip()
        unpacker.skip()
        num_entries = unpacker.read_array_header()
        if num_entries > MAX_ENTRIES_PER_KEY:
            raise ValueError(f"a key must have at most {MAX_ENTRIES_PER_KEY} entries, got {num_entries}")
        with IndexEntries().freeze() as entries:
            for _ in range(num_entries):
                if unpacker.read_array_header() != 3:
                    raise ValueError("an entry must have 3 parts")
                subkey, value, expires_at = unpacker.unpack(), unpacker.unpack(), unpacker.unpack()
                is_sane = isinstance(subkey, str) and isinstance(value, bytes) and isinstance(expires_at, float)
                if is_sane and math.isfinite(expires_at):
                    entries.store(subkey, value, expires_at)
            return entries
    except msgpack.UnpackException as error:  # OutOfData: it ended early
        raise ValueError(f"a dictionary must be complete msgpack, got {type(error).__name__}") from None


def _now() -> float:
    return asyncio.get_running_loop().time()
