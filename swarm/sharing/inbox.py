"""Headers of other nodes, from gossip and from the index: each is validated once, then offered for pulling.

gossip ─┐
        ├─ HeaderValidator ─ candidates ─ pick ─ answered, failed, or given back
index ──┘

`NewestVersions` remembers the newest policy version that each author announced, against which older experience is measured.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from swarm.admission.admission import Admission, check_answer_length
from swarm.config import SharingSection
from swarm.limits.bounded_maps import FairMap
from swarm.limits.peer_backoff import PeerBackoff
from swarm.network.transport import ValidationResult
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.context import SwarmContext
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.header_validator import HeaderValidator
from swarm.sharing.index import Shard
from swarm.sharing.peer_tracker import PeerTracker
from swarm.sharing.reputation import AuthorShares
from swarm.sharing.totals import SharingTotals
from swarm.sharing.usefulness import make_choice
from swarm.types import Header

_MAX_VERSIONS = 4096
_MAX_LINEAGES_PER_AUTHOR = 4
"""Bounds what an author can claim: an honest author changes its lineage only when its configuration changes."""


class NewestVersions:
    """The newest version by author and policy lineage, since each author counts its own versions.

    An author that starts again from version 0 is accepted again `remember_s` after the last header of its earlier run.
    """

    def __init__(self, max_staleness: int, remember_s: float, clock: Callable[[], float]) -> None:
        """`max_staleness`: 0 for no bound."""
        self._max_staleness = max_staleness
        self._remember_s = remember_s
        self._clock = clock
        self._newest: FairMap[tuple[str, str], tuple[int, float]] = FairMap(_MAX_VERSIONS, _MAX_LINEAGES_PER_AUTHOR)
        """{(author, policy lineage): (version, seen at)}"""

    def note(self, header: Header) -> None:
        key, now = (header.author, header.lineage.policy), self._clock()
        version, seen_at = self._newest.get(key) or (-1, 0.0)
        is_news = header.policy_version >= version or seen_at <= now - self._remember_s
        self._newest.add(header.author, key, (header.policy_version, now) if is_news else (version, seen_at))

    def is_stale(self, header: Header) -> bool:
        """Whether the author announced a version more than `max_staleness` beyond this header's."""
        version, seen_at = self._newest.get((header.author, header.lineage.policy)) or (-1, 0.0)
        if not self._max_staleness or seen_at <= self._clock() - self._remember_s:
            return False
        return header.policy_version < version - self._max_staleness


MAX_CANDIDATES = 1024
MAX_CANDIDATES_PER_AUTHOR = 16
"""The newest headers of an author stay: older ones would be too old before they are pulled."""
MAX_STRANGERS = 128
"""Strangers among whom one is drawn at a time."""
SAFE_PER_KNOWN = 4
"""Candidates of each known author that give way to nobody. Beyond these, a shard full of known authors has room for new ones."""


