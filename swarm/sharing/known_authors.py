"""What one node knows of the others: whatever it sees of an author is told here, once, and comes to all who need it.

presence ────────────┐             ┌─ Reputation ──── bans, and with it
header heard ────────┤             ├─ AuthorShares ── how much of what is read each author gets
body admitted ───────┼─▶ KnownAuthors ─ Usefulness ─ which header, where `sharing.choice` is informative
body turned away ────┘             ├─ Beacons ─────── what the own next tasks follow from
                                   ├─ CheckingTurns ─ whose body is checked next, by the time that earlier ones took
                                   └─ Acquaintances ─ for people to look at
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.config import SharingSection
from swarm.pool.success_levels import SuccessLevel, has_success
from swarm.records.fair_map import FairMap
from swarm.records.rejection import Rejection
from swarm.sharing.acquaintances import MAX_PEERS, Acquaintances
from swarm.sharing.author_shares import AddressGroups, AuthorShares, SeenAt
from swarm.sharing.beacons import Beacons, Evidence
from swarm.sharing.checking_turns import CheckingTurns
from swarm.sharing.reputation import Reputation
from swarm.sharing.usefulness import Usefulness
from swarm.tasks.task_mixture import owns_stream
from swarm.types import Header, RolloutGroup

_NO_SUCCESS = 2.0
"""Of a bad body, for each group without a success, where all groups of its author are such: as for unlikely answers."""
_GROUP_MEMORY = 0.9
"""Weight of the earlier groups of an author when a new one arrives (exponential decay)."""
_PRIOR_GROUPS = 2.0
"""An author starts as if it had sent so many groups that lack no more successes than own groups."""
_MAX_AUTHORS = 1024
_OTHER_STREAM = 0.5
"""Of a bad body: its tasks are not of the author's own streams. Either an older version, or it chose them."""
_OF_BEACON = {Evidence.MISSING: 0.1, Evidence.BROKEN: 0.5}
"""Of a bad body: its tasks may have been known ahead, or chosen."""


class KnownAuthors:
    """Of one node. Told on its loop; the reputation, the usefulness and `beacons.current` may be read from any thread."""

    def __init__(
        self,
        config: SharingSection,
        own_peer_id: str,
        clock: Callable[[], float],
        *,
        path: Path | None = None,
        max_shown: int = MAX_PEERS,
        seen_at: SeenAt = lambda peer_id: (),
    ) -> None:
        """`clock`: swarm time. `path`: where the reputation outlives the process. `max_shown`: 0 where nobody will look.

        `seen_at`: tells strangers of different networks apart; without it all strangers count as one network.
        """
        self.reputation = Reputation(config.reputation_half_life_s, clock, path)
        self.shares = AuthorShares(self.reputation, config.max_share_of_strangers, AddressGroups(seen_at))
        self.beacons = Beacons(own_peer_id, clock, self.reputation.is_known, self.reputation.has_known)
        self.turns = CheckingTurns(self.reputation.is_known)
        self.acquaintances = Acquaintances(clock, max_shown)
        is_informative = config.choice == "informative"
        self.usefulness = Usefulness(config.max_age_s, clock, self.reputation.weight) if is_informative else None
        self._lacking: FairMap[str, tuple[float, float]] = FairMap(_MAX_AUTHORS, is_known=self.reputation.is_known)
        """{author: (groups without a success beyond what own groups have, groups)}, earlier ones fading."""
        self.beacon_evidence: Counter[str] = Counter()
        """Bodies admitted, by what the beacon of their header said of their tasks."""

    def present(self, peer_id: str) -> None:
        """It has listed itself."""
        self.acquaintances.seen(peer_id)

    def heard(self, header: Header) -> None:
        """A valid header of it came in, for the first time."""
        self.shares.heard(header.author)
        self.beacons.note(header)
        self.acquaintances.heard(header)

    def admitted(self, header: Header, groups: Sequence[RolloutGroup]) -> None:
        """The body of `header` held what was promised: all `groups` of it."""
        author = header.author
        self.reputation.admitted(author)
        if not all(owns_stream(group.author, group.task.seed) for group in groups):
            self.reputation.hint(author, _OTHER_STREAM)
        evidence = self.beacons.judge(header)
        self.beacon_evidence[evidence.value] += 1
        if evidence in _OF_BEACON:
            self.reputation.hint(author, _OF_BEACON[evidence])
        if not all(group.has_signal for group in groups):
            self.reputation.refused(author, Rejection.NO_SIGNAL)

    def judged(self, groups: Sequence[RolloutGroup], level: Callable[[str], SuccessLevel]) -> None:
        """`groups` with signal were admitted; `level`: what a group of a source must reach to be a good example here.

        Own groups without a success are normal. What counts against an author is how much more often its groups lack one.
        """
        for group in groups:
            expected = level(group.task.source)
            lacks_one = not has_success(group, expected)
            surplus, num_groups = self._lacking.get(group.author) or (0.0, 0.0)
            surplus = _GROUP_MEMORY * surplus + lacks_one - expected.lack
            num_groups = _GROUP_MEMORY * num_groups + 1
            self._lacking.add(group.author, group.author, (surplus, num_groups))
            if lacks_one and surplus > 0:
                self.reputation.hint(group.author, _NO_SUCCESS * surplus / (num_groups + _PRIOR_GROUPS))

    def refused(self, author: str, reason: Rejection) -> bool:
        """A body of it was turned away. Returns whether the author is banned now, for that."""
        if reason is not Rejection.STRANGERS_BUSY:  # which says nothing about it
            self.acquaintances.rejected(author)
        return self.reputation.refused(author, reason)
