"""Two readers of the same offers: one with the defences of a node, and one without any defence.

guarded   Inbox (reputation, bans, backoff) ─ Admission with CopyWatch ─ Reputation
open      believes everything that can be decoded; every offer has the same chance
"""

import random
from collections import Counter

from swarm.admission.admission import Admission
from swarm.admission.copies import CopyWatch
from swarm.admission.reward_verifier import RewardVerifier
from swarm.experiments.learner_swarm import ReaderParts
from swarm.experiments.memory_exchange import MemoryExchange, Offer
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.codec import decode_body, decode_header, decode_record
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.inbox import Inbox
from swarm.sharing.index import subkey
from swarm.sharing.peer_tracker import PeerTracker
from swarm.sharing.totals import SharingTotals
from swarm.tasks.task_mixture import owns_stream
from swarm.types import Header

_FAILURES_IN_A_ROW = 64
"""Failed pulls in a row after which a turn ends, since a node has only a round's time."""


class OfferBook:
    """The offers that one reader has not seen yet, and the body that it gets for each."""

    def __init__(self, exchange: MemoryExchange, own_peer_id: str) -> None:
        self._exchange = exchange
        self._own_peer_id = own_peer_id
        self._seen_until = 0
        self._gets_other = int.from_bytes(own_peer_id.encode()[-2:], "big") % 2 == 1

    def news(self) -> list[Offer]:
        """The new offers since the last call, oldest first."""
        exchange = self._exchange
        offers = [o for a in exchange.authors() if a != self._own_peer_id for o in exchange.offers_of(a)]
        fresh = sorted((o for o in offers if o.number >= self._seen_until), key=lambda offer: offer.number)
        self._seen_until = fresh[-1].number + 1 if fresh else self._seen_until
        return fresh

    def own(self) -> list[Offer]:
        """The newest offers of this node itself."""
        return list(self._exchange.offers_of(self._own_peer_id))

    def body(self, offer: Offer) -> bytes | None:
        """The body that the poster gives to this reader."""
        return offer.other_body if offer.other_body is not None and self._gets_other else offer.body


def _own_network(peer_id: str) -> tuple[str, ...]:
    """An address group per author, which is the best case for an attacker."""
    return (f"/memory/{peer_id}",)


