"""A final merge over the in-memory network on a virtual clock; an adapter is what share of whose start is in it."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from swarm.errors import RequestError
from swarm.merging.exchange.final_list import (
    FINAL_PROTOCOL,
    MAX_MESSAGE_BYTES,
    MeetRequest,
    decode_answer,
    next_boundary,
)
from swarm.merging.exchange.final_meeting import FinalMeeting
from swarm.merging.exchange.proposal import Declined
from swarm.merging.final_merge import meetings_of, num_windows, parts_of
from swarm.network.context import NodeContext
from swarm.network.memory.transport import Faults, MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import run
from swarm.records.identity import Identity
from swarm.records.signing import verified_by
from swarm.sharing.index import EntryValidator
from swarm.simulation.signature_cache import SignatureCache
from swarm.simulation.simulation import INTERNET
from swarm.types import Appointment, Seats, Snapshot
from tests.swarm.merge_swarm import network_of
from tests.unit.experience_factory import LINEAGE, SWARM_ID

INTERVAL_S, WINDOW_S = 120.0, 20.0


class FinalNode:
    def __init__(self, network: MemoryNetwork, number: int, count: int, cache: SignatureCache) -> None:
        identity = Identity(number.to_bytes(32, "big"))
        is_valid = cache.validator(EntryValidator(SWARM_ID))
        self.transport = MemoryTransport(network, identity.peer_id, is_valid, request_timeout_s=5.0)
        rng = random.Random(number)
        context = NodeContext.of(identity, SWARM_ID, self.transport)
        self.meeting = FinalMeeting(context, rng, interval_s=INTERVAL_S, window_s=WINDOW_S, request_timeout_s=3.0)
        self.peer_id = identity.peer_id
        self.shares = np.eye(count)[number]
        self.weight = 1
        self.seats: Seats | None = None
        self.reasons: Counter[str] = Counter()
        self.is_silent = False
        """Listed, and then gone."""

    def snapshot(self, **changes: Any) -> Snapshot:
        fields = {"lineage": LINEAGE.policy, "precision": "bf16", "outer_round": 0, "policy_version": 0}
        return Snapshot(**(fields | changes), payload=self.shares.tobytes())  # type: ignore[arg-type]

    async def gather(self, **changes: Any) -> Seats:
        self.seats = await asyncio.wrap_future(self.meeting.gather(self.snapshot(**changes)))
        return self.seats

    async def merge(self, **changes: Any) -> None:
        seats = await self.gather(**changes)
        for meeting in meetings_of(seats.own_place, len(seats.peer_ids)) if not self.is_silent else ():
            appointment = Appointment(
                meeting.window,
                seats.peer_ids[meeting.place],
                meeting.gives,
                meeting.takes,
                self.weight,
                self.snapshot(),
            )
            met = await asyncio.wrap_future(self.meeting.meet(appointment))
            self.reasons[met.reason] += 1
            if met.partner is not None:
                assert met.weight <= meeting.max_weight
                parts = parts_of(self.weight, met.weight)
                theirs = np.frombuffer(met.partner.snapshot.payload)
                self.shares, self.weight = parts.own * self.shares + parts.other * theirs, parts.weight


@contextlib.asynccontextmanager
async def final_nodes(network: MemoryNetwork, count: int) -> AsyncIterator[list[FinalNode]]:
    cache = SignatureCache()
    nodes = [FinalNode(network, number, count, cache) for number in range(count)]
    with verified_by(cache.verify):
        for node in nodes:
            await node.transport.start()
        working = [asyncio.create_task(node.meeting.work()) for node in nodes]
        await asyncio.sleep(0)
        try:
            yield nodes
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            for node in nodes:
                await node.transport.stop()


def in_final_swarm(
    count: int,
    scenario: Callable[[list[FinalNode], MemoryNetwork], Coroutine[Any, Any, None]],
    faults: Faults = INTERNET,
) -> None:
    async def main() -> None:
        network = network_of(0, faults)
        async with final_nodes(network, count) as nodes:
            await scenario(nodes, network)

    run(main())


async def merge_all(nodes: list[FinalNode]) -> float:
    """Seconds that it took, from lists to results. They come a few seconds apart, all before one boundary."""
    now = nodes[0].transport.now()
    await asyncio.sleep(next_boundary(now, INTERVAL_S) - now)  # none is half over

    async def one(number: int, node: FinalNode) -> None:
        await asyncio.sleep(3.0 * number)
        await node.merge()

    began_at = asyncio.get_running_loop().time()
    await asyncio.gather(*(one(number, node) for number, node in enumerate(nodes)))
    return asyncio.get_running_loop().time() - began_at


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_all_answer_and_everybody_has_something_of_all_in_a_moment(count: int) -> None:
    async def scenario(nodes: list[FinalNode], network: MemoryNetwork) -> None:
        took_s = await merge_all(nodes)
        for node in nodes:
            np.testing.assert_allclose(node.shares.sum(), 1.0, atol=1e-12)
            assert (node.shares > 0).all() and node.shares.max() <= 0.7
            if count & (count - 1) == 0:  # no passengers
                np.testing.assert_allclose(node.shares, 1 / count, atol=1e-12)
            assert set(node.reasons) == {""}
        assert took_s < INTERVAL_S + WINDOW_S, "nobody waits for the end of a window"

    in_final_swarm(count, scenario)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_a_silent_member_costs_its_own_exchanges_and_a_bounded_time(count: int) -> None:
    async def scenario(nodes: list[FinalNode], network: MemoryNetwork) -> None:
        nodes[-1].is_silent = True
        took_s = await merge_all(nodes)
        assert took_s <= INTERVAL_S + num_windows(count) * WINDOW_S + 1
        for node in nodes[:-1]:
            assert node.shares[count - 1] == 0.0
            np.testing.assert_allclose(node.shares.sum(), 1.0, atol=1e-12)
        if count == 8:  # one in each of three windows meets the silent one; the mean of four at least is everywhere
            assert min(np.count_nonzero(node.shares) for node in nodes[:-1]) >= 4

    in_final_swarm(count, scenario)


def test_nobody_there_is_known_at_the_boundary() -> None:
    async def scenario(nodes: list[FinalNode], network: MemoryNetwork) -> None:
        assert await merge_all(nodes) < INTERVAL_S + 5
        assert nodes[0].seats == Seats((nodes[0].peer_id,), 0)

    in_final_swarm(1, scenario)


@pytest.mark.parametrize("changes", [{"lineage": "33" * 16}, {"precision": "int8"}])
def test_other_adapters_merge_among_themselves(changes: dict[str, str]) -> None:
    async def scenario(nodes: list[FinalNode], network: MemoryNetwork) -> None:
        await asyncio.gather(*(node.merge(**(changes if number % 2 else {})) for number, node in enumerate(nodes)))
        for number, node in enumerate(nodes):
            np.testing.assert_allclose(node.shares, [0.5 * (other % 2 == number % 2) for other in range(4)])

    in_final_swarm(4, scenario)


def test_late_comer_is_in_the_next_one() -> None:
    async def scenario(nodes: list[FinalNode], network: MemoryNetwork) -> None:
        now = nodes[0].transport.now()
        merging = asyncio.create_task(merge_all(nodes[:2]))
        await asyncio.sleep(next_boundary(now, INTERVAL_S) - now + 0.95 * INTERVAL_S)
        await nodes[2].merge()
        await merging
        assert nodes[2].seats == Seats((nodes[2].peer_id,), 0)
        assert [len(node.seats.peer_ids) for node in nodes[:2] if node.seats] == [2, 2]

    in_final_swarm(3, scenario)


def test_nodes_that_read_different_lists_decline_each_other_at_once() -> None:
    async def scenario(nodes: list[FinalNode], network: MemoryNetwork) -> None:
        load = nodes[0].transport.load

        async def without_the_last(key: str) -> dict[str, bytes]:
            return {name: value for name, value in (await load(key)).items() if name != nodes[-1].peer_id}

        nodes[0].transport.load = without_the_last  # type: ignore[method-assign]
        took_s = await merge_all(nodes)
        assert nodes[0].shares[0] == 1.0 and nodes[0].reasons["list"] >= 1
        for node in nodes[1:]:
            np.testing.assert_allclose(node.shares.sum(), 1.0)
            assert node.shares[0] == 0.0
        assert took_s < INTERVAL_S + num_windows(4) * WINDOW_S + 1

    in_final_swarm(4, scenario)


def test_member_that_shows_another_adapter_than_the_one_it_listed_is_left() -> None:
    """With one replica in it, an adapter is the one that the signed offer of the list names, the same for all."""

    async def scenario(nodes: list[FinalNode], network: MemoryNetwork) -> None:
        liar, gather = nodes[-1], nodes[-1].gather

        async def gather_and_change() -> Seats:
            seats = await gather()
            liar.shares = liar.shares * 3.0
            return seats

        liar.gather = gather_and_change  # type: ignore[method-assign]
        await merge_all(nodes)
        for node in nodes[:-1]:
            assert node.shares[-1] <= 0.5 and node.shares.sum() == pytest.approx(1.0)
        assert sum(node.reasons["other"] for node in nodes[:-1]) == 1

    in_final_swarm(2, scenario)


@pytest.mark.parametrize(
    "faults",
    [Faults(loss=0.1, delay_s=(0.02, 0.2)), Faults(corruption=0.1, delay_s=(0.02, 0.2)), Faults(delay_s=(0.3, 1.2))],
    ids=["lossy", "corrupting", "slow"],
)
def test_bad_lines_leave_means_of_many(faults: Faults) -> None:
    async def scenario(nodes: list[FinalNode], network: MemoryNetwork) -> None:
        await merge_all(nodes)
        for node in nodes:
            assert (node.shares >= 0).all()
            np.testing.assert_allclose(node.shares.sum(), 1.0)
        assert np.mean([np.count_nonzero(node.shares) for node in nodes]) >= 6

    in_final_swarm(8, scenario, faults)


def test_strangers_get_no_adapter_and_noise_no_answer_but_a_reason() -> None:
    async def scenario(nodes: list[FinalNode], network: MemoryNetwork) -> None:
        one, other, stranger = nodes
        merging = asyncio.create_task(merge_all([one, other]))
        await asyncio.sleep(10)
        other.is_silent = True  # so that the exchange of the first one stays open

        async def ask(request: bytes) -> str:
            answer = await stranger.transport.request(
                one.peer_id, FINAL_PROTOCOL, request, max_response_bytes=MAX_MESSAGE_BYTES, deadline_s=3.0
            )
            decoded = decode_answer(answer)
            assert isinstance(decoded, Declined)
            return decoded.reason

        while one.seats is None:
            assert await ask(b"\xff" * 20) == "invalid"
            await asyncio.sleep(5)
        await asyncio.sleep(10)
        assembly = one.meeting._assembly
        assert assembly is not None
        said = [
            await ask(MeetRequest(merge_id, 1, bytes(32), 1).encode()) for merge_id in (assembly.merge_id, bytes(16))
        ]
        assert said == ["place", "list"]
        said = [await ask(MeetRequest(assembly.merge_id, window, bytes(32), 1).encode()) for window in (0, 2)]
        assert said == ["over", "wait"]
        assert [await ask(b"") for _ in range(4)][-1] == "rate"
        with pytest.raises(RequestError, match="bytes"):
            await ask(bytes(MAX_MESSAGE_BYTES + 1))
        await merging
        assert one.shares[0] == 1.0

    in_final_swarm(3, scenario)


def test_work_that_ends_answers_whoever_waits() -> None:
    async def scenario(nodes: list[FinalNode], network: MemoryNetwork) -> None:
        late = FinalNode(network, 9, 10, SignatureCache())
        assert late.meeting.gather(late.snapshot()).result(0) == Seats((late.peer_id,), 0)
        waiting = nodes[0].meeting.gather(nodes[0].snapshot())
        await asyncio.sleep(1)
        assert not waiting.done() and not waiting.cancel()
        futures.append(waiting)

    futures: list[Any] = []
    in_final_swarm(1, scenario)
    assert len(futures[0].result(0).peer_ids) == 1
