"""Headers of others, from gossip and from the index: judged once, then offered for pulling.

gossip ─ verdict (passed on or not) ─┐
                                     ├─ admit_header ─ candidates ─ pick
index ─ entries not seen before ─────┘
"""

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import Callable

from swarm.config import SharingSection
from swarm.network.transport import Verdict
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.admission import Admission
from swarm.records.codec import body_hash
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.shard import Shard, shard_of
from swarm.types import Header

_MAX_CANDIDATES = 1024
_MAX_REMEMBERED_RECORDS = 16_384
_MAX_REMEMBERED_AUTHORS = 1024
_ABSENT_AUTHOR_PAUSE_S = 20.0
_HEARD_FOR_S = 120.0
_NOBODYS_FAULT = frozenset(
    {
        Rejection.VERSION,  # during an upgrade
        Rejection.OWN_RECORD,
        Rejection.EXPIRED,
        Rejection.CLOCK_SKEW,  # the clock that is wrong may be the own one
        Rejection.REPLAY,
        Rejection.RATE,
        Rejection.UNKNOWN_TASK,
    }
)
"""What an honest peer may pass on in good faith."""


class Inbox:
    """Candidates of one node. Runs on the node's loop."""

    def __init__(
        self,
        config: SharingSection,
        swarm_id: str,
        own_peer_id: str,
        admission: Admission,
        pool: ExperiencePool,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._config = config
        self._swarm_id = swarm_id
        self._own_peer_id = own_peer_id
        self._admission = admission
        self._pool = pool
        self._clock = clock
        self._rng = rng
        self._judged: OrderedDict[bytes, None] = OrderedDict()
        self._candidates: list[Header] = []
        self._heard_at: OrderedDict[str, float] = OrderedDict()
        self._absent_until: dict[str, float] = {}  # authors that did not answer
        self.arrived = asyncio.Event()
        """Set when a candidate comes in."""
        self.rejected: Counter[str] = Counter()
        """Headers turned away, by reason."""

    def take_gossip(self, shard: Shard, record: bytes) -> Verdict:
        """Judge a header that was gossiped in the topic of `shard`, before it is passed on."""
        if self._is_judged(record):
            return Verdict.IGNORE
        try:
            header = self._admission.admit_header(record)
            if shard_of(self._swarm_id, header.author, shard.level, header.created_at) != shard:
                raise InvalidRecord(Rejection.WRONG_SLOT)
        except InvalidRecord as error:
            self.rejected[error.reason.value] += 1
            return Verdict.IGNORE if error.reason in _NOBODYS_FAULT else Verdict.REJECT
        self._offer(header)
        return Verdict.ACCEPT

    def take_entry(self, subkey: str, record: bytes) -> bool:
        """Judge an entry of the index; one that is read again, or was gossiped before, is passed over.

        Returns whether it was news: valid and not seen before.
        """
        if subkey.startswith(f"{self._own_peer_id}/") or self._is_judged(record):
            return False
        try:
            header = self._admission.admit_header(record)
            if not subkey.startswith(f"{header.author}/"):
                raise InvalidRecord(Rejection.WRONG_SLOT)
        except InvalidRecord as error:
            self.rejected[error.reason.value] += 1
            return False
        self._offer(header)
        return True

    def pick(self) -> Header | None:
        """Uniform over the authors that answer, so that a prolific one gets no larger share; then the newest."""
        now = self._clock()
        oldest = now - self._config.max_age_s
        self._candidates = [h for h in self._candidates if h.expires_at > now and h.created_at > oldest]
        self._absent_until = {author: until for author, until in self._absent_until.items() if until > now}
        authors = sorted({header.author for header in self._candidates} - self._absent_until.keys())
        if not authors:
            return None
        author = self._rng.choice(authors)
        header = max((h for h in self._candidates if h.author == author), key=lambda h: (h.created_at, h.sequence))
        self._candidates.remove(header)
        return header

    def leave_alone(self, author: str) -> None:
        """Offer nothing of an author that did not answer, for a while."""
        self._absent_until[author] = self._clock() + _ABSENT_AUTHOR_PAUSE_S

    def num_authors_heard(self) -> int:
        """Authors of whom a header was admitted of late."""
        since = self._clock() - _HEARD_FOR_S
        while self._heard_at and next(iter(self._heard_at.values())) < since:
            self._heard_at.popitem(last=False)
        return len(self._heard_at)

    def _offer(self, header: Header) -> None:
        self._heard_at.pop(header.author, None)
        self._heard_at[header.author] = self._clock()
        while len(self._heard_at) > _MAX_REMEMBERED_AUTHORS:
            self._heard_at.popitem(last=False)
        if self._pool.knows_body(header.body_hash):
            self.rejected[Rejection.REPLAY.value] += 1
            return
        self._candidates.append(header)
        del self._candidates[:-_MAX_CANDIDATES]
        self.arrived.set()

    def _is_judged(self, record: bytes) -> bool:
        fingerprint = body_hash(record)
        if fingerprint in self._judged:
            return True
        self._judged[fingerprint] = None
        while len(self._judged) > _MAX_REMEMBERED_RECORDS:
            self._judged.popitem(last=False)
        return False
