"""Lines over a byte stream: many frames in both directions, where a request opens a stream of its own.

    frame = length (u32, big-endian) · bytes

Opening a stream takes a negotiation and several tasks on both sides, some milliseconds together. A line pays that once.
"""

import asyncio
import struct

from swarm.errors import RequestError
from swarm.network.requests.framing import Stream
from swarm.network.transport import TrafficCounter

_LENGTH = struct.Struct(">I")
_MAX_JOINED_BYTES = 1 << 16
"""Frames up to this size go out in one piece; copying larger ones costs more than it saves."""


class StreamLine:
    """See `transport.Line`."""

    def __init__(self, peer_id: str, stream: Stream, traffic: TrafficCounter) -> None:
        self.peer_id = peer_id
        self._reader, self._writer = stream
        self._traffic = traffic

    async def send(self, *frames: bytes) -> None:
        """See `transport.Line.send`."""
        if self._writer.is_closing():
            raise self._cut("it is closed")
        parts = [part for frame in frames for part in (_LENGTH.pack(len(frame)), frame)]
        num_bytes = sum(map(len, frames))
        for piece in parts if num_bytes > _MAX_JOINED_BYTES else (b"".join(parts),):
            self._writer.write(piece)
        self._traffic.bytes_sent += num_bytes
        try:
            await self._writer.drain()
        except OSError as error:
            raise self._cut(str(error) or type(error).__name__) from None

    async def receive(self, max_bytes: int) -> bytes:
        """See `transport.Line.receive`."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > max_bytes:
                raise RequestError(
                    f"a frame of {self.peer_id} must have <= {max_bytes} bytes, got {length}", "oversize"
                )
            frame = await self._reader.readexactly(length)  # memory grows with what arrives
        except (asyncio.IncompleteReadError, OSError) as error:
            self.close()
            raise self._cut("it has ended" if isinstance(error, asyncio.IncompleteReadError) else str(error)) from None
        self._traffic.bytes_received += length
        return frame

    def close(self) -> None:
        """See `transport.Line.close`."""
        self._writer.close()

    def _cut(self, detail: str) -> RequestError:
        return RequestError(f"the line to {self.peer_id} was cut: {detail}", "cut")
