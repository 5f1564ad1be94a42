"""Whose turn it is not.

Nodes that need the same time for their inner steps come back at the same moments, so each would meet the same neighbour
again and again, and adapters would not mix. And a peer that asks everybody first would be everybody's partner.
"""

from collections import deque
from collections.abc import Iterable

MAX_REMEMBERED = 8
"""Partners, and offers whose lists are remembered."""


class RecentPartners:
    """The last partners of this node. Of n peers that were ready of late, the last (n - 1) / 2 partners have to wait."""

    def __init__(self) -> None:
        self._partners: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._ready: deque[set[str]] = deque([set()], maxlen=MAX_REMEMBERED)

    def begin_offer(self) -> None:
        self._ready.append(set())

    def see(self, ready: Iterable[str]) -> None:
        """Peers that are ready to merge with this node."""
        self._ready[-1].update(ready)

    def add(self, peer_id: str) -> None:
        """A new partner."""
        self._partners.append(peer_id)

    def __contains__(self, peer_id: str) -> bool:
        num_waiting = (len(set().union(*self._ready)) - 1) // 2
        return num_waiting > 0 and peer_id in list(self._partners)[-num_waiting:]
