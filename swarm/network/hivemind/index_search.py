"""Finds the peers of the DHT nearest to a key, and the entries they hold under it, even if some of them lie.

    own routing table ─▶ ask the nearest ─▶ they name others ─▶ ask those ─▶ ... ─▶ the nearest that have answered

hivemind's own search counts a peer as found once anybody has named it. So one peer that names twenty made-up peers near
a key ends every search for that key, or delays it until its time is over, and the answers of honest peers are lost.
Here a peer counts once it has answered, peers named by a peer whose names led nowhere are asked last, and everything
found before the deadline counts.

Only `session` may import this module, since it imports hivemind.
"""

import asyncio
import bisect
import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from swarm.limits.bounded_maps import BoundedMap
from swarm.network.hivemind.index_storage import IndexEntries
from swarm.network.hivemind.parts import DHTID, DHTNode, DictionaryDHTValue, PeerID
from swarm.network.index_entry import PLACES_S, is_enough

SEARCH_TIMEOUT_S = 6.0
NUM_NEAREST = 20
"""A search ends when this many peers have answered and no nearer one is known."""
MAX_ASKED = 200
_NUM_AT_ONCE = 8
_MAX_PLACES = 256
Places = list[tuple[DHTID, PeerID]]


class KnownPlaces:
    """Remembers for PLACES_S where searches ended, so that entries are stored and read without a search for each.

    A search that found fewer peers than it looks for has found everybody, so it counts for every key, until the routing table
    has a peer that it did not find. One that found too few for all replicas counts for none: this node, or its swarm, is only
    just beginning.
    """

    def __init__(self, clock: Callable[[], float], known: Callable[[], Collection[DHTID]]) -> None:
        """`known` returns the peers in the routing table."""
        self._clock = clock
        self._known = known
        self._by_target: BoundedMap[DHTID, tuple[float, Places]] = BoundedMap(_MAX_PLACES)
        self._everybody: tuple[float, Places] | None = None

    def note(self, target: DHTID, search: "IndexSearch", least: int) -> None:
        """Note the end of a search that has just been made, if it found all there is; otherwise only that earlier ones are out of
        date. `least` is the number of replicas.
        """
        nearest = search.nearest if search.is_complete else []
        found = (self._clock(), nearest)
        self._everybody = found if least <= len(nearest) < NUM_NEAREST else None
        self._by_target.pop(target, None)
        if len(nearest) >= max(least, NUM_NEAREST):
            self._by_target[target] = found

    def near(self, target: DHTID) -> Places:
        """Return the peers nearest to `target`, in no order; empty where a search has to find them."""
        if self._everybody is not None and not {node_id for node_id, _ in self._everybody[1]}.issuperset(self._known()):
            self._everybody = None
        for found in (self._everybody, self._by_target.get(target)):
            if found is not None and self._clock() - found[0] < PLACES_S:
                return found[1]
        return []

    def forget(self) -> None:
        """Forget all of it: a peer did not answer."""
        self._everybody = None
        self._by_target.clear()


class IndexSearch:
    """One search from the node of this process. Each object makes at most one `read` and one `run`, in this order."""

    def __init__(self, node: DHTNode, target: DHTID) -> None:
        self._node = node
        self._target = target
        table = node.protocol.routing_table
        self._waiting: dict[DHTID, tuple[PeerID, DHTID | None]] = {
            node_id: (peer_id, None)
            for node_id, peer_id in table.get_nearest_neighbors(target, NUM_NEAREST, exclude=node.node_id)
        }
        """{peer to ask: its peer id, and the peer that named it}"""
        self._known = {node.node_id, *self._waiting}
        self._named_in_vain: Counter[DHTID | None] = Counter()
        self._num_asked = 0
        self._answered: list[tuple[int, DHTID, PeerID]] = []  # (distance, node id, peer id), nearest first
        self.is_complete = False
        """Whether nobody was left to ask: slow peers, or very many, can end a search before that."""
        self.entries = IndexEntries()
        """The newest entry of each subkey under `target`, from all answers and from this node's own storage."""

    @property
    def nearest(self) -> list[tuple[DHTID, PeerID]]:
        """Peers that have answered, nearest first."""
        return [(node_id, peer_id) for _, node_id, peer_id in self._answered[:NUM_NEAREST]]

    async def read(self, hosts: Places) -> bool:
        """Read the entries of these hosts alone. Returns whether they may stand for all; else `run` has to follow. Raises
        nothing.
        """
        held = await asyncio.gather(*(self._read_host(*host) for host in hosts))
        for entries in held:
            self._add(entries)
        return is_enough(
            [entries if entries is None else len(entries.data) for entries in held], len(self.entries.data)
        )

    async def _read_host(self, node_id: DHTID, peer_id: PeerID) -> IndexEntries | None:
        """Return what a host, or this node itself, holds; None where it does not answer."""
        if node_id == self._node.node_id:
            return _dictionary(self._node.protocol.storage.get(self._target))
        reply = await self._node._call_find_with_blacklist(peer_id, [self._target])
        return _dictionary(reply[self._target][0]) if reply else None

    async def run(self) -> None:
        """Search, for at most SEARCH_TIMEOUT_S. Raises nothing."""
        self._add(_dictionary(self._node.protocol.storage.get(self._target)))
        asking: set[asyncio.Task[None]] = set()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEARCH_TIMEOUT_S):
                    while True:
                        while len(asking) < _NUM_AT_ONCE and (chosen := self._next()) is not None:
                            asking.add(asyncio.create_task(self._ask(chosen, *self._waiting.pop(chosen))))
                        if not asking:
                            self.is_complete = self._num_asked < MAX_ASKED
                            return
                        done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                        for task in done:
                            task.result()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def _next(self) -> DHTID | None:
        """Choose the peer to ask next: nearer than those found, and named by the peer with fewest names that led
        nowhere.
        """
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
        self._add(_dictionary(found))
        for other, other_peer in neighbors.items():
            if other not in self._known:
                self._known.add(other)
                self._waiting[other] = other_peer, node_id

    def _distance(self, node_id: DHTID) -> int:
        return self._target ^ node_id

    def _add(self, entries: IndexEntries | None) -> None:
        for subkey, item in entries.data.items() if entries is not None else ():
            self.entries.store(subkey, item.value, item.expiration_time)


def _dictionary(found: Any) -> IndexEntries:
    """Return the validated entries in a ValueWithExpiration, or in None."""
    return found.value if found is not None and isinstance(found.value, DictionaryDHTValue) else IndexEntries()
