"""The in-memory network keeps the contract, and its faults do what they say, the same for every run of a seed."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from swarm.errors import NetworkError, RequestError
from swarm.network.index_entry import MAX_VALUE_BYTES, UNSIGNED, IndexValidator
from swarm.network.memory.transport import NO_FAULTS, Faults, MemoryNetwork, MemoryTransport
from swarm.network.transport import Line, RequestRefused, Transport

pytestmark = pytest.mark.asyncio


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


async def echo(peer_id: str, request: bytes) -> bytes:
    return peer_id.encode() + b":" + request


@asynccontextmanager
async def swarm(
    names: str = "abcd",
    *,
    faults: Faults = NO_FAULTS,
    seed: int = 0,
    validator: Callable[[str], IndexValidator | None] = lambda name: None,
) -> AsyncIterator[tuple[MemoryNetwork, ManualClock, list[MemoryTransport]]]:
    clock = ManualClock()
    network = MemoryNetwork(random.Random(seed), clock, faults)
    nodes = [MemoryTransport(network, name, validator(name)) for name in names]
    for node in nodes:
        node.serve("echo", echo, max_request_bytes=100)
        await node.start()
    try:
        yield network, clock, nodes
    finally:
        for node in nodes:
            await node.stop()


async def ask(node: Transport, peer_id: str, request: bytes = b"hi", *, deadline_s: float = 5.0) -> bytes:
    return await node.request(peer_id, "echo", request, max_response_bytes=100, deadline_s=deadline_s)


async def test_every_node_reads_what_any_node_stored() -> None:
    async with swarm() as (_, clock, nodes):
        for node in nodes:
            assert await node.store("key", f"{node.peer_id}/0", node.peer_id.encode(), clock() + 60)
        for node in nodes:
            assert await node.load("key") == {"a/0": b"a", "b/0": b"b", "c/0": b"c", "d/0": b"d"}
            assert await node.load("other") == {}


async def test_later_expiration_replaces_and_an_earlier_one_does_not() -> None:
    async with swarm() as (_, clock, (a, b, *_rest)):
        assert await a.store("key", "s", b"first", clock() + 60)
        assert await b.store("key", "s", b"second", clock() + 61)
        assert not await a.store("key", "s", b"third", clock() + 60)
        assert await a.load("key") == {"s": b"second"}


async def test_expired_entries_are_gone() -> None:
    async with swarm() as (_, clock, (a, *_rest)):
        await a.store("key", "short", b"1", clock() + 10)
        await a.store("key", "long", b"2", clock() + 100)
        clock.now_s += 10
        assert await a.load("key") == {"long": b"2"}
        assert not await a.store("key", "past", b"3", clock() - 1)


async def test_life_of_an_entry_is_cut_to_an_hour() -> None:
    async with swarm() as (_, clock, (a, *_rest)):
        assert await a.store("key", "s", b"1", float("inf"))
        clock.now_s += 3599
        assert await a.load("key") == {"s": b"1"}
        clock.now_s += 1
        assert await a.load("key") == {}


async def test_oversize_entries_are_a_mistake_of_the_caller() -> None:
    async with swarm() as (_, clock, (a, *_rest)):
        assert await a.store("key", "s", bytes(MAX_VALUE_BYTES), clock() + 60)
        for key, subkey, size in [
            ("key", "s", MAX_VALUE_BYTES + 1),
            ("k" * 129, "s", 1),
            ("key", "s" * 129, 1),
            ("", "s", 1),
        ]:
            with pytest.raises(ValueError, match="bytes"):
                await a.store(key, subkey, bytes(size), clock() + 60)


async def test_entries_that_fail_validation_are_neither_stored_nor_believed() -> None:
    def validator(name: str) -> IndexValidator | None:
        good = ("key", "s", b"good")
        return None if name == "d" else lambda *entry: UNSIGNED if entry == good else None

    async with swarm(validator=validator) as (_, clock, (a, _b, _c, mallory)):
        assert await mallory.store("key", "x", b"good", clock() + 60)  # it keeps them itself, and believes them
        assert await mallory.store("key", "s", b"bad", clock() + 61)
        assert await mallory.load("key") == {"x": b"good", "s": b"bad"}
        assert await a.load("key") == {}
        assert await a.store("key", "s", b"good", clock() + 60)
        assert await a.load("key") == {"s": b"good"}


async def test_an_author_gets_its_share_of_the_index_and_no_more() -> None:
    async with swarm("a") as (_, clock, (a,)):
        taken = [await a.store(f"key {number}", "a/0", b"", clock() + 60) for number in range(1025)]
        assert taken == [True] * 1024 + [False]
        assert a.index_share.refused == {"author_full": 1}
        assert await a.store("key 0", "b/0", b"", clock() + 60)
        assert await a.store("key 0", "a/0", b"", clock() + 61)  # in place of an earlier one
        clock.now_s += 70
        assert await a.store("key", "a/0", b"", clock() + 60)
        assert len(a.index_share) == 1


async def test_request_is_answered_and_counted() -> None:
    async with swarm() as (_, _clock, (a, b, *_rest)):
        assert await ask(a, "b") == b"a:hi"
        assert (a.traffic.bytes_sent, a.traffic.bytes_received) == (2, 4)
        assert (b.traffic.bytes_received, b.traffic.bytes_sent, b.traffic.requests_served) == (2, 4, 1)


async def test_requests_that_cannot_be_answered_are_request_errors() -> None:
    async with swarm() as (_, _clock, (a, b, *_rest)):

        async def refuse(peer_id: str, request: bytes) -> bytes:
            raise RequestRefused("not now")

        async def break_down(peer_id: str, request: bytes) -> bytes:
            raise KeyError(request)

        b.serve("refuse", refuse, max_request_bytes=100)
        b.serve("broken", break_down, max_request_bytes=100)
        for peer_id, protocol, request, max_response_bytes, reason in [
            ("nobody", "echo", b"", 100, "not reachable"),
            ("b", "none", b"", 100, "unknown protocol"),
            ("b", "refuse", b"", 100, "refused: not now"),
            ("b", "broken", b"", 100, "failed: the handler broke"),
            ("b", "echo", bytes(101), 100, "a request must be <= 100 bytes, got 101"),
            ("b", "echo", b"hi", 3, "a response must be <= 3 bytes, got 4"),
        ]:
            with pytest.raises(RequestError, match=reason):
                await a.request(peer_id, protocol, request, max_response_bytes=max_response_bytes, deadline_s=5)
        assert a.traffic.requests_failed == 6


async def test_sixty_four_requests_at_once_are_answered() -> None:
    async with swarm(faults=Faults(delay_s=(0.0, 0.005))) as (_, _clock, (a, *_rest)):
        answers = await asyncio.gather(*(ask(a, "b", b"%d" % number) for number in range(64)))
        assert answers == [b"a:%d" % number for number in range(64)]


async def test_lost_request_fails_at_its_deadline() -> None:
    async with swarm(faults=Faults(loss=1.0)) as (_, _clock, (a, *_rest)):
        with pytest.raises(RequestError, match=r"no answer within 0\.02 s"):
            await ask(a, "b", deadline_s=0.02)


async def test_lost_entries_reach_some_replicas_and_readers_merge() -> None:
    async with swarm(faults=Faults(loss=0.5), seed=3) as (network, clock, (a, b, *_rest)):
        for number in range(20):
            await a.store("key", f"a/{number}", b"x", clock() + 60)
        network.faults = Faults()
        assert len(await b.load("key")) == 20  # the own share is never lost


async def test_duplicated_request_is_handled_twice_and_answered_once() -> None:
    async with swarm(faults=Faults(duplication=1.0)) as (_, clock, (a, b, *_rest)):
        calls = asyncio.Queue[bytes]()

        async def count(peer_id: str, request: bytes) -> bytes:
            calls.put_nowait(request)
            return b""

        b.serve("count", count, max_request_bytes=100)
        assert await a.request("b", "count", b"x", max_response_bytes=0, deadline_s=5) == b""
        assert [await asyncio.wait_for(calls.get(), 5) for _ in range(2)] == [b"x", b"x"]
        assert await a.store("key", "s", b"1", clock() + 60)
        assert await b.load("key") == {"s": b"1"}


async def test_damaged_response_is_noticed_and_damaged_values_are_up_to_the_validator() -> None:
    def validator(name: str) -> IndexValidator:
        return lambda key, subkey, value: UNSIGNED if value == b"value" else None

    async with swarm(faults=Faults(corruption=1.0), validator=validator) as (network, clock, (a, *_rest)):
        with pytest.raises(RequestError, match="damaged"):
            await ask(a, "b")
        assert await a.store("key", "s", b"value", clock() + 60)
        assert await a.load("key") == {}
        network.faults = Faults()
        assert await a.load("key") == {"s": b"value"}


async def test_partition_cuts_sides_off_until_it_heals() -> None:
    async with swarm() as (network, clock, (a, b, c, d)):
        network.partition({"a", "b"}, {"c", "d"})
        assert await a.connected_peers() == ("b",)
        assert await ask(a, "b") == b"a:hi"
        with pytest.raises(RequestError, match="not reachable"):
            await ask(a, "c")
        await a.store("key", "a/0", b"left", clock() + 60)
        await c.store("key", "c/0", b"right", clock() + 60)
        assert (await b.load("key"), await d.load("key")) == ({"a/0": b"left"}, {"c/0": b"right"})
        network.heal()
        assert await b.load("key") == {"a/0": b"left", "c/0": b"right"}
        assert await a.connected_peers() == ("b", "c", "d")


async def test_stopped_node_is_unreachable_and_the_index_survives_it() -> None:
    async with swarm() as (_, clock, (a, b, *_rest)):
        await a.store("key", "a/0", b"1", clock() + 60)
        await a.stop()
        with pytest.raises(RequestError, match="not reachable"):
            await ask(b, "a")
        assert await b.load("key") == {"a/0": b"1"}


async def test_peer_id_is_used_once() -> None:
    async with swarm() as (network, _clock, _nodes):
        with pytest.raises(NetworkError, match="used once"):
            await MemoryTransport(network, "a").start()


async def run_under_faults(seed: int) -> list[object]:
    outcomes: list[object] = []
    faults = Faults(loss=0.2, duplication=0.2, corruption=0.2)
    async with swarm(faults=faults, seed=seed) as (_, clock, nodes):
        for number in range(30):
            node, other = nodes[number % 4], nodes[(number * 7 + 1) % 4]
            outcomes.append(await node.store("key", f"{number}", b"value", clock() + 60))
            outcomes.append(await other.load("key"))
            try:
                outcomes.append(await ask(node, other.peer_id, deadline_s=0.001))
            except RequestError as error:
                outcomes.append(str(error))
        return [*outcomes, *(replace(node.traffic) for node in nodes)]


async def test_equal_seeds_give_equal_faults() -> None:
    first = await run_under_faults(1)
    assert first == await run_under_faults(1)
    assert first != await run_under_faults(2)
    assert sum(isinstance(outcome, bytes) for outcome in first) > 5
    assert sum(isinstance(outcome, str) for outcome in first) > 5


async def test_lines_keep_order_over_losses_and_end_with_either_peer() -> None:
    async def echo_line(line: Line) -> None:
        while True:
            await line.send(await line.receive(100))

    async with swarm(faults=Faults(loss=0.3, delay_s=(0.0, 0.01))) as (network, _, nodes):
        nodes[1].serve_lines("echo", echo_line)
        line = await nodes[0].open_line("b", "echo", deadline_s=30)
        await line.send(*(b"%d" % number for number in range(5)))
        for number in range(5, 20):
            await line.send(b"%d" % number)
        assert [await line.receive(100) for _ in range(20)] == [b"%d" % number for number in range(20)]
        with pytest.raises(RequestError, match="not served"):
            await nodes[0].open_line("b", "unknown", deadline_s=30)
        network.crash("b")
        for failing in (lambda: line.receive(100), lambda: line.send(b"x")):
            with pytest.raises(RequestError) as error:
                await failing()
            assert error.value.reason == "cut"
        with pytest.raises(RequestError, match="not reachable"):
            await nodes[0].open_line("b", "echo", deadline_s=5)
