"""What one node knows of its peers: every observation comes in here once and is passed to all parts that need it.

presence ────────────┐             ┌─ Reputation ──── bans, and with it
valid header ────────┤             ├─ AuthorShares ── how much of what is read each author gets
body admitted ───────┼─▶ PeerTracker ─ Usefulness ─ which header, where `sharing.choice` is informative
body rejected ───────┘             ├─ Beacons ─────── what the own next tasks follow from
                                   ├─ CheckingTurns ─ whose body is checked next, by the time that earlier ones took
                                   └─ PeerStats ───── for people to look at

`PeerStats` decides nothing: it is for the status file and the page. Decisions about peers follow from the `Reputation`.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarm.admission.checking_turns import CheckingTurns
from swarm.config import SharingSection
from swarm.limits.bounded_maps import FairMap
from swarm.pool.success_levels import SuccessLevel, has_success
from swarm.records.context import SwarmContext
from swarm.records.rejection import Rejection
from swarm.sharing.beacons import Beacons, Evidence
from swarm.sharing.reputation import AddressGroups, AuthorShares, Reputation, SeenAt
from swarm.sharing.usefulness import Usefulness
from swarm.tasks.task_mixture import CommonStreams, owns_stream
from swarm.types import Header, RolloutGroup

MAX_PEERS = 256
REWARD_WINDOW_S = 1800.0
"""How long a group counts as recent, ..."""
_MAX_RECENT_GROUPS = 64
"""... and how many count at most per author: with rewards of 0 or 1 their mean is right to about ±0.06."""


class RecentRewards:
    """Mean reward of the groups of one author in the last half hour, the newest 64 of them."""

    def __init__(self) -> None:
        self._rewards: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT_GROUPS)  # (when, mean of a group)

    def add(self, groups: Sequence[RolloutGroup], now: float) -> None:
        self._rewards.extend((now, group.mean_reward) for group in groups)

    def mean(self, now: float) -> tuple[float | None, int]:
        """The mean and the number of groups; the mean is None where there are none."""
        while self._rewards and self._rewards[0][0] < now - REWARD_WINDOW_S:
            self._rewards.popleft()
        count = len(self._rewards)
        return (sum(reward for _, reward in self._rewards) / count if count else None), count


@dataclass(slots=True)
class PeerHistory:
    """What this node has seen of one peer since its process began."""

    last_seen_at: float = 0.0
    """Swarm time of the peer's last presence, header or body."""
    lineage: str = ""
    """Policy lineage of the peer's newest header; empty before the first one."""
    policy_version: int | None = None
    groups_admitted: int = 0
    records_rejected: int = 0
    rewards: RecentRewards = field(default_factory=RecentRewards)
    """As this node recomputed them."""


class PeerStats:
    """The histories of at most `max_peers` peers. It runs on the node's loop.

    Where there are more, peers of whom nothing was admitted are forgotten first, because names cost nothing.
    """

    def __init__(self, clock: Callable[[], float], max_peers: int = MAX_PEERS) -> None:
        """`max_peers`: 0 where nobody looks at them."""
        self._clock = clock
        self._max_peers = max_peers
        self._peers: OrderedDict[str, PeerHistory] = OrderedDict()
        self.own_rewards = RecentRewards()
        """Rewards of what this node shared, to compare with what its peers shared."""

    def seen(self, peer_id: str) -> None:
        """Note that a peer has listed itself."""
        self._note(peer_id)

    def heard(self, header: Header) -> None:
        """Note a valid header."""
        peer = self._note(header.author)
        peer.lineage, peer.policy_version = header.lineage.policy, header.policy_version

    def admitted(self, header: Header, groups: Sequence[RolloutGroup], num_new: int) -> None:
        """Note an admitted body. `groups`: those that went to the pool; `num_new` of them were not there before.

        The mean is of those with differing rewards, as that of own groups is.
        """
        peer = self._note(header.author)
        peer.groups_admitted += num_new
        with_signal = [group for group in groups if group.has_reward_variance]
        peer.rewards.add(with_signal if num_new else (), self._clock())

    def rejected(self, author: str) -> None:
        """Note that a body of this author was rejected, or could not be fetched."""
        self._note(author).records_rejected += 1

    def shared(self, groups: Sequence[RolloutGroup]) -> None:
        """Note that this node shares `groups`."""
        self.own_rewards.add([group for group in groups if group.has_reward_variance], self._clock())

    def last_seen_first(self) -> list[tuple[str, PeerHistory]]:
        return sorted(self._peers.items(), key=lambda item: -item[1].last_seen_at)

    def _note(self, peer_id: str) -> PeerHistory:
        peer = self._peers.pop(peer_id, None) or PeerHistory()
        peer.last_seen_at = self._clock()
        self._peers[peer_id] = peer
        if len(self._peers) > self._max_peers:
            others = (name for name, one in self._peers.items() if not one.groups_admitted and name != peer_id)
            del self._peers[next(others, next(iter(self._peers)))]
        return peer


