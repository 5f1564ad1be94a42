"""The limits that keep callers from doing harm: places, deadlines, sizes, and handlers that break."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from swarm.config import Config, NetworkSection, PipelineSection, PolicySection
from swarm.network.memory.virtual_clock import run
from swarm.network.requests.framing import (
    FrameError,
    Response,
    Status,
    read_response,
    write_acknowledgement,
    write_request,
)
from swarm.network.requests.limits import MAX_REMEMBERED_PEERS, MAX_WAIT_S, CallerTable, RequestLimits
from swarm.network.requests.server import RequestServer, transfer_timeout_s
from swarm.network.transport import RequestRefused, TrafficCounter
from swarm.node.stage_process import network_with_stages
from swarm.records.identity import Identity

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
    """Begins calls: `await call(server, request, protocol, peer_id)`, with None for a caller that stays silent."""
    calls: list[Call] = []

    async def begin(
        server: RequestServer, request: bytes | None, protocol: str = "echo", peer_id: str = CALLER
    ) -> Call:
        one, other = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=one)
        served_reader, served_writer = await asyncio.open_connection(sock=other)
        conversation = asyncio.create_task(server.answer_stream(peer_id, protocol, served_reader, served_writer))
        if request is not None:
            write_request(writer, request)
        calls.append(Call(reader, writer, conversation))
        return calls[-1]

    yield begin
    for one in calls:
        one.writer.close()
    await asyncio.gather(*(one.conversation for one in calls), return_exceptions=True)


def make_server(
    *, max_concurrent: int = 4, timeout_s: float = 5.0, **limits: float | frozenset[str]
) -> tuple[RequestServer, TrafficCounter]:
    traffic = TrafficCounter()
    rates = RequestLimits(**limits)  # type: ignore[arg-type]
    server = RequestServer(max_concurrent=max_concurrent, timeout_s=timeout_s, traffic=traffic, limits=rates)

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


def large(server: RequestServer, num_bytes: int) -> None:
    async def handler(peer_id: str, request: bytes) -> bytes:
        return bytes(num_bytes)

    server.serve("large", handler, max_request_bytes=100)


async def test_one_peer_gets_a_quarter_of_the_places_and_others_are_served(call: Caller) -> None:
    server, _ = make_server(max_concurrent=16)
    greedy = [await call(server, None) for _ in range(4)]
    assert await (await call(server, b"")).response() == Response(Status.REFUSED, b"busy")
    other = await call(server, b"hi", "echo", "another peer")
    assert (await other.response()).body == b"another peerhi"
    assert server.refused == {"busy": 1}
    await server.close()
    assert all(one.conversation.done() for one in greedy)


async def test_flood_of_one_peer_is_cut_off_without_a_word_and_others_are_served(call: Caller) -> None:
    server, _ = make_server(max_concurrent=16)
    for _ in range(8):  # four places, and four that are being refused
        await call(server, None)
    for _ in range(20):
        with pytest.raises((FrameError, ConnectionError)):
            await (await call(server, b"")).response()
    assert server.refused["flood"] == 20
    assert (await (await call(server, b"", "echo", "another peer")).response()).status == Status.OK
    await server.close()


async def test_requests_over_the_rate_of_a_peer_are_refused(call: Caller) -> None:
    server, _ = make_server(requests_per_peer_per_s=0.001)
    assert (await (await call(server, b"")).response()).status == Status.OK
    refused = await (await call(server, b"")).response()
    assert (refused, refused.failure) == (Response(Status.REFUSED, b"rate"), "busy")
    assert (await server.answer(CALLER, "echo", b"")).body == b"rate"
    assert (await (await call(server, b"", "echo", "another peer")).response()).status == Status.OK
    assert server.refused == {"rate": 2}


async def test_rates_do_not_hold_for_peers_that_the_settings_name_and_for_them_alone(call: Caller) -> None:
    server, _ = make_server(
        requests_per_peer_per_s=0.001, upload_bytes_per_peer_per_s=1_000, unlimited_peers=frozenset({CALLER})
    )
    large(server, 100_000)
    for _ in range(5):
        assert (await (await call(server, b"", "large")).response()).status == Status.OK
    assert (await (await call(server, b"", "echo", "another peer")).response()).status == Status.OK
    assert (await (await call(server, b"", "echo", "another peer")).response()).body == b"rate"


async def test_peer_that_took_its_share_of_the_line_waits(call: Caller) -> None:
    server, _ = make_server(upload_bytes_per_peer_per_s=10_000)
    large(server, 100_000)  # eight seconds of its rate are missing afterwards
    assert len((await server.answer(CALLER, "large", b"")).body) == 100_000
    assert (await (await call(server, b"", "large")).response()).body == b"rate"
    assert (await server.answer("another peer", "large", b"")).status == Status.OK


async def test_upload_cap_holds_for_all_peers_together(call: Caller) -> None:
    server, _ = make_server(max_upload_bytes_per_s=2_000_000)
    large(server, 500_000)
    loop = asyncio.get_running_loop()
    start = loop.time()
    calls = [await call(server, b"", "large", f"peer{number}") for number in range(4)]
    await asyncio.gather(*(one.response() for one in calls))
    assert loop.time() - start < 0.3  # a second's worth at once
    more = await call(server, b"", "large")
    await more.response()
    assert 0.15 < loop.time() - start < 1.0  # half a MB later: a quarter of a second


async def test_responses_in_flight_are_bounded_in_sum(call: Caller) -> None:
    server, _ = make_server(max_concurrent=8, response_bytes_in_flight=1_500_000)
    large(server, 1_000_000)
    unread = await call(server, b"", "large", "slow reader")
    await unread.reader.readexactly(1)
    assert (await (await call(server, b"", "large")).response()).body == b"busy"
    await unread.reader.readexactly(40 + 1_000_000)
    write_acknowledgement(unread.writer)
    await unread.conversation
    assert len((await (await call(server, b"", "large")).response()).body) == 1_000_000


async def test_one_response_over_the_bound_is_sent_alone(call: Caller) -> None:
    server, _ = make_server(response_bytes_in_flight=10)
    assert (await (await call(server, b"hello")).response()).status == Status.OK


async def test_reader_that_never_reads_loses_its_place(call: Caller) -> None:
    server, _ = make_server(max_concurrent=1, timeout_s=0.05)

    async def huge(peer_id: str, request: bytes) -> bytes:
        return bytes(8_000_000)

    server.serve("huge", huge, max_request_bytes=100)
    unread = await call(server, b"", "huge")
    unread.reader._transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.wait_for(unread.conversation, 30)
    assert server.refused == {"slow": 1}
    assert (await (await call(server, b"")).response()).status == Status.OK


async def test_request_that_trickles_in_loses_its_place(call: Caller) -> None:
    server, _ = make_server(max_concurrent=1, timeout_s=0.1)
    trickle = await call(server, None)
    trickle.writer.write(b"\0\0\0\x50")

    async def drip() -> None:
        while True:
            trickle.writer.write(b"x")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    await asyncio.wait_for(trickle.conversation, 5)
    dripping.cancel()
    assert server.refused == {"slow": 1}
    assert (await (await call(server, b"")).response()).status == Status.OK


async def test_reasons_are_counted(call: Caller) -> None:
    server, _ = make_server()
    await (await call(server, bytes(101))).response()
    await server.answer(CALLER, "echo", bytes(101))
    await server.answer(CALLER, "none", b"")
    gone = await call(server, None)
    gone.writer.close()
    await gone.conversation
    assert server.refused == {"oversize": 2, "unknown_protocol": 1, "cut": 1}


def never() -> None:
    raise AssertionError("nobody has to give way")


def test_table_of_callers_forgets_the_idle_and_keeps_the_busy() -> None:
    table = CallerTable(RequestLimits(requests_per_peer_per_s=1), 8)
    with table.conversation("busy", 0.0, never):
        for number in range(2 * MAX_REMEMBERED_PEERS):
            with table.conversation(f"peer{number}", 0.0, never):
                pass
        assert table.num_peers == MAX_REMEMBERED_PEERS


def test_line_that_is_booked_out_refuses_instead_of_promising() -> None:
    table = CallerTable(RequestLimits(max_upload_bytes_per_s=1000), 8)
    with table.place("peer", 0.0, never):
        pass
    assert table.charge("peer", 1000, 0.0) == 0.0
    assert table.charge("peer", 3000, 0.0) == 3.0
    table.begin_response("peer", 10, 0.0)
    table.charge("peer", 3000, 0.0)
    with pytest.raises(RequestRefused, match="busy"):
        table.begin_response("peer", 10, 0.0)
    table.begin_response("peer", 10, 6.0 - MAX_WAIT_S)


def test_limits_come_from_the_network_section() -> None:
    config = NetworkSection(requests_per_peer_per_s=3, max_upload_bytes_per_s=5, unlimited_peers=("friend",))
    bytes_per_s = config.upload_bytes_per_peer_per_s
    assert RequestLimits.of(config) == RequestLimits(3, bytes_per_s, 5, 67_108_864, frozenset({"friend"}))


@pytest.mark.parametrize("in_memory", [True, False])
def test_silent_names_of_one_network_leave_room_for_callers_of_others(in_memory: bool) -> None:
    async def main() -> None:
        server = RequestServer(
            max_concurrent=16,
            timeout_s=20.0,
            traffic=TrafficCounter(),
            network_of=lambda peer_id: "11.0.0.0/24" if peer_id == "honest" else "11.0.99.0/24",
        )

        async def echo(peer_id: str, request: bytes) -> bytes:
            await asyncio.sleep(0.0 if request else 20.0)
            return request

        server.serve("echo", echo, max_request_bytes=10)

        async def stay_silent(number: int) -> None:
            while True:
                if in_memory:
                    await server.answer_call(f"name {number}", "echo", b"")
                else:
                    await server.answer_stream(f"name {number}", "echo", asyncio.StreamReader(), Sink())  # type: ignore[arg-type]
                await asyncio.sleep(0.1)

        silent = [asyncio.create_task(stay_silent(number % 20)) for number in range(60)]
        for _ in range(20):
            await asyncio.sleep(1.0)
            assert (await server.answer_call("honest", "echo", b"hi")).body == b"hi"
        assert server.refused["busy"] >= 20
        for task in silent:
            task.cancel()
        await asyncio.gather(*silent, return_exceptions=True)

    run(main())


class Sink:
    """A writer that takes all that is written."""

    def __init__(self) -> None:
        self._is_closing = False

    @property
    def transport(self) -> Any:
        return SimpleNamespace(abort=self.close)

    def write(self, data: object) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing


async def test_strangers_are_refused_but_for_what_is_open_to_all(call: Caller) -> None:
    def admits(peer_id: str, protocol: str) -> bool:
        return protocol == "open"

    async def echo(peer_id: str, request: bytes) -> bytes:
        return request

    server = RequestServer(max_concurrent=4, timeout_s=5.0, traffic=TrafficCounter(), admits=admits)
    for protocol in ("open", "echo"):
        server.serve(protocol, echo, max_request_bytes=10)
    assert (await (await call(server, b"hello", "open")).response()).body == b"hello"
    for response in (await (await call(server, b"hello")).response(), await server.answer(CALLER, "echo", b"hello")):
        assert (response.status, response.reason) == (Status.REFUSED, "not a member")
    assert server.refused == {"stranger": 2}


def test_a_pipeline_lifts_the_rates_for_its_machines_and_for_nobody_else() -> None:
    crew = tuple(Identity(bytes([number]) * 32).peer_id for number in range(3))
    pipeline = PipelineSection(driver=crew[0], machines=(f"/ip4/11.0.0.1/tcp/4001/p2p/{crew[1]}", crew[2]))
    config = Config(policy=PolicySection(pipeline=pipeline))
    table = CallerTable(RequestLimits.of(network_with_stages(config, crew[0])), 8)

    def num_served(peer_id: str, num_requests: int) -> int:
        served = 0
        for _ in range(num_requests):
            with contextlib.suppress(RequestRefused), table.place(peer_id, 0.0, never):
                served += 1
        return served

    assert [num_served(peer_id, 1000) for peer_id in crew] == [1000, 1000, 1000]
    assert num_served("stranger", 1000) == 2 * config.network.requests_per_peer_per_s
    table.begin_response("stranger", 1, 0.0)
    assert table.charge("stranger", 1 << 40, 0.0) > MAX_WAIT_S
