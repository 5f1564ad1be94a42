"""The exchange of a swarm without sockets. It carries the bytes that nodes send, and checks them as nodes do.

    groups ─ encode, sign ─▶ offers of an author ─ header admission ─ a reader chooses ─ body admission ─▶ its pool

Readers see every header at once, and choose and read ahead as nodes do.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.admission.admission import Admission
from swarm.config import SharingSection
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.codec import (
    MAX_GROUPS_PER_BODY,
    MAX_RECORD_BYTES,
    encode_body,
    encode_header,
    encode_record,
    fits_into_body,
    header_of,
    readable_answer_tokens,
)
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord
from swarm.records.signing import sign_record
from swarm.sharing.usefulness import HeaderChoice
from swarm.tasks.task_mixture import CommonStreams
from swarm.types import Header, RolloutGroup

_OFFERS_PER_AUTHOR = 16
_POSTS_PER_POSTER = 512


@dataclass(frozen=True, slots=True)
class Offer:
    """One record with its body, as bytes."""

    number: int
    record: bytes
    body: bytes | None
    """None where nobody gives it."""
    other_body: bytes | None = None
    """The body that half of the readers get instead."""


class MemoryExchange:
    """The offers of all authors, the newest few of each."""

    def __init__(self, swarm_id: str, config: SharingSection, clock: Callable[[], float]) -> None:
        self._swarm_id = swarm_id
        self._config = config
        self._clock = clock
        self._common = CommonStreams.of(config, swarm_id, clock)
        self._offers: defaultdict[str, deque[Offer]] = defaultdict(lambda: deque(maxlen=_OFFERS_PER_AUTHOR))
        self._next_number = 0
        self.num_bytes = 0
        """Bytes offered so far, headers and bodies, each counted once."""

    def publish(self, identity: Identity, groups: Sequence[RolloutGroup]) -> None:
        """Offer the groups with signal, and those on common tasks that others may learn from, in as many records as they need."""
        useful = [group for group in groups if self._common.is_worth_sharing(group)]
        for start in range(0, len(useful), MAX_GROUPS_PER_BODY):
            self._announce(identity, useful[start : start + MAX_GROUPS_PER_BODY])

    def post(self, poster: str, record: bytes, body: bytes | None, other_body: bytes | None = None) -> None:
        """Offer bytes as they are, without any check. For attackers."""
        posts = self._offers.setdefault(poster, deque(maxlen=_POSTS_PER_POSTER))
        posts.append(Offer(self._next_number, record, body, other_body))
        self._next_number += 1
        self.num_bytes += len(record) + len(body or b"")

    def offers_of(self, author: str) -> Sequence[Offer]:
        """The offers of an author, the oldest first."""
        return self._offers[author]

    def authors(self) -> list[str]:
        return sorted(self._offers)

    def _announce(self, identity: Identity, groups: Sequence[RolloutGroup]) -> None:
        body = encode_body(groups)
        header = header_of(
            groups,
            body,
            swarm_id=self._swarm_id,
            sequence=self._next_number,
            now=self._clock(),
            time_to_live_s=self._config.time_to_live_s,
        )
        record = encode_record(sign_record(identity, self._swarm_id, encode_header(header)))
        is_readable = header.max_answer_tokens <= readable_answer_tokens(self._config.max_answer_tokens)
        fits = len(record) <= MAX_RECORD_BYTES and is_readable and fits_into_body(groups)
        if not fits and len(groups) > 1:
            self._announce(identity, groups[: len(groups) // 2])
            self._announce(identity, groups[len(groups) // 2 :])
            return
        self._offers[identity.peer_id].append(Offer(self._next_number, record, body))
        self._next_number += 1
        self.num_bytes += len(record) + len(body)


class MemoryReader:
    """The reader of one node, which fills its pool from the offers of others."""

    def __init__(
        self,
        exchange: MemoryExchange,
        own_peer_id: str,
        *,
        admission: Admission,
        pool: ExperiencePool,
        choice: HeaderChoice,
    ) -> None:
        self._exchange = exchange
        self._own_peer_id = own_peer_id
        self._admission = admission
        self._pool = pool
        self._choice = choice
        self._seen_until = 0
        self._offered: dict[Header, Offer] = {}
        self.rejected: Counter[str] = Counter()
        """Records and bodies that were rejected, by reason."""

    def pull(self, num_groups: int) -> None:
        """Pull until the pool has `num_groups` fresh groups, or nothing useful is on offer."""
        self._look()
        while self._offered and self._pool.num_fresh() < num_groups:
            header = self._choice.choose(list(self._offered), ())
            if header is None:
                return
            body = self._offered.pop(header).body
            try:
                groups = self._admission.admit_body(header, body or b"")
            except InvalidRecord as error:
                self.rejected[error.reason.value] += 1
                continue
            self._pool.add(header.body_hash, header.expires_at, header.created_at, groups)

    def report_peer(self, author: str, part: float) -> None:
        """Do nothing: no author has a reputation here."""

    def _look(self) -> None:
        """Admit new headers, and forget those whose body is no longer on offer."""
        offers = [o for a in self._exchange.authors() if a != self._own_peer_id for o in self._exchange.offers_of(a)]
        there = {offer.number for offer in offers}
        self._offered = {header: offer for header, offer in self._offered.items() if offer.number in there}
        for offer in sorted(offers, key=lambda offer: offer.number):
            if offer.number >= self._seen_until:
                try:
                    self._offered[self._admission.admit_header(offer.record)] = offer
                except InvalidRecord as error:
                    self.rejected[error.reason.value] += 1
        self._seen_until = max(there, default=self._seen_until - 1) + 1
