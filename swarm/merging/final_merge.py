"""The final merge of one replica: the mean of all that take part, met one after the other, and kept only if it does no harm.

    own ─ gather ─▶ places ─▶ meet · check · clip · weighted mean · gate ─▶ … ─▶ clearly worse than the own? own : mean

Every meeting is tried on private tasks first, as merges during training are: the first node that meets a harmful adapter leaves
it out before it is in anybody's mean. A partner's part is at most a half, whatever it claims. All strangers together have at
most the same share as of experience, and they move the own adapter no further than a multiple of its own way. It runs on the
compute thread, which waits here, as there is no training left to go on with.

`meetings_of` says who meets whom: the mean of N replicas takes log₂N exchanges in pairs, without a central node.

    window 0          passengers, those beyond the largest power of two, give their adapter to a core place
    windows 1 … k     core place i meets i xor 2^(w−1); both take the weighted mean of both
    window k + 1      passengers get the result

A weight travels with each adapter: the number of replicas in it, as the other side claims. Nobody can check that number, so the
other side never gets more than half. For a power of two all weights that meet are equal and everybody has the exact mean of all
that answer. For other numbers of replicas, and where some are silent, a replica keeps more of its own adapter than others have.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from swarm.adapters.product_merge import LowRank, Merged, merge_by_layer, rank_of
from swarm.config import MergingSection
from swarm.errors import MergeError
from swarm.merging.outer_optimizer import Adapter, AdapterOrigin
from swarm.merging.pairer import BoundOnStrangers, FinalPairer
from swarm.merging.robust import NormClip, Scores, StrangerBudget, is_clearly_better
from swarm.types import Appointment, MeetResult, Partner, Seats, Snapshot

logger = logging.getLogger(__name__)


MAX_PLACES = 64
"""Largest number of replicas in one final merge."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One exchange as seen from one of its two sides."""

    window: int
    """All meetings of a window happen at the same time."""
    place: int
    """Place of the other side."""
    gives: bool
    takes: bool
    max_weight: int
    """Largest number of replicas that can be in the other side's adapter."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the own and of the other adapter in the new one: not negative, 1 together, `other` at most a half."""

    own: float
    other: float
    weight: int
    """Number of replicas in the new adapter."""


def core_size(num_places: int) -> int:
    """Largest power of two that is not more than `num_places`."""
    return 1 << (num_places.bit_length() - 1)


def num_windows(num_places: int) -> int:
    """The number of windows, including those of passengers, even where there are none."""
    return core_size(num_places).bit_length() + 1


def meetings_of(place: int, num_places: int) -> list[Meeting]:
    """The meetings of one place in the order of their windows. Raises ValueError for a place that does not exist."""
    if not 0 <= place < num_places <= MAX_PLACES:
        raise ValueError(f"a place must be within 1 to {MAX_PLACES} places, got {place} of {num_places}")
    core = core_size(num_places)
    last = num_windows(num_places) - 1
    if place >= core:
        host = place - core
        return [Meeting(0, host, True, False, 1), Meeting(last, host, False, True, num_places)]
    passenger = place + core
    has_passenger = passenger < num_places
    meetings = [Meeting(0, passenger, False, True, 1)] if has_passenger else []
    for window in range(1, last):
        span = 1 << (window - 1)
        other = place ^ span
        first = other & -span
        meetings.append(Meeting(window, other, True, True, _num_carried(range(first, first + span), num_places)))
    return meetings + ([Meeting(last, passenger, True, False, 1)] if has_passenger else [])


def parts_of(own_weight: int, other_weight: int, max_other: float = 0.5) -> Parts:
    """The parts in the result of a meeting. `max_other` is a further bound on the part of the other adapter."""
    total = own_weight + other_weight
    other = min(0.5, max_other, other_weight / total)
    return Parts(1.0 - other, other, total)


def _num_carried(places: Iterable[int], num_places: int) -> int:
    core = core_size(num_places)
    return sum(1 + (place + core < num_places) for place in places)


@dataclass(frozen=True, slots=True)
class Wire:
    """Encodes an adapter as a snapshot, and decodes it. Both raise MergeError."""

    pack: Callable[[Adapter, int], Snapshot]
    """Called with (weights, policy version)."""
    open: Callable[[Snapshot], Adapter]


@dataclass(frozen=True, slots=True)
class FinalResult:
    """The result of a final merge."""

    weights: Adapter
    """float32 on the CPU; the own weights where the mean was clearly worse, or nobody came."""
    reset_names: frozenset[str]
    """Tensors with a new basis."""
    is_merged: bool
    num_places: int
    """Number of nodes that took part, this one included."""
    row: dict[str, Any]
    """Metrics."""


