"""Limits on inbound connections to a py-libp2p host, and on what one connection may use.

    TCP ─ handshake (place for a moment) ─ Noise ─ BoundedYamux ─ connection (place while it lasts) ─ streams

py-libp2p itself counts every connection it ever accepted for as long as the host lives, lets silent connections hold
all places, and also speaks plaintext, in which anybody can claim any peer id.

Its Yamux (0.8.1) only logs when a peer sends more than its window, accepts frames of 16 MiB and any number of streams,
and lets each window grow to 16 MiB. So one connection could fill the memory. It also reads its socket twice per frame;
here as much is read at once as there is.
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from swarm.limits.connection_slots import ConnectionSlots, NoPlace
from swarm.network.libp2p.parts import (
    ID,
    NOISE_PROTOCOL_ID,
    YAMUX_PROTOCOL_ID,
    IHost,
    IMuxedStream,
    INetStream,
    ISecureConn,
    KeyPair,
    MuxerMultistream,
    NoiseTransport,
    RawConnection,
    TProtocol,
    Yamux,
    YamuxStream,
    create_new_x25519_key_pair,
    trio,
)

logger = logging.getLogger(__name__)


MAX_UNREAD_BYTES = 2 << 20
"""Unread bytes of all streams of a connection together: eight full windows."""
MAX_STREAMS = 128
"""Open streams of one connection, including those that this node opened. The peer's next one is reset."""
_READ_BYTES = 16 * 1024


class EagerLock:
    """A lock that lets a task in at once while nobody holds it. It replaces those of py-libp2p.

    trio.Lock switches tasks at every acquisition. On the way of one message through py-libp2p's layers these are a dozen, and a
    switch is a turn of the node's event loop.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._waiting = trio.lowlevel.ParkingLot()

    async def acquire(self) -> None:
        # A task that is cancelled must end here, as with trio.Lock: below, a message is encrypted and then never sent, after
        # which the other side cannot decrypt the next one.
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_held:
            await self._waiting.park()  # whoever releases the lock hands it over
        self._is_held = True

    def release(self) -> None:
        if not self._waiting.unpark():
            self._is_held = False

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *exc_info: object) -> None:
        self.release()


class YamuxOnly(MuxerMultistream):
    """Offers and accepts only BoundedYamux. py-libp2p's own class uses its own Yamux, whichever class it is given."""

    def __init__(self, refused: Counter[str]) -> None:
        """`refused` counts what was refused: streams, overrun."""
        super().__init__({TProtocol(YAMUX_PROTOCOL_ID): Yamux})
        self._refused = refused

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> "BoundedYamux":
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        connection = BoundedYamux(conn, peer_id, self._refused)
        self._annotate_connection(connection, conn, protocol)
        return connection


class BoundedYamux(Yamux):
    """Resets streams above the limit, and closes a connection that sends more than it may."""

    def __init__(self, secured_conn: ISecureConn, peer_id: ID, refused: Counter[str]) -> None:
        super().__init__(secured_conn, peer_id)
        self._refused = refused
        self.streams_lock: Any = EagerLock()
        self._write_lock: Any = EagerLock()
        _read_ahead(secured_conn)

    async def open_stream(self) -> YamuxStream:
        return _adjusted(await super().open_stream())

    async def accept_stream(self) -> YamuxStream:
        while True:
            stream = _adjusted(await super().accept_stream())
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
    """The one error in a frame's body at which py-libp2p closes the connection, whatever the frame."""


def _adjusted(stream: IMuxedStream) -> YamuxStream:
    """Give a stream a window that does not grow, and eager locks."""
    assert isinstance(stream, YamuxStream), "Yamux makes no others"
    stream._apply_autotune_epoch = lambda buffered: 0
    locks: Any = stream
    locks.window_lock = EagerLock()
    locks.rw_lock._writer_lock = EagerLock()
    return stream


