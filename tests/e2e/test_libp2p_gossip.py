"""Gossip over real py-libp2p hosts on loopback: what is invalid goes one hop, and nothing that a peer sends ends the plane."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from swarm.config import NetworkSection
from swarm.errors import NetworkError
from swarm.network.gossip import ForwarderGuard
from swarm.network.libp2p.gossip import NUM_NEIGHBORS, Libp2pGossip
from swarm.network.libp2p.host import Libp2pHost
from swarm.network.libp2p.parts import rpc_pb2
from swarm.network.libp2p.pubsub import MAX_CALL_BYTES, MAX_TOPIC_CHARS, MAX_TOPICS_PER_PEER, encode_frame
from swarm.network.libp2p.trio_guest import TrioGuest
from swarm.network.network_context import NetworkContext
from swarm.network.tcp_address import TcpAddress
from swarm.network.transport import MAX_GOSSIP_BYTES, ValidationResult
from swarm.records.identity import Identity

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TOPIC = "swarm/topic"
GOSSIP_PROTOCOL = "/meshsub/1.1.0"
LOOPBACK = (TcpAddress.parse("/ip4/127.0.0.1/tcp/0"),)
DEADLINE_S = 20.0


class Member:
    """A node that takes what begins with `good`, breaks down at `break`, ignores `other` and rejects the rest."""

    def __init__(self, number: int) -> None:
        self.identity = Identity(bytes([number]) * 32)
        self.peer_id = self.identity.peer_id
        context = NetworkContext.of(NetworkSection(), self.identity)
        self.traffic = context.traffic
        self.plane = Libp2pGossip(context)
        self.got: Counter[bytes] = Counter()
        self.seen: list[tuple[str, bytes]] = []
        self.arrived = asyncio.Event()
        self.plane.subscribe(TOPIC, self.handle)

    def handle(self, forwarder: str, message: bytes) -> ValidationResult:
        self.seen.append((forwarder, message))
        self.arrived.set()
        if message.startswith(b"break"):
            raise KeyError(message)
        if message.startswith(b"good"):
            self.got[message] += 1
            return ValidationResult.ACCEPT
        return ValidationResult.IGNORE if message.startswith(b"other") else ValidationResult.REJECT

    async def until_got(self, *messages: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not all(map(self.got.__contains__, messages)):
                self.arrived.clear()
                await self.arrived.wait()

    def meet(self, *others: "Member") -> None:
        for other in others:
            self.plane.meet(other.peer_id, other.plane.addresses)

    @property
    def pubsub(self):
        assert self.plane._pubsub is not None
        return self.plane._pubsub

    @property
    def mesh(self) -> set[str]:
        return {str(peer_id) for peer_id in self.pubsub.router.mesh.get(TOPIC, ())}


async def until(condition: Callable[[], bool]) -> None:
    """Poll what sends no event: the state of py-libp2p's tables."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def members(count: int, links: Iterable[tuple[int, int]] | None = None) -> AsyncIterator[list[Member]]:
    """Nodes that are connected as `links` says, each with each otherwise, and in each other's meshes."""
    nodes = [Member(number) for number in range(1, count + 1)]
    pairs = list(links) if links is not None else [(a, b) for b in range(count) for a in range(b)]
    try:
        for node in nodes:
            await node.plane.start()
        for a, b in pairs:
            nodes[a].meet(nodes[b])
        for a, b in pairs:
            await until(lambda a=a, b=b: nodes[a].peer_id in nodes[b].mesh and nodes[b].peer_id in nodes[a].mesh)
        yield nodes
    finally:
        await asyncio.gather(*(node.plane.stop() for node in nodes))


@asynccontextmanager
async def stranger(victim: Member, number: int = 99) -> AsyncIterator[asyncio.StreamWriter]:
    """A gossip stream to a node, to write to what no honest peer would."""
    host = await Libp2pHost.open(Identity(bytes([number]) * 32), LOOPBACK, timeout_s=DEADLINE_S)
    try:
        await host.connect(victim.peer_id, victim.plane.addresses)
        _, writer = await host.open_stream(victim.peer_id, GOSSIP_PROTOCOL)
        yield writer
        writer.close()
    finally:
        await host.close()


async def lives(one: Member, other: Member, message: bytes) -> None:
    """Both planes still run, and were never opened anew."""
    await one.plane.publish(TOPIC, message)
    await other.until_got(message)
    assert one.plane.num_restarts == other.plane.num_restarts == 0


