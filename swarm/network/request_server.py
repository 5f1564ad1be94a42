"""Answers to requests of peers, and the limits that keep a peer from doing harm with them.

    stream → (place free?) → request read → handler → response sent → acknowledged

The one place where handlers are registered and where what they raise is caught.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarm.network.framing import (
    FrameError,
    Response,
    Status,
    read_acknowledgement,
    read_request,
    write_response,
)
from swarm.network.transport import RequestHandler, RequestRefused, TrafficCounter

logger = logging.getLogger(__name__)

MIN_BYTES_PER_S = 64 * 1024
"""A reader slower than this (half a megabit) loses its response: its place is for others."""
REFUSAL_TIMEOUT_S = 2.0
"""A refused caller has this long to take note."""


def transfer_timeout_s(base_s: float, num_bytes: int) -> float:
    """Longest wait for a transfer of known size."""
    return base_s + num_bytes / MIN_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class _Service:
    handler: RequestHandler
    max_request_bytes: int


class RequestServer:
    """Handlers of one node by protocol name, with a bound on how many requests are served at once."""

    def __init__(self, *, max_concurrent: int, timeout_s: float, traffic: TrafficCounter) -> None:
        """`timeout_s` bounds each of: reading a request, running its handler, sending a response of no size."""
        self._max_concurrent = max_concurrent
        self._timeout_s = timeout_s
        self._traffic = traffic
        self._services: dict[str, _Service] = {}
        self._num_served = 0
        self._conversations: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @property
    def protocols(self) -> tuple[str, ...]:
        return tuple(self._services)

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        """Register the handler of a protocol. Raises ValueError for a name that has one."""
        if protocol in self._services:
            raise ValueError(f"a protocol must have one handler, got a second for {protocol!r}")
        self._services[protocol] = _Service(handler, max_request_bytes)

    async def answer(self, peer_id: str, protocol: str, request: bytes) -> Response:
        """The response to a request that is in memory already. Raises nothing that a peer or a handler can cause."""
        service = self._services.get(protocol)
        if service is None:
            return Response.because(Status.REFUSED, "unknown protocol")
        if len(request) > service.max_request_bytes:
            reason = f"a request must be <= {service.max_request_bytes} bytes, got {len(request)}"
            return Response.because(Status.REFUSED, reason)
        try:
            with self._place():
                response = await self._handle(service, peer_id, protocol, request)
        except RequestRefused as refusal:
            return Response.because(Status.REFUSED, str(refusal))
        self._count(request, response)
        return response

    async def answer_stream(
        self, peer_id: str, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Hold one conversation as in `framing`, and close it. Whatever the peer does, it ends in bounded time."""
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            await self._converse_or_refuse(peer_id, protocol, reader, writer)
            writer.close()
        except (FrameError, OSError) as error:  # OSError includes TimeoutError and a connection that was reset
            self._traffic.requests_failed += 1
            logger.debug("request %s of %s failed: %s", protocol, peer_id, error or type(error).__name__)
        except asyncio.CancelledError:
            if not self._is_closing:  # else it is over anyway, and asyncio's stream server complains of cancelled tasks
                raise
        finally:
            self._conversations.discard(task)
            if not writer.is_closing():
                writer.transport.abort()  # no waiting for a peer to take what is buffered

    async def close(self) -> None:
        """Cut off the requests that are being served. The server can be used again afterwards."""
        self._is_closing = True
        conversations = tuple(self._conversations)
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)
        self._is_closing = False

    async def _converse_or_refuse(
        self, peer_id: str, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self._conversations) > 2 * self._max_concurrent:
            raise FrameError("too many requests at once, not even refused")
        try:
            with self._place():
                await self._converse(self._services[protocol], peer_id, protocol, reader, writer)
        except RequestRefused as refusal:
            async with asyncio.timeout(REFUSAL_TIMEOUT_S):
                await write_response(writer, Response.because(Status.REFUSED, str(refusal)))
                while await reader.read(65_536):  # closing on unread bytes resets the stream, and the refusal is lost
                    pass

    async def _converse(
        self,
        service: _Service,
        peer_id: str,
        protocol: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        async with asyncio.timeout(self._timeout_s):
            request = await read_request(reader, service.max_request_bytes)
        response = await self._handle(service, peer_id, protocol, request)
        async with asyncio.timeout(transfer_timeout_s(self._timeout_s, len(response.body))):
            await write_response(writer, response)
            await read_acknowledgement(reader)
        self._count(request, response)

    async def _handle(self, service: _Service, peer_id: str, protocol: str, request: bytes) -> Response:
        try:
            async with asyncio.timeout(self._timeout_s):
                return Response(Status.OK, await service.handler(peer_id, request))
        except RequestRefused as refusal:
            return Response.because(Status.REFUSED, str(refusal))
        except Exception:  # a broken handler costs its request, never the node
            logger.warning("the handler of %s broke on a request of %s", protocol, peer_id, exc_info=True)
            return Response.because(Status.FAILED, "the handler broke")

    def _count(self, request: bytes, response: Response) -> None:
        self._traffic.bytes_received += len(request)
        self._traffic.bytes_sent += len(response.body)
        if response.status == Status.FAILED:
            self._traffic.requests_failed += 1
        else:
            self._traffic.requests_served += 1

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._num_served >= self._max_concurrent:
            raise RequestRefused("busy")
        self._num_served += 1
        try:
            yield
        finally:
            self._num_served -= 1
