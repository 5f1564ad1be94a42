"""Lines over real libp2p streams, of the daemon and of py-libp2p, in every pairing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarm.config import parse
from swarm.errors import RequestError
from swarm.network.make_transport import make_transport
from swarm.network.transport import Line, Transport
from swarm.records.identity import Identity

ECHO = "swarm/test-echo/1"
OPENER, ANSWERER = (Identity(bytes([number]) * 32) for number in (1, 2))


async def echo(line: Line) -> None:
    while True:
        await line.send(line.peer_id.encode(), await line.receive(3 << 20))


@asynccontextmanager
async def two(tmp_path: Path, backends: tuple[str, str]) -> AsyncIterator[tuple[Transport, Transport]]:
    transports: list[Transport] = []
    for identity, backend in zip((ANSWERER, OPENER), backends, strict=True):
        initial = list(transports[0].addresses()) if transports else []
        listen = ["/ip4/127.0.0.1/tcp/0"]
        settings = {"backend": backend, "gossip": "off", "listen": listen, "initial_peers": initial}
        folder = tmp_path / identity.peer_name
        folder.mkdir()
        transport = make_transport(parse({"network": settings}).network, identity, folder)
        assert transport is not None
        transport.serve_lines(ECHO, echo)
        await transport.start()
        transports.append(transport)
    try:
        yield transports[1], transports[0]
    finally:
        for transport in reversed(transports):
            await transport.stop()


@pytest.mark.parametrize(
    "backends",
    [("libp2p", "libp2p"), ("hivemind", "hivemind"), ("hivemind", "libp2p"), ("libp2p", "hivemind")],
    ids="-".join,
)
async def test_frames_of_all_sizes_come_back_in_order_until_the_other_side_ends(
    tmp_path: Path, backends: tuple[str, str]
) -> None:
    async with two(tmp_path, backends) as (opener, answerer):
        line = await opener.open_line(ANSWERER.peer_id, ECHO, deadline_s=10)
        frames = [bytes([size % 256]) * size for size in (0, 1, 5000, 70_000, 2 << 20)]
        sending = asyncio.create_task(line.send(*frames))
        async with asyncio.timeout(30):
            for frame in frames:
                assert await line.receive(100) == OPENER.peer_id.encode()
                assert await line.receive(3 << 20) == frame
            await sending
            with pytest.raises(RequestError) as error:
                await line.send(b"x" * 100)
                await line.receive(100)
                await line.receive(99)
            assert error.value.reason == "oversize"
            line.close()
            other = await opener.open_line(ANSWERER.peer_id, ECHO, deadline_s=10)
            await answerer.stop()
            with pytest.raises(RequestError) as error:
                await other.receive(100)
            assert error.value.reason == "cut"


async def test_a_line_that_nobody_serves_is_an_error_at_once(tmp_path: Path) -> None:
    async with two(tmp_path, ("libp2p", "libp2p")) as (opener, _):
        with pytest.raises(RequestError) as error:
            await opener.open_line(ANSWERER.peer_id, "swarm/unknown/1", deadline_s=10)
        assert error.value.reason == "unreachable"