async def test_messages_reach_every_subscriber_once_and_not_their_author() -> None:
    async with members(4) as nodes:
        messages = [b"good %d" % number for number in range(8)]
        for number, message in enumerate(messages):
            await nodes[number % 4].plane.publish(TOPIC, message)
        for number, node in enumerate(nodes):
            others = [message for place, message in enumerate(messages) if place % 4 != number]
            await node.until_got(*others)
            assert node.got == Counter(others)


async def test_messages_cross_hops_and_bytes_are_counted_on_both_ends() -> None:
    async with members(3, [(0, 1), (1, 2)]) as (a, b, c):
        before = c.traffic.gossip_bytes_received
        await a.plane.publish(TOPIC, b"good" + bytes(500))
        await c.until_got(b"good" + bytes(500))
        assert c.seen == [(b.peer_id, b"good" + bytes(500))]
        assert 500 < c.traffic.gossip_bytes_received - before < 700  # no address records ride along
        await until(
            lambda: (
                a.traffic.gossip_messages_sent + c.traffic.gossip_messages_sent == b.traffic.gossip_messages_received
            )
        )
        sent = sum(node.traffic.gossip_bytes_sent for node in (a, b, c))
        assert sent == sum(node.traffic.gossip_bytes_received for node in (a, b, c))
        assert all(node.traffic.bytes_sent == node.traffic.gossip_bytes_sent > 0 for node in (a, b, c))


async def test_an_invalid_message_goes_one_hop_and_its_forwarder_is_shut_out() -> None:
    async with members(3, [(0, 1), (1, 2)]) as (mallory, honest, behind):
        mallory.plane.subscribe(TOPIC, lambda forwarder, message: ValidationResult.ACCEPT)
        for number in range(25):
            await mallory.plane.publish(TOPIC, b"bad %d" % number)
        await until(lambda: mallory.peer_id not in honest.plane.peers())
        assert honest.plane.rejected["invalid"] == ForwarderGuard.MAX_FAULTS + 1
        assert {forwarder for forwarder, _ in honest.seen} == {mallory.peer_id}
        await lives(honest, behind, b"good")
        assert behind.seen == [(honest.peer_id, b"good")]
        with suppress(NetworkError):
            mallory.meet(honest)
        assert mallory.peer_id not in honest.plane.peers()


async def test_a_peer_that_is_shut_out_again_and_again_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def levels() -> list[int]:
        return [record.levelno for record in caplog.records if "is banned" in record.getMessage()]

    caplog.set_level(logging.DEBUG, "swarm.network.libp2p.gossip")
    identity = Identity(bytes([77]) * 32)
    plane = Libp2pGossip(NetworkContext.of(NetworkSection(), identity, admits=lambda peer_id, wanted: False))
    outsider = await Libp2pHost.open(Identity(bytes([78]) * 32), LOOPBACK, timeout_s=DEADLINE_S)
    try:
        await plane.start()
        await outsider.connect(identity.peer_id, plane.addresses)
        await until(lambda: levels() == [logging.INFO] and not plane.peers())
        plane._log_ban(str(outsider._host.get_id()))
        assert levels() == [logging.INFO, logging.DEBUG]
        for number in range(1000):
            plane._log_ban(str(number))
        assert len(plane._reported) < 300
    finally:
        await outsider.close()
        await plane.stop()


async def test_an_ignored_message_goes_one_hop_and_is_nobodys_fault() -> None:
    async with members(3, [(0, 1), (1, 2)]) as (a, b, c):
        for number in range(30):
            await a.plane.publish(TOPIC, b"other %d" % number)
        await a.plane.publish(TOPIC, b"good")
        await c.until_got(b"good")
        assert [message for _, message in c.seen] == [b"good"]
        assert not b.plane.rejected


async def test_a_broken_handler_costs_its_message_only() -> None:
    async with members(2) as (a, b):
        for number in range(30):
            await a.plane.publish(TOPIC, b"break %d" % number)
        await lives(a, b, b"good")
        assert len(b.seen) == 31 and not b.plane.rejected


async def test_oversize_is_a_mistake_of_the_caller_and_a_fault_of_a_peer() -> None:
    async with members(2) as (a, b):
        with pytest.raises(ValueError, match=f"{MAX_GOSSIP_BYTES} bytes, got {MAX_GOSSIP_BYTES + 1}"):
            await a.plane.publish(TOPIC, bytes(MAX_GOSSIP_BYTES + 1))
        assert a.plane._host is not None
        await a.plane._host.run(a.pubsub.publish, TOPIC, b"good" + bytes(MAX_GOSSIP_BYTES))
        await until(lambda: b.plane.rejected["invalid"] == 1)
        await lives(a, b, b"good")
        assert [message for _, message in b.seen] == [b"good"]


