"""A libp2p host in Python (py-libp2p), for machines without the daemon and for gossip.

    asyncio: StreamReader/StreamWriter ══ socket pair ══ pump (trio) ══ libp2p stream ══ peer

It speaks to the Go daemon and to other py-libp2p hosts. py-libp2p ends a whole host when a handler raises anything, so
every handler is wrapped here. `exited` reports a host that ended all the same.
"""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from swarm.errors import NetworkError
from swarm.network.libp2p.host_hardening import (
    CLOSE_TIMEOUT_S,
    DeadLines,
    OnSeen,
    Sightings,
    check_free,
    close_network,
    hang_up,
    restrain,
)
from swarm.network.libp2p.inbound_limits import (
    HANDSHAKE_TIMEOUT_S,
    MAX_CONNECTIONS,
    ConnectionGater,
    EagerLock,
    security_of,
)
from swarm.network.libp2p.parts import (
    ID,
    ConnectionConfig,
    IHost,
    INetStream,
    Multiaddr,
    PeerInfo,
    PeerStoreError,
    StreamError,
    TProtocol,
    create_new_key_pair,
    new_host,
    trio,
)
from swarm.network.libp2p.trio_guest import TrioGuest
from swarm.network.requests.framing import PIECE_BYTES
from swarm.network.tcp_address import TcpAddress
from swarm.records.identity import Identity

logger = logging.getLogger(__name__)

