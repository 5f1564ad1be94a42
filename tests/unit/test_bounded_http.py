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
from swarm.observability import bounded_http, http_server
from swarm.observability.http_server import HttpServer
from swarm.observability.metrics import Metrics

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


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
        for outcome in islice(asyncio.as_completed(outcomes), 7):  # six found no place, one gave up its own
            assert await outcome
        assert sum(task.done() for task in outcomes) == 7
        for _, writer in silent:
            writer.close()
        await asyncio.gather(*outcomes)
        assert await health(served, HERE) == 200


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