class _ReadAhead:
    """Reads a connection in large pieces and hands out small ones without a switch of tasks."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._piece = memoryview(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def read(self, n: int | None = None) -> bytes:
        if not self._piece:
            self._piece = memoryview(await self._connection.read(_READ_BYTES))
        piece, self._piece = self._piece[:n], self._piece[n:] if n is not None else memoryview(b"")
        return bytes(piece)


def _read_ahead(secured_conn: Any) -> None:
    """Install `_ReadAhead` between handshake and first frame, when no byte is buffered elsewhere."""
    packets = getattr(getattr(secured_conn, "conn", None), "read_writer", None)
    if packets is not None:  # else there is no Noise, as in tests
        line: Any = getattr(packets.read_write_closer, "stream", None)  # a TrioTCPStream
        if hasattr(line, "write_lock") and hasattr(line, "read_lock"):
            line.write_lock, line.read_lock = EagerLock(), EagerLock()
        packets.read_write_closer = _ReadAhead(packets.read_write_closer)


MAX_CONNECTIONS = 128
MAX_INBOUND_CONNECTIONS = 96
"""The other places are for peers that this node chose itself, so that strangers cannot use up all."""
MAX_HANDSHAKES = 64
HANDSHAKE_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 1.0


def security_of(key_pair: KeyPair) -> dict[TProtocol, Any]:
    """Allow Noise only: it proves who the peer is, and the daemon speaks it, too."""
    return {NOISE_PROTOCOL_ID: NoiseTransport(key_pair, create_new_x25519_key_pair().private_key)}


class ConnectionGater:
    """Replaces py-libp2p's own handling of inbound connections."""

    def __init__(self, host: IHost, refused: Counter[str]) -> None:
        """`refused` counts what was refused: handshake, connections, streams, overrun, broken."""
        self._network: Any = host.get_network()  # a Swarm, whose parts the interface does not show
        self._refused = refused
        self._handshakes = ConnectionSlots(MAX_HANDSHAKES, newest_wins=True)
        self._connections = ConnectionSlots(MAX_INBOUND_CONNECTIONS)

    def install(self) -> None:
        """Take over the host's inbound connections. The host must not run yet."""
        self._network._handle_inbound_connection = self._handle
        self._network.upgrader.muxer_multistream = YamuxOnly(self._refused)
        self._network.set_stream_handler(self._guarded(self._network.common_stream_handler))

    def _guarded(self, handler: Callable[[INetStream], Awaitable[None]]) -> Callable[[INetStream], Awaitable[None]]:
        """Wrap py-libp2p's own handlers, such as identify. What they raise would end the host."""

        async def answer(stream: INetStream) -> None:
            try:
                await handler(stream)
            except Exception as error:
                logger.debug("an inbound stream broke: %s: %s", type(error).__name__, error)
                self._refused["broken"] += 1
                with contextlib.suppress(Exception):
                    await stream.reset()

        return answer

    async def _handle(self, stream: Any, listen_address: Any) -> None:
        """Handle a connection from its first byte to its last. Raises nothing."""
        remote = stream.get_remote_address()
        address = remote[0] if remote else ""
        raw = RawConnection(stream, False)
        try:
            connection = await self._shake_hands(address, raw, listen_address)
            if connection is not None:
                await self._hold(address, connection)
        except NoPlace:
            self._refused["connections"] += 1
        except Exception:  # py-libp2p has dozens of types for "this handshake failed"
            self._refused["handshake"] += 1
        finally:
            with trio.move_on_after(_CLOSE_TIMEOUT_S) as scope:
                scope.shield = True
                await raw.close()

    async def _shake_hands(self, address: str, raw: RawConnection, listen_address: Any) -> Any:
        """Return the connection; None where it had to make room for another or was too slow."""
        with trio.move_on_after(HANDSHAKE_TIMEOUT_S) as scope, self._handshakes.hold(address, scope.cancel):
            return await self._network.upgrade_inbound_raw_conn(raw, listen_address)
        self._refused["handshake"] += 1
        return None

    async def _hold(self, address: str, connection: Any) -> None:
        with trio.move_on_at(math.inf) as scope, self._connections.hold(address, scope.cancel):
            await connection.event_closed.wait()
            return
        if scope.cancelled_caught:
            self._refused["connections"] += 1