StreamHandler = Callable[[str, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""(peer id, protocol, reader, writer); it closes the stream and raises nothing. It runs on asyncio."""
HostServices = Callable[[IHost], AbstractAsyncContextManager[None]]
"""Returns a trio context that runs on the host for as long as the host lives, such as pubsub."""

_DIAL_TIMEOUT_S = 5.0
_NEGOTIATION_TIMEOUT_S = 5.0
_STALL_TIMEOUT_S = 20.0
_MAX_CONNECTIONS_PER_PEER = 2


@contextlib.asynccontextmanager
async def _no_services(host: IHost):
    yield


class Libp2pHost:
    """One host, from `open` to `close`. It cannot be used after `close`."""

    def __init__(
        self,
        guest: TrioGuest,
        identity: Identity,
        listen: Sequence[TcpAddress],
        *,
        handlers: Mapping[str, StreamHandler],
        services: HostServices,
        refused: Counter[str],
        on_seen: OnSeen | None,
    ) -> None:
        """`refused` counts what was refused: handshake, connections, streams, overrun, broken."""
        self._guest = guest
        self._listen = [Multiaddr(str(address)) for address in listen]
        self._services = services
        self._conversations: set[asyncio.Task[None]] = set()
        self._life: asyncio.Task[None] | None = None
        self._closing = trio.Event()
        self._cause = "it was closed"
        self._host = _new_host(identity, self._listen)
        self._gate = restrain(self._host)
        self._host.get_network().register_notifee(DeadLines())
        if on_seen is not None:
            Sightings(self._host, on_seen).install()
        ConnectionGater(self._host, refused).install()
        for protocol, handler in handlers.items():
            self._host.set_stream_handler(TProtocol(protocol), self._inbound(protocol, handler))

    @classmethod
    async def open(
        cls,
        identity: Identity,
        listen: Sequence[TcpAddress],
        *,
        protocols: Sequence[str] = (),
        handler: StreamHandler | None = None,
        services: HostServices = _no_services,
        refused: Counter[str] | None = None,
        on_seen: OnSeen | None = None,
        timeout_s: float,
    ) -> "Libp2pHost":
        """Open a host that listens. `on_seen` receives the address of each peer that connects. Raises NetworkError."""
        for address in listen:
            check_free(address)
        quiet_libp2p()
        handlers = {protocol: handler for protocol in protocols if handler is not None}
        host = cls(
            await TrioGuest.enter(),
            identity,
            listen,
            handlers=handlers,
            services=services,
            refused=Counter() if refused is None else refused,
            on_seen=on_seen,
        )
        ready = asyncio.get_running_loop().create_future()
        host._life = asyncio.create_task(host._live(ready), name="libp2p-host")
        try:
            await asyncio.wait([ready, host._life], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                cause = host._cause if host._life.done() else f"no answer within {timeout_s:.0f} s"
                raise NetworkError(f"py-libp2p must start on {', '.join(map(str, listen))}, got {cause}")
        except BaseException:
            await host.close()
            raise
        return host

    async def close(self) -> None:
        """End the host and every stream on it. Idempotent."""
        if self._life is None:
            return
        life, self._life = self._life, None
        for task in self._conversations:
            task.cancel()
        self._guest.call_soon(self._closing.set)
        await asyncio.wait([life], timeout=2 * CLOSE_TIMEOUT_S)
        life.cancel()
        await asyncio.gather(life, *self._conversations, return_exceptions=True)
        await self._guest.leave()

    async def exited(self) -> str:
        """Wait until the host has ended by itself, and return the cause."""
        assert self._life is not None, "closed"
        await asyncio.wait([self._life])
        return self._cause

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses that the host listens on, without /p2p."""
        return tuple(str(address).rpartition("/p2p/")[0] or str(address) for address in self._host.get_addrs())

    def peers(self) -> tuple[str, ...]:
        """Return the peer ids with an open connection."""
        return tuple(str(peer_id) for peer_id in self._host.get_connected_peers())

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Open a connection, or use the one that is open. Raises NetworkError."""
        try:
            info = PeerInfo(ID.from_base58(peer_id), [Multiaddr(address) for address in addresses])
        except ValueError as error:  # a stranger announced them
            raise NetworkError(f"connect to {peer_id}: {error}") from None
        network: Any = self._host.get_network()
        network.unblock_peer(info.peer_id)  # the caller decides when an unreachable peer is tried again
        self._forget_unless_connected(info.peer_id)  # otherwise addresses of earlier calls would be dialled, too
        try:
            with self._gate.open_for(info.addrs):
                await self._ask(f"connect to {peer_id}", self._host.connect, info)
        finally:
            self._forget_unless_connected(info.peer_id)

    async def disconnect(self, peer_id: str, streams: Sequence[INetStream] = ()) -> None:
        """Close all connections to a peer, and those beneath `streams`. Raises NetworkError."""
        await self._ask(f"disconnect {peer_id}", hang_up, self._host, ID.from_base58(peer_id), streams)

    async def open_stream(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw stream to a connected peer, which the caller closes. Raises NetworkError."""
        stream = await self._ask(
            f"open {protocol} to {peer_id}", self._host.new_stream, ID.from_base58(peer_id), [TProtocol(protocol)]
        )
        near, far = socket.socketpair()
        self._converse(self._pump(stream, far))
        return await asyncio.open_connection(sock=near)

    async def run(self, function: Callable, *arguments):
        """Await a trio coroutine of a service on this host. Raises what the coroutine raises, and NetworkError."""
        return await self._guest.run(function, *arguments)

    def _forget_unless_connected(self, peer_id: ID) -> None:
        if peer_id != self._host.get_id() and peer_id not in self._host.get_connected_peers():
            with contextlib.suppress(PeerStoreError):  # nothing is known of it
                self._host.get_peerstore().clear_peerdata(peer_id)

    async def _ask(self, what: str, function: Callable, *arguments):
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                return await self._guest.run(function, *arguments)
        except TimeoutError:
            raise NetworkError(f"{what}: no answer within {_DIAL_TIMEOUT_S:.0f} s") from None
        except NetworkError:
            raise
        except Exception as error:  # py-libp2p has dozens of types for "this peer cannot be reached"
            raise NetworkError(f"{what}: {error or type(error).__name__}") from None

    async def _live(self, ready: "asyncio.Future[None]") -> None:
        try:
            await self._guest.run(self._serve, ready)
        except Exception as error:  # the supervisor asks for the cause and opens another host
            self._cause = _innermost(error)

    async def _serve(self, ready: "asyncio.Future[None]") -> None:
        """Run the host until it is closed. In trio."""
        async with self._host.run(listen_addrs=self._listen):
            try:
                async with self._services(self._host):
                    if not ready.done():
                        ready.set_result(None)
                    await self._closing.wait()
            finally:
                await close_network(self._host)

    def _inbound(self, protocol: str, handler: StreamHandler) -> Callable[[INetStream], Awaitable[None]]:
        async def on_stream(stream: INetStream) -> None:
            near, far = socket.socketpair()
            self._converse(self._answer(str(stream.muxed_conn.peer_id), protocol, handler, near))
            await pump(stream, far)

        return on_stream

    async def _answer(self, peer_id: str, protocol: str, handler: StreamHandler, near: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=near)
        await handler(peer_id, protocol, reader, writer)

    async def _pump(self, stream: INetStream, far: socket.socket) -> None:
        with contextlib.suppress(NetworkError):
            await self._guest.run(pump, stream, far)

    def _converse(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)


async def pump(stream: INetStream, far: socket.socket) -> None:
    """Copy bytes between a libp2p stream and a socket until both directions end. In trio; raises nothing."""
    side = trio.SocketStream(trio.socket.from_stdlib_socket(far))
    inner: Any = stream
    inner._state_lock = EagerLock()
    try:
        async with side, trio.open_nursery() as nursery:
            nursery.start_soon(_carry_in, stream, side)
            await _carry_out(side, stream)
            nursery.cancel_scope.cancel()
    except Exception as error:  # a peer must not end the host by breaking a stream
        logger.debug("a stream broke: %s", _innermost(error))
    for end in (_close, _reset):
        with trio.move_on_after(CLOSE_TIMEOUT_S) as scope:
            scope.shield = True
            await end(stream)


async def _carry_in(stream: INetStream, side: "trio.SocketStream") -> None:
    with contextlib.suppress(StreamError):  # py-libp2p raises it at a normal end, too
        while data := await stream.read(PIECE_BYTES):
            await side.send_all(data)
    await side.send_eof()


async def _carry_out(side: "trio.SocketStream", stream: INetStream) -> None:
    while data := await side.receive_some(PIECE_BYTES):
        with trio.fail_after(_STALL_TIMEOUT_S):  # a peer may read byte by byte
            await stream.write(data)


async def _close(stream: INetStream) -> None:
    """Close the own side, and wait for the other side to close."""
    with contextlib.suppress(Exception):
        await stream.close()
        while await stream.read(PIECE_BYTES):
            pass


async def _reset(stream: INetStream) -> None:
    """Reset the stream: half closed, it would stay for as long as the connection. A stream that both closed ignores it."""
    with contextlib.suppress(Exception):
        await stream.reset()


def _new_host(identity: Identity, listen: Sequence[Multiaddr]) -> IHost:
    config = ConnectionConfig(
        max_connections=MAX_CONNECTIONS,
        high_watermark=MAX_CONNECTIONS,
        low_watermark=0,
        min_connections=0,  # the parts that need connections open them
        max_connections_per_peer=_MAX_CONNECTIONS_PER_PEER,
        dial_timeout=_DIAL_TIMEOUT_S,
        inbound_upgrade_timeout=HANDSHAKE_TIMEOUT_S,
        inbound_stream_protocol_negotiation_timeout=_NEGOTIATION_TIMEOUT_S,
    )
    key_pair = create_new_key_pair(identity.seed)
    return new_host(key_pair=key_pair, listen_addrs=listen, sec_opt=security_of(key_pair), connection_config=config)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def quiet_libp2p() -> None:
    """Silence py-libp2p, which warns of every message of a misbehaving peer, unless debug logging is on."""
    is_debugging = logging.getLogger().isEnabledFor(logging.DEBUG)
    logging.getLogger("libp2p").setLevel(logging.DEBUG if is_debugging else logging.CRITICAL)
