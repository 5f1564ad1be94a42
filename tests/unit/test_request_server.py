"""The limits that keep callers from doing harm: places, deadlines, sizes, and handlers that break."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio

from swarm.network.framing import (
    FrameError,
    Response,
    Status,
    read_response,
    write_acknowledgement,
    write_request,
)
from swarm.network.request_server import RequestServer, transfer_timeout_s
from swarm.network.transport import RequestRefused, TrafficCounter

pytestmark = pytest.mark.asyncio
CALLER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


@dataclass
class Call:
    """One caller's end of a conversation that a server holds."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    conversation: asyncio.Task[None]

    async def response(self) -> Response:
        response = await read_response(self.reader, 10**6)
        write_acknowledgement(self.writer)
        self.writer.close()
        await self.conversation
        return response


Caller = Callable[..., Awaitable[Call]]


@pytest_asyncio.fixture
async def call() -> AsyncIterator[Caller]:
    """Begins calls of a server: `await call(server, request, protocol)`, with None for a caller that stays silent."""
    calls: list[Call] = []

    async def begin(server: RequestServer, request: bytes | None, protocol: str = "echo") -> Call:
        one, other = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=one)
        served_reader, served_writer = await asyncio.open_connection(sock=other)
        conversation = asyncio.create_task(server.answer_stream(CALLER, protocol, served_reader, served_writer))
        if request is not None:
            write_request(writer, request)
        calls.append(Call(reader, writer, conversation))
        return calls[-1]

    yield begin
    for one in calls:
        one.writer.close()
    await asyncio.gather(*(one.conversation for one in calls), return_exceptions=True)


def make_server(*, max_concurrent: int = 4, timeout_s: float = 5.0) -> tuple[RequestServer, TrafficCounter]:
    traffic = TrafficCounter()
    server = RequestServer(max_concurrent=max_concurrent, timeout_s=timeout_s, traffic=traffic)

    async def echo(peer_id: str, request: bytes) -> bytes:
        return peer_id.encode() + request

    server.serve("echo", echo, max_request_bytes=100)
    return server, traffic


async def test_handler_learns_the_caller_and_traffic_is_counted(call: Caller) -> None:
    server, traffic = make_server()
    response = await (await call(server, b"hello")).response()
    assert response == Response(Status.OK, CALLER.encode() + b"hello")
    assert traffic == TrafficCounter(bytes_sent=len(response.body), bytes_received=5, requests_served=1)


async def test_reason_of_a_refusal_reaches_the_caller(call: Caller) -> None:
    server, traffic = make_server()

    async def refuse(peer_id: str, request: bytes) -> bytes:
        raise RequestRefused("not for you")

    server.serve("refuse", refuse, max_request_bytes=100)
    assert await (await call(server, b"", "refuse")).response() == Response(Status.REFUSED, b"not for you")
    assert traffic.requests_failed == 0


@pytest.mark.parametrize("error", [ValueError("secret"), KeyError(), RecursionError(), TimeoutError()])
async def test_broken_handler_costs_its_request_only(call: Caller, error: Exception) -> None:
    server, traffic = make_server()

    async def break_down(peer_id: str, request: bytes) -> bytes:
        raise error

    server.serve("broken", break_down, max_request_bytes=100)
    assert await (await call(server, b"", "broken")).response() == Response(Status.FAILED, b"the handler broke")
    assert traffic.requests_failed == 1
    assert (await (await call(server, b"")).response()).status == Status.OK


async def test_handler_that_hangs_is_cut_off(call: Caller) -> None:
    server, _ = make_server(timeout_s=0.05)

    async def hang(peer_id: str, request: bytes) -> bytes:
        return await asyncio.get_running_loop().create_future()

    server.serve("hang", hang, max_request_bytes=100)
    assert (await (await call(server, b"", "hang")).response()).status == Status.FAILED


async def test_callers_over_the_limit_are_refused_at_once_and_served_later(call: Caller) -> None:
    server, _ = make_server(max_concurrent=2)
    is_open = asyncio.Event()

    async def wait(peer_id: str, request: bytes) -> bytes:
        await is_open.wait()
        return b"done"

    server.serve("wait", wait, max_request_bytes=100)
    served = [await call(server, b"", "wait") for _ in range(2)]
    assert await (await call(server, b"", "wait")).response() == Response(Status.REFUSED, b"busy")
    is_open.set()
    assert [(await one.response()).body for one in served] == [b"done", b"done"]
    assert (await (await call(server, b"", "wait")).response()).body == b"done"


async def test_flood_of_callers_is_cut_off_without_a_word(call: Caller) -> None:
    server, _ = make_server(max_concurrent=1)
    silent = [await call(server, None) for _ in range(2)]  # one has the place, one is being refused
    with pytest.raises((FrameError, ConnectionError)):
        await (await call(server, b"")).response()
    await server.close()
    assert all(one.conversation.done() for one in silent)


async def test_oversize_request_is_refused_although_the_caller_goes_on_sending(call: Caller) -> None:
    server, _ = make_server()
    response = await (await call(server, bytes(1_000_000))).response()
    assert response == Response(Status.REFUSED, b"a request must be <= 100 bytes, got 1000000")


@pytest.mark.parametrize("request_bytes", [None, b"half"])
async def test_caller_that_never_finishes_its_request_loses_its_place(
    call: Caller, request_bytes: bytes | None
) -> None:
    server, traffic = make_server(max_concurrent=1, timeout_s=0.05)
    slow = await call(server, None)
    if request_bytes is not None:
        slow.writer.write(b"\0\0\0\x20" + request_bytes)
    await slow.conversation
    assert traffic.requests_failed == 1
    assert (await (await call(server, b"")).response()).status == Status.OK


async def test_reader_that_never_acknowledges_loses_its_place(call: Caller) -> None:
    server, traffic = make_server(max_concurrent=1, timeout_s=0.05)
    slow = await call(server, b"hello")
    await slow.conversation
    assert traffic == TrafficCounter(requests_failed=1)
    assert (await (await call(server, b"")).response()).status == Status.OK


async def test_transfers_get_time_by_size() -> None:
    assert transfer_timeout_s(20.0, 0) == 20.0
    assert transfer_timeout_s(20.0, 16 * 2**20) == 20.0 + 256.0


async def test_close_cuts_off_what_is_being_served(call: Caller) -> None:
    server, _ = make_server()
    silent = await call(server, None)
    await asyncio.wait_for(server.close(), 1)
    assert silent.conversation.done()
    assert await silent.reader.read() == b""


async def test_request_in_memory_meets_the_same_limits(call: Caller) -> None:
    server, _ = make_server(max_concurrent=1)
    assert (await server.answer(CALLER, "echo", b"x")).body == CALLER.encode() + b"x"
    assert await server.answer(CALLER, "none", b"x") == Response(Status.REFUSED, b"unknown protocol")
    assert (await server.answer(CALLER, "echo", bytes(101))).status == Status.REFUSED
    is_serving = asyncio.Event()

    async def hang(peer_id: str, request: bytes) -> bytes:
        is_serving.set()
        return await asyncio.get_running_loop().create_future()

    server.serve("hang", hang, max_request_bytes=100)
    await call(server, b"", "hang")
    await is_serving.wait()
    assert await server.answer(CALLER, "echo", b"x") == Response(Status.REFUSED, b"busy")
    await server.close()


async def test_second_handler_of_a_protocol_is_a_mistake() -> None:
    server, _ = make_server()

    async def other(peer_id: str, request: bytes) -> bytes:
        return b""

    with pytest.raises(ValueError, match="one handler"):
        server.serve("echo", other, max_request_bytes=1)
