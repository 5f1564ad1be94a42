"""A bounded table of peers in which strangers cannot displace the peers that this node has met."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from swarm.records.fair_map import FairMap

Value = TypeVar("Value")


class BoundedPeers(Generic[Value]):
    """Keeps one value for each of at most `max_peers` peers.

    A full table forgets the stranger of whom it has not heard for the longest time. A peer counts as met once `met` was
    called for it. At most half of the peers count as met, so that there is always room for new ones. Names cost nothing:
    beyond that the network of which most peers were met gives up the one that was met first.
    """

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self._values: OrderedDict[str, Value] = OrderedDict()
        """The peer heard of last is last."""
        self._met: FairMap[str, None] = FairMap(max_peers // 2)
        """A subset of the keys above, by the network at which each was met."""

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, peer_id: str) -> Value | None:
        return self._values.get(peer_id)

    def put(self, peer_id: str, value: Value) -> None:
        """Enter or replace a value. A stranger that finds no room takes the place of another stranger."""
        self._values[peer_id] = value
        self._values.move_to_end(peer_id)
        while len(self._values) > self._max_peers:
            self.forget(next(one for one in self._values if one not in self._met))

    def met(self, peer_id: str, network: str = "") -> None:
        """Note that this node is connected to a peer, which it sees at `network`. Does nothing for one not in the table."""
        if peer_id in self._values:
            self._met.add(network, peer_id, None)

    def is_met(self, peer_id: str) -> bool:
        return peer_id in self._met

    def forget(self, peer_id: str) -> None:
        self._values.pop(peer_id, None)
        self._met.pop(peer_id)
