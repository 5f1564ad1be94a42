"""What the daemon offers to strangers below all protocols of ours, and what becomes of one that takes too much memory."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import base58
import pytest

from swarm.config import NetworkSection
from swarm.errors import NetworkError
from swarm.network.hivemind import daemon as daemon_module
from swarm.network.hivemind.daemon import Daemon, DaemonSettings
from swarm.network.hivemind.daemon_control import DaemonControl
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.libp2p.host import Libp2pHost
from swarm.network.reach.role import Role
from swarm.network.tcp_address import TcpAddress
from swarm.records.identity import Identity, create

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
KAD, IDENTIFY = "/ipfs/kad/1.0.0", "/ipfs/id/1.0.0"
LOOPBACK = TcpAddress.parse("/ip4/127.0.0.1/tcp/0")
NEEDED = {
    "/ipfs/id/1.0.0",
    "/ipfs/id/push/1.0.0",
    "/ipfs/ping/1.0.0",
    "/libp2p/autonat/1.0.0",
    "/libp2p/circuit/relay/0.2.0/hop",
    "/libp2p/circuit/relay/0.2.0/stop",
}


def _binary() -> Path:
    from swarm.network.hivemind.parts import hivemind_cli

    return Path(hivemind_cli.__path__[0]) / "p2pd"


@asynccontextmanager
async def running(role: Role) -> AsyncIterator[tuple[Daemon, DaemonControl]]:
    with tempfile.TemporaryDirectory(prefix="swarm-test-") as folder:
        socket = Path(folder) / "control.sock"
        daemon = Daemon(_binary(), socket, DaemonSettings(role, [LOOPBACK]))
        await daemon.start(20)
        try:
            yield daemon, DaemonControl(socket)
        finally:
            await daemon.stop()


@pytest.mark.parametrize("serves_relay", [False, True])
@pytest.mark.parametrize("is_local", [False, True])
async def test_a_stranger_finds_no_service_of_the_daemon_that_the_swarm_does_not_need(
    serves_relay: bool, is_local: bool
) -> None:
    role = Role(is_full=True, is_local=is_local, serves_relay=serves_relay)
    async with running(role) as (_, victim), running(Role(is_full=False, is_local=True)) as (_, stranger):
        peer_id, addresses = await victim.identity()
        await stranger.connect(peer_id, addresses)
        assert await _protocols(stranger, peer_id) <= NEEDED
        with pytest.raises(NetworkError, match="protocols not supported"):
            await _add_providers(stranger, peer_id)


async def test_a_daemon_that_takes_too_much_memory_is_replaced_and_its_node_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held at the bound by a test: what strangers can make a daemon keep is not to be known in advance."""
    too_much = asyncio.Event()

    async def outgrown(self: Daemon) -> int:
        if self.pid != first_pid:
            await asyncio.get_running_loop().create_future()
        await too_much.wait()
        return 600 << 20

    first_pid: int | None = None
    monkeypatch.setattr(Daemon, "outgrown", outgrown)
    nodes = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        initial = nodes[0].addresses() if nodes else ()
        settings = NetworkSection(listen=("/ip4/127.0.0.1/tcp/0",), initial_peers=initial, gossip="off")
        nodes.append(HivemindTransport(settings, Identity(name.encode().ljust(32)), tmp_path / name))
        nodes[-1].serve("test/echo", _echo, max_request_bytes=100)
        await nodes[-1].start()
        if name == "one":
            assert nodes[0]._session is not None
            first_pid = nodes[0]._session.daemon_pid
    one, other = nodes
    try:
        too_much.set()
        await _until(lambda: one._session is not None and one._session.daemon_pid != first_pid)
        assert one.refused["daemon/memory"] == 1
        await _until_answered(other, one.peer_id)
        assert (one.num_restarts, other.num_restarts) == (1, 0)
    finally:
        for node in nodes:
            await node.stop()


