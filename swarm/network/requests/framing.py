"""The wire format of one request and its response on a byte stream, and the asking side.

    caller → server   request length (u32) · request
    server → caller   status (u8) · body length (u64) · SHA-256 of the body (32 bytes) · body in pieces of 256 KiB
    caller → server   acknowledgement (1 byte); then both close

Every transfer has a length, a hash and an acknowledgement, because a libp2p stream may lose its last piece without an
error (seen over QUIC). Nothing is read before its announced length is checked. Callers set the deadlines: every
coroutine here may wait for as long as the other side is silent. Integers are big-endian.

A short request is sent as a single message where both sides can do that. If that fails, it is sent on a stream.
"""

import asyncio
import contextlib
import hashlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from swarm.errors import NetworkError, RequestError, RequestFailure
from swarm.network.transport import RequestRefused, TrafficCounter
from swarm.records.identity import is_peer_id

PIECE_BYTES = 256 * 1024
"""One message of 64 MB runs at 41 MB/s, pieces of this size at 290 MB/s."""
MAX_CALL_BYTES = 64 * 1024
"""A request and a response up to this size are sent as one message each, where both sides can (`ShortCalls`)."""
MAX_REASON_BYTES = 200
"""Longest reason of a refusal or failure; the rest is cut off."""

_REQUEST_HEADER = struct.Struct(">I")
_RESPONSE_HEADER = struct.Struct(">BQ32s")
_ACKNOWLEDGEMENT = b"\x06"


BUSY_REASONS = ("busy", "rate")
"""Reasons of a refusal that mean: ask later, or ask another peer."""


def encode_frame(payload: bytes) -> bytes:
    """Return the length of `payload` as an unsigned varint, then `payload`: a message of protobuf in libp2p's protocols."""
    length, prefix = len(payload), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + payload


class FrameError(Exception):
    """The other side broke the protocol, or the stream ended early."""

    def __init__(self, message: str, reason: Literal["oversize", "damaged", "cut"] = "cut") -> None:
        super().__init__(message)
        self.reason: Literal["oversize", "damaged", "cut"] = reason


class Status(IntEnum):
    OK = 0
    """The body answers the request."""
    REFUSED = 1
    """The handler refused; the body is its reason."""
    FAILED = 2
    """The handler failed; the body is a short text."""


@dataclass(frozen=True, slots=True)
class Response:
    status: Status
    body: bytes

    @classmethod
    def because(cls, status: Status, reason: str) -> "Response":
        return cls(status, reason.encode("ascii", "replace")[:MAX_REASON_BYTES])

    @property
    def reason(self) -> str:
        """The body of a refusal or failure as one printable line, whatever a hostile server sent."""
        return "".join(chr(code) if 32 <= code < 127 else "?" for code in self.body)

    @property
    def failure(self) -> RequestFailure:
        """The reason that a caller gives its RequestError for a response that is not OK."""
        return "busy" if self.reason in BUSY_REASONS else "refused"


def write_request(writer: asyncio.StreamWriter, request: bytes) -> None:
    """Queue a request without waiting until it is sent, so that an early refusal is read. It is in memory anyway."""
    writer.write(_REQUEST_HEADER.pack(len(request)))
    writer.write(request)


