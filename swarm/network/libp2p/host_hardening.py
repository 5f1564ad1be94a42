"""Hardens a py-libp2p host: it dials only what its owner asks for, forgets peers that left, and notices dead
connections.

After a sleep or a change of network, or when a router forgets it, a connection is dead and neither end is told; Linux
keeps trying for a quarter of an hour. So the system is asked to close connections on which nothing comes back. The
ports of a host are checked before it opens them and closed after it has ended, since py-libp2p does neither. And the
remote address of each connection, which nobody can forge, is reported.
"""

import contextlib
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from swarm.errors import NetworkError
from swarm.network.libp2p.parts import (
    ID,
    AutoConnector,
    IHost,
    INetConn,
    INetStream,
    INetwork,
    INotifee,
    PeerIDMismatchesPubkey,
    PeerStoreError,
    RetryConfig,
    trio,
)
from swarm.network.own_ports import try_port
from swarm.network.tcp_address import TcpAddress

logger = logging.getLogger(__name__)


SILENCE_S = 30
"""Longest time in which the other system may leave data or a keep-alive question unanswered."""
_FIRST_QUESTION_S = 10
_QUESTION_INTERVAL_S = 5
_INNER = ("conn", "stream", "socket")
"""The attributes under which py-libp2p's layers hold the next one: security, framing, raw connection, trio's stream,
socket."""
_MAX_LAYERS = 8


class DeadLines(INotifee):
    """Sets keep-alive options on new connections. It is registered with a host's network."""

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        secured: Any = conn.muxed_conn  # the interface does not show what is beneath
        line = _socket_of(secured.secured_conn)
        if line is None:
            logger.warning("cannot find the socket of a connection; its end will be noticed late")
            return
        try:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _options():
                line.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError as error:  # it is closed already, or this system does not know the option
            logger.debug("a connection keeps the system's own timeouts: %s", error)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None: ...

    async def opened_stream(self, network: INetwork, stream: object) -> None: ...

    async def closed_stream(self, network: INetwork, stream: object) -> None: ...

    async def listen(self, network: INetwork, multiaddr: object) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: object) -> None: ...


