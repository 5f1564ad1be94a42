"""What stands between hivemind's DHT and peers that store or return bad entries.

Imports hivemind: only `hivemind_session` may import this module.

A validator in hivemind sees the SHA-1 of a key. So that ours sees what the publisher passed, the key travels in front
of the value, `key NUL value`, and counts only if it hashes to where the entry was found. Beyond validation, hivemind
1.1.12 needs protection in four places, each met by hostile peers or by clocks that differ:
- one bad subkey voids a whole reply, so that readers with a slow clock would lose a key altogether: drop the subkey;
- the expiration that a peer claims orders entries and ends their life: the entry itself says both (`IndexRule`);
- a plain value without subkeys and with a later expiration replaces all subkeys of a key: refuse plain values;
- a reply with an infinite expiration ends the search before other replicas are heard: ignore it;
- a key over 4 MiB cannot be read any more: bound the entries under a key (`index_storage`).
Bounds on memory are in `index_storage`, bounds on calls and replies in `index_calls`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from swarm.limits.bounded_maps import BoundedMap
from swarm.limits.token_bucket import TokenBucket
from swarm.network.hivemind.daemon_control import forget_when_cancelled
from swarm.network.hivemind.index_storage import FlatSerializer, IndexStorage, ValidatedValue
from swarm.network.hivemind.parts import (
    DHTID,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    RecordValidatorBase,
    ValueWithExpiration,
    dht_pb2,
)
from swarm.network.index_entry import (
    MAX_ENTRIES_PER_KEY,
    MAX_KEY_BYTES,
    MAX_SUBKEY_BYTES,
    MAX_VALUE_BYTES,
    IndexRule,
    IndexValidator,
    Validity,
    check_entry,
    is_live,
)
from swarm.network.peers.peer_routing import PeerRouting
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


_KEY_END = b"\0"
_MAX_STORED_BYTES = MAX_KEY_BYTES + MAX_VALUE_BYTES + 8
_MAX_STORED_SUBKEY_BYTES = MAX_SUBKEY_BYTES + 8


def wrap(key: str, value: bytes) -> bytes:
    """The value as it is stored under `key`."""
    return key.encode() + _KEY_END + value


def unwrap(stored: bytes) -> bytes:
    """The value as it was published."""
    return stored.partition(_KEY_END)[2]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    key: str
    subkey: str
    value: bytes


def decode_entry(record: DHTRecord) -> IndexEntry | None:
    """The entry in a record of the DHT; None for anything that this program would not have stored."""
    if len(record.value) > _MAX_STORED_BYTES or len(record.subkey) > _MAX_STORED_SUBKEY_BYTES:
        return None
    try:
        subkey = msgpack.unpackb(record.subkey)
        stored = msgpack.unpackb(record.value)
        if not (isinstance(subkey, str) and isinstance(stored, bytes) and _KEY_END in stored):
            return None
        key_bytes, _, value = stored.partition(_KEY_END)
        key = key_bytes.decode()
        check_entry(key, subkey, value)
    except (ValueError, msgpack.UnpackException):
        return None
    return IndexEntry(key, subkey, value) if DHTID.generate(source=key).to_bytes() == record.key else None


class IndexGuard(RecordValidatorBase):
    """The validator of one node as hivemind wants it."""

    def __init__(
        self,
        validator: IndexValidator | None,
        now: Callable[[], float],
        admits: Admits = everybody,
        routing: PeerRouting | None = None,
    ) -> None:
        """`now` gives swarm time; without a `validator` only form and expiration are checked.

        `routing` finds peers that replies name by their ids alone.
        """
        self._routing = routing
        self._rule = IndexRule(validator, now)
        self._now = now
        self._last: tuple[DHTRecord, Validity | None] | None = None  # that was validated last, and not stored yet
        self.calls = CallLimits(self._rule, admits)
        self.storage: IndexStorage | None = None
        """This node's share of the index, once there is a node."""

    @property
    def refused(self) -> Counter[str]:
        """Calls and entries that were refused, and entries evicted, by reason, since this guard was made."""
        stored = Counter[str]() if self.storage is None else self.storage.refused
        return self.calls.refused + self._rule.refused + stored

    def validate(self, record: DHTRecord) -> bool:
        self._last = record, self._judge(record)
        return self._last[1] is not None

    def _judge(self, record: DHTRecord) -> Validity | None:
        """The validity of a record; None where it does not count now."""
        entry = decode_entry(record)
        if entry is None:
            return None
        return self._rule.judge(
            entry.key, entry.subkey, entry.value, claimed_end=record.expiration_time, giver=giver.get()
        )

    def _judge_once(self, record: DHTRecord) -> Validity | None:
        """As `_judge`. hivemind has a record validated and stores it at once: its signature need not be checked again."""
        last, self._last = self._last, None
        return last[1] if last is not None and last[0] == record else self._judge(record)

    def protect(self, protocol: DHTProtocol) -> None:
        """Put the guard into the protocol of a new DHTNode, before it meets a peer."""
        find, get_stub = protocol.call_find, protocol.get_stub

        async def find_sane(peer: PeerID, keys: Collection[DHTID]):
            results = await from_giver(peer, find(peer, keys)) or {}
            for key, (found, neighbors) in results.items():
                if self._routing is not None:
                    self._routing.named(peer.to_base58(), (one.to_base58() for one in neighbors.values()))
                if found is not None and not is_live(found.expiration_time, self._now()):
                    results[key] = None, neighbors
            return results

        # hivemind has no seam for these; the attributes are those of one object, its classes stay as they are.
        protocol.storage = self.storage = IndexStorage(self._now, judge=self._judge_once)
        protocol.cache = IndexStorage(self._now, max_bytes=0)  # where a stranger says "cache" we say no
        protocol.serializer = FlatSerializer  # type: ignore[assignment]
        protocol._validate_dictionary = self.keep_valid
        protocol.call_find = find_sane
        protocol.get_stub = lambda peer: CheckedStub(
            get_stub(peer), peer, reach=self._reach(peer), turn=self._rule.turn
        )  # type: ignore[assignment, return-value]
        self.calls.install(protocol.p2p._client)

    def _reach(self, peer: PeerID) -> Callable[[], Awaitable[bool]]:
        async def reach() -> bool:
            return self._routing is not None and await self._routing.reach(peer.to_base58())

        return reach

    def keep_valid(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Drop the subkeys of a reply (or a handed over key) that are not valid, and note the validity of the others.

        Returns whether any is left.
        """
        dictionary.maxsize = float("inf")  # chosen by the peer
        with dictionary.freeze():
            for subkey, (value, expires_at) in list(dictionary.items()):
                validity = None
                if isinstance(subkey, str) and isinstance(value, bytes) and isinstance(expires_at, float):
                    packed_subkey = DHTProtocol.serializer.dumps(subkey)
                    validity = self._judge(DHTRecord(key_bytes, packed_subkey, value, expires_at))
                if validity is None:
                    del dictionary[subkey]
                else:
                    dictionary.data[subkey] = ValueWithExpiration(ValidatedValue.of(value, validity), expires_at)
            for subkey in list(dictionary.data)[MAX_ENTRIES_PER_KEY:]:
                del dictionary[subkey]
            return bool(dictionary.data)


def _now() -> float:
    return asyncio.get_running_loop().time()