async def read_request(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Raises RequestRefused for an announced length over `max_bytes`, FrameError for a stream that ends early."""
    return await read_request_body(reader, await read_request_length(reader, max_bytes))


async def read_request_length(reader: asyncio.StreamReader, max_bytes: int) -> int:
    """Read the length of a request, for a server whose deadline depends on it. Raises as `read_request` does."""
    (length,) = _REQUEST_HEADER.unpack(await _read_exactly(reader, _REQUEST_HEADER.size))
    if length > max_bytes:
        raise RequestRefused(f"a request must be <= {max_bytes} bytes, got {length}")
    return length


async def read_request_body(reader: asyncio.StreamReader, length: int) -> bytes:
    """Read the rest of a request. Raises FrameError for a stream that ends early."""
    return await _read_exactly(reader, length)


async def write_response(
    writer: asyncio.StreamWriter, response: Response, before_piece: Callable[[int], Awaitable[None]] | None = None
) -> None:
    """Send a response, and wait for a reader that is slower than the own memory.

    `before_piece` is given the length of every piece before it is sent, and may delay it.
    """
    body = response.body
    # Hashing one piece takes less than a millisecond; more would block the event loop.
    digest = _sha256(body) if len(body) <= PIECE_BYTES else await asyncio.to_thread(_sha256, body)
    writer.write(_RESPONSE_HEADER.pack(response.status, len(body), digest))
    view = memoryview(body)
    for start in range(0, len(body), PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        if before_piece is not None:
            await before_piece(len(piece))
        writer.write(piece)
        await writer.drain()
    await writer.drain()


def response_frame(response: Response) -> bytes:
    """Return a whole response, or only its header where the body exceeds MAX_CALL_BYTES, which is more than was asked
    for.
    """
    header = _RESPONSE_HEADER.pack(response.status, len(response.body), _sha256(response.body))
    return header + response.body if len(response.body) <= MAX_CALL_BYTES else header


def parse_response(frame: bytes, max_bytes: int) -> Response:
    """Parse what `response_frame` made. Raises FrameError as `read_response` does."""
    if len(frame) < _RESPONSE_HEADER.size:
        raise FrameError(f"a response must have a header, got {len(frame)} bytes")
    length, digest = _check_header(frame[: _RESPONSE_HEADER.size], max_bytes)
    body = frame[_RESPONSE_HEADER.size :]
    if len(body) != length:
        raise FrameError(f"a response of {length} bytes came with {len(body)}")
    if _sha256(body) != digest:
        raise FrameError(f"a response of {length} bytes was damaged: its hash differs", "damaged")
    return Response(Status(frame[0]), body)


async def read_response(reader: asyncio.StreamReader, max_bytes: int) -> Response:
    """Raises FrameError: over `max_bytes` (before any of it is read), cut off, damaged or not of this protocol."""
    header = await _read_exactly(reader, _RESPONSE_HEADER.size)
    length, digest = _check_header(header, max_bytes)
    return Response(Status(header[0]), await _read_body(reader, length, digest))


def _check_header(header: bytes, max_bytes: int) -> tuple[int, bytes]:
    """Return the length and digest of the body."""
    status, length, digest = _RESPONSE_HEADER.unpack(header)
    if status not in (Status.OK, Status.REFUSED, Status.FAILED):
        raise FrameError(f"a response status must be 0, 1 or 2, got {status}", "damaged")
    bound = max_bytes if status == Status.OK else MAX_REASON_BYTES
    if length > bound:
        raise FrameError(f"a response must be <= {bound} bytes, got {length}", "oversize")
    return length, digest


def write_acknowledgement(writer: asyncio.StreamWriter) -> None:
    """Tell the server that the whole response has arrived, so that it may close."""
    writer.write(_ACKNOWLEDGEMENT)


async def read_acknowledgement(reader: asyncio.StreamReader) -> None:
    """Raises FrameError where the caller left without an acknowledgement."""
    if await _read_exactly(reader, len(_ACKNOWLEDGEMENT)) != _ACKNOWLEDGEMENT:
        raise FrameError("a response must be acknowledged, got another byte")


async def _read_body(reader: asyncio.StreamReader, length: int, digest: bytes) -> bytes:
    # Memory grows with what arrives, not with what is announced. Each piece is hashed as it comes, so none blocks the
    # event loop for long.
    body, sha256 = bytearray(), hashlib.sha256()
    while len(body) < length:
        piece = await reader.read(min(PIECE_BYTES, length - len(body)))
        if not piece:
            raise FrameError(f"a response of {length} bytes was cut off after {len(body)}")
        body += piece
        sha256.update(piece)
    if sha256.digest() != digest:
        raise FrameError(f"a response of {length} bytes was damaged: its hash differs", "damaged")
    return bytes(body)


async def _read_exactly(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    try:
        return await reader.readexactly(num_bytes)
    except asyncio.IncompleteReadError as error:
        raise FrameError(f"the stream ended after {len(error.partial)} of {num_bytes} bytes") from None


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
StreamOpener = Callable[[str, str], Awaitable[Stream]]
"""(peer id, protocol) -> stream, which the caller closes. Raises NetworkError where none can be opened."""
ShortCall = Callable[[str, str, bytes], Awaitable[bytes]]
"""(peer id, protocol, request) -> frame of the response. Raises NetworkError where the peer cannot be asked this way.
"""


class StreamRequests:
    """Sends requests and checks responses. Every failure is counted and raised as RequestError."""

    def __init__(self, open_stream: StreamOpener, traffic: TrafficCounter, call: ShortCall | None = None) -> None:
        self._open_stream = open_stream
        self._call = call
        self._traffic = traffic

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        """See `transport.Transport.request`."""
        target = f"{protocol} to {peer_id}"
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._ask(peer_id, protocol, request, max_response_bytes=max_response_bytes)
        except TimeoutError:
            raise self._failure(target, "deadline", f"no answer within {deadline_s:g} s") from None
        except FrameError as error:
            raise self._failure(target, error.reason, str(error)) from None
        except (NetworkError, OSError) as error:
            raise self._failure(target, "unreachable", str(error) or type(error).__name__) from None
        self._traffic.bytes_sent += len(request)
        self._traffic.bytes_received += len(response.body)
        if response.status != Status.OK:
            raise self._failure(target, response.failure, f"{response.status.name.lower()}: {response.reason}")
        return response.body

    async def open(self, peer_id: str, protocol: str, deadline_s: float) -> Stream:
        """Return an open stream, which the caller closes. Raises RequestError."""
        target = f"{protocol} to {peer_id}"
        try:
            if not is_peer_id(peer_id):
                raise NetworkError("not a peer id")
            async with asyncio.timeout(deadline_s):
                return await self._open_stream(peer_id, protocol)
        except TimeoutError:
            raise self._failure(target, "deadline", f"no answer within {deadline_s:g} s") from None
        except (NetworkError, OSError) as error:
            raise self._failure(target, "unreachable", str(error) or type(error).__name__) from None

    async def _ask(self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int) -> Response:
        if not is_peer_id(peer_id):
            raise NetworkError("not a peer id")
        if self._call is not None and max(len(request), max_response_bytes) <= MAX_CALL_BYTES:
            with contextlib.suppress(NetworkError):
                return parse_response(await self._call(peer_id, protocol, request), max_response_bytes)
        async with self._stream(peer_id, protocol) as (reader, writer):
            try:
                write_request(writer, request)
                response = await read_response(reader, max_response_bytes)
                write_acknowledgement(writer)
            except (NetworkError, OSError) as error:  # a stream may end with a reset, too
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
                writer.transport.abort()  # nobody needs what is still buffered

    def _failure(self, target: str, reason: RequestFailure, detail: str) -> RequestError:
        self._traffic.requests_failed += 1
        return RequestError(f"request {target} failed: {detail}", reason)