class GuardedReader:
    """Reads as a node does, without a network."""

    def __init__(self, parts: ReaderParts) -> None:
        sharing, context = parts.config.sharing, parts.context
        self._pool = parts.pool
        self._book = OfferBook(parts.exchange, context.peer_id)
        self._own_peer_id = context.peer_id
        self._tracker = tracker = PeerTracker(sharing, context, max_shown=0, seen_at=_own_network)
        self.reputation = tracker.reputation
        self._copies = CopyWatch(owns_stream, self.reputation.refused, is_common=tracker.common.holds)
        verifier = RewardVerifier(parts.mixture, is_known=self.reputation.is_known, sandboxed=None)
        self._admission = Admission(
            sharing, context, verifier=verifier, vocabulary=parts.vocabulary, copies=self._copies
        )
        totals = SharingTotals(context.clock)
        self.rejected = totals.rejected
        """Headers and bodies that were rejected, by reason."""
        self._inbox = Inbox(
            sharing, context, totals, admission=self._admission, pool=parts.pool, tracker=tracker, rng=parts.rng
        )
        self._offers: dict[tuple[str, bytes], Offer] = {}
        self.num_admitted: Counter[str] = Counter()
        """Number of admitted bodies, by author."""

    def pull(self, num_groups: int) -> None:
        """Pull bodies until the pool has `num_groups` fresh groups, nobody offers more, or too many pulls in a row failed."""
        self._look()
        failures = 0
        while self._pool.num_fresh() < num_groups and failures < _FAILURES_IN_A_ROW:
            header = self._inbox.pick()
            if header is None:
                return
            failures = 0 if self._take(header) else failures + 1

    def report_peer(self, author: str, part: float) -> None:
        self.reputation.unlikely(author, part)

    def _note_own(self) -> None:
        """Note the groups that this node has offered, as a node does when it publishes them."""
        for offer in self._book.own():
            header = decode_header(decode_record(offer.record).payload, self._own_peer_id)
            self._copies.note(decode_body(offer.body or b"", self._own_peer_id, header.lineage, header.policy_version))

    def _look(self) -> None:
        self._note_own()
        offers = dict[tuple[str, bytes], Offer]()
        for offer in self._book.news():
            try:
                record = decode_record(offer.record)
                header = decode_header(record.payload, record.author)
                offers[header.author, header.body_hash] = offer
                entry = subkey(header.author, header.sequence)
            except InvalidRecord:
                entry = "unreadable"
            self._inbox.take_entry(entry, offer.record)
        self._offers = dict(list({**offers, **self._offers}.items())[: 8 * len(offers) + 4096])

    def _take(self, header: Header) -> bool:
        offer = self._offers.pop((header.author, header.body_hash), None)
        body = self._book.body(offer) if offer else None
        try:
            if body is None:
                raise InvalidRecord(Rejection.UNAVAILABLE)
            groups = self._admission.admit_body(header, body)
        except InvalidRecord as error:
            self.rejected[error.reason.value] += 1
            if self.reputation.refused(header.author, error.reason):
                self._pool.drop_author(header.author)
            if error.reason in (Rejection.UNAVAILABLE, Rejection.WRONG_HASH, Rejection.TOO_SLOW):
                self._inbox.leave_alone(header.author)
            return False
        self._inbox.answered(header.author)
        self.reputation.admitted(header.author)
        self.num_admitted[header.author] += 1
        useful = [group for group in groups if self._tracker.common.is_worth_sharing(group)]
        if len(useful) < len(groups):
            self.rejected[Rejection.NO_SIGNAL.value] += len(groups) - len(useful)
            self.reputation.refused(header.author, Rejection.NO_SIGNAL)
        self._tracker.judged(useful, self._pool.success_level)
        return self._pool.add(header.body_hash, header.expires_at, header.created_at, useful) > 0


class OpenReader:
    """Believes everything: it checks no signature, hash, reward or author, and every offer has the same chance."""

    def __init__(self, parts: ReaderParts) -> None:
        self._pool: ExperiencePool = parts.pool
        self._book = OfferBook(parts.exchange, parts.context.peer_id)
        self._rng: random.Random = parts.rng
        self._own_peer_id = parts.context.peer_id
        self._offers: list[tuple[Header, Offer]] = []
        self.num_admitted: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        """Number of bodies and headers that could not be decoded or were missing, by reason."""

    def pull(self, num_groups: int) -> None:
        self._look()
        failures = 0
        while self._offers and self._pool.num_fresh() < num_groups and failures < _FAILURES_IN_A_ROW:
            header, offer = self._offers.pop(self._rng.randrange(len(self._offers)))
            failures = 0 if self._take(header, offer) else failures + 1

    def report_peer(self, author: str, part: float) -> None:
        """Does nothing: it keeps no reputation."""

    def _look(self) -> None:
        for offer in self._book.news():
            try:
                record = decode_record(offer.record)
                header = decode_header(record.payload, record.author)
            except InvalidRecord as error:
                self.rejected[error.reason.value] += 1
                continue
            if header.author != self._own_peer_id:
                self._offers.append((header, offer))
        del self._offers[:-1024]

    def _take(self, header: Header, offer: Offer) -> bool:
        body = self._book.body(offer)
        try:
            if body is None:
                raise InvalidRecord(Rejection.UNAVAILABLE)
            groups = decode_body(body, header.author, header.lineage, header.policy_version)
        except InvalidRecord as error:
            self.rejected[error.reason.value] += 1
            return False
        self.num_admitted[header.author] += 1
        return self._pool.add(header.body_hash, header.expires_at, header.created_at, groups) > 0
