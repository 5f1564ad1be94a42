"""hivemind's DHT behind our guard: what a stranger calls and what a stranger answers, as functions of bytes.

The first byte chooses the call. The protocol, its storage and its routing table are hivemind's own and ours; only the
daemon that would carry the bytes is missing.
"""

import asyncio
import functools
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from swarm.network.hivemind.index_guard import IndexGuard, decode_entry
from swarm.network.hivemind.index_storage import FlatSerializer
from swarm.network.hivemind.parts import DHTID, DHTProtocol, DHTRecord, DictionaryDHTValue, PeerID, dht_pb2
from swarm.network.index_entry import is_live
from swarm.records.identity import Identity
from tests.fuzz.record_targets import HEADER_KEY
from tests.unit.experience_factory import NOW

DHT_NOW = 1e10
"""Far ahead: hivemind looks at the real clock, and nothing may expire by it."""
DHT_KEY = "key"
CALLER = PeerID.from_base58(Identity(b"c" * 32).peer_id)
_messages: Any = dht_pb2
_CALLS = (
    ("rpc_ping", _messages.PingRequest, _messages.PingResponse),
    ("rpc_store", _messages.StoreRequest, _messages.StoreResponse),
    ("rpc_find", _messages.FindRequest, _messages.FindResponse),
)


def stored_entry(data: bytes) -> bool:
    """Subkey and value as they are in a store call, each msgpack: the first byte is the length of the subkey."""
    length = data[0] if data else 0
    found = DHTRecord(DHTID.generate(source=HEADER_KEY).to_bytes(), data[1 : 1 + length], data[1 + length :], NOW + 60)
    assert IndexGuard(None, lambda: NOW).validate(found) == (decode_entry(found) is not None)
    return decode_entry(found) is not None


def dictionary(data: bytes) -> bool:
    """The entries of a key in one value, as a replica answers."""
    try:
        value = FlatSerializer.loads(data)
    except ValueError:
        return False
    if not isinstance(value, DictionaryDHTValue):
        return False
    return IndexGuard(None, lambda: NOW).keep_valid(DHTID.generate(source=HEADER_KEY).to_bytes(), value)


def dht_call(data: bytes) -> bool:
    """A call to this node, counted, decoded and answered."""
    name, request_type, _ = _CALLS[_choice(data)]
    protocol, guard, client = _node(b"")

    async def handler(request: bytes, peer_id: PeerID) -> bytes:
        context = SimpleNamespace(remote_id=peer_id)
        return (await getattr(protocol, name)(request_type.FromString(request), context)).SerializeToString()

    async def call() -> bool:
        try:
            await guard.calls.limited(f"DHTProtocol.{name}", handler, client)(data[1:], CALLER)
        except Exception:  # the daemon's client sends any of them back to the caller, and nothing else happens
            return False
        return True

    is_answered = run_on_loop(call())
    assert guard.storage is not None
    for key, found in guard.storage.data.items():
        _check_entries(guard, key, found.value)
    return is_answered


def dht_reply(data: bytes) -> bool:
    """An answer to a call of this node. Nothing is raised, and what is found has passed the guard."""
    protocol, guard, _ = _node(data[1:])
    key = DHTID.generate(source=DHT_KEY)
    if _choice(data) == 0:
        return run_on_loop(protocol.call_ping(CALLER, validate=True, strict=False)) is not None
    if _choice(data) == 1:
        return run_on_loop(protocol.call_store(CALLER, [key], [b"value"], [DHT_NOW + 60], ["a/0"])) is not None
    results = run_on_loop(protocol.call_find(CALLER, [key]))
    for found, neighbors in results.values():
        assert all(isinstance(peer_id, PeerID) for peer_id in neighbors.values())
        if found is not None:
            assert is_live(found.expiration_time, DHT_NOW)
            _check_entries(guard, key, found.value)
    return bool(results)


def run_on_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """To its end, on one loop for all inputs; the tasks that it started must end as well, and without an error."""

    async def with_tasks() -> Any:
        result = await coroutine
        others = asyncio.all_tasks() - {asyncio.current_task()}
        async with asyncio.timeout(10):
            await asyncio.gather(*others)
        return result

    return _loop().run_until_complete(with_tasks())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _choice(data: bytes) -> int:
    return data[0] % len(_CALLS) if data else 0


class _Stub:
    """A peer that answers every call with the same bytes."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply

    def __getattr__(self, name: str) -> Any:
        response_type = next(response for call, _, response in _CALLS if call == name)

        async def answer(request: Any, timeout: float | None = None) -> Any:
            return response_type.FromString(self._reply)

        return answer


def _node(reply: bytes) -> tuple[DHTProtocol, IndexGuard, Any]:
    """As `DHTProtocol.create` and the session make it, whose peers all give this reply."""
    from hivemind.dht.routing import RoutingTable

    client = SimpleNamespace(
        control=SimpleNamespace(unary_handlers={}, _handler_tasks={}), add_unary_handler=lambda *_: None
    )
    guard = IndexGuard(None, lambda: DHT_NOW)
    protocol: Any = DHTProtocol(_initialized_with_create=True)
    protocol.node_id = DHTID.generate(source=b"node")
    protocol.bucket_size, protocol.num_replicas, protocol.wait_timeout = 20, 3, 1.0
    protocol.p2p, protocol.client_mode, protocol.record_validator = SimpleNamespace(_client=client), False, guard
    protocol.routing_table = RoutingTable(protocol.node_id, 20, 5)
    protocol.rpc_semaphore = asyncio.Semaphore(8)
    protocol.node_info = _messages.NodeInfo(node_id=protocol.node_id.to_bytes())
    protocol.get_stub = lambda peer: _Stub(reply)
    guard.protect(protocol)
    return protocol, guard, client


def _check_entries(guard: IndexGuard, key: DHTID, entries: object) -> None:
    assert isinstance(entries, DictionaryDHTValue)
    for subkey, (value, expires_at) in entries.items():
        assert guard.validate(DHTRecord(key.to_bytes(), DHTProtocol.serializer.dumps(subkey), value, expires_at))