class FinalMerge:
    """One final merge of one replica. It runs once, on the compute thread."""

    def __init__(
        self,
        config: MergingSection,
        wire: Wire,
        origin: AdapterOrigin,
        *,
        pairer: FinalPairer,
        score: Callable[[Adapter], Scores] | None,
        bound: BoundOnStrangers = lambda peer_ids: ((), 1.0),
    ) -> None:
        """Without a `score` nothing is tried. `bound` says who is a stranger, by default nobody."""
        self._wire = wire
        self._origin = origin
        self._pairer = pairer
        self._score = score or (lambda weights: [])
        self._num_tries = config.final_tries
        self._drift_threshold = config.drift_threshold
        self._clip = NormClip(config.clip_factor)
        self._budget = StrangerBudget(config.strangers_factor)
        self._bound = bound
        self._strangers: Collection[str] = ()
        self._max_strangers_part = 1.0
        self._strangers_part = 0.0
        self._weights: Adapter = {}
        self._weight = 1
        self._scores: Scores = []
        self._reset: frozenset[str] = frozenset()
        self._clipped_shares: list[float] = []
        self._reasons: Counter[str] = Counter()

    def run(self, own: Adapter, policy_version: int) -> FinalResult:
        """Merge with the others, and wait for them at most as long as `FinalPairer` does. Never raises for what others do."""
        started = time.monotonic()
        self._weights = own
        # Adapters of the same lineage may lie as far from the origin as the own training went, times the factor.
        self._clip.observe(own, self._origin.weights)
        self._budget.observe(own, self._origin.weights)
        seats, own_scores = self._gather(own, policy_version)
        self._scores, num_places = own_scores, len(seats.peer_ids)
        self._strangers, self._max_strangers_part = self._bound(
            [one for one in seats.peer_ids if one != seats.own_peer_id]
        )
        for meeting in meetings_of(seats.own_place, num_places):
            self._attend(meeting, seats, policy_version)
        is_taken = self._weight > 1 and not is_clearly_better(own_scores, self._scores)
        row = self._row(num_places, is_taken, own_scores) | {"final/duration_s": time.monotonic() - started}
        logger.info(
            "final merge of %d nodes: %d adapters in the mean, %s",
            num_places, self._weight, "taken" if is_taken else "the own adapter is kept",
        )  # fmt: skip
        reset = self._reset if is_taken else frozenset[str]()
        return FinalResult(self._weights if is_taken else own, reset, is_taken, num_places, row)

    def _row(self, num_places: int, is_taken: bool, own_scores: Scores) -> dict[str, Any]:
        scores = {"final/score_own": own_scores, "final/score_merged": self._scores}
        return {
            "final/places": num_places,
            "final/replicas": self._weight,
            "final/is_taken": int(is_taken),
            "final/strangers_part": self._strangers_part,
            "final/reasons": dict(self._reasons),
            "final/clipped_share": fmean(self._clipped_shares) if self._clipped_shares else 0.0,
            "final/product_factors": len(self._reset),
            **{name: fmean(values) for name, values in scores.items() if values and all(map(math.isfinite, values))},
        }

    def _gather(self, own: Adapter, policy_version: int) -> tuple[Seats, Scores]:
        """Find out who takes part, and score the own adapter in the meantime."""
        try:
            snapshot = self._wire.pack(own, policy_version)
        except MergeError as error:
            logger.warning("no final merge: %s", error)
            self._reasons["unsendable"] += 1
            return Seats(("",), 0), []
        gathering = self._pairer.gather(snapshot)
        scores = self._score(own)
        seats = gathering.result()
        while len(seats.peer_ids) == 1:
            self._reasons["nobody"] += 1
            if self._reasons["nobody"] == self._num_tries:
                break
            seats = self._pairer.gather(snapshot).result()
        return seats, scores

    def _attend(self, meeting: Meeting, seats: Seats, policy_version: int) -> None:
        """Attend one meeting. Whatever goes wrong there, the own mean stays as it was."""
        try:
            snapshot = self._wire.pack(self._weights, policy_version)
        except MergeError as error:
            logger.warning("left out of the final merge: %s", error)
            self._reasons["unsendable"] += 1
            return
        peer_id = seats.peer_ids[meeting.place]
        appointment = Appointment(meeting.window, peer_id, meeting.gives, meeting.takes, self._weight, snapshot)
        met = self._pairer.meet(appointment).result()
        reason = met.reason
        if met.partner is not None:
            reason = self._take(meeting, met, met.partner, peer_id in self._strangers)
        self._reasons[reason or ("merged" if meeting.takes else "given")] += 1

    def _take(self, meeting: Meeting, met: MeetResult, partner: Partner, is_stranger: bool) -> str:
        """Merge a partner's adapter into the own mean. Returns why not; empty where it was merged."""
        try:
            theirs = self._wire.open(partner.snapshot)
            if met.weight > meeting.max_weight:
                raise MergeError(f"at most {meeting.max_weight} replicas can be in it, got {met.weight}; leave it out")
        except MergeError as error:
            logger.warning("the adapter of %s is not merged: %s", partner.peer_id, error)
            return "unusable"
        self._clipped_shares.append(self._clip.clipped_share(theirs, self._weights))
        parts = parts_of(self._weight, met.weight, self._part_left() if is_stranger else 0.5)
        if parts.other == 0:
            return "strangers"
        theirs = self._clip.clip(theirs, self._weights)
        if is_stranger:
            theirs = self._budget.limit(theirs, self._weights, parts.other)
        merged = self._mean(theirs, parts.own, parts.other)
        scores = self._score(merged.tensors)
        if is_clearly_better(self._scores, scores):
            return "gate"
        if is_stranger:
            self._budget.spend(theirs, self._weights, parts.other)
        # The adapter of a known partner may hold as large a part of strangers as the own one may.
        of_strangers = 1.0 if is_stranger else min(1.0, self._max_strangers_part)
        self._strangers_part = parts.own * self._strangers_part + parts.other * of_strangers
        self._weights, self._weight, self._scores = merged.tensors, parts.weight, scores
        self._reset |= frozenset(merged.reset_names)
        return ""

    def _part_left(self) -> float:
        """Largest part that one more stranger may have, so that all strangers together stay within their share."""
        share, part = self._max_strangers_part, self._strangers_part
        return 1.0 if share >= 1 else max(0.0, (share - part) / (1 - part))

    def _mean(self, theirs: Adapter, own_part: float, other_part: float) -> Merged:
        both = [LowRank(self._weights, self._origin.scaling), LowRank(theirs, self._origin.scaling)]
        rank = rank_of(self._weights)
        return merge_by_layer(
            both, [own_part, other_part], rank, self._origin.scaling, self._drift_threshold, like=self._weights
        )