TOO_LONG = MAX_CALL_BYTES + 1
WRONG_CALLS = {
    "no protobuf": encode_frame(b"\xff" * 100),
    "no length": b"\xff" * 100,
    "oversize": bytes([TOO_LONG & 0x7F | 0x80, TOO_LONG >> 7 & 0x7F | 0x80, TOO_LONG >> 14]) + bytes(1000),
    "two topics": encode_frame(
        rpc_pb2.RPC(publish=[rpc_pb2.Message(topicIDs=[TOPIC, "x"], data=b"good")]).SerializeToString()
    ),
    "no topic": encode_frame(rpc_pb2.RPC(publish=[rpc_pb2.Message(data=b"good")]).SerializeToString()),
}


@pytest.mark.parametrize("kind", WRONG_CALLS)
async def test_bytes_that_are_no_calls_are_held_against_their_sender_and_end_nothing(kind: str) -> None:
    async with members(2) as (a, b):
        async with stranger(a) as writer:
            writer.write(WRONG_CALLS[kind])
            await until(
                lambda: any(
                    state.faults._tokens < ForwarderGuard.MAX_FAULTS for state in a.plane._guard._forwarders.values()
                )
            )
        await lives(a, b, b"good still")
        assert [message for _, message in b.seen] == [b"good still"]


async def test_words_without_end_are_cut_off_and_leave_nothing_behind() -> None:
    """Subscriptions, prunes and ids in masses: what one stranger can make a node remember."""
    topics = [f"{number:04}" + "x" * 60 for number in range(300)]
    control = rpc_pb2.ControlMessage(
        prune=[rpc_pb2.ControlPrune(topicID=topic, backoff=1 << 40) for topic in topics[:20]],
        graft=[rpc_pb2.ControlGraft(topicID=topic) for topic in topics[:20]],
        ihave=[rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=[bytes([n, 1]) * 8 for n in range(250)])],
        iwant=[rpc_pb2.ControlIWant(messageIDs=[bytes([n, 2]) * 8 for n in range(250)])],
    )
    calls = [
        rpc_pb2.RPC(
            subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=topic) for topic in topics[start : start + 50]]
        )
        for start in range(0, 300, 50)
    ]
    long_topic = rpc_pb2.RPC.SubOpts(subscribe=True, topicid="y" * (MAX_TOPIC_CHARS + 1))
    async with members(2) as (a, b):
        async with stranger(a) as writer:
            first = rpc_pb2.RPC(control=control, subscriptions=[long_topic])
            writer.write(encode_frame(first.SerializeToString()))
            for call in calls:
                writer.write(encode_frame(call.SerializeToString()))
            await until(lambda: len(a.pubsub.peer_topics) == 1 + MAX_TOPICS_PER_PEER)
            assert not any(len(topic) > MAX_TOPIC_CHARS for topic in a.pubsub.peer_topics)
            assert a.pubsub.router.back_off.keys() <= {TOPIC}
            with suppress(ConnectionError):
                for call in calls * 40:
                    writer.write(encode_frame(call.SerializeToString()))
                    await writer.drain()
            await until(lambda: any(map(a.plane._guard.is_banned, a.plane._guard._forwarders)))
        await until(lambda: a.pubsub.peer_topics.keys() == {TOPIC})
        await lives(a, b, b"good")


async def test_a_stranger_who_joins_again_and_again_is_told_recent_messages_once() -> None:
    async with members(2) as (a, b):
        for number in range(20):
            await a.plane.publish(TOPIC, b"good %d" % number)
        await b.until_got(*(b"good %d" % number for number in range(20)))
        await b.plane.stop()
        c = Member(77)
        await c.plane.start()
        try:
            c.meet(a)
            await until(lambda: c.peer_id in a.mesh)
            told, heard = a.traffic.gossip_messages_sent, a.traffic.gossip_messages_received
            assert c.plane._host is not None
            for _ in range(10):
                await c.plane._host.run(c.pubsub.unsubscribe, TOPIC)
                await c.plane._host.run(c.pubsub.subscribe, TOPIC)
            await until(lambda: c.peer_id in map(str, a.pubsub.peer_topics.get(TOPIC, ())))
            await until(lambda: a.traffic.gossip_messages_received > heard + 20)  # all of it has arrived
            assert a.traffic.gossip_messages_sent - told < 60  # 20 messages once, and some grafts and prunes
        finally:
            await c.plane.stop()


