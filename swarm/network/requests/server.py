"""Answers the requests of peers, within limits that keep a peer from doing harm.

    stream → place → request read → handler → upload → response sent → acknowledged

This is the one place where handlers are registered and where their exceptions are caught. `requests.limits` holds the
limits.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Self

from swarm.errors import RequestError
from swarm.network.network_context import NetworkContext
from swarm.network.requests.framing import (
    BUSY_REASONS,
    FrameError,
    Response,
    Status,
    read_acknowledgement,
    read_request_body,
    read_request_length,
    write_response,
)
from swarm.network.requests.limits import NO_LIMITS, CallerTable, GaveWay, NetworkOf, RequestLimits, giving_way
from swarm.network.requests.lines import StreamLine
from swarm.network.transport import Admits, Line, LineHandler, RequestHandler, RequestRefused, TrafficCounter, everybody

logger = logging.getLogger(__name__)

MIN_BYTES_PER_S = 64 * 1024
"""A slower reader (half a megabit) loses its response, so that its place is free for others."""
REFUSAL_TIMEOUT_S = 2.0
"""A refused caller has this long to read the refusal,"""
MAX_DRAINED_BYTES = 4 << 20
"""and may go on sending this much."""
STALL_TIMEOUT_S = 5.0
"""Longest silence of a caller whose next bytes are due."""
STRANGER = "not a member"
"""The refusal of a peer that this node does not answer at all."""
MAX_BUFFERED_BYTES = 16 << 20
"""Bytes of a response that may be in buffers of the system, of libp2p and of the network when all is sent."""


def transfer_timeout_s(base_s: float, num_bytes: int) -> float:
    """Return the longest wait for a transfer of known size."""
    return base_s + num_bytes / MIN_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class _Service:
    handler: RequestHandler
    max_request_bytes: int


class RequestServer:
    """The request handlers of one node by protocol, with limits on what callers may use."""

    def __init__(
        self,
        *,
        max_concurrent: int,
        timeout_s: float,
        traffic: TrafficCounter,
        limits: RequestLimits = NO_LIMITS,
        admits: Admits = everybody,
        network_of: NetworkOf = lambda peer_id: "",
    ) -> None:
        """`timeout_s` limits each of: reading a request, running its handler, sending an empty response.

        `network_of` names the network of a caller. Networks share the places when all are in use.
        """
        self._admits = admits
        self._timeout_s = timeout_s
        self._stall_timeout_s = min(STALL_TIMEOUT_S, timeout_s)
        self._traffic = traffic
        self._callers = CallerTable(limits, max_concurrent, network_of)
        self._services: dict[str, _Service] = {}
        self._line_handlers: dict[str, LineHandler] = {}
        self._conversations: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self.refused: Counter[str] = Counter()
        """Requests without an answer, by reason: busy, rate, flood, oversize, slow, cut, unknown_protocol, handler,
        stranger."""

    @classmethod
    def of(cls, context: NetworkContext) -> Self:
        """Make the server of a node, with the limits of its settings."""
        return cls(
            max_concurrent=context.config.max_concurrent_requests,
            timeout_s=context.config.request_timeout_s,
            traffic=context.traffic,
            limits=RequestLimits.of(context.config),
            admits=context.admits,
            network_of=context.dialling.network_of,
        )

    @property
    def protocols(self) -> tuple[str, ...]:
        return (*self._services, *self._line_handlers)

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        """Register the handler of a protocol. Raises ValueError for a protocol that has one."""
        if protocol in self._services:
            raise ValueError(f"a protocol must have one handler, got a second for {protocol!r}")
        self._services[protocol] = _Service(handler, max_request_bytes)

    def serve_lines(self, protocol: str, handler: LineHandler) -> None:
        """Register the handler of the lines of a protocol."""
        self._line_handlers[protocol] = handler

    async def answer_line(self, protocol: str, line: Line) -> None:
        """Serve a line until its handler returns, and close it. What the peer does raises nothing here."""
        try:
            if not self._admits(line.peer_id, protocol):
                self.refused["stranger"] += 1
            else:
                await self._line_handlers[protocol](line)
        except RequestError as error:
            self.refused["oversize" if error.reason == "oversize" else "cut"] += 1
        except RequestRefused:
            self.refused["handler"] += 1
        except Exception:  # a failing handler costs its line, never the node
            logger.warning("the handler of %s failed on a line of %s", protocol, line.peer_id, exc_info=True)
        finally:
            line.close()

    async def answer(self, peer_id: str, protocol: str, request: bytes, *, waits: bool = False) -> Response:
        """Answer a request that is in memory already. Nothing that a peer or a handler does raises here.

        Rates and places count as on a stream. With `waits` the response also waits for its share of the upload.
        """
        service = self._services.get(protocol)
        if service is None:
            return self._refusal("unknown protocol", "unknown_protocol")
        if not self._admits(peer_id, protocol):
            return self._refusal(STRANGER, "stranger")
        if len(request) > service.max_request_bytes:
            reason = f"a request must be <= {service.max_request_bytes} bytes, got {len(request)}"
            return self._refusal(reason, "oversize")
        try:
            async with self._place(peer_id):
                response = await self._handle(service, peer_id, protocol, request)
                with self._room(peer_id, response):
                    wait_s = self._callers.charge(peer_id, len(response.body), _now())
                    if waits and wait_s > 0:
                        await asyncio.sleep(wait_s)
        except GaveWay:
            return self._refusal("busy", "busy")
        except RequestRefused as refusal:
            return self._refusal(str(refusal), _reason_of(refusal))
        self._count(request, response)
        return response

    async def answer_call(self, peer_id: str, protocol: str, request: bytes) -> Response:
        """Answer a request that arrived as a single message. The response waits for its share of the upload."""
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            async with self._conversation(peer_id) as is_welcome:
                if not is_welcome:
                    return self._refusal("busy", "flood")
                return await self.answer(peer_id, protocol, request, waits=True)
        except GaveWay:
            return self._refusal("busy", "flood")
        finally:
            self._conversations.discard(task)

    async def answer_stream(
        self, peer_id: str, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Hold one conversation as in `framing`, and close it. It ends in bounded time, whatever the peer does."""
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            async with self._conversation(peer_id) as is_welcome:
                if is_welcome and protocol in self._line_handlers:
                    await self.answer_line(protocol, StreamLine(peer_id, (reader, writer), self._traffic))
                elif is_welcome:
                    await self._converse_or_refuse(peer_id, protocol, reader, writer)
                    writer.close()
                else:  # too many even to refuse them
                    self.refused["flood"] += 1
        except GaveWay:  # a refusal could end up in the middle of a response
            self.refused["busy"] += 1
        except (FrameError, OSError) as error:  # OSError includes TimeoutError and a reset connection
            self._traffic.requests_failed += 1
            self.refused["slow" if isinstance(error, TimeoutError) else "cut"] += 1
            logger.debug("request %s of %s failed: %s", protocol, peer_id, error or type(error).__name__)
        except asyncio.CancelledError:
            if (
                not self._is_closing
            ):  # else this is the end anyway, and asyncio's stream server warns of cancelled tasks
                raise
        finally:
            self._conversations.discard(task)
            if not writer.is_closing():
                writer.transport.abort()  # do not wait for a peer to read what is buffered

    async def close(self) -> None:
        """Cut off the requests in progress. The server can be used again afterwards."""
        self._is_closing = True
        conversations = tuple(self._conversations)
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)
        self._is_closing = False

    async def _converse_or_refuse(
        self, peer_id: str, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            if not self._admits(peer_id, protocol):
                raise RequestRefused(STRANGER)
            async with self._place(peer_id):
                await self._converse(self._services[protocol], peer_id, protocol, reader, writer)
        except RequestRefused as refusal:
            response = self._refusal(str(refusal), _reason_of(refusal))
            async with asyncio.timeout(REFUSAL_TIMEOUT_S):
                await write_response(writer, response)
                await _drain(reader)

    async def _converse(
        self,
        service: _Service,
        peer_id: str,
        protocol: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        async with asyncio.timeout(self._stall_timeout_s) as deadline:
            length = await read_request_length(reader, service.max_request_bytes)
            deadline.reschedule(_now() + transfer_timeout_s(self._stall_timeout_s, length))
            request = await read_request_body(reader, length)
        response = await self._handle(service, peer_id, protocol, request)
        with self._room(peer_id, response):
            await self._send(peer_id, response, reader, writer)
        self._count(request, response)

    async def _send(
        self, peer_id: str, response: Response, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send piece by piece, as fast as the limits and the reader allow. Raises TimeoutError for a reader that is too
        slow.
        """
        async with asyncio.timeout(self._stall_timeout_s) as deadline:

            async def before_piece(num_bytes: int) -> None:
                wait_s = self._callers.charge(peer_id, num_bytes, _now())
                deadline.reschedule(_now() + wait_s + transfer_timeout_s(self._stall_timeout_s, num_bytes))
                if wait_s > 0:
                    await asyncio.sleep(wait_s)

            await write_response(writer, response, before_piece)
            # Much of it may still be in buffers of the system and of libp2p.
            deadline.reschedule(
                _now() + transfer_timeout_s(self._timeout_s, min(len(response.body), MAX_BUFFERED_BYTES))
            )
            await read_acknowledgement(reader)

    async def _handle(self, service: _Service, peer_id: str, protocol: str, request: bytes) -> Response:
        try:
            async with asyncio.timeout(self._timeout_s):
                return Response(Status.OK, await service.handler(peer_id, request))
        except RequestRefused as refusal:
            self.refused["handler"] += 1
            return Response.because(Status.REFUSED, str(refusal))
        except Exception:  # a failing handler costs its request, never the node
            logger.warning("the handler of %s failed on a request of %s", protocol, peer_id, exc_info=True)
            return Response.because(Status.FAILED, "the handler broke")

    def _refusal(self, reason: str, counted_as: str) -> Response:
        self.refused[counted_as] += 1
        return Response.because(Status.REFUSED, reason)

    def _count(self, request: bytes, response: Response) -> None:
        self._traffic.bytes_received += len(request)
        self._traffic.bytes_sent += len(response.body)
        if response.status == Status.FAILED:
            self._traffic.requests_failed += 1
        else:
            self._traffic.requests_served += 1

    @asynccontextmanager
    async def _conversation(self, peer_id: str) -> AsyncIterator[bool]:
        async with giving_way() as leave:
            with self._callers.conversation(peer_id, _now(), leave) as is_welcome:
                yield is_welcome

    @asynccontextmanager
    async def _place(self, peer_id: str) -> AsyncIterator[None]:
        async with giving_way() as leave:
            with self._callers.place(peer_id, _now(), leave):
                yield

    @contextmanager
    def _room(self, peer_id: str, response: Response) -> Iterator[None]:
        self._callers.begin_response(peer_id, len(response.body), _now())
        try:
            yield
        finally:
            self._callers.end_response(len(response.body))


async def _drain(reader: asyncio.StreamReader) -> None:
    """Read on after a refusal, because closing on unread bytes resets the stream and the refusal is lost."""
    num_bytes = 0
    while num_bytes < MAX_DRAINED_BYTES and (data := await reader.read(65_536)):
        num_bytes += len(data)


def _reason_of(refusal: RequestRefused) -> str:
    """Return the reason under which a refusal is counted that was not the handler's. The only other one names a size."""
    reason = str(refusal)
    if reason == STRANGER:
        return "stranger"
    return reason if reason in BUSY_REASONS else "oversize"


def _now() -> float:
    return asyncio.get_running_loop().time()
