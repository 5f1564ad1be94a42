"""Strangers name the address of a bystander: how often do real nodes connect to it? And whom do names displace?"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from swarm.config import NetworkSection
from swarm.errors import NetworkError, RequestError
from swarm.network.context import NodeContext
from swarm.network.libp2p.gossip import Libp2pGossip
from swarm.network.libp2p.host import Libp2pHost
from swarm.network.libp2p.parts import ID, Multiaddr
from swarm.network.libp2p.pubsub import encode_frame
from swarm.network.libp2p.transport import LightTransport
from swarm.network.make_transport import make_transport
from swarm.network.tcp_address import TcpAddress
from swarm.network.transport import Contact, Transport
from swarm.records.identity import Identity, create
from swarm.records.presence import Presence, sign_presence
from swarm.sharing.directory import Directory
from swarm.sharing.index import EntryValidator, Shard, presence_key
from swarm.sharing.totals import SharingTotals
from tests.unit.experience_factory import SWARM_ID

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
NUM_NAMES = 64
SCENE_S = 4.0
TURN_S = 0.5


class Bystander:
    """Accepts connections, counts them and hangs up: it knows nothing of any swarm."""

    def __init__(self) -> None:
        self.num_accepted = 0
        self.first = asyncio.Event()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        self.first.set()
        writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The multiaddress of it."""
        async with await asyncio.start_server(self.take, "127.0.0.1", 0) as server:
            yield f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"


def node(folder: Path, backend: Literal["hivemind", "libp2p"], *peers: str) -> tuple[Transport, Identity]:
    folder.mkdir()
    config, identity = NetworkSection(backend=backend, initial_peers=peers), create(folder / "identity.key")
    transport = make_transport(config, identity, folder, EntryValidator(SWARM_ID))
    assert transport is not None
    return transport, identity


async def list_names(transport: Transport, address: str) -> int:
    """Presence of made-up identities that all name one address; how many the index took."""
    num_taken, now = 0, transport.now()
    for number in range(NUM_NAMES):
        name = Identity(number.to_bytes(2, "big") * 16)
        presence = Presence(name.peer_id, (address,), (address,), True, 0, now, now + 120.0)
        record = sign_presence(name, SWARM_ID, presence)
        num_taken += await transport.store(
            presence_key(SWARM_ID, Shard(0, 0)), name.peer_id, record, presence.expires_at
        )
    return num_taken


async def test_a_bystander_whom_strangers_name_is_dialled_a_few_times_at_most(tmp_path: Path) -> None:
    bystander = Bystander()
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(bystander.listening())
        full, identity = node(tmp_path / "full", "hivemind")
        await full.start()
        stack.push_async_callback(full.stop)
        light, light_identity = node(tmp_path / "light", "libp2p", *full.addresses())
        await light.start()
        stack.push_async_callback(light.stop)
        assert await list_names(full, address) == NUM_NAMES
        readers = [
            Directory(NodeContext.of(one, SWARM_ID, transport), SharingTotals(transport.now, reads=False))
            for one, transport in ((identity, full), (light_identity, light))
        ]
        until = time.monotonic() + SCENE_S
        while time.monotonic() < until:
            for reader in readers:
                await reader.turn()
                assert reader.num_members >= NUM_NAMES
            await asyncio.sleep(TURN_S)
    assert 1 <= bystander.num_accepted <= 6, "two nodes; each tries again after 5 s and after 20 s more"


async def test_a_contact_that_was_met_outlasts_hundreds_of_names(tmp_path: Path) -> None:
    async def echo(peer_id: str, request: bytes) -> bytes:
        return request

    async with AsyncExitStack() as stack:
        reader, _ = node(tmp_path / "reader", "libp2p")
        holder, _ = node(tmp_path / "holder", "libp2p")
        holder.serve("echo", echo, max_request_bytes=10)
        for one in (reader, holder):
            await one.start()
            stack.push_async_callback(one.stop)
        address = holder.addresses()[0].rpartition("/p2p/")[0]
        reader.meet(Contact(holder.peer_id, (address,), (), hosts_index=True))
        ask = partial(reader.request, holder.peer_id, "echo", b"hi", max_response_bytes=10, deadline_s=10.0)
        assert await ask() == b"hi"
        assert reader.seen_at(holder.peer_id) == ("/ip4/127.0.0.1/tcp/0",)
        for number in range(600):
            name = Identity(number.to_bytes(2, "big") * 16).peer_id
            reader.meet(Contact(name, ("/ip4/127.0.0.1/tcp/4001",), (), hosts_index=True))
        await holder.stop()
        await holder.start()  # at the same port, which ended the connection
        async with asyncio.timeout(10.0):
            while holder.peer_id in await reader.connected_peers():
                await asyncio.sleep(0.02)
        assert await ask() == b"hi"


