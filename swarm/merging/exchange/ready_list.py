"""The lists of nodes that are ready to merge: nodes of one lineage list their signed offers in the index, and read others'.

    own offer ─> list of the own shard, thinned out also of wider ones          `<swarm id>/merge/<lineage>/<shard>`
    list of the own shard ─ random sample ─ verified ─ mergeable ─> candidates

A lineage begins with one list. It splits by the number of ready nodes, as the lists of the directory do, and never further than
those: the directory's level needs authors whose rollouts were admitted, which made-up listings do not have.
"""

import random
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping

from swarm.limits.bounded_maps import BoundedMap
from swarm.merging.exchange.proposal import MAX_LAG_ROUNDS, check_terms, is_current
from swarm.network.context import NodeContext
from swarm.records.adapter_offer import AdapterList, AdapterOffer, verify_offer
from swarm.records.rejection import InvalidRecord
from swarm.sharing.index import SPLIT_ABOVE, Shard, adapter_key, next_level, shard_of, thinning_depth

MAX_READ = 64
"""Entries of a list that are checked. They are a random sample, so that place and name in the list give no advantage."""
CATCH_UP_TO = MAX_LAG_ROUNDS // 2
"""Outer rounds behind the others that a slow node offers its adapter as; the others go on while it searches."""
_WIDEST = Shard(0, 0)
Standing = Callable[[Collection[str]], Mapping[str, float]]


class ReadyList:
    """The lists of one node's lineage, and the node's place in them. It runs on the node's loop."""

    def __init__(
        self,
        context: NodeContext,
        rng: random.Random,
        *,
        max_level: Callable[[], int] = lambda: 0,
        kind: AdapterList = "merge",
        standing: Standing = lambda peer_ids: dict.fromkeys(peer_ids, 1.0),
    ) -> None:
        """`max_level`: level of the node's shard in the directory. `standing`: {peer: how much its outer round counts}."""
        self._standing = standing
        self._kind: AdapterList = kind
        self._swarm_id = context.swarm_id
        self._transport = context.transport
        self._rng = rng
        self._max_level = max_level
        self._levels: dict[str, int] = {}  # by lineage; a node has one, or a few in a lifetime
        self._rounds: BoundedMap[str, int] = BoundedMap(MAX_READ)  # outer round of each peer that was listed last
        self._enlisted: AdapterOffer | None = None
        self._keys: set[str] = set()  # that the enlisted offer lies under

    async def level(self, lineage: str) -> int:
        """The level of the shard in which an offer of this lineage is listed. At first it is read from the widest list."""
        if lineage not in self._levels:
            others = await self.widest(lineage)
            self._levels[lineage] = int(statistics.median(other.level for other in others)) if others else 0
        self._levels[lineage] = min(self._levels[lineage], self._max_level())
        return self._levels[lineage]

    def caught_up(self, outer_round: int) -> int:
        """The outer round to offer an adapter as: the own one, or a little less than the others' for a node that fell behind.

        Otherwise slow and late nodes would stay alone for ever. A partner counts for less the further behind it is, so such a
        node counts as little as any. The others' round is the median by standing: moving it takes half of the standing, and
        strangers have a quarter while known peers are listed.
        """
        if not self._rounds:
            return outer_round
        rounds = dict(self._rounds)
        standing = self._standing(rounds)
        half, passed = sum(standing.values()) / 2, 0.0
        for peer_id in sorted(rounds, key=rounds.__getitem__):
            median, passed = rounds[peer_id], passed + standing[peer_id]
            if passed >= half * (1 - 1e-9):
                break
        return max(outer_round, median - CATCH_UP_TO)

    def note_round(self, other: AdapterOffer) -> None:
        """Note the outer round of a peer of this lineage. The last MAX_READ peers are remembered."""
        self._rounds[other.peer_id] = other.outer_round

    async def enlist(self, offer: AdapterOffer, record: bytes, until: float) -> None:
        """List an offer until this swarm time, in every list where it is missing."""
        if offer != self._enlisted:
            self._enlisted, self._keys = offer, set()
        until = min(until, offer.expires_at)
        depth = thinning_depth(self._swarm_id, offer.peer_id)
        for level in range(max(0, offer.level - depth), offer.level + 1):
            key = self._key(offer, level)
            if key not in self._keys and await self._transport.store(key, offer.peer_id, record, until):
                self._keys.add(key)

    async def candidates(self, own: AdapterOffer) -> list[AdapterOffer]:
        """The offers that `own` could be merged with, in random order."""
        found = self._mergeable(own, await self.others(own))
        if not found and own.level > 0:
            found = self._mergeable(own, await self.widest(own.lineage))
        return found

    async def others(self, own: AdapterOffer) -> list[AdapterOffer]:
        """The offers in the same list as `own`. Their number decides the level of the next offer."""
        listed = await self._load(self._key(own, own.level))
        self._adapt(own.lineage, len(listed))
        return self._verified(listed)

    async def widest(self, lineage: str) -> list[AdapterOffer]:
        """The offers in the list where newcomers look, which is thinned out as the lineage grows."""
        return self._verified(await self._load(adapter_key(self._swarm_id, self._kind, lineage, _WIDEST)))

    def _key(self, offer: AdapterOffer, level: int) -> str:
        """The key of the shard in which the offer was made, although shards may have been drawn anew since."""
        shard = shard_of(self._swarm_id, offer.peer_id, level, offer.created_at)
        return adapter_key(self._swarm_id, self._kind, offer.lineage, shard)

    async def _load(self, key: str) -> dict[str, bytes]:
        listed = await self._transport.load(key)
        listed.pop(self._transport.peer_id, None)
        return listed

    def _verified(self, listed: dict[str, bytes]) -> list[AdapterOffer]:
        names = sorted(listed)
        found = []
        for name in self._rng.sample(names, min(MAX_READ, len(names))):
            try:
                offer = verify_offer(listed[name], self._swarm_id, self._kind)
            except InvalidRecord:
                continue
            if offer.peer_id == name and is_current(offer, self._transport.now()):
                found.append(offer)
        return found

    def _mergeable(self, own: AdapterOffer, others: Iterable[AdapterOffer]) -> list[AdapterOffer]:
        others = [other for other in others if other.lineage == own.lineage]
        for other in others:
            self.note_round(other)
        return [other for other in others if check_terms(own, other) is None]

    def _adapt(self, lineage: str, num_listed: int) -> None:
        """Adapt the level of the next offer; the current one stays where it is listed."""
        level = self._levels.get(lineage, 0)
        num_authors = SPLIT_ABOVE if level < self._max_level() else 0
        self._levels[lineage] = next_level(level, num_listed + 1, num_authors)
