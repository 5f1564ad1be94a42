"""The directory of nodes: each lists itself in the index, signed, and learns from the lists whom it can connect to.

    every PRESENCE_INTERVAL_S:  own presence ─> list of the own shard, thinned out also of the wider shards above it
                                list of the own shard ─> transport.meet(each) · size of the shard ─> level of the shard
                                (a long list every third time)

Every list has about as many entries as a shard has members, however large the swarm: in the list of a shard k levels
above its own a node appears with probability 2**-k. A newcomer reads the widest list, sees the level of those in it, and
goes to its own shard. Names cost nothing, so it stays at a level only while rollouts of others prove true there. Silence
alone is no reason to leave for long: the others may be slow, and a single made-up name may be listed at another level.
"""

import asyncio
import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable

from swarm.network.context import NodeContext
from swarm.network.index_entry import CLOCK_SKEW_S
from swarm.network.transport import Contact
from swarm.records.presence import MAX_ADDRESSES, Presence, sign_presence, verify_presence
from swarm.records.rejection import InvalidRecord
from swarm.sharing.index import EPOCH_S, Shard, next_level, presence_key, shard_of, thinning_depth
from swarm.sharing.totals import SharingTotals

logger = logging.getLogger(__name__)

PRESENCE_INTERVAL_S = 30.0
PRESENCE_LIFETIME_S = 120.0
SETTLE_S = 2 * PRESENCE_INTERVAL_S
"""How long no node changes its level after all shards were drawn anew, because the others are still listing themselves."""
FIRST_INTERVALS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""The first intervals of a node are shorter, and it reads in each: others may be starting at the same time."""
ALONE_INTERVAL_S = 5.0
"""The interval of a node that finds nobody listed: whoever comes back after an outage is met soon, and it costs nobody else."""
PROOF_S = EPOCH_S
"""A level at which no body of others was admitted for this long is left for another one at which somebody is listed."""
PROOF_BODIES = 3
"""It is not left before this node has published this many bodies itself: where rounds take long, silence says little."""
BARREN_S = 6 * EPOCH_S
"""How long no small shard joins its twin at a level that was left."""
MAX_STAY_S = 3 * EPOCH_S
"""Longest silence after which a node leaves the level where a body was admitted. Each look elsewhere that finds nothing doubles
the time until the next one, up to this: that body may have been sent to keep the node there."""
_MOST_OWN_ENTRIES = 64
"""How many own entries a node remembers: more than it makes in PRESENCE_LIFETIME_S."""
LONG_LIST = 32
"""Members of a list that need not be read in every turn: who knows that many peers can wait for the newest one. Reading costs a
signature of each member, and the bytes of the whole list from each of its replicas."""
TURNS_PER_LONG_LIST = 3
_CHECKS_PER_PAUSE = 128
"""Signatures of a list that are checked in one piece: strangers may fill it with 2,048 names."""
_TURNS_PER_WIDE_LOOK = 10
"""Turns between two looks of a node in a narrow shard at the widest list, where relays for all shards are listed."""


class Directory:
    """The presence of one node and the shard that it shares in. It runs on the node's loop."""

    def __init__(
        self,
        context: NodeContext,
        totals: SharingTotals,
        *,
        on_presence: Callable[[str], None] = lambda peer_id: None,
        stays_widest: bool = False,
    ) -> None:
        """`totals`: what this node published, received and admitted. A shard of whose authors it receives nothing never splits.

        `on_presence`: called with the peer id of everybody who is listed. `stays_widest`: be listed where newcomers look,
        whatever level the others are at.
        """
        self._swarm_id = context.swarm_id
        self._identity = context.identity
        self._transport = context.transport
        self._totals = totals
        self._on_presence = on_presence
        self._stays_widest = stays_widest
        self._num_proven = 0
        self._silent_since = (self._transport.now(), 0)  # and the number of own bodies published by then
        self._left_at: dict[int, float] = {}
        self._home: int | None = None
        """The level at which a body of others was admitted last."""
        self._stay_s = PROOF_S  # at that level
        self._num_turns = 0
        self._last_list: tuple[Shard, int] | None = None
        """The one that was read last."""
        self._num_turns_unread = 0
        self._began_at = self._transport.now()
        self._own_entries = deque[float]((), _MOST_OWN_ENTRIES)  # when each was made
        self._told_of_twin_at = -math.inf
        self.level = 0
        self.levels: Counter[int] = Counter()
        """Levels of the others in the list that was read last."""
        self.num_members = 1
        """Nodes in the list of the own shard, this one included."""

    @property
    def shard(self) -> Shard:
        """The node's shard at this moment."""
        return shard_of(self._swarm_id, self._identity.peer_id, self.level, self._transport.now())

    async def turn(self) -> float:
        """List this node, and read who else is listed where that is due. Returns the seconds until the next turn."""
        if self._num_turns == 0 and not self._stays_widest:
            await self._find_level()
        elif self.level and self._num_turns % _TURNS_PER_WIDE_LOOK == 0:
            await self._members(Shard(0, 0))
        await self._announce()
        if self._is_reading_due():
            await self._read_own_list()
        else:
            self._num_turns_unread += 1
        self._num_turns += 1
        if self._num_turns <= len(FIRST_INTERVALS_S):
            return FIRST_INTERVALS_S[self._num_turns - 1]
        return ALONE_INTERVAL_S if self.num_members == 1 else PRESENCE_INTERVAL_S

    def _is_reading_due(self) -> bool:
        if self._num_turns < len(FIRST_INTERVALS_S) or self.num_members < LONG_LIST:
            return True
        return self._own_list() != self._last_list or self._num_turns_unread >= TURNS_PER_LONG_LIST - 1

    def _own_list(self) -> tuple[Shard, int]:
        """The list that this node belongs to now: its shard, and the epoch for which shards were drawn."""
        return self.shard, int(self._transport.now() // EPOCH_S)

    async def _read_own_list(self) -> None:
        """Meet the members of the own shard, and go to another level where their number says so."""
        self._last_list, self._num_turns_unread = self._own_list(), 0
        members = await self._members(self.shard)
        self.num_members = len(members.keys() | {self._identity.peer_id})
        level = self.level if self._is_settling() else await self._next_level()
        if level != self.level:
            logger.info("shard %s has %d members: going to level %d", self.shard.name, self.num_members, level)
            self.level = level
            await self._announce()

    async def _next_level(self) -> int:
        now = self._transport.now()
        if self._is_barren(now):
            return await self._level_of_others(now)
        level = next_level(self.level, self.num_members, self._totals.num_authors_heard())
        return self.level if now - self._left_at.get(level, -math.inf) < BARREN_S else level

    def _is_barren(self, now: float) -> bool:
        """Whether no body of others was admitted at this level for too long: its members may be made up."""
        if not self._totals.reads:
            return False
        if (count := self._totals.num_records_admitted) != self._num_proven:
            self._num_proven = count
            self._restart_silence(now)
            self._left_at.pop(self.level, None)
            if self._home != self.level:
                self._home, self._stay_s = self.level, PROOF_S
        since, num_published_before = self._silent_since
        if self._home is not None and self.level != self._home:
            return now - since >= PROOF_S
        num_published = self._totals.num_published - num_published_before
        has_own_pace = num_published >= PROOF_BODIES or not self._totals.publishes
        return has_own_pace and now - since >= self._stay_s

    def _restart_silence(self, now: float) -> None:
        self._silent_since = now, self._totals.num_published

    async def _level_of_others(self, now: float) -> int:
        """The level where bodies have been admitted, if that is another one.

        Otherwise, of the levels in the widest list, the one that was left longest ago or never tried, and of these the one with
        most names; the present level where there is no other.
        """
        self._restart_silence(now)  # each level gets the full time
        self._left_at[self.level] = now
        if self._home is not None and self.level != self._home:
            self._left_at.pop(self._home, None)
            return self._home
        names = Counter(presence.level for presence in (await self._members(Shard(0, 0))).values())
        others = [level for level in names if level != self.level]
        level = min(others, key=lambda one: (self._left_at.get(one, -math.inf), -names[one]), default=None)
        if level is None:
            del self._left_at[self.level]
            return self.level
        if self._home is not None:
            self._stay_s = min(2 * self._stay_s, MAX_STAY_S)
        logger.info("no body of others was admitted in shard %s: going to level %d", self.shard.name, level)
        return level

    def _is_settling(self) -> bool:
        """Whether the lists of a new epoch are still filling and look smaller than they are."""
        return self._transport.now() % EPOCH_S < SETTLE_S

    async def _find_level(self) -> None:
        """Go to the median level of the nodes in the widest list."""
        members = await self._members(Shard(0, 0))
        if members:
            self.level = int(statistics.median(presence.level for presence in members.values()))

    async def _announce(self) -> None:
        transport, now = self._transport, self._transport.now()
        presence = Presence(
            peer_id=self._identity.peer_id,
            addresses=tuple(address.rpartition("/p2p/")[0] for address in transport.addresses()),
            gossip_addresses=transport.gossip_addresses(),
            hosts_index=transport.hosts_index,
            level=self.level,
            created_at=now,
            expires_at=now + PRESENCE_LIFETIME_S,
        )
        self._own_entries.append(now)
        record = sign_presence(self._identity, self._swarm_id, presence)
        depth = thinning_depth(self._swarm_id, self._identity.peer_id)
        for level in range(max(0, self.level - depth), self.level + 1):
            shard = shard_of(self._swarm_id, self._identity.peer_id, level, now)
            key = presence_key(self._swarm_id, shard)
            await transport.store(key, self._identity.peer_id, record, presence.expires_at)

    async def _members(self, shard: Shard) -> dict[str, Presence]:
        """Read the other nodes in a list and introduce them to the transport. Entries of an earlier epoch are ignored."""
        members: dict[str, Presence] = {}
        now = self._transport.now()
        for number, (subkey, value) in enumerate(
            (await self._transport.load(presence_key(self._swarm_id, shard))).items()
        ):
            if number % _CHECKS_PER_PAUSE == _CHECKS_PER_PAUSE - 1:
                await asyncio.sleep(0)
            try:
                presence = verify_presence(value, self._swarm_id)
            except InvalidRecord:
                continue
            if presence.peer_id != subkey:
                continue
            if presence.peer_id == self._identity.peer_id:
                self._look_for_twin(presence)
                continue
            is_current = presence.created_at <= now + CLOCK_SKEW_S and now < presence.expires_at
            if is_current and shard_of(self._swarm_id, presence.peer_id, shard.level, now) == shard:
                members[presence.peer_id] = presence
                self._on_presence(presence.peer_id)
                self._transport.meet(_contact(presence))
        self.levels = Counter(presence.level for presence in members.values())
        return members

    def _look_for_twin(self, own: Presence) -> None:
        """Tell, once per EPOCH_S, of an entry that has the key of this node, and that neither it nor its last run has made."""
        is_of_this_run = own.created_at > self._began_at + CLOCK_SKEW_S
        if not is_of_this_run or own.created_at in self._own_entries:
            return
        if (now := self._transport.now()) - self._told_of_twin_at >= EPOCH_S:
            self._told_of_twin_at = now
            logger.warning(
                "another process uses the identity of this node, perhaps on another machine (at %s): peers reach only one of "
                "them, and count the rates of both as one; stop that one, or give it a key of its own: swarm identity rotate",
                ", ".join(own.addresses) or "no address",
            )


def _contact(presence: Presence) -> Contact:
    return Contact(
        presence.peer_id,
        presence.addresses[:MAX_ADDRESSES],
        presence.gossip_addresses[:MAX_ADDRESSES],
        presence.hosts_index,
    )
