"""GossipSub's framing: each remote procedure call is a length (unsigned varint) and so many bytes of protobuf.

Read in large pieces: py-libp2p reads the length byte by byte, which costs more than the message.
"""

from collections.abc import Iterator


class OversizeFrame(ValueError):
    """A peer announces a frame longer than it may be, or a length that is none."""


def encode_frame(payload: bytes) -> bytes:
    """The length of `payload`, then `payload`."""
    length, prefix = len(payload), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + payload


class FrameReader:
    """Bytes as they arrive in, whole frames out; never holds more than one frame and one piece."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The frames that `piece` completes; to be exhausted. Raises OversizeFrame as soon as a length says so."""
        self._buffer += piece
        position = 0
        while (head := self._read_length(position)) is not None:
            length, start = head
            if len(self._buffer) - start < length:
                break
            position = start + length
            yield bytes(self._buffer[start:position])
        del self._buffer[:position]

    def _read_length(self, position: int) -> tuple[int, int] | None:
        """(length, where the frame begins), None while the length is incomplete."""
        length = 0
        for shift in range(0, 35, 7):
            if position >= len(self._buffer):
                return None
            byte = self._buffer[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if length > self._max_frame_bytes:
                raise OversizeFrame(f"a gossip frame must be <= {self._max_frame_bytes} bytes, got {length}")
            if byte < 0x80:
                return length, position
        raise OversizeFrame("the length of a gossip frame must be a varint of at most 5 bytes, got more")
