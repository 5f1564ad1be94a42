"""A full peer stores and looks up for others, who believe nothing but the form of what it says."""

import asyncio
import contextlib
import math
import random

import msgpack
import pytest

from swarm.errors import RequestError
from swarm.network.index_entry import MAX_ENTRIES_PER_KEY, MAX_VALUE_BYTES, IndexRule
from swarm.network.index_gateway import (
    MAX_INDEX_RESPONSE_BYTES,
    MAX_SEARCHES,
    IndexGateway,
    load_request,
    read_loaded,
    read_stored,
    store_request,
)
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import run
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


class SlowIndex:
    """The transport of a full peer, whose searches take as long as they may."""

    def __init__(self) -> None:
        self.num_searches = 0
        self.num_open = 0
        self.most_open = 0

    async def load(self, key: str) -> dict[str, bytes]:
        self.num_searches += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(6.0 if key.startswith("made up") else 0.05)
        self.num_open -= 1
        return {"a/0": b"value"}

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        return bool(await self.load(key))


def test_requests_of_strangers_start_a_bounded_number_of_searches() -> None:
    async def main() -> None:
        index, loop = SlowIndex(), asyncio.get_running_loop()
        gateway = IndexGateway(index, IndexRule(None, lambda: NOW), monotonic=loop.time)  # type: ignore[arg-type]

        async def ask(name: str, number: int) -> None:
            request = load_request(f"made up {number}")
            if number % 2:
                request = store_request(f"made up {number}", "a/0", b"value", NOW + 60)
            with contextlib.suppress(RequestRefused):
                await gateway.answer(name, request)

        asking: set[asyncio.Future[None]] = set()
        for turn in range(60):
            for number in range(100):
                asking.add(asyncio.ensure_future(ask(f"name {number}", 100 * turn + number)))
            await asyncio.sleep(1.0)
        assert index.most_open <= MAX_SEARCHES
        assert index.num_searches <= 60 * MAX_SEARCHES / 6.0 + MAX_SEARCHES
        await asyncio.sleep(7.0)
        assert read_loaded(await gateway.answer("honest", load_request("key"))) == {"a/0": b"value"}

    run(main())


def test_one_light_node_does_not_use_up_the_searches_of_the_others() -> None:
    async def main() -> None:
        index, loop = SlowIndex(), asyncio.get_running_loop()
        gateway = IndexGateway(index, IndexRule(None, lambda: NOW), monotonic=loop.time)  # type: ignore[arg-type]
        num_refused = 0
        for number in range(600):
            try:
                await gateway.answer("greedy", load_request(f"key {number}"))
            except RequestRefused:
                num_refused += 1
            if number % 20 == 0:
                assert read_loaded(await gateway.answer("honest", load_request("key"))) == {"a/0": b"value"}
        assert num_refused > 300

    run(main())


@pytest.mark.parametrize("names", [["attacker"], [f"attacker {number}" for number in range(8)]])
def test_whoever_makes_searches_take_long_leaves_places_to_peers_of_other_networks(names: list[str]) -> None:
    async def main() -> None:
        index, loop = SlowIndex(), asyncio.get_running_loop()
        gateway = IndexGateway(
            index,  # type: ignore[arg-type]
            IndexRule(None, lambda: NOW),
            network_of=lambda peer_id: peer_id.partition(" ")[0],
            monotonic=loop.time,
        )

        async def ask(name: str) -> None:
            with contextlib.suppress(RequestRefused):
                await gateway.answer(name, load_request("made up"))

        asking: set[asyncio.Future[None]] = set()
        for _ in range(20):
            for name in names:
                asking.add(asyncio.ensure_future(ask(name)))
            await asyncio.sleep(1.0)
            assert read_loaded(await gateway.answer("honest", load_request("key"))) == {"a/0": b"value"}
        assert index.most_open >= MAX_SEARCHES // 4

    run(main())