async def test_a_host_dials_nothing_that_a_peer_has_told_it(tmp_path: Path) -> None:
    """Neither by a new stream to a peer that has just left, nor beside what its owner asks for."""
    bystander, name = Bystander(), Identity(b"n" * 32).peer_id
    async with AsyncExitStack() as stack:
        told = await stack.enter_async_context(bystander.listening())
        asked = Bystander()
        wanted = await stack.enter_async_context(asked.listening())
        host = await Libp2pHost.open(Identity(b"h" * 32), [TcpAddress.parse("/ip4/127.0.0.1/tcp/0")], timeout_s=10.0)
        stack.push_async_callback(host.close)
        for attempt in (lambda: host.open_stream(name, "echo"), lambda: host.connect(name, [wanted])):
            host._host.get_peerstore().add_addrs(ID.from_base58(name), [Multiaddr(told)], 7200)  # as identify does
            with pytest.raises(NetworkError):
                await attempt()
    assert (asked.num_accepted, bystander.num_accepted) == (1, 0)


async def test_names_that_claim_the_address_of_an_honest_peer_do_not_keep_others_from_it(tmp_path: Path) -> None:
    async def echo(peer_id: str, request: bytes) -> bytes:
        return request

    async with AsyncExitStack() as stack:
        reader, _ = node(tmp_path / "reader", "libp2p")
        honest, _ = node(tmp_path / "honest", "libp2p")
        honest.serve("echo", echo, max_request_bytes=10)
        for one in (reader, honest):
            await one.start()
            stack.push_async_callback(one.stop)
        address = honest.addresses()[0].rpartition("/p2p/")[0]

        async def ask(peer_id: str) -> bytes:
            reader.meet(Contact(peer_id, (address,), (), hosts_index=False))
            return await reader.request(peer_id, "echo", b"hi", max_response_bytes=10, deadline_s=10.0)

        for number in range(NUM_NAMES):
            with pytest.raises(RequestError):
                await ask(Identity(number.to_bytes(2, "big") * 16).peer_id)
        assert await ask(honest.peer_id) == b"hi"


async def test_names_that_claim_the_address_of_an_honest_daemon_do_not_keep_others_from_it(tmp_path: Path) -> None:
    from swarm.network.hivemind.transport import HivemindTransport

    config = NetworkSection(gossip="off")
    honest, node = (
        HivemindTransport(config, create(tmp_path / name / "key"), tmp_path / name) for name in ("honest", "node")
    )
    try:
        await asyncio.gather(honest.start(), node.start())
        session, peers = node._session, node._peers
        assert session is not None
        address = honest.addresses()[0].rpartition("/p2p/")[0]
        for number in range(3):
            made_up = Identity(bytes([number + 1]) * 32).peer_id
            assert await session.greet(peers.due({made_up: (address,)})) == 0
            peers.learn(honest.peer_id, [address])
        assert await session.greet(peers.due({honest.peer_id: (address,)})) == 1
    finally:
        await asyncio.gather(honest.stop(), node.stop())


async def test_words_of_a_listener_put_no_honest_peer_at_its_address(tmp_path: Path) -> None:
    from swarm.network.hivemind.transport import HivemindTransport

    made_up, honest = Identity(b"m" * 32).peer_id, Identity(b"h" * 32).peer_id

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        words = (
            f"[{address}] failed to negotiate security protocol: "
            f"peer id mismatch: expected {made_up}, but remote key matches {honest}\n"
        )
        for line in ("/multistream/1.0.0\n", words):
            writer.write(encode_frame(line.encode()))
        writer.close()

    node = HivemindTransport(NetworkSection(gossip="off"), create(tmp_path / "key"), tmp_path)
    await node.start()
    try:
        async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
            address = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
            said: list[str] = []
            assert node._session is not None
            told = node._session._on_other_peer
            node._session._on_other_peer = lambda peer_id, addresses: (said.append(peer_id), told(peer_id, addresses))[
                1
            ]
            assert not await node._session.connect(made_up, (address,))
        assert said == [honest], "else the listener says it in another way by now"
        assert node.seen_at(honest) == ()
    finally:
        await node.stop()


async def test_a_node_of_a_public_swarm_does_not_dial_its_own_machine_for_strangers(tmp_path: Path) -> None:
    bystander, public = Bystander(), "/ip4/11.0.0.1/tcp/4001"
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(bystander.listening())
        folder = tmp_path / "node"
        folder.mkdir()
        config = NetworkSection(backend="libp2p", announce=(public,), gossip_announce=(public,))
        transport = make_transport(config, create(folder / "identity.key"), folder)
        assert isinstance(transport, LightTransport)
        await transport.start()
        stack.push_async_callback(transport.stop)
        for number in range(NUM_NAMES):
            name = Identity(number.to_bytes(2, "big") * 16).peer_id
            transport.meet(Contact(name, (address,), (address,), hosts_index=True))
            with pytest.raises(RequestError, match="no address"):
                await transport.request(name, "swarm/body/1", b"", max_response_bytes=10, deadline_s=5.0)
        await transport._maintain(transport._host)  # type: ignore[arg-type]
        plane = transport.gossip._service
        assert isinstance(plane, Libp2pGossip) and plane._host is not None
        await plane._maintain(plane._host)
    assert bystander.num_accepted == 0
