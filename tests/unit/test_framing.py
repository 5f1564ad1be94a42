"""The request protocol on a byte stream: whole, bounded and undamaged, or a named error."""

import asyncio
import hashlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.network.requests.framing import (
    MAX_CALL_BYTES,
    MAX_REASON_BYTES,
    PIECE_BYTES,
    FrameError,
    Response,
    Status,
    parse_response,
    read_acknowledgement,
    read_request,
    read_response,
    response_frame,
    write_acknowledgement,
    write_request,
    write_response,
)
from swarm.network.transport import RequestRefused

pytestmark = pytest.mark.asyncio
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[Stream, Stream]]:
    """Both ends of a socket pair."""
    one, other = socket.socketpair()
    ends = await asyncio.open_connection(sock=one), await asyncio.open_connection(sock=other)
    try:
        yield ends
    finally:
        for _, writer in ends:
            writer.transport.abort()


def received(data: bytes) -> asyncio.StreamReader:
    """A stream that delivers `data` and ends."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def response_bytes(body: bytes, *, status: int = 0, length: int | None = None, digest: bytes | None = None) -> bytes:
    header = struct.pack(">BQ", status, len(body) if length is None else length)
    return header + (digest or hashlib.sha256(body).digest()) + body


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5_000_000])
async def test_conversation_carries_request_and_response(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with connection() as ((caller_reader, caller_writer), (server_reader, server_writer)):

        async def serve() -> bytes:
            request = await read_request(server_reader, 100)
            await write_response(server_writer, Response(Status.OK, body))
            await read_acknowledgement(server_reader)
            return request

        server = asyncio.create_task(serve())
        write_request(caller_writer, b"question")
        assert await read_response(caller_reader, size) == Response(Status.OK, body)
        write_acknowledgement(caller_writer)
        assert await server == b"question"


async def test_bytes_on_the_wire_are_as_documented() -> None:
    async with connection() as ((caller_reader, caller_writer), (server_reader, server_writer)):
        write_request(caller_writer, b"abc")
        assert await server_reader.readexactly(7) == b"\0\0\0\x03abc"
        await write_response(server_writer, Response(Status.REFUSED, b"no"))
        assert (
            await caller_reader.readexactly(43)
            == b"\x01" + (2).to_bytes(8, "big") + hashlib.sha256(b"no").digest() + b"no"
        )
        write_acknowledgement(caller_writer)
        assert await server_reader.readexactly(1) == b"\x06"


async def test_oversize_request_is_refused_before_it_is_read() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(struct.pack(">I", 101))  # no body follows, and no end
    with pytest.raises(RequestRefused, match="<= 100 bytes, got 101"):
        await read_request(reader, 100)


async def test_oversize_response_is_refused_before_it_is_read() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(response_bytes(b"", length=2**40))
    with pytest.raises(FrameError, match=f"<= 100 bytes, got {2**40}"):
        await read_response(reader, 100)


async def test_oversize_reason_is_refused() -> None:
    with pytest.raises(FrameError, match=f"<= {MAX_REASON_BYTES} bytes"):
        await read_response(received(response_bytes(bytes(MAX_REASON_BYTES + 1), status=1)), 10**6)


@pytest.mark.parametrize("lost", [1, 1000, PIECE_BYTES])
async def test_lost_end_of_a_response_is_noticed(lost: int) -> None:
    data = response_bytes(bytes(2 * PIECE_BYTES))
    with pytest.raises(FrameError, match="cut off after"):
        await read_response(received(data[:-lost]), 10**6)


async def test_damaged_response_is_noticed() -> None:
    with pytest.raises(FrameError, match="damaged"):
        await read_response(received(response_bytes(b"body", digest=hashlib.sha256(b"Body").digest())), 100)


async def test_unknown_status_is_refused() -> None:
    with pytest.raises(FrameError, match="got 3"):
        await read_response(received(response_bytes(b"", status=3)), 100)


@pytest.mark.parametrize("answer", [b"", b"\x00"])
async def test_missing_acknowledgement_is_noticed(answer: bytes) -> None:
    with pytest.raises(FrameError):
        await read_acknowledgement(received(answer))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (response_bytes(b"", length=2**40), "oversize"),
        (response_bytes(b"", status=9), "damaged"),
        (response_bytes(b"body", digest=bytes(32)), "damaged"),
        (response_bytes(b"body")[:-1], "cut"),
        (b"", "cut"),
    ],
)
async def test_failure_has_one_stable_word(data: bytes, reason: str) -> None:
    with pytest.raises(FrameError) as caught:
        await read_response(received(data), 100)
    assert caught.value.reason == reason


async def test_refusal_for_lack_of_room_is_told_from_one_for_good() -> None:
    assert Response.because(Status.REFUSED, "busy").failure == "busy"
    assert Response.because(Status.REFUSED, "rate").failure == "busy"
    assert Response.because(Status.REFUSED, "unknown blob").failure == "refused"


async def test_writer_is_held_back_before_every_piece() -> None:
    sizes: list[int] = []

    async def before_piece(num_bytes: int) -> None:
        sizes.append(num_bytes)

    async with connection() as ((reader, _), (_, writer)):
        writing = asyncio.create_task(write_response(writer, Response(Status.OK, bytes(PIECE_BYTES + 7)), before_piece))
        await read_response(reader, 10**6)
        await writing
    assert sizes == [PIECE_BYTES, 7]


async def test_reason_of_a_hostile_server_is_one_printable_line() -> None:
    response = await read_response(received(response_bytes(b"\x1b[2Jline\r\nline\xff", status=1)), 100)
    assert response.reason == "?[2Jline??line?"


async def test_long_reason_is_cut() -> None:
    assert len(Response.because(Status.REFUSED, "x" * 10_000).body) == MAX_REASON_BYTES
    assert Response.because(Status.REFUSED, "größe").reason == "gr??e"


@given(st.binary(max_size=200))
async def test_any_bytes_are_a_request_or_a_named_error(data: bytes) -> None:
    with suppress(FrameError, RequestRefused):
        assert await read_request(received(data), 50) == data[4 : 4 + int.from_bytes(data[:4], "big")]


@given(st.binary(max_size=200) | st.binary(max_size=50).map(response_bytes))
async def test_any_bytes_are_a_response_or_a_named_error(data: bytes) -> None:
    try:
        response = await read_response(received(data), 50)
    except FrameError:
        return
    assert hashlib.sha256(response.body).digest() == data[9:41]


async def test_response_in_one_message_is_checked_as_on_a_stream() -> None:
    frame = response_frame(Response(Status.OK, b"a body"))
    assert parse_response(frame, 6) == Response(Status.OK, b"a body")
    for broken, bound, reason in (
        (frame, 5, "oversize"),
        (response_frame(Response(Status.OK, bytes(MAX_CALL_BYTES + 1))), MAX_CALL_BYTES, "oversize"),
        (frame[:-1] + b"!", 6, "damaged"),
        (b"\x07" + frame[1:], 6, "damaged"),
        (frame[:-1], 6, "cut"),
        (frame + b"!", 6, "cut"),
        (frame[:40], 6, "cut"),
        (b"", 6, "cut"),
    ):
        with pytest.raises(FrameError) as error:
            parse_response(broken, bound)
        assert error.value.reason == reason
