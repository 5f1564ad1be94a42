"""What a page's server bears: connections that say nothing, and many of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from swarm.config import ObservabilitySection
from swarm.limits.turn_queue import FairRateLimiter
from swarm.observability import http_server
from swarm.observability import http_server as bounded_http
from swarm.observability.http_server import HttpServer
from swarm.observability.metrics import Metrics

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def server(*pages: Route) -> AsyncIterator[HttpServer]:
    served = HttpServer(ObservabilitySection(http=True, http_port=0), Metrics(), lambda: {"ok": True}, pages)
    await served.start()
    try:
        yield served
    finally:
        await served.stop()


async def health(served: HttpServer, source: str) -> int:
    transport = httpx.AsyncHTTPTransport(local_address=source)
    async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
        return (await client.get(f"http://{HERE}:{served.port}/health")).status_code


async def is_closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(5):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


async def test_one_address_takes_no_places_that_another_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)
    async with server() as served:
        silent = [await asyncio.open_connection(HERE, served.port) for _ in range(10)]
        assert await health(served, ELSEWHERE) == 200
        outcomes = [asyncio.create_task(is_closed(reader)) for reader, _ in silent]
        for outcome in islice(
            asyncio.as_completed(outcomes), 7
        ):  # each gave way to a later one, the seventh to another address
            assert await outcome
        assert sum(task.done() for task in outcomes) == 7
        for _, writer in silent:
            writer.close()
        await asyncio.gather(*outcomes)
        assert await health(served, HERE) == 200


async def test_who_holds_all_places_keeps_nobody_of_the_same_address_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)
    async with server() as served:
        silent = [await asyncio.open_connection(HERE, served.port) for _ in range(4)]
        assert await health(served, HERE) == 200
        assert await is_closed(silent[0][0]), "the oldest gave way"
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize("sent", [b"", REQUEST[:20]])
async def test_whoever_sends_no_whole_head_is_dropped(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_TIMEOUT_S", 0.2)
    async with server() as served:
        reader, writer = await asyncio.open_connection(HERE, served.port)
        writer.write(sent)
        assert await is_closed(reader)
        writer.close()


async def test_a_second_request_of_a_connection_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_TIMEOUT_S", 0.2)
    async with server() as served:
        reader, writer = await asyncio.open_connection(HERE, served.port)
        for _ in range(3):
            writer.write(REQUEST)
            await reader.readuntil(b'{"ok":true}')
            await asyncio.sleep(0.25)  # idle, which uvicorn itself ends after five seconds
        writer.write(REQUEST[:20])
        assert await is_closed(reader)
        writer.close()


async def test_an_answer_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_TIMEOUT_S", 0.1)

    async def answer(request: Request) -> Response:
        await asyncio.sleep(0.4)
        return PlainTextResponse("at last")

    async with server(Route("/slow", answer)) as served, httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://{HERE}:{served.port}/slow")).text == "at last"


@pytest.mark.parametrize("is_pipelined", [True, False])
async def test_nobody_is_answered_faster_than_the_bound(is_pipelined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BURST_ANSWERS", 5)
    monkeypatch.setattr(http_server, "ANSWERS_PER_S", 20.0)
    num_asked = 15
    async with server() as served:
        reader, writer = await asyncio.open_connection(HERE, served.port)
        started = asyncio.get_running_loop().time()
        if is_pipelined:
            writer.write(REQUEST * num_asked)
        async with asyncio.timeout(20):
            for _ in range(num_asked):
                if not is_pipelined:
                    writer.write(REQUEST)
                await reader.readuntil(b'{"ok":true}')
        took_s = asyncio.get_running_loop().time() - started
        writer.close()
    assert took_s > 0.9 * (num_asked - 5) / 20


async def test_a_flood_holds_up_others_for_a_turn_each_and_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BURST_ANSWERS", 1)
    monkeypatch.setattr(http_server, "ANSWERS_PER_S", 20.0)
    async with server() as served:
        flooding = [await asyncio.open_connection(HERE, served.port) for _ in range(4)]
        for _, writer in flooding:
            writer.write(REQUEST * 100_000)
        async with asyncio.timeout(5):  # of 20,000 s that the flood would take
            assert await health(served, ELSEWHERE) == 200
        assert served._server is not None
        held = [len(one._held or b"") for one in served._server.server_state.connections]  # type: ignore[union-attr]
        assert sum(held) < 4 << 20
        for _, writer in flooding:
            writer.close()


async def test_who_left_takes_no_turn() -> None:
    turns, done = FairRateLimiter(50.0, 1), []
    for who in range(100):
        turns.take(HERE, who, lambda who=who: done.append(who))
    for who in range(1, 99):
        turns.leave(HERE, who)
    async with asyncio.timeout(5):
        while 99 not in done:
            await asyncio.sleep(0.005)  # until its turn
    assert done == [0, 99]


async def test_addresses_take_turns_however_much_waits_at_one_of_them() -> None:
    turns, done = FairRateLimiter(1000.0, 1), list[str]()
    for number in range(9):
        turns.take(ELSEWHERE, number, lambda: done.append(ELSEWHERE))
    for number in range(2):
        turns.take(HERE, number, lambda: done.append(HERE))
    async with asyncio.timeout(5):
        while len(done) < 11:
            await asyncio.sleep(0.001)  # until their turns
    assert done[:5] == [ELSEWHERE, ELSEWHERE, HERE, ELSEWHERE, HERE]
