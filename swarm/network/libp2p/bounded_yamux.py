"""Yamux of py-libp2p with the bounds that its own leaves to the good will of the peer.

py-libp2p 0.8.1 only logs when a peer sends more than its window, takes frames of 16 MiB and any number of streams, and
lets windows grow to 16 MiB each. So one connection could fill the memory.

It also reads its socket twice per frame, for two bytes and for the rest; here as much at once as there is.
"""

from collections import Counter
from typing import Any

from swarm.network.libp2p.parts import (
    ID,
    YAMUX_PROTOCOL_ID,
    IMuxedStream,
    ISecureConn,
    MuxerMultistream,
    TProtocol,
    Yamux,
    YamuxStream,
    trio,
)

MAX_UNREAD_BYTES = 2 << 20
"""Of all streams of a connection together: eight full windows."""
MAX_STREAMS = 128
"""Open at a time on one connection, own ones included; the peer's next one is reset."""
_READ_BYTES = 16 * 1024


class YamuxOnly(MuxerMultistream):
    """Offers and accepts no other multiplexer; py-libp2p's own takes its own Yamux, whichever class it is given."""

    def __init__(self, refused: Counter[str]) -> None:
        """`refused` is told what was turned away: streams, overrun."""
        super().__init__({TProtocol(YAMUX_PROTOCOL_ID): Yamux})
        self._refused = refused

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> "BoundedYamux":
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        connection = BoundedYamux(conn, peer_id, self._refused)
        self._annotate_connection(connection, conn, protocol)
        return connection


class BoundedYamux(Yamux):
    """Resets streams beyond the bound, and closes a connection that sends more than it may."""

    def __init__(self, secured_conn: ISecureConn, peer_id: ID, refused: Counter[str]) -> None:
        super().__init__(secured_conn, peer_id)
        self._refused = refused
        _read_ahead(secured_conn)

    async def open_stream(self) -> YamuxStream:
        return _with_fixed_window(await super().open_stream())

    async def accept_stream(self) -> YamuxStream:
        while True:
            stream = _with_fixed_window(await super().accept_stream())
            if len(self.streams) <= MAX_STREAMS:
                return stream
            self._refused["streams"] += 1
            await stream.reset()

    async def _read_data_body(self, length: int) -> bytes:
        num_unread = sum(map(len, self.stream_buffers.values()))
        if num_unread + length > MAX_UNREAD_BYTES:
            self._refused["overrun"] += 1
            raise _Overrun
        return await super()._read_data_body(length)


class _Overrun(trio.TooSlowError):
    """The one kind of error in a frame's body upon which py-libp2p closes the connection, whatever the frame."""


def _with_fixed_window(stream: IMuxedStream) -> YamuxStream:
    assert isinstance(stream, YamuxStream), "Yamux makes no others"
    stream._apply_autotune_epoch = lambda buffered: 0
    return stream


class _ReadAhead:
    """A connection that is read in large pieces, and handed out in small ones without asking the scheduler."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._piece = memoryview(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def read(self, n: int | None = None) -> bytes:
        if not self._piece:
            self._piece = memoryview(await self._connection.read(_READ_BYTES))
        taken, self._piece = self._piece[:n], self._piece[n:] if n is not None else memoryview(b"")
        return bytes(taken)


def _read_ahead(secured_conn: Any) -> None:
    """Between handshake and first frame, when nothing has been read that is not used."""
    packets = getattr(getattr(secured_conn, "conn", None), "read_writer", None)
    if packets is not None:  # else no Noise: a connection of a test
        packets.read_write_closer = _ReadAhead(packets.read_write_closer)