class Inbox:
    """The candidates of one node: headers whose bodies may be pulled. It runs on the node's loop."""

    def __init__(
        self,
        config: SharingSection,
        context: SwarmContext,
        totals: SharingTotals,
        *,
        admission: Admission,
        pool: ExperiencePool,
        tracker: PeerTracker,
        rng: random.Random,
    ) -> None:
        """`totals`: counts the headers that are admitted or rejected. `tracker`: is shown every admitted header; by the
        standing of the authors in it the next one is chosen.
        """
        clock, reputation = context.clock, tracker.reputation
        self._config = config
        self._own_peer_id = context.peer_id
        self._clock = clock
        self.totals = totals
        self._pool = pool
        self._tracker = tracker
        self._validator = HeaderValidator(context, admission, config.max_age_s, rejected=totals.rejected)
        self._candidates: FairMap[tuple[str, bytes], Header] = FairMap(
            MAX_CANDIDATES, MAX_CANDIDATES_PER_AUTHOR, is_known=reputation.is_known, safe_per_known=SAFE_PER_KNOWN
        )
        self._rng = rng
        self._backoff = PeerBackoff(clock, rng)
        self._choice = make_choice(config, pool, tracker.usefulness, rng, tracker.shares)
        self._newest = NewestVersions(config.max_staleness, config.max_age_s, clock)
        self.arrived = asyncio.Event()
        """Set when a candidate comes in."""

    def take_gossip(self, shard: Shard, record: bytes) -> ValidationResult:
        """Validate a header that was gossiped in the topic of `shard`, before it is passed on."""
        result, header = self._validator.validate_gossip(shard, record)
        if header is not None and not self._offer(header):
            return ValidationResult.IGNORE
        return result

    def take_entry(self, subkey: str, record: bytes) -> bool:
        """Validate an entry of the index. Returns whether it was new: valid and not seen before."""
        if subkey.startswith(f"{self._own_peer_id}/"):
            return False
        header = self._validator.validate_entry(subkey, record)
        return header is not None and self._offer(header)

    def pick(self, being_pulled: Collection[Header] = ()) -> Header | None:
        """Remove and return the next header to pull, by the configured choice; None where there is none worth pulling.

        Authors that are in a pause after a failure are left out. So is an author that failed last time and is being asked now:
        it gets one place, not all of them.
        """
        self._drop_old()
        candidates = self._candidates.values()
        in_trouble = {header.author for header in being_pulled if self._backoff.has_failed(header.author)}
        offering = {header.author for header in candidates} - in_trouble
        answering = {author for author in offering if author not in self._backoff}
        shares = self._tracker.shares
        considered = considered_of(answering, shares, self._rng) | {self._longest_waiting(candidates, answering)}
        offered = shares.within_share([header for header in candidates if header.author in considered])
        if not offered:
            return None
        first = self._tracker.turns.first(offered)
        header = self._choice.choose(first, being_pulled)
        if header is None and len(first) < len(offered):  # a body that is slow to check is better than none
            header = self._choice.choose(offered, being_pulled)
        if header is not None:
            self._candidates.pop(_key(header))
            shares.pulled(header)
        return header

    def _longest_waiting(self, candidates: Sequence[Header], answering: Collection[str]) -> str | None:
        reputation = self._tracker.reputation
        waiting = (header.author for header in candidates if header.author in answering)
        return next((author for author in waiting if reputation.is_untried(author)), None)

    def leave_alone(self, author: str) -> None:
        """Offer nothing of an author that did not answer for a while, longer after each failure in a row."""
        self._backoff.failed(author)

    def answered(self, author: str) -> None:
        """Note that an author answered: its next failure counts as a first one."""
        self._backoff.answered(author)

    def give_back(self, header: Header, pause_s: float) -> bool:
        """Offer a header again later while it is young enough: its author was busy, or could not be reached.

        `pause_s`: the pause after a first failure of the author. Returns whether the author has failed before.
        """
        is_repeated = self._backoff.has_failed(header.author)
        self._backoff.failed(header.author, pause_s)
        self.take_back(header)
        return is_repeated

    def take_back(self, header: Header) -> None:
        """Offer a header again that was picked and not pulled, which is not the author's fault."""
        self._tracker.shares.put_back(header)
        self._candidates.add(header.author, _key(header), header)

    def _drop_old(self) -> None:
        """Remove candidates that are too old, or whose author is banned or has a much newer policy by now."""
        now = self._clock()
        oldest = now - self._config.max_age_s
        for header in self._candidates.values():
            if self._is_banned(header.author):
                self.totals.rejected[Rejection.BANNED.value] += 1
            elif header.expires_at > now and header.created_at > oldest:
                if not self._newest.is_stale(header):
                    continue
                self.totals.rejected[Rejection.STALE.value] += 1
            self._candidates.pop(_key(header))

    def _is_banned(self, author: str) -> bool:
        return self._tracker.reputation.is_banned(author)

    def _offer(self, header: Header) -> bool:
        """Add a candidate. Returns False where its author is banned: this node then does not pass the header on, either."""
        if self._is_banned(header.author):
            self.totals.rejected[Rejection.BANNED.value] += 1
            return False
        self._tracker.heard(header)
        self._newest.note(header)
        self.totals.heard(header.author)
        try:
            check_answer_length(self._config, header)
        except InvalidRecord as error:  # nobody's fault, and of use to nodes with a higher limit
            self.totals.rejected[error.reason.value] += 1
            return True
        if self._pool.knows_body(header.body_hash):
            self.totals.rejected[Rejection.REPLAY.value] += 1
            return True
        self._candidates.add(header.author, _key(header), header)
        self.arrived.set()
        return True


def _key(header: Header) -> tuple[str, bytes]:
    return header.author, header.body_hash


def considered_of(authors: Collection[str], shares: AuthorShares, rng: random.Random) -> frozenset[str]:
    """All known ones of `authors`, and a random sample of the strangers that has as many of each address group as it can.

    The weights of a draw take time for each author, and names cost nothing.
    """
    strangers = [author for author in sorted(authors) if not shares.reputation.is_known(author)]
    if len(strangers) <= MAX_STRANGERS:
        return frozenset(authors)
    crowds, places = Counter[str](), list[tuple[int, str]]()
    for author in rng.sample(strangers, len(strangers)):
        groups = shares.addresses.of(author)
        places.append((max(crowds[group] for group in groups), author))
        crowds.update(groups)
    places.sort(key=lambda place: place[0])
    left_out = frozenset(author for _, author in places[MAX_STRANGERS:])
    return frozenset(authors) - left_out
