"""Protects hivemind's DHT from peers that store or return bad entries, or that call too often.

A validator in hivemind sees the SHA-1 of a key. So that ours sees the key itself, the key is stored in front of the
value, `key NUL value`, and counts only if it hashes to where the entry was found. hivemind 1.1.12 needs more
protection, since hostile peers and differing clocks do this:

- one bad subkey makes a whole reply invalid, so readers with a slow clock lose the key: only the subkey is dropped;
- the expiration that a peer claims orders entries and ends their life: the entry itself states both (`IndexRule`);
- a plain value without subkeys replaces all subkeys of a key: plain values are refused;
- a reply with an infinite expiration ends the search before other replicas answer: it is ignored;
- a key over 4 MiB cannot be read any more: the entries under a key are limited (`index_storage`).

It also answers every call and decodes every reply as they come. So that a stranger cannot block the event loop:

- calls are counted per peer, by number and by bytes in both directions, before they are decoded;
- each key in a call counts as a call, since each costs a sort of the routing table;
- a reply names peers by ids of a sane length (base58 of a long one takes quadratic time);
- a node's place in the DHT follows from its peer id: else a peer could choose its place, and name others at the places
  of honest peers;
- a dictionary is decoded flat: 4 MiB of nested empty lists would take 240 MB;
- entries wait to be checked where the checks of others have taken too much time (`IndexRule`).

Limits on memory are in `index_storage`. Only `session` and `supervisor` may import this module, since it imports
hivemind.
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
"""Seconds of its rates that a peer may use at once. A node that joins is sent whole keys."""
MAX_CALL_BYTES = 8 * 1024
"""Largest call other than a store: about 370 keys."""
MAX_STORE_WAIT_S = 2.0
"""A store that waits longer for its check is refused; its caller waits for 3 s."""
MAX_WAITING_BYTES = 16 * 1024 * 1024
"""Stores that wait for their check at the same time. One peer can send at most 10 MiB at once."""
_WAITING_CALL_BYTES = 4096
"""What a waiting store takes beside its bytes."""
MAX_REMEMBERED_CALLERS = 1024
MAX_PEER_ID_BYTES = 64
MAX_NEIGHBORS = 64
"""Neighbours of one key in a reply; hivemind sends 20."""
_messages: Any = dht_pb2  # protobuf makes its classes at run time
_REQUESTS: dict[str, Any] = {
    "DHTProtocol.rpc_ping": _messages.PingRequest,
    "DHTProtocol.rpc_store": _messages.StoreRequest,
    "DHTProtocol.rpc_find": _messages.FindRequest,
}

entry_sender: ContextVar[str | None] = ContextVar("entry_sender", default=None)
"""The peer that sent the entries which hivemind validates in this context; None for entries of this node."""

T = TypeVar("T")
UnaryHandler = Callable[[bytes, PeerID], Awaitable[bytes]]


def node_id_of(peer_id: bytes) -> bytes:
    """Return the place of a peer in the DHT, by its id in binary. It is the same after a restart."""
    return DHTID.generate(source=peer_id).to_bytes()


async def from_sender(peer: PeerID, work: Awaitable[T]) -> T:
    """Await `work`, in which hivemind validates what `peer` has sent."""
    name = entry_sender.set(peer.to_base58())
    try:
        return await work
    finally:
        entry_sender.reset(name)


class CallRefused(Exception):
    """A call is refused; the caller receives an error."""


class _Caller:
    __slots__ = ("calls", "returned", "stored")

    def __init__(self, now: float) -> None:
        self.calls = TokenBucket(CALLS_PER_PEER_PER_S, BURST_S * CALLS_PER_PEER_PER_S, now)
        self.stored = TokenBucket(STORED_BYTES_PER_PEER_PER_S, 4 * BURST_S * STORED_BYTES_PER_PEER_PER_S, now)
        self.returned = TokenBucket(RETURNED_BYTES_PER_PEER_PER_S, BURST_S * RETURNED_BYTES_PER_PEER_PER_S, now)


class CallLimits:
    """Limits the calls that peers make to this node's DHT."""

    def __init__(self, rule: IndexRule, admits: Admits = everybody) -> None:
        """`admits` decides whose calls are answered, `rule` checks the entries in them."""
        self._admits = admits
        self._rule = rule
        self.refused: Counter[str] = Counter()
        """Refused calls by reason: rate, busy, oversize, malformed, stranger."""
        self._callers: BoundedMap[PeerID, _Caller] = BoundedMap(MAX_REMEMBERED_CALLERS)
        self.waiting_bytes = 0
        """Of stores that wait for their check."""

    def install(self, client: Any) -> None:
        """Install the limits in hivemind's client of the daemon, for present and later handlers of the DHT."""
        handlers, add = client.control.unary_handlers, client.add_unary_handler
        for name in handlers:
            handlers[name] = self.limited(name, handlers[name], client)

        async def add_limited(name: str, handler: UnaryHandler, *args: Any, **options: Any) -> None:
            await add(name, self.limited(name, handler, client), *args, **options)

        client.add_unary_handler = add_limited

    def limited(self, name: str, handler: UnaryHandler, client: Any) -> UnaryHandler:
        """Wrap `handler` in these limits. A handler that is not the DHT's is returned unchanged."""
        if name not in _REQUESTS:
            return handler

        async def answer(request: bytes, peer_id: PeerID) -> bytes:
            forget_when_cancelled(client.control)
            caller = self._admit(name, request, peer_id)
            if name.endswith("rpc_store"):
                await self._turn(len(request))
            response = await from_sender(peer_id, handler(request, peer_id))
            caller.returned.take(len(response), _now())
            return response

        return answer

    async def _turn(self, num_bytes: int) -> None:
        """Wait until the entries of a store may be checked. Raises CallRefused where too much waits already, or too long."""
        num_bytes += _WAITING_CALL_BYTES
        if self.waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            raise self._refusal("busy")
        self.waiting_bytes += num_bytes
        try:
            async with asyncio.timeout(MAX_STORE_WAIT_S):
                await self._rule.turn()
        except TimeoutError:
            raise self._refusal("busy") from None
        finally:
            self.waiting_bytes -= num_bytes

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
        if call.peer.node_id not in (b"", node_id_of(peer_id.to_bytes())):  # empty for a client that hosts nothing
            raise self._refusal("malformed")
        return caller

    def _refusal(self, reason: str) -> CallRefused:
        self.refused[reason] += 1
        return CallRefused(reason)


