"""Takes two habits from a py-libp2p host: to dial whom it likes, and to remember everybody it has ever met."""

import contextlib
from typing import Any

from swarm.network.libp2p.parts import ID, AutoConnector, IHost, INetConn, INetwork, INotifee, PeerStoreError


def restrain(host: IHost) -> None:
    """For a host that does not run yet. Afterwards it dials only whom it is told to, and forgets whom it is not connected to."""
    network: Any = host.get_network()  # a Swarm; the interface does not tell of its parts
    network.auto_connector = _NeverDials(network)
    network.register_notifee(_Forgetter(host))


class _NeverDials(AutoConnector):
    async def run_background_task(self, nursery) -> None:
        """py-libp2p's own looks every few seconds for peers to dial."""

    async def maybe_connect(self) -> None:
        """Called when a connection ends."""

    def record_disconnect(self, peer_id: ID) -> None:
        """A table of all peers that ever left."""


class _Forgetter(INotifee):
    """Drops what the peerstore holds of a peer with its last connection."""

    def __init__(self, host: IHost) -> None:
        self._host = host

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        peer_id = conn.muxed_conn.peer_id
        if not network.get_connections(peer_id) and peer_id != self._host.get_id():  # which holds the host's own key
            with contextlib.suppress(PeerStoreError):  # nothing known
                network.peerstore.clear_peerdata(peer_id)

    async def connected(self, network: INetwork, conn: INetConn) -> None: ...

    async def opened_stream(self, network: INetwork, stream: object) -> None: ...

    async def closed_stream(self, network: INetwork, stream: object) -> None: ...

    async def listen(self, network: INetwork, multiaddr: object) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: object) -> None: ...
