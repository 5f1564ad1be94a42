"""Tells where peers of a py-libp2p host are seen: the remote address of a connection, which nobody can invent."""

import ipaddress
from collections.abc import Callable
from typing import Any

from swarm.network.libp2p.parts import ID, IHost, INetConn, INetwork, INotifee, PeerIDMismatchesPubkey
from swarm.network.tcp_address import TcpAddress

OnSeen = Callable[[str, tuple[str, ...]], None]
"""(peer id, multiaddresses of the far end of its connection). It runs on the node's thread and raises nothing."""


class Sightings(INotifee):
    """Reports the peers of inbound and outbound connections, and whoever answers in place of the peer that was dialled.

    A stranger that names the address of an honest peer would otherwise make this node believe that nobody answers there.
    """

    def __init__(self, on_seen: OnSeen) -> None:
        self._on_seen = on_seen

    def install(self, host: IHost) -> None:
        """Watch a host that does not run yet."""
        network: Any = host.get_network()  # a Swarm; the interface does not tell of its parts
        network.register_notifee(self)
        self._secure: Callable[..., Any] = network.upgrader.security_multistream.secure_outbound
        network.upgrader.security_multistream.secure_outbound = self._secure_outbound

    async def _secure_outbound(self, raw: Any, peer_id: ID) -> Any:
        """The handshake of a dial. It is completed with anybody, and then refused to all but the peer that was dialled."""
        session = await self._secure(raw, None)
        actual = session.get_remote_peer()
        self._tell(actual, session.get_remote_address())
        if actual != peer_id:
            raise PeerIDMismatchesPubkey(f"dialled {peer_id}, and {actual} is there")
        return session

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        secured: Any = conn.muxed_conn  # the interface does not tell what is beneath
        self._tell(secured.peer_id, secured.secured_conn.get_remote_address())

    def _tell(self, peer_id: ID, remote: tuple[str, int] | None) -> None:
        if remote is None:
            return
        ip = ipaddress.ip_address(remote[0].partition("%")[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip  # a socket for both families shows IPv4 peers so
        self._on_seen(str(peer_id), (TcpAddress(f"ip{ip.version}", str(ip), remote[1]).transport,))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None: ...

    async def opened_stream(self, network: INetwork, stream: object) -> None: ...

    async def closed_stream(self, network: INetwork, stream: object) -> None: ...

    async def listen(self, network: INetwork, multiaddr: object) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: object) -> None: ...
