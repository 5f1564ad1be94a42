"""Partners without a network: replicas whose offers wait at the same time are paired at random, as `MergeExchange` pairs nodes.

    offer(snapshot) ─▶ waiting ─ match ─▶ on its way ─ after the delay ─▶ future: Partner, or Alone where it failed or nobody came

Time is counted in units of the run. What crosses are the bytes that nodes send; a liar's are exchanged for its lie.
"""

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Offer:
    replica: int
    snapshot: Snapshot
    future: "Future[Outcome]"
    until: int
    """Time at which it gives up."""


class MemoryPairing:
    """All replicas of one run; `door` is the `Pairer` of one of them."""

    def __init__(self, terms: Terms, rng: random.Random, tamper: Tamper) -> None:
        self._terms, self._rng, self._tamper = terms, rng, tamper
        self._now = 0
        self._waiting: list[_Offer] = []
        self._on_the_way: list[tuple[int, _Offer, Outcome]] = []
        self._refused: set[tuple[int, str]] = set()
        self.sent_bytes = 0
        self.num_exchanges = 0
        """Pairs that were matched, those that failed included."""

    def door(self, replica: int) -> "PairingDoor":
        return PairingDoor(self, replica)

    def offer(self, replica: int, snapshot: Snapshot) -> "Future[Outcome]":
        future: Future[Outcome] = Future()
        self._waiting.append(_Offer(replica, snapshot, future, self._now + self._terms.patience))
        return future

    def refuse(self, replica: int, peer_id: str) -> None:
        """Nodes leave a peer of no use alone for longer and longer; here it is for the rest of the run."""
        self._refused.add((replica, peer_id))

    def advance(self, now: int) -> None:
        """Match those that wait, and settle what is done by `now`."""
        self._now = now
        self._match()
        for offer in [one for one in self._waiting if one.until <= now]:
            self._waiting.remove(offer)
            offer.future.set_result(Alone("nobody"))
        for entry in [one for one in self._on_the_way if one[0] <= now]:
            self._on_the_way.remove(entry)
            entry[1].future.set_result(entry[2])

    def _match(self) -> None:
        self._rng.shuffle(self._waiting)
        left = list[_Offer]()
        while self._waiting:
            first = self._waiting.pop()
            second = next((one for one in self._waiting if self._suits(first, one)), None)
            if second is None:
                left.append(first)
                continue
            self._waiting.remove(second)
            self._exchange(first, second)
        self._waiting = left

    def _suits(self, one: _Offer, other: _Offer) -> bool:
        is_refused = {(one.replica, _name(other.replica)), (other.replica, _name(one.replica))} & self._refused
        return not is_refused and abs(one.snapshot.outer_round - other.snapshot.outer_round) <= MAX_LAG

    def _exchange(self, first: _Offer, second: _Offer) -> None:
        self.num_exchanges += 1
        fails = self._rng.random() < self._terms.drop_rate
        for own, other in ((first, second), (second, first)):
            sent = None if fails else self._tamper(other.replica, other.snapshot)
            outcome = Alone("unreachable") if sent is None else Partner(_name(other.replica), sent)
            self.sent_bytes += 0 if sent is None else len(sent.payload)
            self._on_the_way.append((self._now + self._terms.delay, own, outcome))


@dataclass(frozen=True, slots=True)
class PairingDoor:
    """The `Pairer` of one replica."""

    pairing: MemoryPairing
    replica: int

    def offer(self, snapshot: Snapshot) -> "Future[Outcome]":
        return self.pairing.offer(self.replica, snapshot)

    def distrust(self, peer_id: str) -> None:
        self.pairing.refuse(self.replica, peer_id)


def _name(replica: int) -> str:
    return f"replica {replica}"
