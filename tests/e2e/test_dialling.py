"""Strangers list themselves with the address of a bystander: how often do real nodes connect to it?"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from swarm.config import NetworkSection
from swarm.network.make_transport import make_transport
from swarm.network.transport import Transport
from swarm.records.identity import Identity, create
from swarm.records.presence import Presence, sign_presence
from swarm.sharing.directory import Directory
from swarm.sharing.index import EntryValidator, presence_key
from swarm.sharing.shard import Shard
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
            Directory(SWARM_ID, one, transport, lambda: 0)
            for one, transport in ((identity, full), (light_identity, light))
        ]
        until = time.monotonic() + SCENE_S
        while time.monotonic() < until:
            for reader in readers:
                await reader.turn()
                assert reader.num_members >= NUM_NAMES
            await asyncio.sleep(TURN_S)
    assert 1 <= bystander.num_accepted <= 4, "two nodes, each with two planes"
