"""When headers came to their readers."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Spread:
    created_at: float
    num_readers: int
    delays_s: list[float] = field(default_factory=list)


class SpreadLog:
    """Times from the making of a header to its admission, by reader."""

    def __init__(self) -> None:
        self._since = -math.inf
        self._spreads: dict[Hashable, _Spread] = {}

    def note(self, header: Hashable, created_at: float, now: float, num_readers: int) -> None:
        """One reader admitted `header` (any name of it that is its own).

        `num_readers`: how many should get it in the end, as known when the first one does.
        """
        if created_at < self._since:
            return
        if header not in self._spreads:
            self._spreads[header] = _Spread(created_at, num_readers)
        self._spreads[header].delays_s.append(now - created_at)

    def begin(self, now: float) -> None:
        """Forget what was, as when a swarm has settled: headers made from now on count."""
        self._since = now
        self._spreads.clear()

    def __len__(self) -> int:
        return len(self._spreads)

    def num_arrivals(self) -> int:
        return sum(len(spread.delays_s) for spread in self._spreads.values())

    def times_s(self, share: float, created_before: float) -> list[float]:
        """For each header that old: seconds until `share` of its readers had it; infinite where they never did."""
        return [
            _time_to(sorted(spread.delays_s), math.ceil(share * spread.num_readers))
            for spread in self._spreads.values()
            if spread.created_at < created_before and spread.num_readers > 0
        ]

    def coverage(self, created_before: float) -> float:
        """Mean share of the readers that got a header."""
        shares = [
            min(1.0, len(spread.delays_s) / spread.num_readers)
            for spread in self._spreads.values()
            if spread.created_at < created_before and spread.num_readers > 0
        ]
        return sum(shares) / len(shares) if shares else math.nan


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed; NaN for none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def _time_to(delays_s: list[float], count: int) -> float:
    return delays_s[count - 1] if 0 < count <= len(delays_s) else math.inf
