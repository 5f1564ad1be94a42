"""Hostile peers over real libp2p streams: whatever they do ends in bounded time and memory, and others are served."""

import asyncio
import hashlib
import os
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest

from swarm.config import NetworkSection
from swarm.errors import RequestError
from swarm.network.hivemind.parts import StreamInfo
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.requests.blob_protocol import BLOB_REQUEST_BYTES, PIECE_BYTES, BlobRequest, manifest_of, serve_blobs
from swarm.network.requests.framing import Response, Status, read_request, write_request, write_response
from swarm.network.requests.transfer import Download, fetch
from swarm.network.transport import RequestRefused
from swarm.records.identity import create

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BLOBS, ECHO, HOSTILE = "test/blobs", "test/echo", "test/hostile"
BLOB = random.Random(0).randbytes(6 * PIECE_BYTES + 77)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def digest_of(blob: bytes) -> bytes:
    return hashlib.sha256(blob).digest()


async def echo(peer_id: str, request: bytes) -> bytes:
    return request


def make_node(folder: Path, *blobs: bytes, **settings: object) -> HivemindTransport:
    folder.mkdir()
    node = HivemindTransport(NetworkSection.model_validate(settings), create(folder / "identity.key"), folder)
    held = {digest_of(blob): blob for blob in blobs}
    node.serve(BLOBS, serve_blobs(held.get), max_request_bytes=BLOB_REQUEST_BYTES)
    node.serve(ECHO, echo, max_request_bytes=10_000_000)
    return node


@asynccontextmanager
async def joined(first: HivemindTransport, *others: HivemindTransport) -> AsyncIterator[None]:
    """The nodes, started, all connected to the first."""
    async with AsyncExitStack() as stack:
        await first.start()
        stack.push_async_callback(first.stop)
        for other in others:
            await other.start()
            stack.push_async_callback(other.stop)
            assert other._session is not None
            address = first.addresses()[0].partition("/p2p/")[0]
            assert await other._session.greet({first.peer_id: [address]}) == 1
        yield


