"""The in-memory gossip spreads like GossipSub: through meshes, after validation, repaired where messages were lost."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from swarm.network.gossip import NODE_DEGREE
from swarm.network.memory.gossip import (
    IGNORE_SCORE,
    MAX_NEW_PER_HEARTBEAT,
    PRUNE_SCORE,
    GossipRouter,
)
from swarm.network.memory.mesh import MAX_TOPIC_PEERS, GossipMessage
from swarm.network.memory.transport import NO_FAULTS, Faults, MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.network.transport import MAX_GOSSIP_BYTES, ValidationResult

TOPIC = "swarm/topic"


class Member:
    """A node that takes what begins with `good`, rejects what begins with `bad` and ignores the rest."""

    def __init__(self, network: MemoryNetwork, name: str, subscribed: bool = True) -> None:
        self.transport = MemoryTransport(network, name)
        self.got: list[bytes] = []
        self.forwarders: list[str] = []
        if subscribed:
            self.transport.subscribe(TOPIC, self.handle)

    def handle(self, sender: str, data: bytes) -> ValidationResult:
        self.forwarders.append(sender)
        if data.startswith(b"bad"):
            return ValidationResult.REJECT
        if not data.startswith(b"good"):
            return ValidationResult.IGNORE
        self.got.append(data)
        return ValidationResult.ACCEPT


Scenario = Callable[[MemoryNetwork, list[Member]], Awaitable[None]]


def in_swarm(size: int, scenario: Scenario, faults: Faults = NO_FAULTS, seed: int = 0) -> None:
    """Run `scenario` in a swarm that has settled for five seconds."""

    async def main() -> None:
        network = MemoryNetwork(random.Random(seed), virtual_now, faults or Faults(delay_s=(0.01, 0.1)))
        members = [Member(network, f"peer-{number}") for number in range(size)]
        for member in members:
            await member.transport.start()
        await asyncio.sleep(5)
        await scenario(network, members)
        for member in members:
            await member.transport.stop()

    run(main())


@pytest.mark.parametrize("size", [2, 3, 8, 100])
def test_a_message_reaches_every_subscriber_once_and_not_its_author(size: int) -> None:
    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        await members[0].transport.publish(TOPIC, b"good")
        await asyncio.sleep(2)
        assert [member.got for member in members] == [[], *([[b"good"]] * (size - 1))]

    in_swarm(size, scenario)


def test_meshes_stay_within_their_bounds_and_cost_does_not_grow_with_the_swarm() -> None:
    sent: list[float] = []

    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        degrees = [len(member.transport.gossip.mesh(TOPIC)) for member in members]
        assert NODE_DEGREE.low <= min(degrees) <= max(degrees) <= NODE_DEGREE.high
        before = sum(member.transport.traffic.gossip_bytes_sent for member in members)
        for number in range(5):
            await members[number].transport.publish(TOPIC, b"good" + bytes([number]) * 300)
        await asyncio.sleep(0.9)
        after = sum(member.transport.traffic.gossip_bytes_sent for member in members)
        received = sum(member.transport.traffic.gossip_bytes_received for member in members)
        assert 0.99 * after < received <= after  # a few words are under way
        sent.append((after - before) / len(members))

    in_swarm(50, scenario)
    in_swarm(400, scenario)
    assert sent[1] < 1.25 * sent[0]


def test_a_node_outside_a_topic_can_publish_to_it() -> None:
    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        outsider = Member(network, "outsider", subscribed=False)
        await outsider.transport.start()
        await outsider.transport.publish(TOPIC, b"good")
        await asyncio.sleep(2)
        assert all(member.got == [b"good"] for member in members)
        assert outsider.got == []
        await outsider.transport.stop()

    in_swarm(20, scenario)


def test_leaving_a_topic_ends_delivery_and_the_others_close_the_gap() -> None:
    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        for member in members[:10]:
            member.transport.unsubscribe(TOPIC)
        await asyncio.sleep(3)
        await members[-1].transport.publish(TOPIC, b"good")
        await asyncio.sleep(3)
        assert [len(member.got) for member in members] == [0] * 10 + [1] * 9 + [0]

    in_swarm(20, scenario)


def test_an_invalid_message_goes_no_further_and_costs_its_forwarder_the_mesh_and_then_the_hearing() -> None:
    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        mallory = members[0]
        victims = [m for m in members if m.transport.peer_id in mallory.transport.gossip.mesh(TOPIC)]
        for number in range(20):
            await mallory.transport.publish(TOPIC, b"bad %d" % number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert {name for member in members for name in member.forwarders} == {"peer-0"}
        for victim in victims:
            gossip = victim.transport.gossip
            assert IGNORE_SCORE - 1 <= gossip.score("peer-0") < PRUNE_SCORE
            assert "peer-0" not in gossip.mesh(TOPIC)
            assert gossip.num_rejected == len(victim.forwarders) < 14

    in_swarm(30, scenario)


def test_an_ignored_message_is_nobodys_fault() -> None:
    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        for number in range(20):
            await members[0].transport.publish(TOPIC, b"other %d" % number)
        await asyncio.sleep(2)
        assert all(member.transport.gossip.score("peer-0") == 0 for member in members)
        assert {name for member in members for name in member.forwarders} == {"peer-0"}

    in_swarm(30, scenario)


def test_lost_messages_are_repaired() -> None:
    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        for number in range(20):
            await members[number].transport.publish(TOPIC, b"good %d" % number)
        await asyncio.sleep(6)
        assert sum(len(member.got) for member in members) >= 0.99 * 20 * (len(members) - 1)

    in_swarm(60, scenario, Faults(loss=0.3, delay_s=(0.01, 0.1)))


def test_a_broken_handler_costs_its_message_only() -> None:
    def break_down(sender: str, data: bytes) -> ValidationResult:
        raise KeyError(data)

    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        members[1].transport.subscribe(TOPIC, break_down)
        for number in range(3):
            await members[0].transport.publish(TOPIC, b"good %d" % number)
        await asyncio.sleep(2)
        assert len(members[2].got) == 3

    in_swarm(10, scenario)


def test_oversize_messages_are_a_mistake_of_the_caller_and_a_fault_of_a_peer() -> None:
    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        with pytest.raises(ValueError, match=f"{MAX_GOSSIP_BYTES} bytes, got {MAX_GOSSIP_BYTES + 1}"):
            await members[0].transport.publish(TOPIC, bytes(MAX_GOSSIP_BYTES + 1))
        forged = GossipMessage.of(TOPIC, b"good" + bytes(MAX_GOSSIP_BYTES))
        network.post("peer-0", "peer-1", forged.num_bytes, GossipRouter.on_message, forged, 1)
        await asyncio.sleep(0.2)
        assert members[1].got == []
        assert members[1].transport.gossip.num_rejected == 1

    in_swarm(2, scenario)


def test_a_flood_is_cut_off_and_what_is_remembered_stays_bounded() -> None:
    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        for number in range(10_000):
            await members[0].transport.publish(TOPIC, b"good %d" % number)
        await asyncio.sleep(0.95)
        for member in members[1:]:
            assert len(member.got) <= 2 * MAX_NEW_PER_HEARTBEAT * NODE_DEGREE.high
            assert member.transport.gossip.num_dropped > 0
            assert member.transport.gossip.num_remembered() < 80_000 + MAX_TOPIC_PEERS
        await asyncio.sleep(130)
        for member in members[1:]:
            assert member.transport.gossip.num_remembered() < 100

    in_swarm(4, scenario)


def test_a_crashed_peer_is_replaced_and_a_frozen_one_only_misses_what_comes_meanwhile() -> None:
    async def scenario(network: MemoryNetwork, members: list[Member]) -> None:
        for member in members[:10]:
            network.crash(member.transport.peer_id)
        network.freeze("peer-10")
        await asyncio.sleep(3)
        await members[29].transport.publish(TOPIC, b"good 1")
        await asyncio.sleep(3)
        assert [len(member.got) for member in members] == [0] * 11 + [1] * 18 + [0]
        assert all(len(member.transport.gossip.mesh(TOPIC)) >= NODE_DEGREE.low for member in members[11:])
        network.thaw("peer-10")
        await members[29].transport.publish(TOPIC, b"good 2")
        await asyncio.sleep(3)
        assert b"good 2" in members[10].got

    in_swarm(30, scenario)
