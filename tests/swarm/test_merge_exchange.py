"""Nodes find partners and exchange adapters with nobody in charge: no deadlock, no lock-step, no favourite."""

import asyncio
import itertools
import random
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from swarm.merging.exchange.proposal import MAX_LAG_ROUNDS
from swarm.merging.exchange.ready_list import CATCH_UP_TO
from swarm.merging.exchange.recent_partners import MergeTimeouts
from swarm.network.memory.network import MemoryNetwork
from swarm.network.memory.transport import Faults
from swarm.types import Alone, Outcome, Partner, Snapshot
from tests.swarm.merge_swarm import PIECES, SMALL, TIMEOUTS, MergeNode, in_merge_swarm, named, tell
from tests.unit.experience_factory import LINEAGE


async def live(node: MergeNode, num_offers: int, inner_s: float, unevenness: float) -> None:
    """Inner steps, an offer, inner steps … at a pace of the node's own: the steps do not wait for the outcome."""
    rng = random.Random(1000 + node.number)
    pace_s = inner_s * rng.uniform(1 - unevenness, 1 + unevenness)
    await asyncio.sleep(rng.uniform(0, inner_s))
    offers = []
    for _ in range(num_offers):
        offers.append(asyncio.create_task(node.offer()))
        await asyncio.sleep(pace_s * rng.uniform(0.98, 1.02))
    await asyncio.gather(*offers)


async def live_together(
    nodes: list[MergeNode], num_offers: int, *, inner_s: float = TIMEOUTS.search_s, unevenness: float = 0.2
) -> None:
    await asyncio.gather(*(live(node, num_offers, inner_s, unevenness) for node in nodes))


def test_two_nodes_exchange_what_the_other_offered() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        one, other = nodes
        outcomes = await asyncio.gather(one.offer(PIECES, policy_version=7), other.offer(PIECES, outer_round=3))
        mine = Snapshot(LINEAGE.policy, "bf16", 0, 7, one.payload(PIECES))
        theirs = Snapshot(LINEAGE.policy, "bf16", 3, 0, other.payload(PIECES))
        assert all(isinstance(outcome, Partner) for outcome in outcomes)
        found = [(outcome.peer_id, outcome.snapshot) for outcome in outcomes if isinstance(outcome, Partner)]
        assert found == [(other.peer_id, theirs), (one.peer_id, mine)]

    in_merge_swarm(2, scenario)


def test_node_far_behind_finds_a_partner_once_it_has_seen_where_the_others_are() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        ahead, behind = nodes
        ahead.outer_round = 100
        assert await asyncio.gather(ahead.offer(), behind.offer()) == [Alone("nobody")] * 2
        for _ in range(3):
            outcome, theirs = await asyncio.gather(ahead.offer(), behind.offer())
            assert isinstance(outcome, Partner) and isinstance(theirs, Partner)
            assert theirs.snapshot.outer_round - outcome.snapshot.outer_round in (CATCH_UP_TO, CATCH_UP_TO + 1)

    in_merge_swarm(2, scenario)


@pytest.mark.parametrize("seed", range(8))
def test_nodes_that_begin_at_the_same_instant_pair_up(seed: int) -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        began_at = asyncio.get_running_loop().time()
        for _ in range(3):
            outcomes = await asyncio.gather(*(node.offer() for node in nodes))
            for node, outcome in zip(nodes, outcomes, strict=True):
                assert isinstance(outcome, Partner)
                assert named(nodes, outcome.peer_id).partners[node.peer_id] > 0  # both have each other
        assert asyncio.get_running_loop().time() - began_at < 3 * TIMEOUTS.search_s

    in_merge_swarm(8, scenario, seed=seed)


def test_partners_are_drawn_evenly_and_few_stay_alone() -> None:
    num_offers = 40

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        await live_together(nodes, num_offers)
        told = tell(nodes)
        assert told["merged"] > 0.9 * len(nodes) * num_offers, told
        pairs = [one.partners[other.peer_id] for one, other in itertools.combinations(nodes, 2)]
        mean = sum(pairs) / len(pairs)
        chi_squared = sum((count - mean) ** 2 for count in pairs) / mean
        assert chi_squared < 55.5, pairs  # of 28 pairs, 27 degrees of freedom: less in 999 of 1000 uniform draws

    in_merge_swarm(8, scenario)


