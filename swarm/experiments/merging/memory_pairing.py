"""Pairs replicas without a network: offers that wait at the same time are paired at random, as `MergeExchange` does.

The code of nodes decides which replicas are passed over, as recent partners or as ones whose adapters were not useful.

    offer(snapshot) ─▶ waiting ─ match ─▶ on its way ─ after the delay ─▶ future: Partner, or Alone where it failed or nobody came

Time is counted in units of the run. Replicas exchange the bytes that nodes send; those of a liar are replaced.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from swarm.merging.exchange.recent_partners import RecentPartners
from swarm.merging.outer_optimizer import MAX_LAG
from swarm.types import Alone, Outcome, Partner, Snapshot

Tamper = Callable[[int, Snapshot], Snapshot | None]
"""What a replica sends in place of its snapshot; None for nothing."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Of all exchanges of a run."""

    drop_rate: float
    delay: int
    """Units of time from a match to its outcome."""
    patience: int
    """Units of time that an offer waits for a match."""
    are_known: bool = False
    """Whether replicas have proven themselves to each other by other work, such as experience that they share."""


@dataclass(slots=True)
class _Offer:
    replica: int
    snapshot: Snapshot
    future: "Future[Outcome]"
    until: int
    """Time at which it gives up."""


class MemoryPairing:
    """All replicas of one run; `pairer` gives the `Pairer` of one of them."""

    def __init__(self, terms: Terms, rng: random.Random, tamper: Tamper) -> None:
        self.terms, self._rng, self._tamper = terms, rng, tamper
        self._now = 0
        self._waiting: list[_Offer] = []
        self._on_the_way: list[tuple[int, _Offer, Outcome]] = []
        self._recent: defaultdict[int, RecentPartners] = defaultdict(RecentPartners)
        self.sent_bytes = 0
        self.num_exchanges = 0
        """Pairs that were matched, those that failed included."""

    def pairer(self, replica: int) -> "ReplicaPairer":
        return ReplicaPairer(self, replica)

    def offer(self, replica: int, snapshot: Snapshot) -> "Future[Outcome]":
        future: Future[Outcome] = Future()
        self._recent[replica].begin_offer()
        self._waiting.append(_Offer(replica, snapshot, future, self._now + self.terms.patience))
        return future

    def refuse(self, replica: int, peer_id: str) -> None:
        """The partner's adapter was of no use."""
        self._recent[replica].failed(peer_id)

    def advance(self, now: int) -> None:
        """Match those that wait, and finish what is done by `now`."""
        self._now = now
        self._match()
        for offer in [one for one in self._waiting if one.until <= now]:
            self._waiting.remove(offer)
            offer.future.set_result(Alone("nobody"))
        for entry in [one for one in self._on_the_way if one[0] <= now]:
            self._on_the_way.remove(entry)
            entry[1].future.set_result(entry[2])

    def _match(self) -> None:
        for one in self._waiting:
            ready = [other for other in self._waiting if other is not one and _is_in_step(one, other)]
            self._recent[one.replica].see(_name(other.replica) for other in ready)
        for takes_anybody in (False, True):
            self._rng.shuffle(self._waiting)
            left = list[_Offer]()
            while self._waiting:
                first = self._waiting.pop()
                second = next((one for one in self._waiting if self._suit(first, one, takes_anybody)), None)
                if second is None:
                    left.append(first)
                    continue
                self._waiting.remove(second)
                self._exchange(first, second)
            self._waiting = left

    def _suit(self, one: _Offer, other: _Offer, takes_anybody: bool) -> bool:
        """`takes_anybody`: also partners of late, once an offer has waited for half of its time."""
        for own, its in ((one, other), (other, one)):
            recent, name = self._recent[own.replica], _name(its.replica)
            is_late = takes_anybody and self._now >= own.until - self.terms.patience / 2
            if recent.has_failed(name) or (name in recent and not is_late):
                return False
        return _is_in_step(one, other)

    def _exchange(self, first: _Offer, second: _Offer) -> None:
        self.num_exchanges += 1
        fails = self._rng.random() < self.terms.drop_rate
        for own, other in ((first, second), (second, first)):
            sent = None if fails else self._tamper(other.replica, other.snapshot)
            outcome = Alone("unreachable") if sent is None else Partner(_name(other.replica), sent)
            self._recent[own.replica].add(_name(other.replica))
            if sent is None:
                self._recent[own.replica].failed(_name(other.replica))
            self.sent_bytes += 0 if sent is None else len(sent.payload)
            self._on_the_way.append((self._now + self.terms.delay, own, outcome))


@dataclass(frozen=True, slots=True)
class ReplicaPairer:
    """The `Pairer` of one replica."""

    pairing: MemoryPairing
    replica: int

    def offer(self, snapshot: Snapshot) -> "Future[Outcome]":
        return self.pairing.offer(self.replica, snapshot)

    def report_unusable(self, peer_id: str) -> None:
        self.pairing.refuse(self.replica, peer_id)

    def is_known(self, peer_id: str) -> bool:
        return self.pairing.terms.are_known


def send_as_it_is(replica: int, snapshot: Snapshot) -> Snapshot:
    """The `Tamper` of honest replicas."""
    return snapshot


def _is_in_step(one: _Offer, other: _Offer) -> bool:
    return abs(one.snapshot.outer_round - other.snapshot.outer_round) <= MAX_LAG


def _name(replica: int) -> str:
    return f"replica {replica}"
