"""Finds the peers of the DHT that are nearest to a key, and what they hold under it, whatever some of them say.

    own routing table ─▶ ask the nearest ─▶ they name others ─▶ ask those ─▶ ... ─▶ the nearest that have answered

hivemind's own search counts a peer as found once anybody has named it. One peer that named twenty made-up ones near a key
so ended every search for it, or held it up until its time was over, and what honest peers had answered was lost.
Here a peer counts once it has answered; the names of a peer that has named others in vain come last; and what was found
until the deadline counts.
Imports hivemind: only `session` may import this module.
"""

import asyncio
import bisect
import contextlib
from collections import Counter
from typing import Any

from swarm.network.hivemind.index_storage import IndexEntries
from swarm.network.hivemind.parts import DHTID, DHTNode, DictionaryDHTValue, PeerID

SEARCH_TIMEOUT_S = 6.0
NUM_NEAREST = 20
"""A search ends when so many peers have answered and no other is known that is nearer."""
MAX_ASKED = 200
_NUM_AT_ONCE = 8


class IndexSearch:
    """One search from the node of this process. Made for one `run`."""

    def __init__(self, node: DHTNode, target: DHTID) -> None:
        self._node = node
        self._target = target
        table = node.protocol.routing_table
        self._waiting: dict[DHTID, tuple[PeerID, DHTID | None]] = {
            node_id: (peer_id, None)
            for node_id, peer_id in table.get_nearest_neighbors(target, NUM_NEAREST, exclude=node.node_id)
        }
        """{peer to ask: its peer id, and who has named it}"""
        self._known = {node.node_id, *self._waiting}
        self._named_in_vain: Counter[DHTID | None] = Counter()
        self._num_asked = 0
        self._answered: list[tuple[int, DHTID, PeerID]] = []  # (distance, node id, peer id), nearest first
        self.entries = IndexEntries()
        """The newest entry of each subkey under `target`, of all answers and of what this node holds itself."""

    @property
    def nearest(self) -> list[tuple[DHTID, PeerID]]:
        """Peers that have answered, nearest first."""
        return [(node_id, peer_id) for _, node_id, peer_id in self._answered[:NUM_NEAREST]]

    async def run(self) -> None:
        """Ends by itself, after SEARCH_TIMEOUT_S at the latest. Raises nothing."""
        self._take(self._node.protocol.storage.get(self._target))
        asking: set[asyncio.Task[None]] = set()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEARCH_TIMEOUT_S):
                    while True:
                        while len(asking) < _NUM_AT_ONCE and (chosen := self._next()) is not None:
                            asking.add(asyncio.create_task(self._ask(chosen, *self._waiting.pop(chosen))))
                        if not asking:
                            return
                        done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                        for task in done:
                            task.result()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def _next(self) -> DHTID | None:
        """Whom to ask next: of those nearer than the peers found so far, whose namer has named fewest others in vain."""
        bound = self._answered[NUM_NEAREST - 1][0] if len(self._answered) >= NUM_NEAREST else None
        near = [one for one in self._waiting if bound is None or self._distance(one) < bound]
        if not near or self._num_asked >= MAX_ASKED:
            return None
        self._num_asked += 1
        return min(near, key=lambda one: (self._named_in_vain[self._waiting[one][1]], self._distance(one)))

    async def _ask(self, node_id: DHTID, peer_id: PeerID, namer: DHTID | None) -> None:
        reply = await self._node._call_find_with_blacklist(peer_id, [self._target])
        if not reply:
            self._named_in_vain[namer] += namer is not None
            return
        bisect.insort(self._answered, (self._distance(node_id), node_id, peer_id))
        found, neighbors = reply[self._target]
        self._take(found)
        for other, other_peer in neighbors.items():
            if other not in self._known:
                self._known.add(other)
                self._waiting[other] = other_peer, node_id

    def _distance(self, node_id: DHTID) -> int:
        return self._target ^ node_id

    def _take(self, found: Any) -> None:
        """Add entries that were judged: `found` is a ValueWithExpiration, or None."""
        if found is not None and isinstance(found.value, DictionaryDHTValue):
            for subkey, item in found.value.data.items():
                self.entries.store(subkey, item.value, item.expiration_time)