async def serve_raw(node: HivemindTransport, protocol: str, server: Server) -> None:
    """Answer streams of a protocol with bytes of the test's own."""
    assert node._session is not None

    async def on_stream(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await server(reader, writer)
        except OSError:
            pass  # the honest side hung up, which is what it should do
        finally:
            writer.transport.abort()

    await node._session._p2p.add_binary_stream_handler(protocol, on_stream)


async def open_stream(node: HivemindTransport, peer_id: str, protocol: str) -> Stream:
    assert node._session is not None
    return await node._session.open_stream(peer_id, protocol)


async def ask(
    node: HivemindTransport, peer_id: str, protocol: str, *, deadline_s: float = 5.0, max_response_bytes: int = 100_000
) -> bytes:
    """By stream, unless `max_response_bytes` is short enough for a call."""
    return await node.request(peer_id, protocol, b"hi", max_response_bytes=max_response_bytes, deadline_s=deadline_s)


async def failure(node: HivemindTransport, peer_id: str, protocol: str, **limits: float) -> str:
    """The reason with which a request to a hostile server ends."""
    with pytest.raises(RequestError) as caught:
        await ask(node, peer_id, protocol, **limits)  # type: ignore[arg-type]
    return caught.value.reason


def header(length: int, digest: bytes = bytes(32)) -> bytes:
    return struct.pack(">BQ32s", 0, length, digest)


async def announce_a_terabyte(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(header(2**40))
    while True:
        writer.write(bytes(65_536))
        await writer.drain()


async def never_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As much as was asked for, announced; a byte at a time, without an end."""
    writer.write(header(100_000))
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def stop_in_the_middle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(header(100_000) + bytes(50_000))
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def send_other_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(header(5, digest_of(b"right")) + b"wrong")
    await writer.drain()
    await reader.read()


SERVERS: list[tuple[Server, str]] = [
    (announce_a_terabyte, "oversize"),
    (never_end, "deadline"),
    (stop_in_the_middle, "cut"),
    (send_other_bytes, "damaged"),
]
FRAMES = [
    (header(2**40), "oversize"),
    (header(60_001) + bytes(60_001), "oversize"),
    (header(60_000) + bytes(100), "cut"),
    (header(5, digest_of(b"right")) + b"wrong", "damaged"),
    (b"", "cut"),
    (bytes(2_000_000), "cut"),
]


async def test_hostile_responses_end_with_their_reasons(tmp_path: Path) -> None:
    """By stream; and as answers to short calls, which need no stream."""
    node, mallory = make_node(tmp_path / "node"), make_node(tmp_path / "mallory")

    def liar(frame: bytes) -> Callable[[bytes, object], Awaitable[bytes]]:
        async def lie(request: bytes, peer_id: object) -> bytes:
            return frame

        return lie

    async with joined(node, mallory):
        assert mallory._session is not None
        for number, (server, reason) in enumerate(SERVERS):
            protocol = f"{HOSTILE}/stream-{number}"
            await serve_raw(mallory, protocol, server)
            deadline_s = 0.5 if reason == "deadline" else 5.0
            assert await failure(node, mallory.peer_id, protocol, deadline_s=deadline_s) == reason, server.__name__
            assert await ask(node, mallory.peer_id, ECHO) == b"hi"
        for number, (frame, reason) in enumerate(FRAMES):
            protocol = f"{HOSTILE}/frame-{number}"
            client = mallory._session._p2p._client
            await client.add_unary_handler(f"{protocol}/call", liar(frame))  # type: ignore[attr-defined]
            assert await failure(node, mallory.peer_id, protocol, max_response_bytes=60_000) == reason, frame[:50]
            assert await ask(node, mallory.peer_id, ECHO, max_response_bytes=60_000) == b"hi"


async def test_one_peer_with_many_calls_leaves_room_for_others(tmp_path: Path) -> None:
    """Its calls stay until the others were served, so that they fill all the places that one peer may have."""
    node = make_node(tmp_path / "node", max_concurrent_requests=8)
    mallory, honest = make_node(tmp_path / "mallory"), make_node(tmp_path / "honest")
    others_were_served = asyncio.Event()

    async def echo_late(peer_id: str, request: bytes) -> bytes:
        await others_were_served.wait()
        return request

    node.serve(HOSTILE, echo_late, max_request_bytes=100_000)
    process, refused = psutil.Process(), node._server.refused
    async with joined(node, mallory, honest):
        assert mallory._session is not None
        calls, memory = mallory._session.calls, process.memory_info().rss
        flood = [asyncio.create_task(calls.ask(node.peer_id, HOSTILE, bytes(60_000))) for _ in range(500)]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)  # a refusal: nothing else has been answered yet
        for _ in range(5):
            assert await ask(honest, node.peer_id, ECHO, max_response_bytes=60_000) == b"hi"
        others_were_served.set()
        frames = await asyncio.gather(*flood)
        num_refused = [frame[0] for frame in frames].count(Status.REFUSED)
        assert 0 < num_refused <= sum(refused.values())  # requests of its node itself are refused, too
        async with asyncio.timeout(30):  # the last answer may arrive before its conversation has ended
            await asyncio.gather(*node._server._conversations)
        assert process.memory_info().rss - memory < 150 << 20  # of both sides: requests, responses and 500 tasks


async def test_trickling_oversize_and_unread_streams_lose_their_places(tmp_path: Path) -> None:
    node = make_node(tmp_path / "node", BLOB, request_timeout_s=0.3, max_concurrent_requests=8)
    mallory, honest = make_node(tmp_path / "mallory"), make_node(tmp_path / "honest")
    async with joined(node, mallory, honest):
        oversize, writer = await open_stream(mallory, node.peer_id, ECHO)
        writer.write(struct.pack(">I", 2**32 - 1))
        assert b"must be <= 10000000 bytes" in await oversize.read()
        trickle, trickling = await open_stream(mallory, node.peer_id, ECHO)
        trickling.write(struct.pack(">I", 10))  # and never the rest: read() ends when the other side hangs up
        _, unread = await open_stream(mallory, node.peer_id, BLOBS)
        write_request(unread, BlobRequest(digest_of(BLOB), 0, 100_000).encode())
        await unread.drain()
        assert await ask(honest, node.peer_id, ECHO) == b"hi"  # meanwhile
        with pytest.raises((RequestError, ConnectionError)):
            await hung_up(trickle)
        server = node._server
        async with asyncio.timeout(30):
            while server.refused["slow"] < 2 or server._conversations:
                await asyncio.sleep(0.02)  # nobody sends an event when a server gives up
        assert server.refused["oversize"] == 1
        assert await ask(mallory, node.peer_id, ECHO) == b"hi"
        for _, stream in ((trickle, trickling), (None, unread)):
            stream.transport.abort()


async def hung_up(reader: asyncio.StreamReader) -> None:
    """Raises ConnectionError once the other side has closed or reset the stream."""
    await reader.read()
    raise ConnectionResetError


async def test_one_peer_with_many_streams_leaves_room_for_others(tmp_path: Path) -> None:
    node = make_node(tmp_path / "node", max_concurrent_requests=8)
    mallory, honest = make_node(tmp_path / "mallory"), make_node(tmp_path / "honest")
    async with joined(node, mallory, honest):
        silent = [await open_stream(mallory, node.peer_id, ECHO) for _ in range(20)]
        async with asyncio.timeout(10):
            while node._server.refused["flood"] + node._server.refused["busy"] < 16:
                await asyncio.sleep(0.02)
        for _ in range(5):
            assert await ask(honest, node.peer_id, ECHO) == b"hi"
        for _, writer in silent:
            writer.transport.abort()


async def test_cut_transfer_goes_on_with_another_holder_and_a_liar_is_known(tmp_path: Path) -> None:
    node, honest = make_node(tmp_path / "node"), make_node(tmp_path / "honest", BLOB)
    cutter, liar = make_node(tmp_path / "cutter"), make_node(tmp_path / "liar")
    served: list[int] = []
    false_blob = bytearray(BLOB)
    false_blob[2 * PIECE_BYTES] ^= 1

    async def cut_after_three(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wanted = BlobRequest.decode(await read_request(reader, BLOB_REQUEST_BYTES))
        if wanted.length == 0:
            await write_response(writer, Response(Status.OK, manifest_of(BLOB)))
        elif len(served) < 3:
            served.append(wanted.offset)
            await write_response(writer, Response(Status.OK, BLOB[wanted.offset : wanted.offset + wanted.length]))
        else:
            writer.write(header(wanted.length) + bytes(300_000))
            await writer.drain()
            return
        await reader.read(1)

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wanted = BlobRequest.decode(await read_request(reader, BLOB_REQUEST_BYTES))
        piece = manifest_of(bytes(false_blob)) if wanted.length == 0 else false_blob[wanted.offset :][: wanted.length]
        await write_response(writer, Response(Status.OK, bytes(piece)))
        await reader.read(1)

    wanted, rng = Download(digest_of(BLOB), len(BLOB), HOSTILE), random.Random(0)
    async with joined(node, cutter, liar, honest):
        await serve_raw(cutter, HOSTILE, cut_after_three)
        await serve_raw(liar, HOSTILE, lie)
        await serve_raw(honest, HOSTILE, _honest)
        blamed: list[str] = []
        assert await fetch(node, [cutter.peer_id, honest.peer_id], wanted, rng, blamed.append) == BLOB
        assert (len(served), blamed) == (3, [])
        assert await fetch(node, [liar.peer_id, honest.peer_id], wanted, rng, blamed.append) == BLOB
        assert blamed == [liar.peer_id]


async def _honest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    request = await read_request(reader, BLOB_REQUEST_BYTES)
    try:
        response = Response(Status.OK, await serve_blobs({digest_of(BLOB): BLOB}.get)("node", request))
    except RequestRefused as refusal:
        response = Response.because(Status.REFUSED, str(refusal))
    await write_response(writer, response)
    await reader.read(1)


async def test_sixty_four_megabytes_arrive_within_bounded_memory(tmp_path: Path) -> None:
    adapter = os.urandom(64 << 20)
    holder, node = make_node(tmp_path / "holder", adapter), make_node(tmp_path / "node")
    process = psutil.Process()
    async with joined(holder, node):
        assert await ask(node, holder.peer_id, ECHO) == b"hi"
        before, most = process.memory_info().rss, 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, process.memory_info().rss)
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        wanted = Download(digest_of(adapter), len(adapter), BLOBS)
        assert await fetch(node, [holder.peer_id], wanted, random.Random(0)) == adapter
        most = max(most, process.memory_info().rss)
        watching.cancel()
    assert most - before < 2.5 * len(adapter)
