"""Peers that break the rules of a py-libp2p connection itself: below streams, where no handler of ours looks."""

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from swarm.errors import NetworkError
from swarm.network.libp2p import host as host_module
from swarm.network.libp2p.host import Libp2pHost
from swarm.network.libp2p.inbound_limits import MAX_STREAMS, MAX_UNREAD_BYTES, ConnectionGater
from swarm.network.tcp_address import TcpAddress
from swarm.records.identity import Identity

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
ECHO, SLOW = "test/echo", "test/slow"
LOOPBACK = (TcpAddress.parse("/ip4/127.0.0.1/tcp/0"),)
DATA, WINDOW_UPDATE, SYN = 0, 1, 1


class Victim:
    def __init__(self) -> None:
        self.identity = Identity(b"v" * 32)
        self.refused: Counter[str] = Counter()
        self.is_over = asyncio.Event()

    async def answer(
        self, peer_id: str, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if protocol == SLOW:
            await self.is_over.wait()
        else:
            writer.write(await reader.read(100))
        writer.close()

    async def open(self) -> Libp2pHost:
        return await Libp2pHost.open(
            self.identity, LOOPBACK, protocols=[ECHO, SLOW], handler=self.answer, refused=self.refused, timeout_s=10
        )


@asynccontextmanager
async def opened(number: int = 1) -> AsyncIterator[Libp2pHost]:
    host = await Libp2pHost.open(Identity(bytes([number]) * 32), LOOPBACK, timeout_s=10)
    try:
        yield host
    finally:
        await host.close()


@asynccontextmanager
async def victim_and_mallory() -> AsyncIterator[tuple[Victim, Libp2pHost, Libp2pHost]]:
    victim = Victim()
    served = await victim.open()
    try:
        async with opened() as mallory:
            yield victim, served, mallory
    finally:
        await served.close()


async def echo(victim: Victim, served: Libp2pHost) -> bytes:
    """What an honest peer hears."""
    async with opened(99) as honest:
        await honest.connect(victim.identity.peer_id, served.addresses)
        reader, writer = await honest.open_stream(victim.identity.peer_id, ECHO)
        writer.write(b"hi")
        async with asyncio.timeout(5):
            return await reader.read()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)  # it sends no event


def connection_of(host: Libp2pHost) -> Any:
    network: Any = host._host.get_network()
    return network.get_connections()[0].muxed_conn


def frame(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    return struct.pack(">BBHII", 0, kind, flags, stream_id, length)


async def test_peer_that_ignores_its_window_is_disconnected_and_fills_no_memory() -> None:
    async with victim_and_mallory() as (victim, served, mallory):
        from libp2p.io.exceptions import IOException  # `parts` has loaded it

        await mallory.connect(victim.identity.peer_id, served.addresses)
        _, writer = await mallory.open_stream(victim.identity.peer_id, SLOW)
        connection, body = connection_of(mallory), bytes(65_536)
        own_streams = [number for number in connection.streams if number % 2]  # one may still be there to identify
        assert own_streams, connection.streams
        before = psutil.Process().memory_info().rss

        async def send_until_cut_off() -> None:
            with contextlib.suppress(IOException):  # how a write sees the end; the reading side may be first
                while not connection.event_shutting_down.is_set():
                    for stream_id in own_streams:
                        await connection._write_frame(frame(DATA, 0, stream_id, len(body)) + body)

        async with asyncio.timeout(60):
            await mallory.run(send_until_cut_off)
        assert psutil.Process().memory_info().rss - before < 16 * MAX_UNREAD_BYTES
        assert victim.refused == {"overrun": 1}
        await until(lambda: not served.peers())
        victim.is_over.set()
        writer.close()
        assert await echo(victim, served) == b"hi"


async def test_streams_beyond_the_bound_are_reset() -> None:
    async with victim_and_mallory() as (victim, served, mallory):
        await mallory.connect(victim.identity.peer_id, served.addresses)
        connection = connection_of(mallory)

        async def open_many() -> None:
            for number in range(1000):
                await connection._write_frame(frame(WINDOW_UPDATE, SYN, 1001 + 2 * number, 0))

        await mallory.run(open_many)
        await until(lambda: victim.refused["streams"] >= 1000 - 2 * MAX_STREAMS)
        assert len(connection_of(served).streams) <= 2 * MAX_STREAMS
        assert await echo(victim, served) == b"hi"


async def test_nobody_gets_in_under_another_name_in_plaintext(monkeypatch: pytest.MonkeyPatch) -> None:
    async with victim_and_mallory() as (victim, served, _):
        from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport  # `parts` has loaded it

        with monkeypatch.context() as patch:  # only of the attacker's host
            patch.setattr(
                host_module, "security_of", lambda key_pair: {PLAINTEXT_PROTOCOL_ID: InsecureTransport(key_pair)}
            )
            async with opened(2) as pretender:
                with pytest.raises(NetworkError):
                    await pretender.connect(victim.identity.peer_id, served.addresses)
        await until(lambda: victim.refused["handshake"] > 0)
        assert not served.peers()
        assert await echo(victim, served) == b"hi"


async def test_connections_that_ended_leave_their_places() -> None:
    async with victim_and_mallory() as (victim, served, mallory):
        for _ in range(10):
            await mallory.connect(victim.identity.peer_id, served.addresses)
            await mallory.disconnect(victim.identity.peer_id)
            await until(lambda: not served.peers())
        door: Any = served._host.get_network()._handle_inbound_connection  # type: ignore[attr-defined]
        await until(lambda: door.__self__._connections.num_taken == 0)
        assert not victim.refused


async def test_an_error_in_the_librarys_own_handlers_ends_the_stream_alone() -> None:
    async def breaks(stream: object) -> None:
        raise KeyError("whatever")

    refused: Counter[str] = Counter()
    stream = _Stream()
    async with opened() as host:
        await ConnectionGater(host._host, refused)._guarded(breaks)(stream)  # type: ignore[arg-type]
    assert refused == {"broken": 1}
    assert stream.is_reset


class _Stream:
    is_reset = False

    async def reset(self) -> None:
        self.is_reset = True
