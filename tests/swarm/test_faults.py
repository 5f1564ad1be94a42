"""Faults in a swarm of light nodes on a virtual clock: honest nodes go on, memory stays bounded, reasons are counted.

What shares and admits is the code of real nodes; only rollouts and network are light.
"""

import contextlib
import hashlib
from dataclasses import replace

import pytest

from swarm.network.memory.gossip import MAX_NEW_PER_HEARTBEAT
from swarm.network.memory.transport import Faults, MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.network.peer_index import MAX_ENTRIES_PER_AUTHOR
from swarm.simulation.light_node import LightNode
from swarm.simulation.simulation import Simulation, SimulationSettings
from tests.swarm import mallory as deeds
from tests.swarm.light_swarm import HARMLESS, NUM_NODES, ROUNDS, all_train_on, in_swarm, trained
from tests.swarm.mallory import Deed, mallory_in


async def trace_of(seed: int) -> str:
    settings = SimulationSettings(NUM_NODES, seed, Faults(0.1, 0.1, 0.01, (0.01, 0.2)), ROUNDS)
    digest = hashlib.sha256()

    def note(what: str, sender: str, recipient: str, num_bytes: int) -> None:
        digest.update(f"{virtual_now():.9f} {what} {sender} {recipient} {num_bytes}\n".encode())

    async with Simulation(settings) as simulation:
        simulation.network.observer = note
        await simulation.start()
        await simulation.let(8)
    digest.update(repr((trained(simulation.nodes), sorted(simulation.rejected().items()))).encode())
    return digest.hexdigest()


def test_one_seed_gives_one_trace() -> None:
    first = run(trace_of(1))
    assert first == run(trace_of(1))
    assert first != run(trace_of(2))


async def assert_headers_reach_everyone(simulation: Simulation, within_s: float = 3.0) -> None:
    """Headers made from now on reach 95 % of their readers in time, each of them."""
    simulation.spread.begin(virtual_now())
    await simulation.let(15)
    times_s = simulation.spread.times_s(0.95, virtual_now() - 5)
    assert len(times_s) > NUM_NODES and max(times_s) < within_s


def transport_of(node: LightNode) -> MemoryTransport:
    assert isinstance(node.transport, MemoryTransport)
    return node.transport


def test_the_first_node_dies_and_newcomers_still_find_everyone() -> None:
    async def scenario(simulation: Simulation) -> None:
        network, nodes = simulation.network, simulation.nodes
        first = nodes.pop(0)
        network.crash(first.peer_id)
        newcomers = [simulation.make_node(NUM_NODES + number) for number in range(4)]
        for node in newcomers:
            await node.start()
        nodes += newcomers
        await all_train_on(simulation, nodes)
        await assert_headers_reach_everyone(simulation)
        assert {node.directory.num_members for node in newcomers} <= {
            len(nodes),
            len(nodes) + 1,
        }  # its list entry lives on
        assert set(simulation.rejected()) <= HARMLESS
        await first.stop()

    in_swarm(scenario)