async def test_names_that_go_on_connecting_do_not_cut_a_node_off_from_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "_MAX_CONNECTIONS", 8)
    monkeypatch.setattr(daemon_module, "_KEPT_CONNECTIONS", 4)
    monkeypatch.setattr(daemon_module, "_NEW_CONNECTION_S", 1)
    config = NetworkSection(gossip="off")
    node = HivemindTransport(config, create(tmp_path / "node" / "key"), tmp_path / "node", health_interval_s=0.2)
    async with AsyncExitStack() as stack:
        await node.start()
        stack.push_async_callback(node.stop)
        neighbor_config = NetworkSection(gossip="off", initial_peers=node.addresses()[:1])
        neighbors = [
            HivemindTransport(neighbor_config, create(tmp_path / name / "key"), tmp_path / name) for name in ("a", "b")
        ]
        for one in neighbors:
            stack.push_async_callback(one.stop)
        await asyncio.gather(*(one.start() for one in neighbors))
        named = {one.peer_id for one in neighbors}
        from swarm.network.hivemind.parts import p2pd_pb2

        messages: Any = p2pd_pb2  # protobuf makes its classes while it runs
        session = node._session
        assert session is not None
        async with asyncio.timeout(20):
            while not named <= set(session._preferred):
                await asyncio.sleep(0.05)  # it sends no event
        at = [address.rpartition("/p2p/")[0] for address in node.addresses()]
        for number in range(8):
            host = await Libp2pHost.open(Identity(bytes([number + 1]) * 32), [LOOPBACK], timeout_s=10)
            stack.push_async_callback(host.close)
            await host.connect(node.peer_id, at)
        await asyncio.sleep(1.1)  # younger connections are left alone
        now = messages.ConnManagerRequest(type=messages.ConnManagerRequest.TRIM)  # else it does so every ten seconds
        await session.control._ask(messages.Request(type=messages.Request.CONNMANAGER, connManager=now))
        async with asyncio.timeout(10):
            while len(connected := set(await session.peers())) > 8:
                await asyncio.sleep(0.05)
        assert named <= connected


async def test_the_memory_that_a_daemon_uses_is_seen() -> None:
    async with running(Role(is_full=True, is_local=True)) as (daemon, _):
        assert await asyncio.wait_for(daemon.outgrown(1 << 20), 5) > 1 << 20
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(daemon.outgrown(), 0.1)


async def _echo(peer_id: str, request: bytes) -> bytes:
    return request


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


async def _until_answered(asker: HivemindTransport, peer_id: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await asker.request(peer_id, "test/echo", b"hi", max_response_bytes=100, deadline_s=5)
            except NetworkError:
                await asyncio.sleep(0.1)
            else:
                return


async def _protocols(stranger: DaemonControl, peer_id: str) -> set[str]:
    """What the daemon says of itself to whoever connects."""
    reader, writer = await stranger.open_stream(peer_id, IDENTIFY)
    try:
        async with asyncio.timeout(5):
            answer = await reader.read()
    finally:
        writer.transport.abort()
    fields, at = [], _varint_end(answer, 0)[1]
    while at < len(answer):
        tag, at = _varint_end(answer, at)
        length, at = _varint_end(answer, at)
        fields.append((tag >> 3, answer[at : at + length]))
        at += length
    return {value.decode() for number, value in fields if number == 3}


def _varint_end(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if not byte & 0x80:
            return value, at


async def _add_providers(stranger: DaemonControl, peer_id: str) -> None:
    """Records of the daemon's own DHT: made-up keys, each with a thousand made-up addresses of the stranger."""
    own = base58.b58decode((await stranger.identity())[0])
    _, writer = await stranger.open_stream(peer_id, KAD)
    try:
        for _ in range(100):
            addresses = [b"\x04" + os.urandom(4) + b"\x06" + os.urandom(2) for _ in range(1000)]
            provider = _field(1, own) + b"".join(_field(2, address) for address in addresses)
            message = b"\x08\x02" + _field(2, os.urandom(32)) + _field(9, provider)
            writer.write(_varint(len(message)) + message)
            await writer.drain()
    finally:
        writer.transport.abort()


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