class CheckedStub:
    """Calls one peer's DHT and checks the replies before hivemind does. Raises ValueError, as hivemind expects."""

    def __init__(
        self,
        stub: Any,
        peer_id: PeerID,
        reach: Callable[[], Awaitable[bool]],
        turn: Callable[[], Awaitable[None]],
    ) -> None:
        """`reach` connects to the peer where a call did not reach it, and returns whether it succeeded.

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
        """Call within one time-out for all attempts. Otherwise naming peers that do not exist would delay every search."""
        async with asyncio.timeout(timeout):
            try:
                return self._checked_sender(await call(request, timeout=timeout))
            except (P2PDaemonError, P2PHandlerError):
                if not await self._reach():
                    raise
                return self._checked_sender(await call(request, timeout=timeout))

    def _checked_sender(self, response: Any) -> Any:
        if response.peer.node_id not in (b"", self._node_id):
            raise ValueError("a reply names its sender by another node's id")
        return response

    async def rpc_find(self, request: Any, timeout: float | None = None) -> Any:
        response = await self._call(self._stub.rpc_find, request, timeout)
        for result in response.results:
            if max(len(result.nearest_node_ids), len(result.nearest_peer_ids)) > MAX_NEIGHBORS:
                raise ValueError(f"a reply must name at most {MAX_NEIGHBORS} neighbours")
            if any(not 0 < len(peer_id) <= MAX_PEER_ID_BYTES for peer_id in result.nearest_peer_ids):
                raise ValueError("a reply names a peer by an id of another length")
            if result.type not in _messages.ResultType.values():
                raise ValueError("a reply is of an unknown type")  # for which hivemind would log an error
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
    """Return the value as it is stored under `key`."""
    return key.encode() + _KEY_END + value


def unwrap(stored: bytes) -> bytes:
    """Return the value as it was published."""
    return stored.partition(_KEY_END)[2]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    key: str
    subkey: str
    value: bytes


def decode_entry(record: DHTRecord) -> IndexEntry | None:
    """Return the entry in a record of the DHT; None for anything that this software would not have stored."""
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
    """The validator of one node, as hivemind expects it."""

    def __init__(
        self,
        validator: IndexValidator | None,
        now: Callable[[], float],
        admits: Admits = everybody,
        routing: PeerRouting | None = None,
    ) -> None:
        """`now` gives swarm time. Without a `validator` only form and expiration are checked.

        `routing` finds peers that replies name only by their ids.
        """
        self._routing = routing
        self._rule = IndexRule(validator, now)
        self._now = now
        self._last: tuple[DHTRecord, Validity | None] | None = None  # the record validated last, not stored yet
        self.calls = CallLimits(self._rule, admits)
        self.storage: IndexStorage | None = None
        """This node's share of the index, once there is a node."""

    @property
    def refused(self) -> Counter[str]:
        """Refused calls and entries, and evicted entries, by reason, since this guard was made."""
        stored = Counter[str]() if self.storage is None else self.storage.refused
        return self.calls.refused + self._rule.refused + stored

    def validate(self, record: DHTRecord) -> bool:
        self._last = record, self._judge(record)
        return self._last[1] is not None

    def _judge(self, record: DHTRecord) -> Validity | None:
        """Return the validity of a record; None where it is not valid now."""
        entry = decode_entry(record)
        if entry is None:
            return None
        return self._rule.judge(
            entry.key, entry.subkey, entry.value, claimed_end=record.expiration_time, sender=entry_sender.get()
        )

    def _judge_once(self, record: DHTRecord) -> Validity | None:
        """Return the same as `_judge`. hivemind stores a record right after validation, so its signature is checked
        only once.
        """
        last, self._last = self._last, None
        return last[1] if last is not None and last[0] == record else self._judge(record)

    def protect(self, protocol: DHTProtocol) -> None:
        """Install the guard in the protocol of a new DHTNode, before it meets a peer."""
        find, get_stub = protocol.call_find, protocol.get_stub

        async def find_checked(peer: PeerID, keys: Collection[DHTID]):
            results = await from_sender(peer, find(peer, keys)) or {}
            for key, (found, neighbors) in results.items():
                if self._routing is not None:
                    self._routing.named(peer.to_base58(), (one.to_base58() for one in neighbors.values()))
                if found is not None and not is_live(found.expiration_time, self._now()):
                    results[key] = None, neighbors
            return results

        # hivemind has no hooks for these. The attributes of one object are replaced; its classes stay as they are.
        protocol.storage = self.storage = IndexStorage(self._now, judge=self._judge_once)
        protocol.cache = IndexStorage(self._now, max_bytes=0)  # a stranger's "cache" flag is ignored
        protocol.serializer = FlatSerializer  # type: ignore[assignment]
        protocol._validate_dictionary = self.keep_valid
        protocol.call_find = find_checked
        protocol.get_stub = lambda peer: CheckedStub(
            get_stub(peer), peer, reach=self._reach(peer), turn=self._rule.turn
        )  # type: ignore[assignment, return-value]
        self.calls.install(protocol.p2p._client)

    def _reach(self, peer: PeerID) -> Callable[[], Awaitable[bool]]:
        async def reach() -> bool:
            return self._routing is not None and await self._routing.reach(peer.to_base58())

        return reach

    def keep_valid(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Drop the invalid subkeys of a reply or of a transferred key, and note the validity of the others.

        Returns whether any is left.
        """
        dictionary.maxsize = float("inf")  # the peer chose it
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
