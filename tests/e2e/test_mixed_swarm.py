"""Nodes with the libp2p daemon and nodes without it are one swarm: signed rollouts go both ways, gossiped and pulled."""

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.config import NetworkSection, SharingSection
from swarm.errors import NetworkError
from swarm.network.context import NodeContext
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.libp2p.gossip import Libp2pGossip
from swarm.network.libp2p.transport import LightTransport
from swarm.network.make_transport import make_transport
from swarm.network.transport import ValidationResult
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import Identity, create
from swarm.sharing.exchange import Exchange
from swarm.sharing.index import EntryValidator
from swarm.types import RolloutGroup
from tests.unit.experience_factory import LINEAGE, SWARM_ID, admission, group, sharing_parts

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
DEADLINE_S = 40.0
SHARING = SharingSection(swarm_groups=16)


class Node:
    """A node without model and trainer: what it publishes is made up, what it admits is checked as ever."""

    def __init__(self, folder: Path, **settings: object) -> None:
        folder.mkdir()
        network = NetworkSection.model_validate({"poll_interval_s": 0.5, **settings})
        self.identity: Identity = create(folder / "identity.key")
        transport = make_transport(network, self.identity, folder, EntryValidator(SWARM_ID))
        assert isinstance(transport, HivemindTransport | LightTransport)
        self.transport = transport
        self.pool = ExperiencePool(":memory:", SHARING, transport.now)
        context = NodeContext.of(self.identity, SWARM_ID, transport)
        self.parts = sharing_parts(SHARING, context)
        self.exchange = Exchange(
            SHARING,
            network,
            self.parts,
            admission=admission(context),
            pool=self.pool,
            rng=random.Random(self.identity.peer_id),
        )
        self.num_failures = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.transport.start()
        self._tasks = [asyncio.create_task(work) for work in self.exchange.work(self._count_failure)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.transport.stop()

    def _count_failure(self) -> None:
        self.num_failures += 1

    def groups(self, *indices: int) -> list[RolloutGroup]:
        return [replace(group(index=index), author=self.identity.peer_id, lineage=LINEAGE) for index in indices]

    @property
    def num_admitted(self) -> int:
        return self.exchange.parts.totals.num_groups_admitted

    @property
    def hears_gossip(self) -> bool:
        return self.exchange.parts.totals.num_headers_gossiped > 0

    def drawn(self) -> list[tuple[str, int]]:
        """(author, index) of all that the pool holds."""
        return sorted((one.author, one.task.index) for one in self.pool.draw(99, random.Random(0)))


async def until(condition: Callable[[], bool]) -> None:
    """Poll what sends no event: pools of other nodes."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def swarm(folder: Path, backends: Sequence[str], **settings: object) -> AsyncIterator[list[Node]]:
    """Nodes that join through the first one."""
    nodes: list[Node] = []
    try:
        for number, backend in enumerate(backends):
            initial = nodes[0].transport.addresses() if nodes else ()
            nodes.append(Node(folder / str(number), backend=backend, initial_peers=initial, **settings))
            await nodes[-1].start()
        yield nodes
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


async def exchange_twice(nodes: list[Node]) -> None:
    """Everybody's groups reach everybody; those of the second round by gossip, since nobody looks into the index then."""
    for start in (0, 100):
        for number, node in enumerate(nodes):
            node.exchange.hand_out(node.groups(start + 2 * number, start + 2 * number + 1))
        expected = (2 if start == 0 else 4) * (len(nodes) - 1)
        await until(lambda expected=expected: all(node.num_admitted == expected for node in nodes))
        if start == 0:
            await until(lambda: all(node.exchange.parts.directory.num_members == len(nodes) for node in nodes))
            await gossip_reaches_all(nodes)
            for node in nodes:
                node.exchange.reader.pace.swept_at = math.inf  # no sweep of the index any more
    for number, node in enumerate(nodes):
        others = [(one.identity.peer_id, place) for place, one in enumerate(nodes) if place != number]
        published = [(peer, start + 2 * place + i) for peer, place in others for start in (0, 100) for i in (0, 1)]
        assert node.drawn() == sorted(published)
        await until(lambda node=node: node.exchange.parts.totals.num_indexed == 2)  # gossip is ahead of the index
        assert node.num_failures == 0
        assert not +node.exchange.parts.totals.rejected
        assert not node.transport.gossip.rejected


async def gossip_reaches_all(nodes: list[Node]) -> None:
    """Wait until a message of each node reaches each other one."""
    topic, heard = "test/reaches", {node.identity.peer_id: set[bytes]() for node in nodes}
    for node in nodes:
        mine = heard[node.identity.peer_id]

        def hear(forwarder: str, message: bytes, mine: set[bytes] = mine) -> ValidationResult:
            mine.add(message.partition(b" ")[0])
            return ValidationResult.ACCEPT

        node.transport.subscribe(topic, hear)
    for attempt in itertools.count():
        for node in nodes:
            await node.transport.publish(topic, b"%s %d" % (node.identity.peer_id.encode(), attempt))
        if all(len(names - {peer_id.encode()}) == len(nodes) - 1 for peer_id, names in heard.items()):
            break
        assert attempt < 400, heard
        await asyncio.sleep(0.05)
    for node in nodes:
        node.transport.unsubscribe(topic)


async def test_rollouts_go_both_ways_between_nodes_with_and_without_the_daemon(tmp_path: Path) -> None:
    async with swarm(tmp_path, ["hivemind", "libp2p", "hivemind", "libp2p"]) as nodes:
        await exchange_twice(nodes)
        assert all(node.hears_gossip for node in nodes)
        assert [node.transport.hosts_index for node in nodes] == [True, False, True, False]
        for node in nodes:
            traffic = node.transport.traffic
            assert 0 < traffic.gossip_bytes_sent < traffic.bytes_sent
            assert 0 < traffic.gossip_bytes_received < traffic.bytes_received


async def test_rollouts_go_round_over_the_daemon_s_own_pubsub(tmp_path: Path) -> None:
    async with swarm(tmp_path, ["hivemind"] * 3, gossip="daemon") as nodes:
        await exchange_twice(nodes)
        assert all(node.hears_gossip for node in nodes)
        assert all(node.transport.gossip.addresses == () for node in nodes)
        assert all(node.transport.traffic.gossip_messages_received >= 4 for node in nodes)


async def test_one_key_is_one_peer_id_in_both_stacks(tmp_path: Path) -> None:
    async with swarm(tmp_path, ["hivemind", "libp2p"]) as (full, light):
        peer_id, plane = full.identity.peer_id, full.transport.gossip._service
        assert peer_id in await light.transport.connected_peers()  # proved by the daemon's handshake
        assert isinstance(plane, Libp2pGossip) and plane._host is not None
        assert str(plane._host._host.get_id()) == peer_id
        await until(lambda: peer_id in light.transport.gossip.peers())  # proved by py-libp2p's
        assert isinstance(light.transport, LightTransport) and light.transport._host is not None
        assert str(light.transport._host._host.get_id()) == light.identity.peer_id


async def test_a_light_node_cannot_use_the_daemon_s_pubsub(tmp_path: Path) -> None:
    node = Node(tmp_path / "light", backend="libp2p", gossip="daemon")
    with pytest.raises(NetworkError, match=r'network\.gossip = "daemon" needs network\.backend = "hivemind"'):
        await node.start()
    await node.stop()