def _options() -> list[tuple[int, int]]:
    """Return (TCP option, value) of the options that this system has. Linux has all, others some."""
    num_questions = (SILENCE_S - _FIRST_QUESTION_S) // _QUESTION_INTERVAL_S
    wanted = {
        "TCP_KEEPIDLE": _FIRST_QUESTION_S,
        "TCP_KEEPINTVL": _QUESTION_INTERVAL_S,
        "TCP_KEEPCNT": num_questions,
        "TCP_USER_TIMEOUT": SILENCE_S * 1000,  # for data that was sent
    }
    return [(getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]


def _socket_of(layer: Any) -> Any:
    """Return the socket beneath the layers of a connection; None where py-libp2p is built differently."""
    for _ in range(_MAX_LAYERS):
        if layer is None or hasattr(layer, "setsockopt"):
            return layer
        layer = next((getattr(layer, name) for name in _INNER if hasattr(layer, name)), None)
    return None


CLOSE_TIMEOUT_S = 1.0


def check_free(address: TcpAddress) -> None:
    """Raise NetworkError for a port that another program has. py-libp2p would share it and lose connections to it."""
    try:
        try_port(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise NetworkError(f"py-libp2p must start on {address}, got {reason}; choose another port") from None


async def close_network(host: IHost) -> None:
    """Close ports and connections. In trio. When py-libp2p is cancelled, it leaves its ports open for good."""
    network: Any = host.get_network()  # a Swarm, whose parts the interface does not show
    with trio.move_on_after(CLOSE_TIMEOUT_S) as scope:
        scope.shield = True
        async with trio.open_nursery() as nursery:
            for part in (*network.listeners.values(), *network.get_connections()):
                nursery.start_soon(_close, part)


async def hang_up(host: IHost, peer_id: ID, streams: Sequence[INetStream] = ()) -> None:
    """Close all connections to a peer, and those beneath `streams`, down to their sockets. In trio.

    py-libp2p's own disconnect closes the connections that it finds, and then forgets all that the peer has by then. A peer that
    dials again at once is connected on its side only, and its stream lives on without a connection here.
    """
    network: Any = host.get_network()
    connections = network.get_connections(peer_id)
    carriers: list[Any] = [*connections, *streams]
    lines = [_socket_of(carrier.muxed_conn.secured_conn) for carrier in carriers]

    async def cut_late() -> None:
        await trio.sleep(CLOSE_TIMEOUT_S)
        _cut(lines)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut_late)
            for connection in connections:
                network.cleanup_connection_health(peer_id, connection)
                await connection.close()
            nursery.cancel_scope.cancel()
    finally:
        _cut(lines)


def _cut(lines: Sequence[Any]) -> None:
    for line in lines:
        if line is not None:
            with contextlib.suppress(OSError):  # it is closed already
                getattr(line, "socket", line).shutdown(socket.SHUT_RDWR)  # trio's stream has options and no shutdown


async def _close(part: Any) -> None:
    connection = getattr(part, "muxed_conn", None)
    try:
        await part.close()  # this does not reach the socket of a connection that was cancelled
        if connection is not None:
            await connection.secured_conn.close()
    except Exception as error:  # it is broken already
        logger.debug("a part of the host did not close: %s: %s", type(error).__name__, error)


OnSeen = Callable[[str, tuple[str, ...]], None]
"""(peer id, multiaddresses of the far end of its connection). It runs on the node's thread and raises nothing."""


class Sightings(INotifee):
    """Reports the peers of inbound and outbound connections, and peers that answer in place of the one that was
    dialled.

    Otherwise a stranger that announces the address of an honest peer could make this node believe that nobody answers
    there.
    """

    def __init__(self, host: IHost, on_seen: OnSeen) -> None:
        self._on_seen = on_seen
        self._network: Any = host.get_network()  # a Swarm, whose parts the interface does not show
        self._secure: Callable[..., Any] = self._network.upgrader.security_multistream.secure_outbound

    def install(self) -> None:
        """Watch the host, which must not run yet."""
        self._network.register_notifee(self)
        self._network.upgrader.security_multistream.secure_outbound = self._secure_outbound

    async def _secure_outbound(self, raw: Any, peer_id: ID) -> Any:
        """Make the handshake of a dial. It is completed with any peer, and then refused unless it is the peer that was
        dialled.
        """
        session = await self._secure(raw, None)
        actual = session.get_remote_peer()
        self._report(actual, session.get_remote_address())
        if actual != peer_id:
            raise PeerIDMismatchesPubkey(f"dialled {peer_id}, but {actual} answered")
        return session

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        secured: Any = conn.muxed_conn  # the interface does not show what is beneath
        self._report(secured.peer_id, secured.secured_conn.get_remote_address())

    def _report(self, peer_id: ID, remote: tuple[str, int] | None) -> None:
        if remote is None:
            return
        ip = ipaddress.ip_address(remote[0].partition("%")[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip  # a socket for both families shows IPv4 peers in this form
        self._on_seen(str(peer_id), (TcpAddress(f"ip{ip.version}", str(ip), remote[1]).transport,))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None: ...

    async def opened_stream(self, network: INetwork, stream: object) -> None: ...

    async def closed_stream(self, network: INetwork, stream: object) -> None: ...

    async def listen(self, network: INetwork, multiaddr: object) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: object) -> None: ...


class DialGate:
    """Replaces py-libp2p's connection gate. The host can dial an address only while its owner asks for it.

    Otherwise a new stream to a peer whose connection has just ended would dial any address that the peer has named in
    an identify message or in a signed address record.
    """

    def __init__(self) -> None:
        self._allowed: Counter[str] = Counter()

    @contextlib.contextmanager
    def open_for(self, addresses: Iterable[object]) -> Iterator[None]:
        """Allow these addresses to be dialled within the context."""
        texts = Counter(map(str, addresses))
        self._allowed += texts
        try:
            yield
        finally:
            self._allowed -= texts

    async def is_allowed(self, address: object) -> bool:
        """py-libp2p asks this before it dials."""
        return str(address) in self._allowed

    def is_in_allow_list(self, address: object) -> bool:
        """py-libp2p asks this before it closes a surplus connection. No peer is exempt."""
        return False


def restrain(host: IHost) -> DialGate:
    """Restrict a host that does not run yet: it dials only what the returned gate allows, and forgets peers that left."""
    network: Any = host.get_network()  # a Swarm, whose parts the interface does not show
    network.connection_gate = gate = DialGate()
    network.retry_config = RetryConfig(max_retries=0)  # the caller decides when to try again
    network.auto_connector = _NeverDials(network)
    network.register_notifee(_Forgetter(host))
    return gate


class _NeverDials(AutoConnector):
    async def run_background_task(self, nursery) -> None:
        """Do nothing. py-libp2p's own looks every few seconds for peers to dial."""

    async def maybe_connect(self) -> None:
        """Do nothing when a connection ends."""

    def record_disconnect(self, peer_id: ID) -> None:
        """Do nothing. py-libp2p's own keeps a table of all peers that ever left."""


class _Forgetter(INotifee):
    """Drops what the peerstore holds of a peer with its last connection."""

    def __init__(self, host: IHost) -> None:
        self._host = host

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        peer_id = conn.muxed_conn.peer_id
        if not network.get_connections(peer_id) and peer_id != self._host.get_id():  # it holds the host's own key
            with contextlib.suppress(PeerStoreError):  # nothing is known of it
                network.peerstore.clear_peerdata(peer_id)

    async def connected(self, network: INetwork, conn: INetConn) -> None: ...

    async def opened_stream(self, network: INetwork, stream: object) -> None: ...

    async def closed_stream(self, network: INetwork, stream: object) -> None: ...

    async def listen(self, network: INetwork, multiaddr: object) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: object) -> None: ...