@pytest.mark.parametrize(("count", "inner_s"), [(2, 240.0), (4, 1200.0)])
def test_searches_last_as_long_as_outer_rounds_so_that_few_nodes_with_long_ones_meet(
    count: int, inner_s: float
) -> None:
    num_offers = 20

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        await live_together(nodes, num_offers, inner_s=inner_s)
        # each node's first search is a short one, and so is that of which nobody knew how long it would have to be
        assert tell(nodes)["merged"] >= (num_offers - 2) * count, tell(nodes)

    in_merge_swarm(count, scenario, timeouts=MergeTimeouts(request_timeout_s=3.0))


@pytest.mark.parametrize(
    ("fixed_s", "interval_s", "search_s"),
    [(0.0, 0.0, 30.0), (0.0, 20.0, 30.0), (0.0, 200.0, 180.0), (0.0, 1e6, 3000.0), (7.0, 200.0, 7.0)],
)
def test_length_of_a_search(fixed_s: float, interval_s: float, search_s: float) -> None:
    assert MergeTimeouts(search_s=fixed_s).search_after(interval_s) == pytest.approx(search_s)


def test_nodes_of_one_pace_do_not_meet_the_same_neighbour_for_ever() -> None:
    num_offers = 30

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        await live_together(nodes, num_offers, unevenness=0.0)
        assert tell(nodes)["merged"] > 0.9 * len(nodes) * num_offers
        for node in nodes:
            assert max(node.partners.values()) < num_offers / 3 and len(node.partners) >= 5, node.partners

    in_merge_swarm(8, scenario)


def test_sixty_four_nodes_mix_without_rounds_of_their_own() -> None:
    num_offers = 4

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        await live_together(nodes, num_offers, unevenness=0.5)
        told = tell(nodes)
        assert told.total() == len(nodes) * num_offers
        assert told["merged"] > 0.9 * told.total(), told
        repeated = sum(count - 1 for node in nodes for count in node.partners.values())
        assert repeated < 0.1 * told["merged"]  # by chance alone some 3 %
        rounds = [node.outer_round for node in nodes]
        assert min(rounds) == max(rounds) == num_offers

    in_merge_swarm(64, scenario)


def test_same_seed_same_partners() -> None:
    traces: list[list[tuple[str, int]]] = []

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        await live_together(nodes, 5)
        traces.append([item for node in nodes for item in sorted(node.partners.items())])

    for seed in (1, 1, 2):
        in_merge_swarm(8, scenario, seed=seed)
    assert traces[0] == traces[1] != traces[2]


@pytest.mark.parametrize(
    "faults",
    [
        Faults(loss=0.1, delay_s=(0.02, 0.2)),
        Faults(duplication=0.3, delay_s=(0.02, 0.2)),
        Faults(corruption=0.1, delay_s=(0.02, 0.2)),
        Faults(delay_s=(0.3, 1.2)),
    ],
    ids=["lossy", "duplicating", "corrupting", "slow"],
)
def test_bad_lines_cost_solo_steps_and_no_more(faults: Faults) -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        await live_together(nodes, 10)
        told = tell(nodes)
        assert told.total() == 80
        assert told["merged"] > 40, told

    in_merge_swarm(8, scenario, faults=faults)


def test_a_node_alone_knows_it_in_time() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        began_at = asyncio.get_running_loop().time()
        assert await nodes[0].offer() == Alone("nobody")
        assert asyncio.get_running_loop().time() - began_at <= TIMEOUTS.search_s + 1.0

    in_merge_swarm(1, scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lineage": "33" * 16}, "nobody"),
        ({"precision": "int8"}, "nobody"),
        ({"num_bytes": SMALL + 1}, "nobody"),
        ({"outer_round": MAX_LAG_ROUNDS + 1}, "nobody"),
        ({"outer_round": MAX_LAG_ROUNDS}, None),
    ],
)
def test_only_what_can_be_merged_is_merged(changes: dict[str, object], reason: str | None) -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        one, other = await asyncio.gather(nodes[0].offer(), nodes[1].offer(**changes))  # type: ignore[arg-type]
        told = {outcome.reason if isinstance(outcome, Alone) else None for outcome in (one, other)}
        assert told == {reason}

    in_merge_swarm(2, scenario)


def test_three_nodes_leave_one_alone_and_none_waiting() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        outcomes = await asyncio.gather(*(node.offer() for node in nodes))
        assert sorted(isinstance(outcome, Partner) for outcome in outcomes) == [False, True, True]
        assert tell(nodes)["declined"] == 1

    in_merge_swarm(3, scenario)


