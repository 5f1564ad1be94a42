"""The peers through which a node joins, and joins again when it has lost everyone."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from swarm.network.tcp_address import TcpAddress

MAX_SEEN_PEERS = 64
MAX_ADDRESSES_PER_PEER = 4

Addresses = tuple[str, ...]
"""Multiaddresses of one peer, without its id."""


class KnownPeers:
    """Configured peers, which are never forgotten, and the peers seen last."""

    def __init__(self, initial: Iterable[TcpAddress], own_peer_id: str) -> None:
        """`initial`: addresses that each name a peer; those of this node itself are left out."""
        self._own_peer_id = own_peer_id
        self._initial: dict[str, Addresses] = {}
        self._seen: OrderedDict[str, Addresses] = OrderedDict()  # the latest seen last
        for address in initial:
            if address.peer_id is not None and address.peer_id != own_peer_id:
                self._initial[address.peer_id] = (*self._initial.get(address.peer_id, ()), address.transport)

    def see(self, peers: Mapping[str, Addresses]) -> None:
        """Remember connected peers {peer id: addresses}."""
        for peer_id, addresses in peers.items():
            self._seen[peer_id] = addresses[:MAX_ADDRESSES_PER_PEER]
            self._seen.move_to_end(peer_id)
        while len(self._seen) > MAX_SEEN_PEERS:
            self._seen.popitem(last=False)

    def all(self) -> dict[str, Addresses]:
        """{peer id: addresses}, configured addresses first."""
        peer_ids = dict.fromkeys((*self._initial, *self._seen))
        return {
            peer_id: tuple(dict.fromkeys((*self._initial.get(peer_id, ()), *self._seen.get(peer_id, ()))))
            for peer_id in peer_ids
        }

    def absent(self, neighbors: Collection[str]) -> dict[str, Addresses]:
        """The configured peers that are not among `neighbors`.

        A bootstrap peer that starts anew knows nobody: unless the others greet it, it gathers a second swarm.
        """
        return {peer_id: addresses for peer_id, addresses in self._initial.items() if peer_id not in neighbors}