async def test_what_is_remembered_of_peers_that_left_does_not_grow() -> None:
    async with members(2) as (a, b):
        assert a.plane._host is not None
        host: Any = a.plane._host._host
        for number in range(100, 106):
            async with stranger(a, number) as writer:
                writer.write(encode_frame(rpc_pb2.RPC().SerializeToString()))
                await until(lambda: len(a.plane.peers()) == 2)
        await until(lambda: a.plane.peers() == (b.peer_id,))
        network, pubsub, router = host.get_network(), a.pubsub, a.pubsub.router
        tables = (
            network.auto_connector._recent_disconnects,
            network.tag_store._tags,
            host._identified_peers,
            pubsub.peers,
            pubsub.peer_queues,
            pubsub.peer_topics,
            pubsub._num_streams,
            pubsub._replayed_recent_topics,
            router.peer_protocol,
            router.back_off,
            router._pending_messages,
            router.dont_send_message_ids,
        )

        def is_forgotten() -> bool:
            known = {str(peer_id) for peer_id in host.get_peerstore().peer_ids()}
            return known <= {a.peer_id, b.peer_id} and all(len(table) <= 1 for table in tables)

        await until(is_forgotten)
        await lives(a, b, b"good")


async def test_nobody_is_dialed_that_was_not_asked_for() -> None:
    async with members(3, [(0, 1), (1, 2)]) as (a, b, c):
        await lives(a, b, b"good")
        await c.until_got(b"good")
        assert set(a.plane.peers()) == {b.peer_id} == set(c.plane.peers())


async def test_a_plane_that_broke_down_is_opened_again_at_its_port_and_finds_its_neighbors() -> None:
    async def break_down() -> None:
        raise RuntimeError("found by a stranger")

    async with members(2) as (a, b):
        addresses = a.plane.addresses
        broken = a.pubsub
        a.plane._host._guest.call_soon(lambda: broken.manager.run_task(break_down))  # type: ignore[union-attr]
        await until(lambda: a.plane.num_restarts == 1 and a.plane._pubsub not in (None, broken))
        await until(lambda: a.plane.addresses == addresses)
        await until(lambda: b.peer_id in a.mesh and a.peer_id in b.mesh)
        await a.plane.publish(TOPIC, b"good again")
        await b.until_got(b"good again")
        await b.plane.publish(TOPIC, b"good, too")
        await a.until_got(b"good, too")


async def test_stop_leaves_no_task_no_thread_and_no_port() -> None:
    tasks = asyncio.all_tasks()
    threads = set(threading.enumerate())
    async with members(2) as (a, b):
        (address,) = a.plane.addresses
        await a.plane.publish(TOPIC, b"good")
        await b.until_got(b"good")
        await a.plane.stop()
        assert a.plane.addresses == () == a.plane.peers()
        await a.plane.publish(TOPIC, b"into the void")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", TcpAddress.parse(address).port)
    assert asyncio.get_running_loop() not in TrioGuest._by_loop
    await until(lambda: asyncio.all_tasks() == tasks)
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert not {name for name in left if not name.startswith("Trio thread")}, left  # trio keeps idle threads for 10 s


async def test_the_host_has_the_peer_id_of_the_identity() -> None:
    async with members(1) as (one,):
        assert one.plane._host is not None
        assert str(one.plane._host._host.get_id()) == one.identity.peer_id


async def test_a_port_that_is_taken_is_said() -> None:
    async with members(1) as (one,):
        taken = TcpAddress.parse(one.plane.addresses[0])
        other = Libp2pGossip(NetworkContext.of(NetworkSection(gossip_listen=(str(taken),)), Identity(bytes([50]) * 32)))
        with pytest.raises(NetworkError, match=r"py-libp2p must start on /ip4/127\.0\.0\.1/tcp/\d+, got "):
            await other.start()
        await other.stop()


async def test_strangers_that_take_every_place_do_not_keep_a_node_from_its_own_choice() -> None:
    async with AsyncExitStack() as stack, members(2, links=()) as (victim, friend):
        for number in range(100, 100 + NUM_NEIGHBORS):
            await stack.enter_async_context(stranger(victim, number))
        await until(lambda: len(victim.plane.peers()) >= NUM_NEIGHBORS)
        victim.meet(friend)
        await until(lambda: friend.peer_id in victim.plane.peers())