_NO_SUCCESS = 2.0
"""Part of a bad body that a group without a success counts as, where all groups of its author lack one."""
_GROUP_MEMORY = 0.9
"""Weight of the earlier groups of an author when a new one arrives (exponential decay)."""
_PRIOR_GROUPS = 2.0
"""An author starts as if it had sent this many groups that lack no more successes than own groups."""
_MAX_AUTHORS = 1024
_OTHER_STREAM = 0.5
"""Part of a bad body that tasks outside the author's own streams count as: an older version, or chosen tasks."""
_OF_BEACON = {Evidence.MISSING: 0.1, Evidence.BROKEN: 0.5}
"""Part of a bad body that a missing or broken beacon counts as: the tasks may have been chosen, or known in advance."""


class PeerTracker:
    """Receives every observation of one node about its peers, on the node's loop.

    `reputation`, `usefulness` and `beacons.current` may be read from any thread.
    """

    def __init__(
        self,
        config: SharingSection,
        context: SwarmContext,
        *,
        path: Path | None = None,
        max_shown: int = MAX_PEERS,
        seen_at: SeenAt = lambda peer_id: (),
    ) -> None:
        """`path`: file in which the reputation outlives the process. `max_shown`: peers with statistics; 0 where nobody looks.

        `seen_at`: the addresses at which a peer is connected, which tell strangers of different networks apart; without it all
        strangers count as one network.
        """
        clock = context.clock
        self.reputation = Reputation(config.reputation_half_life_s, clock, path)
        self.shares = AuthorShares(self.reputation, config.max_share_of_strangers, AddressGroups(seen_at))
        self.common = CommonStreams.of(config, context.swarm_id, clock)
        """Which tasks all nodes draw: their stream and their beacon say nothing about an author."""
        self.beacons = Beacons(
            context,
            is_known=self.reputation.is_known,
            has_known=self.reputation.has_known,
            is_common=self.common.holds,
        )
        self.turns = CheckingTurns(self.reputation.is_known)
        self.stats = PeerStats(clock, max_shown)
        is_informative = config.choice == "informative"
        self.usefulness = Usefulness(config.max_age_s, clock, self.reputation.weight) if is_informative else None
        self._lacking: FairMap[str, tuple[float, float]] = FairMap(_MAX_AUTHORS, is_known=self.reputation.is_known)
        """{author: (groups without a success beyond what own groups have, groups)}; earlier ones count less."""
        self.beacon_evidence: Counter[str] = Counter()
        """Admitted bodies, by what the beacon of their header said about their tasks."""

    def present(self, peer_id: str) -> None:
        """Note that a peer has listed itself."""
        self.stats.seen(peer_id)

    def heard(self, header: Header) -> None:
        """Note a valid header that came in for the first time."""
        self.shares.heard(header.author)
        self.beacons.note(header)
        self.stats.heard(header)

    def admitted(self, header: Header, groups: Sequence[RolloutGroup]) -> None:
        """Note that the body of `header` held what was promised: all `groups` of it."""
        author = header.author
        self.reputation.admitted(author)
        if not all(owns_stream(group.author, group.task.seed) or self.common.holds(group.task) for group in groups):
            self.reputation.hint(author, _OTHER_STREAM)
        evidence = self.beacons.judge(header)
        self.beacon_evidence[evidence.value] += 1
        if evidence in _OF_BEACON:
            self.reputation.hint(author, _OF_BEACON[evidence])
        if not all(self.common.is_worth_sharing(group) for group in groups):
            self.reputation.refused(author, Rejection.NO_SIGNAL)

    def judged(self, groups: Sequence[RolloutGroup], level: Callable[[str], SuccessLevel]) -> None:
        """Note admitted `groups`. `level`: what a group of a source must reach to count as a success here.

        Own groups without a success are normal. What counts against an author is how much more often its groups lack one. Groups
        of right answers alone do not count: whoever chose the easiest common tasks would make up for others with them.
        """
        for group in groups:
            expected = level(group.task.source)
            lacks_one = not has_success(group, expected)
            if not group.has_reward_variance and not lacks_one:
                continue
            surplus, num_groups = self._lacking.get(group.author) or (0.0, 0.0)
            surplus = _GROUP_MEMORY * surplus + lacks_one - expected.lack
            num_groups = _GROUP_MEMORY * num_groups + 1
            self._lacking.add(group.author, group.author, (surplus, num_groups))
            if lacks_one and surplus > 0:
                self.reputation.hint(group.author, _NO_SUCCESS * surplus / (num_groups + _PRIOR_GROUPS))

    def refused(self, author: str, reason: Rejection) -> bool:
        """Note that a body of this author was rejected. Returns whether the author is banned for it."""
        if reason is not Rejection.STRANGERS_BUSY:  # which says nothing about this author
            self.stats.rejected(author)
        return self.reputation.refused(author, reason)
