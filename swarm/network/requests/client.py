"""Requests, the asking side: one stream per request, whatever opens it (daemon or Python host), or one message each way.

A short request goes as a message first, where that is possible. Where the peer does not take it, a stream has the last word.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from swarm.errors import NetworkError, RequestError, RequestFailure
from swarm.network.requests.framing import (
    MAX_CALL_BYTES,
    FrameError,
    Response,
    Status,
    parse_response,
    read_response,
    write_acknowledgement,
    write_request,
)
from swarm.network.transport import TrafficCounter
from swarm.records.identity import is_peer_id

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
StreamOpener = Callable[[str, str], Awaitable[Stream]]
"""(peer id, protocol) -> stream, to be closed by the caller. Raises NetworkError where there is none to be had."""
ShortCall = Callable[[str, str, bytes], Awaitable[bytes]]
"""(peer id, protocol, request) -> frame of the response. Raises NetworkError where the peer cannot be asked like that."""


class StreamRequests:
    """Sends requests and checks responses; every failure is a RequestError and counted."""

    def __init__(self, open_stream: StreamOpener, traffic: TrafficCounter, call: ShortCall | None = None) -> None:
        self._open_stream = open_stream
        self._call = call
        self._traffic = traffic

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        """See `transport.Transport.request`."""
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._ask(peer_id, protocol, request, max_response_bytes)
        except TimeoutError:
            raise self._failure(peer_id, protocol, "deadline", f"no answer within {deadline_s:g} s") from None
        except FrameError as error:
            raise self._failure(peer_id, protocol, error.reason, str(error)) from None
        except (NetworkError, OSError) as error:
            raise self._failure(peer_id, protocol, "unreachable", str(error) or type(error).__name__) from None
        self._traffic.bytes_sent += len(request)
        self._traffic.bytes_received += len(response.body)
        if response.status != Status.OK:
            raise self._failure(
                peer_id, protocol, response.failure, f"{response.status.name.lower()}: {response.reason}"
            )
        return response.body

    async def _ask(self, peer_id: str, protocol: str, request: bytes, max_response_bytes: int) -> Response:
        if not is_peer_id(peer_id):
            raise NetworkError("this is no peer id")
        if self._call is not None and max(len(request), max_response_bytes) <= MAX_CALL_BYTES:
            with contextlib.suppress(NetworkError):
                return parse_response(await self._call(peer_id, protocol, request), max_response_bytes)
        async with self._stream(peer_id, protocol) as (reader, writer):
            try:
                write_request(writer, request)
                response = await read_response(reader, max_response_bytes)
                write_acknowledgement(writer)
            except (NetworkError, OSError) as error:  # a stream may end with a reset as well as with an end
                raise FrameError(str(error) or type(error).__name__) from None
            return response

    @contextlib.asynccontextmanager
    async def _stream(self, peer_id: str, protocol: str) -> AsyncIterator[Stream]:
        reader, writer = await self._open_stream(peer_id, protocol)
        try:
            yield reader, writer
            writer.close()
        finally:
            if not writer.is_closing():
                writer.transport.abort()  # what is still buffered is of no use to anyone

    def _failure(self, peer_id: str, protocol: str, reason: RequestFailure, detail: str) -> RequestError:
        self._traffic.requests_failed += 1
        return RequestError(f"request {protocol} to {peer_id} failed: {detail}", reason)
