"""Calls of strangers on the DHT are counted before they are decoded, and their replies looked at before hivemind does."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

pytest.importorskip("hivemind")

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2
from hypothesis import given
from hypothesis import strategies as st

from swarm.network.hivemind.index_guard import (
    BURST_S,
    CALLS_PER_PEER_PER_S,
    MAX_CALL_BYTES,
    MAX_NEIGHBORS,
    MAX_REMEMBERED_CALLERS,
    RETURNED_BYTES_PER_PEER_PER_S,
    CallLimits,
    CallRefused,
    CheckedStub,
    FlatSerializer,
    node_id_of,
)
from swarm.network.index_entry import MAX_ENTRIES_PER_KEY, IndexRule
from swarm.network.memory.virtual_clock import run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
messages: Any = dht_pb2
FIND = "DHTProtocol.rpc_find"
PEER_ID = bytes(38)
NODE_ID = node_id_of(PEER_ID)
OTHER_NODE_ID = node_id_of(b"another peer")
FUTURE = 1e11


def peer(number: int) -> PeerID:
    return PeerID(b"\x00\x24" + number.to_bytes(36, "big"))


def door(reply: bytes = b"reply") -> tuple[CallLimits, Any, list[bytes]]:
    """Limits on a client of the daemon whose handlers all answer `reply`, and the requests that came through."""
    came: list[bytes] = []

    async def handler(request: bytes, peer_id: PeerID) -> bytes:
        came.append(request)
        return reply

    control = SimpleNamespace(unary_handlers={FIND: handler, "other": handler}, _handler_tasks={})

    async def add(name: str, handler: object, balanced: bool = False) -> None:
        control.unary_handlers[name] = handler

    limits, client = CallLimits(IndexRule(None, time.time)), SimpleNamespace(control=control, add_unary_handler=add)
    limits.install(client)
    return limits, client, came


async def test_caller_over_its_rate_is_refused_and_others_are_not() -> None:
    limits, client, _ = door()
    find = client.control.unary_handlers[FIND]
    allowed = int(CALLS_PER_PEER_PER_S * BURST_S)
    for _ in range(allowed):
        assert await find(b"", peer(1)) == b"reply"
    results = await asyncio.gather(*(find(b"", peer(1)) for _ in range(200)), return_exceptions=True)
    assert sum(isinstance(result, CallRefused) for result in results) >= 150  # the bucket fills meanwhile
    assert limits.refused["rate"] >= 150
    assert await find(b"", peer(2)) == b"reply"
    assert await client.control.unary_handlers["other"](b"", peer(1)) == b"reply"


async def test_caller_that_asks_for_too_much_is_refused() -> None:
    limits, client, _ = door(reply=bytes(1 << 20))
    find = client.control.unary_handlers[FIND]
    with pytest.raises(CallRefused, match="oversize"):
        await find(messages.FindRequest(keys=[NODE_ID] * (MAX_CALL_BYTES // 22 + 1)).SerializeToString(), peer(1))
    with pytest.raises(CallRefused, match="rate"):
        for _ in range(int(BURST_S * RETURNED_BYTES_PER_PEER_PER_S) // (1 << 20) + 5):
            await find(b"", peer(1))
    assert limits.refused == {"oversize": 1, "rate": 1}


async def test_each_key_that_a_call_names_counts_as_a_call() -> None:
    limits, client, came = door()
    find = client.control.unary_handlers[FIND]
    request = messages.FindRequest(keys=[NODE_ID] * 350).SerializeToString()
    with pytest.raises(CallRefused, match="rate"):
        for _ in range(10):
            await find(request, peer(1))
    assert len(came) * 350 <= BURST_S * CALLS_PER_PEER_PER_S + 350
    assert await find(request, peer(2)) == b"reply"
    assert limits.refused == {"rate": 1}


async def test_caller_with_a_false_node_id_is_refused() -> None:
    _, client, came = door()
    find = client.control.unary_handlers[FIND]
    for node_id in (b"x", bytes(20), bytes(21), bytes(4000), OTHER_NODE_ID):
        request = messages.FindRequest(peer=messages.NodeInfo(node_id=node_id))
        with pytest.raises(CallRefused, match="malformed"):
            await find(request.SerializeToString(), peer(1))
    assert came == []
    own = messages.NodeInfo(node_id=node_id_of(peer(1).to_bytes()))
    await find(messages.FindRequest(peer=own).SerializeToString(), peer(1))


async def test_handlers_added_later_are_limited_as_well() -> None:
    _, client, _ = door()

    async def handler(request: bytes, peer_id: PeerID) -> bytes:
        return b""

    await client.add_unary_handler("DHTProtocol.rpc_ping", handler, balanced=False)
    with pytest.raises(CallRefused):
        await client.control.unary_handlers["DHTProtocol.rpc_ping"](bytes(MAX_CALL_BYTES + 1), peer(1))


async def test_table_of_callers_is_bounded() -> None:
    limits, client, _ = door()
    for number in range(MAX_REMEMBERED_CALLERS + 50):
        await client.control.unary_handlers[FIND](b"", peer(number))
    assert len(limits._callers) == MAX_REMEMBERED_CALLERS


async def test_call_that_its_caller_cancelled_is_forgotten() -> None:
    limits, client, _ = door()
    started = asyncio.Event()

    async def wait(request: bytes, peer_id: PeerID) -> bytes:
        started.set()
        return await asyncio.get_running_loop().create_future()

    call = asyncio.create_task(limits.limited(FIND, wait, client)(b"", peer(1)))
    client.control._handler_tasks["id"] = call
    await started.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert client.control._handler_tasks == {}


class Stub:
    """A peer that answers every call with the same."""

    def __init__(self, reply: object) -> None:
        self._reply = reply

    async def answer(self, request: object, timeout: float | None = None) -> object:
        return self._reply

    rpc_ping = rpc_store = rpc_find = answer


async def unreachable() -> bool:
    return False


async def at_once() -> None:
    """Entries are checked without waiting."""


def found(**fields: object) -> Any:
    return messages.FindResponse(results=[messages.FindResult(type=messages.NOT_FOUND, **fields)])


@pytest.mark.parametrize(
    "hostile",
    [
        found(nearest_node_ids=[NODE_ID], nearest_peer_ids=[bytes(65)]),
        found(nearest_node_ids=[NODE_ID], nearest_peer_ids=[bytes(3_000_000)]),
        found(nearest_node_ids=[NODE_ID], nearest_peer_ids=[b""]),
        found(nearest_node_ids=[NODE_ID] * (MAX_NEIGHBORS + 1)),
        messages.FindResponse(peer=messages.NodeInfo(node_id=bytes(21))),
        messages.FindResponse(peer=messages.NodeInfo(node_id=OTHER_NODE_ID)),
        messages.FindResponse(results=[messages.FindResult(type=7)]),
    ],
)
async def test_reply_with_ids_out_of_bounds_is_an_error_before_it_is_decoded(hostile: Any) -> None:
    with pytest.raises(ValueError):
        await CheckedStub(Stub(hostile), PeerID(PEER_ID), unreachable, at_once).rpc_find(None)


def stub(reply: object) -> CheckedStub:
    return CheckedStub(Stub(reply), PeerID(PEER_ID), unreachable, at_once)


async def test_honest_replies_pass() -> None:
    honest = found(nearest_node_ids=[NODE_ID], nearest_peer_ids=[PEER_ID])
    assert await stub(honest).rpc_find(None, timeout=1) is honest
    assert list(honest.results[0].nearest_node_ids) == [NODE_ID]
    pong = messages.PingResponse(peer=messages.NodeInfo(node_id=NODE_ID))
    assert await stub(pong).rpc_ping(None) is pong
    with pytest.raises(ValueError):
        await stub(messages.PingResponse(peer=messages.NodeInfo(node_id=b"x"))).rpc_ping(None)


async def test_a_peer_named_at_the_place_of_another_is_left_out() -> None:
    places = [OTHER_NODE_ID, NODE_ID, bytes(20), bytes(21), NODE_ID]
    reply = await stub(found(nearest_node_ids=places, nearest_peer_ids=[PEER_ID] * 3 + [b"x"])).rpc_find(None)
    assert list(reply.results[0].nearest_node_ids) == [NODE_ID]
    assert list(reply.results[0].nearest_peer_ids) == [PEER_ID]


def test_a_peer_that_is_nowhere_holds_up_a_call_for_its_time_out_and_no_longer() -> None:
    async def find() -> bool:
        await asyncio.sleep(30)
        return True

    class Nowhere:
        async def rpc_find(self, request: object, timeout: float | None = None) -> object:
            raise P2PDaemonError("failed to find any peer in table")

    async def main() -> None:
        start = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await CheckedStub(Nowhere(), PeerID(PEER_ID), find, at_once).rpc_find(None, timeout=3.0)
        assert asyncio.get_running_loop().time() - start == 3.0

    run(main())


def dictionary(*entries: tuple[object, object, object]) -> bytes:
    return packed([None, 1.0, [list(entry) for entry in entries]])


def packed(value: object) -> bytes:
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb(value)))


def test_dictionary_of_hivemind_is_read_back() -> None:
    with DictionaryDHTValue().freeze() as sent:
        sent.store("a/0", b"1", FUTURE)
        sent.store("b/0", b"2", FUTURE + 1)
    loaded = FlatSerializer.loads(DHTProtocol.serializer.dumps(sent))
    assert isinstance(loaded, DictionaryDHTValue)
    assert {subkey: tuple(item) for subkey, item in loaded.data.items()} == {
        "a/0": (b"1", FUTURE),
        "b/0": (b"2", FUTURE + 1),
    }
    assert loaded.latest_expiration_time == FUTURE + 1
    assert FlatSerializer.loads(FlatSerializer.dumps("a/0")) == "a/0"


def test_entries_of_other_types_are_left_out() -> None:
    loaded = FlatSerializer.loads(dictionary(("a/0", b"1", 5.0), (1, b"1", 5.0), ("b", "1", 5.0), ("c", b"1", 5)))
    assert isinstance(loaded, DictionaryDHTValue)
    assert list(loaded.data) == ["a/0"]
    assert not FlatSerializer.loads(dictionary(("a/0", b"1", float("nan"))))


@pytest.mark.parametrize(
    "hostile",
    [
        msgpack.packb([1]),
        msgpack.packb({1: 1}),
        packed([None, 1.0, [[]]]),
        packed([None, 1.0, [["a", b"1", [1]]]]),
        packed([None, 1.0]),
        packed(5),
        packed([None, 1.0, [["a", b"1", 5.0]] * (MAX_ENTRIES_PER_KEY + 1)]),
        msgpack.packb(msgpack.ExtType(0x40, b"\x90")),
        packed([None, 1.0, [["a", b"1", 5.0]]])[:-3],
        b"",
    ],
)
def test_hostile_dictionary_is_a_value_error(hostile: bytes) -> None:
    with pytest.raises(ValueError):
        FlatSerializer.loads(hostile)


@given(st.binary(max_size=300))
def test_any_bytes_are_flat_or_a_value_error(data: bytes) -> None:
    for candidate in (data, msgpack.packb(msgpack.ExtType(0x50, data))):
        try:
            value = FlatSerializer.loads(candidate)
        except ValueError:
            continue
        assert not value or not isinstance(value, list | dict)


async def test_calls_of_strangers_are_refused_unread() -> None:
    limits, client, came = door()
    limits._admits = lambda peer_id, wanted: (peer_id, wanted) == (peer(1).to_base58(), "index")
    handler = client.control.unary_handlers[FIND]
    assert await handler(b"", peer(1)) == b"reply"
    with pytest.raises(CallRefused, match="stranger"):
        await handler(b"\xff", peer(2))
    assert came == [b""] and limits.refused == {"stranger": 1}
