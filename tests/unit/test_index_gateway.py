"""A full peer stores and looks up for others, who believe nothing but the form of what it says."""

import math
import random

import msgpack
import pytest

from swarm.errors import RequestError
from swarm.network.index_entry import MAX_ENTRIES_PER_KEY, MAX_VALUE_BYTES, IndexRule
from swarm.network.index_gateway import (
    MAX_INDEX_RESPONSE_BYTES,
    IndexGateway,
    load_request,
    read_loaded,
    read_stored,
    store_request,
)
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.transport import RequestRefused

NOW = 1_000.0


async def full_peer() -> tuple[IndexGateway, MemoryTransport]:
    transport = MemoryTransport(MemoryNetwork(random.Random(0), lambda: NOW), "full")
    await transport.start()
    return IndexGateway(transport, IndexRule(None, lambda: NOW)), transport


async def test_what_one_light_node_stores_another_one_reads() -> None:
    gateway, _ = await full_peer()
    assert read_stored(await gateway.answer("a", store_request("key", "a/0", b"value", NOW + 60)))
    assert not read_stored(await gateway.answer("a", store_request("key", "a/0", b"earlier", NOW + 50)))
    assert read_loaded(await gateway.answer("b", load_request("key"))) == {"a/0": b"value"}
    assert read_loaded(await gateway.answer("b", load_request("other"))) == {}


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\xc1",
        b"\x91" * 1000,
        msgpack.packb([0, "key", "a/0", b"value"]),
        msgpack.packb([0, "key", "a/0", "value", NOW + 60]),
        msgpack.packb([1, "k" * 129]),
        msgpack.packb([2, "key"]),
        store_request("key", "a/0", bytes(MAX_VALUE_BYTES + 1), NOW + 60),
        store_request("", "a/0", b"value", NOW + 60),
        store_request("key", "a/0", b"value", math.nan),
        store_request("key", "a/0", b"value", math.inf),
    ],
)
async def test_malformed_request_is_refused(request_bytes: bytes) -> None:
    gateway, transport = await full_peer()
    with pytest.raises(RequestRefused):
        await gateway.answer("a", request_bytes)
    assert await transport.load("key") == {}


async def test_answer_holds_as_many_entries_as_it_may() -> None:
    gateway, transport = await full_peer()
    for number in range(1100):
        assert await transport.store("key", f"{number}", bytes(MAX_VALUE_BYTES), NOW + 60)
    answer = await gateway.answer("a", load_request("key"))
    assert len(answer) <= MAX_INDEX_RESPONSE_BYTES
    assert len(read_loaded(answer)) > 800


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        msgpack.packb([True]),
        msgpack.packb(1),
        msgpack.packb({str(number): b"" for number in range(MAX_ENTRIES_PER_KEY + 1)}),
        b"\xdd\x00\x0f\x00\x00" * 1000,
    ],
)
def test_malformed_answer_is_a_request_error(answer: bytes) -> None:
    for read in (read_stored, read_loaded):
        with pytest.raises(RequestError) as caught:
            read(answer)
        assert caught.value.reason == "damaged"


def test_entries_of_other_types_are_left_out() -> None:
    assert read_loaded(msgpack.packb({"a": b"1", "b": "2", b"c": b"3"}) or b"") == {"a": b"1"}
