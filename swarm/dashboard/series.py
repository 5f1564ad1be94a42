"""What the page shows of a run, in bounded memory: curves over its rounds, and its last merges.

A curve has buckets of rounds of one width, which doubles whenever there are too many buckets.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_MERGES = 50
_DETAILS = {
    "partner": "merge/partner",
    "share": "merge/partner_share",
    "clipped_share": "merge/clipped_share",
    "drift": "merge/drift",
    "lag_steps": "merge/lag_steps",
    "took_s": "merge/last_step_s",
}


class MergeLog:
    """Bounded. A merge is a row whose count of merges is higher than that of the row before."""

    def __init__(self) -> None:
        self._merges: deque[dict[str, Any]] = deque(maxlen=MAX_MERGES)
        self._num_seen: int | None = None

    def add(self, row: Mapping[str, Any], time_s: float) -> dict[str, Any] | None:
        """The merge of this round, if there was one."""
        count = row.get("merge/merges_total")
        if not isinstance(count, int):
            return None
        is_new = count > (self._num_seen or 0) and "merge/partner" in row
        self._num_seen = count
        if not is_new:
            return None
        merge = {"time_s": time_s, "round": row.get("round"), **{k: row.get(entry) for k, entry in _DETAILS.items()}}
        self._merges.append(merge)
        return merge

    def newest_first(self) -> list[dict[str, Any]]:
        return list(reversed(self._merges))


MAX_BUCKETS = 400
"""About as many as a chart has pixels for."""
METRICS = {
    "reward": "rollout/reward_mean",
    "entropy": "train/entropy",
    "tokens_per_s": "rollout/tokens_per_s",
    "staleness": "train/staleness_mean",
}
"""{name on the page: entry of a row of metrics.jsonl}"""
_DIGITS = 5

Points = dict[str, list[float | None]]


@dataclass(slots=True)
class _Spread:
    """Of one metric within one bucket."""

    count: int = 0
    total: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def add(self, other: "_Spread") -> None:
        if not other.count:
            return
        self.least = min(self.least, other.least) if self.count else other.least
        self.most = max(self.most, other.most) if self.count else other.most
        self.count += other.count
        self.total += other.total

    def values(self) -> tuple[float | None, float | None, float | None]:
        """(mean, min, max)"""
        if not self.count:
            return None, None, None
        return _short(self.total / self.count), _short(self.least), _short(self.most)


@dataclass(slots=True)
class _Bucket:
    start: int
    """First round of it, a multiple of the width."""
    spreads: dict[str, _Spread] = field(default_factory=lambda: {name: _Spread() for name in METRICS})


class Series:
    """Every metric's mean, least and greatest value per bucket, over the whole run. Not safe from several threads."""

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max_buckets = max_buckets
        self._buckets: list[_Bucket] = []
        self.width = 1
        """Rounds of one bucket."""

    def add(self, row: Mapping[str, Any]) -> None:
        """A row of kind round. One whose number has been there before undoes what came after: a restart from a checkpoint.

        Of the bucket that this falls into, both are kept.
        """
        number = row.get("round")
        if not isinstance(number, int) or number < 0:
            return
        start = number - number % self.width
        while self._buckets and self._buckets[-1].start > start:
            self._buckets.pop()
        if not self._buckets or self._buckets[-1].start < start or self.width == 1:
            if self._buckets and self._buckets[-1].start == start:
                self._buckets.pop()
            self._buckets.append(_Bucket(start))
        for name, entry in METRICS.items():
            value = row.get(entry)
            if isinstance(value, int | float) and abs(value) < 1e300:  # NaN fails
                self._buckets[-1].spreads[name].add(_Spread(1, value, value, value))
        while len(self._buckets) > self._max_buckets:
            self._widen()

    def points(self, since: int = 0) -> dict[str, Any]:
        """{"width", "start": first rounds, and of each metric "mean", "min", "max"}, of the buckets from place `since` on."""
        buckets = self._buckets[since:]
        curves: dict[str, Points] = {}
        for name in METRICS:
            values = [bucket.spreads[name].values() for bucket in buckets]
            curves[name] = {kind: [v[place] for v in values] for place, kind in enumerate(("mean", "min", "max"))}
        return {"width": self.width, "start": [bucket.start for bucket in buckets], **curves}

    def last_point(self) -> dict[str, Any]:
        """As `points`, of the newest bucket alone."""
        return self.points(max(0, len(self._buckets) - 1))

    def rewards(self, max_points: int) -> dict[str, list[Any]]:
        """{"start", "reward"}: means only, of at most so many buckets."""
        step = -(-len(self._buckets) // max_points) or 1
        groups = [self._buckets[place : place + step] for place in range(0, len(self._buckets), step)]
        merged = [_merged(group) for group in groups]
        return {"start": [b.start for b in merged], "reward": [b.spreads["reward"].values()[0] for b in merged]}

    def _widen(self) -> None:
        self.width *= 2
        joined: dict[int, list[_Bucket]] = {}
        for bucket in self._buckets:
            joined.setdefault(bucket.start - bucket.start % self.width, []).append(bucket)
        self._buckets = [_merged(group, start) for start, group in joined.items()]


def _merged(buckets: list[_Bucket], start: int | None = None) -> _Bucket:
    merged = _Bucket(buckets[0].start if start is None else start)
    for bucket in buckets:
        for name, spread in bucket.spreads.items():
            merged.spreads[name].add(spread)
    return merged


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
