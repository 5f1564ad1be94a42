"""Tells where each peer of a py-libp2p host is seen: the remote address of a connection, which nobody can invent."""

import ipaddress
from collections.abc import Callable
from typing import Any

from swarm.network.libp2p.parts import INetConn, INetwork, INotifee
from swarm.network.tcp_address import TcpAddress

OnSeen = Callable[[str, tuple[str, ...]], None]
"""(peer id, multiaddresses of the far end of its connection). It runs on the node's thread and raises nothing."""


class Sightings(INotifee):
    """To be registered with a host's network."""

    def __init__(self, on_seen: OnSeen) -> None:
        self._on_seen = on_seen

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        secured: Any = conn.muxed_conn  # the interface does not tell what is beneath
        remote = secured.secured_conn.get_remote_address()
        if remote is None:
            return
        host, port = remote[0].partition("%")[0], remote[1]
        ip = ipaddress.ip_address(host)
        ip = getattr(ip, "ipv4_mapped", None) or ip  # a socket for both families shows IPv4 peers so
        address = TcpAddress(f"ip{ip.version}", str(ip), port)
        self._on_seen(str(conn.muxed_conn.peer_id), (address.transport,))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None: ...

    async def opened_stream(self, network: INetwork, stream: object) -> None: ...

    async def closed_stream(self, network: INetwork, stream: object) -> None: ...

    async def listen(self, network: INetwork, multiaddr: object) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: object) -> None: ...