def test_a_third_of_the_nodes_killed_at_once_and_restarted_later() -> None:
    async def scenario(simulation: Simulation) -> None:
        killed, survivors = simulation.nodes[: NUM_NODES // 3], simulation.nodes[NUM_NODES // 3 :]
        for node in killed:
            simulation.network.crash(node.peer_id)
        simulation.nodes[:] = survivors
        await all_train_on(simulation, survivors)
        await assert_headers_reach_everyone(simulation)
        restarted = [simulation.make_node(number) for number in range(len(killed))]
        for node in restarted:
            await node.start()
        simulation.nodes += restarted
        await all_train_on(simulation, simulation.nodes)
        assert set(simulation.rejected()) <= HARMLESS
        for node in killed:
            await node.stop()

    in_swarm(scenario)


def test_partition_for_a_minute_and_healing() -> None:
    async def scenario(simulation: Simulation) -> None:
        left, right = simulation.nodes[::2], simulation.nodes[1::2]
        simulation.network.partition([n.peer_id for n in left], [n.peer_id for n in right])
        crossed: list[str] = []
        sides = {node.peer_id: number % 2 for number, node in enumerate(simulation.nodes)}

        def note(what: str, sender: str, recipient: str, num_bytes: int) -> None:
            if sides[sender] != sides[recipient]:
                crossed.append(what)

        simulation.network.observer = note
        await all_train_on(simulation, simulation.nodes, 60)
        assert crossed == []
        simulation.network.heal()
        await simulation.let(15)
        assert crossed
        await assert_headers_reach_everyone(simulation)
        assert set(simulation.rejected()) <= HARMLESS

    in_swarm(scenario)


@pytest.mark.parametrize(
    "faults",
    [Faults(loss=0.2, delay_s=(0.2, 0.2)), Faults(duplication=0.5, delay_s=(0.01, 0.3))],
    ids=["lossy", "duplicating"],
)
def test_bad_lines(faults: Faults) -> None:
    async def scenario(simulation: Simulation) -> None:
        simulation.spread.begin(virtual_now())
        await all_train_on(simulation, simulation.nodes, 30)
        assert simulation.spread.coverage(virtual_now() - 10) > 0.99
        assert set(simulation.rejected()) <= HARMLESS

    in_swarm(scenario, faults)


def test_frozen_nodes_and_wrong_clocks_harm_nobody_else() -> None:
    async def scenario(simulation: Simulation) -> None:
        network, nodes = simulation.network, simulation.nodes
        network.freeze(nodes[0].peer_id)
        network.skew_clock(nodes[1].peer_id, 5.0)
        network.skew_clock(nodes[2].peer_id, 3600.0)
        network.limit_uplink(nodes[3].peer_id, 20_000.0)
        await all_train_on(simulation, [nodes[1], *nodes[4:]], 40)
        assert simulation.rejected()["clock_skew"] > 0
        network.thaw(nodes[0].peer_id)
        await all_train_on(simulation, [nodes[0]], 60)

    in_swarm(scenario)


@pytest.mark.essential
@pytest.mark.parametrize(
    "reason_of",
    [
        {
            deeds.garbage: "malformed",
            deeds.forgery: "bad_signature",
            deeds.future: "clock_skew",
            deeds.compression_bomb: "oversize",
            deeds.wrong_hash: "wrong_hash",
            deeds.silence: "unavailable",
        },
        {deeds.garbage_body: "malformed", deeds.oversize_body: "unavailable", deeds.false_reward: "reward_mismatch"},
    ],
    ids=["headers, hashes and silence", "bodies"],
)
def test_hostile_peers_are_counted_and_the_others_train_on(reason_of: dict[Deed, str]) -> None:
    """One peer for each deed: no two deeds in a swarm have the same reason, so that each is seen to be counted for its own."""

    async def scenario(simulation: Simulation) -> None:
        async with contextlib.AsyncExitStack() as stack:
            hostile = [
                (deed, await stack.enter_async_context(mallory_in(simulation, number)))
                for number, deed in enumerate(reason_of)
            ]
            before, reasons = trained(simulation.nodes), set(reason_of.values())
            for _ in range(100):
                for deed, mallory in hostile:
                    await deed(mallory)
                await simulation.let(0.2)
            assert reasons <= set(simulation.rejected())
            assert set(simulation.rejected()) <= reasons | HARMLESS | {"banned"}
            assert all(now > then for now, then in zip(trained(simulation.nodes), before, strict=True))
            await assert_headers_reach_everyone(simulation)

    in_swarm(scenario)


def test_oversize_messages_are_dropped_at_the_first_hop_and_their_sender_is_no_longer_heard() -> None:
    async def scenario(simulation: Simulation) -> None:
        async with mallory_in(simulation) as mallory:
            for _ in range(20):
                await deeds.oversize_message(mallory)
                await simulation.let(0.2)
            routers = [transport_of(node).gossip for node in simulation.nodes]
            assert all(10 <= router.num_rejected < 20 for router in routers)
            assert all(mallory.identity.peer_id not in router.mesh(deeds.TOPIC) for router in routers)
            await all_train_on(simulation, simulation.nodes)

    in_swarm(scenario)


def test_an_author_cannot_fill_the_index() -> None:
    async def scenario(simulation: Simulation) -> None:
        async with mallory_in(simulation) as mallory:
            for _ in range(30):
                await deeds.index_flood(mallory)
            shares = [transport_of(node).index_share for node in simulation.nodes]
            assert all(len(share) < MAX_ENTRIES_PER_AUTHOR + 500 for share in shares)
            assert sum(share.refused["author_full"] + share.refused["evicted"] for share in shares) > 1000
            await all_train_on(simulation, simulation.nodes)

    in_swarm(scenario)


def test_ten_thousand_headers_per_second_of_one_author() -> None:
    async def scenario(simulation: Simulation) -> None:
        async with mallory_in(simulation) as mallory:
            before = trained(simulation.nodes)
            header, _ = mallory.honest()
            for number in range(10_000):
                nonce = hashlib.sha256(b"%d" % number).digest()
                await mallory.transport.publish(deeds.TOPIC, mallory.signed(replace(header, body_hash=nonce)))
                if number % 100 == 99:
                    await simulation.let(0.01)
            await simulation.let(10)
            assert simulation.rejected()["rate"] > 100
            dropped = [transport_of(node).gossip.num_dropped for node in simulation.nodes]
            assert sum(dropped) > 10_000 - 4 * MAX_NEW_PER_HEARTBEAT
            assert all(now > then for now, then in zip(trained(simulation.nodes), before, strict=True))

    in_swarm(scenario)
