"""Takes two habits from a py-libp2p host: to dial whom it likes, and to remember everybody it has ever met."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from swarm.network.libp2p.parts import (
    ID,
    AutoConnector,
    IHost,
    INetConn,
    INetwork,
    INotifee,
    PeerStoreError,
    RetryConfig,
)


class DialGate:
    """Takes the place of py-libp2p's connection gate: it lets the host dial an address only while its owner asks for it.

    Otherwise a new stream to a peer whose connection has just ended would dial any address that the peer has named in
    an identify message or in a signed address record.
    """

    def __init__(self) -> None:
        self._allowed: Counter[str] = Counter()

    @contextlib.contextmanager
    def open_for(self, addresses: Iterable[object]) -> Iterator[None]:
        """Let these addresses be dialled within the context."""
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
        """py-libp2p asks this before it closes a connection of too many; no peer is exempt."""
        return False


def restrain(host: IHost) -> DialGate:
    """Limit a host that does not run yet: it dials only where the returned gate lets it, and forgets who has left."""
    network: Any = host.get_network()  # a Swarm; the interface does not tell of its parts
    network.connection_gate = gate = DialGate()
    network.retry_config = RetryConfig(max_retries=0)  # whoever dials decides when to try again
    network.auto_connector = _NeverDials(network)
    network.register_notifee(_Forgetter(host))
    return gate


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