def test_newer_snapshot_waits_until_a_partner_with_a_slow_line_has_the_one_before() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        quick, slow = nodes
        network.limit_uplink(slow.peer_id, 1e9)
        network.limit_uplink(quick.peer_id, 2e6)  # the other one has its adapter in six seconds
        theirs = asyncio.create_task(slow.offer(6 * PIECES))
        assert isinstance(await quick.offer(6 * PIECES), Partner) and not theirs.done()
        newer = asyncio.create_task(quick.offer(SMALL))
        assert isinstance(await theirs, Partner)
        assert await newer == Alone("nobody")

    in_merge_swarm(2, scenario)


def test_newer_snapshot_ends_the_search_for_the_one_before() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        one, other = nodes
        old = asyncio.create_task(one.offer(policy_version=1))
        await asyncio.sleep(5)
        new = asyncio.create_task(one.offer(policy_version=2))
        newest = asyncio.create_task(one.offer(policy_version=3))
        assert await old == Alone("replaced")
        assert await new == Alone("replaced")
        met = await other.offer()
        assert isinstance(met, Partner) and met.snapshot.policy_version == 3
        assert isinstance(await newest, Partner)

    in_merge_swarm(2, scenario)


def test_offers_of_an_exchange_that_does_not_run_are_over_at_once() -> None:
    outcomes: list[Future[Outcome]] = []
    snapshot = Snapshot(LINEAGE.policy, "bf16", 0, 0, b"adapter")

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        outcomes.append(nodes[0].exchange.offer(snapshot))
        await asyncio.sleep(1)
        late = MergeNode(network, 9, cache=_NoCache())  # type: ignore[arg-type]
        assert late.exchange.offer(snapshot).result(0) == Alone("stopped")

    in_merge_swarm(1, scenario)
    assert outcomes[0].result(0) == Alone("stopped")


class _NoCache:
    @staticmethod
    def validator(validate: object) -> object:
        return validate


def test_any_thread_may_offer() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        one, other = nodes
        snapshot = Snapshot(LINEAGE.policy, "bf16", 0, 0, one.payload())
        futures: list[Future[Outcome]] = []
        thread = threading.Thread(target=lambda: futures.append(one.exchange.offer(snapshot)))
        thread.start()
        thread.join()
        assert isinstance(await other.offer(), Partner)
        assert isinstance(await asyncio.wrap_future(futures[0]), Partner)

    in_merge_swarm(2, scenario)


def test_nobody_can_cancel_an_offer_under_way() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        one, other = nodes
        future = one.exchange.offer(Snapshot(LINEAGE.policy, "bf16", 0, 0, one.payload()))
        assert not future.cancel()
        waiting = asyncio.wrap_future(future)
        waiting.cancel()
        assert isinstance(await other.offer(), Partner)
        assert isinstance(future.result(), Partner)

    in_merge_swarm(2, scenario)


@pytest.mark.parametrize("changes", [{"payload": b""}, {"precision": "x" * 17}])
def test_what_cannot_be_offered_is_a_mistake_of_the_caller(changes: dict[str, Any]) -> None:
    fields = {"lineage": LINEAGE.policy, "precision": "bf16", "outer_round": 0, "policy_version": 0, "payload": b"x"}
    with pytest.raises(ValueError, match="must have"):
        Snapshot(**(fields | changes))


def test_own_adapter_is_let_go_when_the_partner_has_it_or_the_time_is_over() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        one, other = nodes
        await asyncio.gather(one.offer(PIECES), other.offer(PIECES))
        await asyncio.sleep(1)
        assert one.exchange._own is None and other.exchange._own is None
        offers = asyncio.create_task(one.offer()), asyncio.create_task(other.offer())
        ended, _ = await asyncio.wait(offers, return_when=asyncio.FIRST_COMPLETED)
        first = offers[1] in ended
        network.crash(nodes[first].peer_id)  # has what it wanted, and will not say so
        survivor = nodes[not first]
        await offers[not first]
        assert survivor.exchange._own is not None
        await asyncio.sleep(TIMEOUTS.transfer_s(SMALL))
        assert survivor.exchange._own is None

    in_merge_swarm(2, scenario, seed=1)  # with 0 the survivor is declined a moment before the crash


def test_slow_line_costs_a_solo_step_in_time() -> None:
    """On both sides here: what the slow node asks waits behind what it sends."""

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        one, other = nodes
        network.limit_uplink(other.peer_id, 20_000.0)
        began_at = asyncio.get_running_loop().time()
        assert await asyncio.gather(one.offer(PIECES), other.offer(PIECES)) == [Alone("deadline")] * 2
        assert asyncio.get_running_loop().time() - began_at < one.exchange.time_limit_s(PIECES)

    in_merge_swarm(2, scenario, timeouts=replace(TIMEOUTS, min_bytes_per_s=60_000.0))
