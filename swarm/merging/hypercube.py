"""Who meets whom in a final merge of N replicas: the mean of all in log₂N exchanges in pairs, nobody in the middle.

    window 0          passengers, those beyond the largest power of two, hand their adapter to a core place
    windows 1 … k     core place i meets i xor 2^(w−1); both take the weighted mean of both
    window k + 1      passengers get the result

A weight travels with each adapter: the number of replicas in it, as the other side says. Nobody can check that number, so the
other side never gets more than half. For a power of two all weights that meet are equal and everybody has the exact mean of all
that answer. For other numbers of replicas, and where some are silent, a replica keeps more of its own adapter than others have.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_PLACES = 64
"""Replicas of one final merge."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One exchange as seen from one of its two sides."""

    window: int
    """All meetings of a window happen at the same time."""
    place: int
    """Of the other side."""
    gives: bool
    takes: bool
    max_weight: int
    """Replicas in the other side's adapter, at most."""


@dataclass(frozen=True, slots=True)
class Parts:
    """How much of the own adapter and of the other one is in the new one: not negative, 1 in sum, `other` at most a half."""

    own: float
    other: float
    weight: int
    """Replicas in the new one."""


def core_size(num_places: int) -> int:
    """Largest power of two that is not more than `num_places`."""
    return 1 << (num_places.bit_length() - 1)


def num_windows(num_places: int) -> int:
    """Those of passengers included, though there may be none."""
    return core_size(num_places).bit_length() + 1


def meetings_of(place: int, num_places: int) -> list[Meeting]:
    """In the order of their windows. Raises ValueError for a place that there is not."""
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
    """Of the adapter that comes out of a meeting. `max_other` bounds the part of the other one further than a half does."""
    total = own_weight + other_weight
    other = min(0.5, max_other, other_weight / total)
    return Parts(1.0 - other, other, total)


def _num_carried(places: Iterable[int], num_places: int) -> int:
    core = core_size(num_places)
    return sum(1 + (place + core < num_places) for place in places)
