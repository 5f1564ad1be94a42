"""What one node knows of the others: whatever it sees of an author is told here, once, and comes to all who need it.

presence ────────────┐             ┌─ Reputation ──── bans, and with it
header heard ────────┤             ├─ AuthorShares ── how much of what is read each author gets
body admitted ───────┼─▶ KnownAuthors ─ Usefulness ─ which header, where `sharing.choice` is informative
body turned away ────┘             ├─ Beacons ─────── what the own next tasks follow from
                                   └─ Acquaintances ─ for people to look at
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.config import SharingSection
from swarm.records.rejection import Rejection
from swarm.sharing.acquaintances import MAX_PEERS, Acquaintances
from swarm.sharing.author_shares import AddressGroups, AuthorShares
from swarm.sharing.beacons import Beacons, Evidence
from swarm.sharing.reputation import Reputation
from swarm.sharing.usefulness import Usefulness
from swarm.tasks.task_mixture import owns_stream
from swarm.types import Header, RolloutGroup

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
    ) -> None:
        """`clock`: swarm time. `path`: where the reputation outlives the process. `max_shown`: 0 where nobody will look."""
        self.reputation = Reputation(config.reputation_half_life_s, clock, path)
        self.addresses = AddressGroups()
        self.shares = AuthorShares(self.reputation, config.max_share_of_strangers, self.addresses)
        self.beacons = Beacons(own_peer_id, clock, self.reputation.is_known, self.reputation.has_known)
        self.acquaintances = Acquaintances(clock, max_shown)
        is_informative = config.choice == "informative"
        self.usefulness = Usefulness(config.max_age_s, clock, self.reputation.weight) if is_informative else None
        self.beacon_evidence: Counter[str] = Counter()
        """Bodies admitted, by what the beacon of their header said of their tasks."""

    def present(self, peer_id: str, addresses: Sequence[str]) -> None:
        """It has listed itself, with the multiaddresses at which it can be reached."""
        self.addresses.note(peer_id, addresses)
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

    def refused(self, author: str, reason: Rejection) -> bool:
        """A body of it was turned away. Returns whether the author is banned now, for that."""
        if reason is not Rejection.STRANGERS_BUSY:  # which says nothing about it
            self.acquaintances.rejected(author)
        return self.reputation.refused(author, reason)
