"""The exchange of a swarm without sockets: what crosses it are the bytes that nodes send, judged as nodes judge them.

    groups ─ encode, sign ─▶ offers of an author ─ a reader picks ─ header and body admission ─▶ its pool

Readers pull when they need something, newest first, from an author drawn at random, as nodes do.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.config import SharingSection
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.admission import Admission
from swarm.records.codec import (
    MAX_BODY_BYTES,
    MAX_GROUPS_PER_BODY,
    MAX_RECORD_BYTES,
    body_hash,
    encode_body,
    encode_header,
    encode_record,
    fits_into_body,
)
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord
from swarm.records.signing import sign_record
from swarm.types import GroupSummary, Header, RolloutGroup

_OFFERS_PER_AUTHOR = 16


@dataclass(frozen=True, slots=True)
class Offer:
    """One record with its body, as bytes."""

    number: int
    record: bytes
    body: bytes


class MemoryExchange:
    """Offers of all authors, the newest few of each."""

    def __init__(self, swarm_id: str, config: SharingSection, clock: Callable[[], float]) -> None:
        self._swarm_id = swarm_id
        self._config = config
        self._clock = clock
        self._offers: defaultdict[str, deque[Offer]] = defaultdict(lambda: deque(maxlen=_OFFERS_PER_AUTHOR))
        self._next_number = 0
        self.num_bytes = 0
        """Offered so far, headers and bodies, each counted once."""

    def publish(self, identity: Identity, groups: Sequence[RolloutGroup]) -> None:
        """Offer the groups with signal, in as many records as they need."""
        useful = [group for group in groups if group.has_signal]
        for start in range(0, len(useful), MAX_GROUPS_PER_BODY):
            self._announce(identity, useful[start : start + MAX_GROUPS_PER_BODY])

    def offers_of(self, author: str) -> Sequence[Offer]:
        """Oldest first."""
        return self._offers[author]

    def authors(self) -> list[str]:
        return sorted(self._offers)

    def _announce(self, identity: Identity, groups: Sequence[RolloutGroup]) -> None:
        body = encode_body(groups)
        record = encode_record(sign_record(identity, self._swarm_id, encode_header(self._header(groups, body))))
        fits = len(record) <= MAX_RECORD_BYTES and len(body) <= MAX_BODY_BYTES and fits_into_body(groups)
        if not fits and len(groups) > 1:
            self._announce(identity, groups[: len(groups) // 2])
            self._announce(identity, groups[len(groups) // 2 :])
            return
        self._offers[identity.peer_id].append(Offer(self._next_number, record, body))
        self._next_number += 1
        self.num_bytes += len(record) + len(body)

    def _header(self, groups: Sequence[RolloutGroup], body: bytes) -> Header:
        now = self._clock()
        return Header(
            swarm_id=self._swarm_id,
            author=groups[0].author,
            sequence=self._next_number,
            body_hash=body_hash(body),
            body_bytes=len(body),
            groups=tuple(GroupSummary(group.task, len(group.rollouts), group.mean_reward) for group in groups),
            lineage=groups[0].lineage,
            policy_version=min(group.policy_version for group in groups),
            created_at=now,
            expires_at=now + self._config.time_to_live_s,
        )


class MemoryReader:
    """One node's side: fills its pool from the offers of others."""

    def __init__(
        self, exchange: MemoryExchange, own_peer_id: str, admission: Admission, pool: ExperiencePool, rng: random.Random
    ) -> None:
        self._exchange = exchange
        self._own_peer_id = own_peer_id
        self._admission = admission
        self._pool = pool
        self._rng = rng
        self._read: defaultdict[str, set[int]] = defaultdict(set)
        self.rejected: Counter[str] = Counter()
        """Records and bodies turned away, by reason."""

    def pull(self, num_groups: int) -> None:
        """Until the pool has `num_groups` fresh ones, or nobody offers more."""
        while self._pool.num_fresh() < num_groups and (offer := self._pick()) is not None:
            try:
                header = self._admission.admit_header(offer.record)
                groups = self._admission.admit_body(header, offer.body)
            except InvalidRecord as error:
                self.rejected[error.reason.value] += 1
                continue
            self._pool.add(header.body_hash, header.expires_at, header.created_at, groups)

    def _pick(self) -> Offer | None:
        unread = {author: newest for author in self._exchange.authors() if (newest := self._newest_unread(author))}
        if not unread:
            return None
        author = self._rng.choice(sorted(unread))
        self._read[author].add(unread[author].number)
        return unread[author]

    def _newest_unread(self, author: str) -> Offer | None:
        """Forgets the numbers of offers that are gone."""
        if author == self._own_peer_id:
            return None
        offers = self._exchange.offers_of(author)
        self._read[author] &= {offer.number for offer in offers}
        return next((o for o in reversed(offers) if o.number not in self._read[author]), None)
