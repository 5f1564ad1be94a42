"""What the page shows of a run, in bounded memory: curves over its rounds, its evaluations, and its last merges.

A curve has buckets of rounds of one width, which doubles whenever there are too many buckets. The newest rounds are also kept
one by one, for who looks at a part of a curve.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeGuard

import numpy as np

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
    "own": "train/own_groups",
    "swarm": "train/swarm_groups",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "kl": "train/kl",
    "entropy": "train/entropy",
    "clipped": "train/clip_fraction",
    "staleness": "train/staleness_mean",
    "tokens_per_s": "rollout/tokens_per_s",
}
"""{name on the page: entry of a row of metrics.jsonl}"""
_BY_SOURCE = "rollout/reward_by_source"
_OF_SIGNAL = "reward/"
MAX_MEMBERS = 12
"""Task sources, and reward signals, that have a curve of their own."""
MAX_EVALUATIONS = 400
_MAX_NAME = 80
_DIGITS = 5
_MOST = 1e38
"""Of what a float32 holds."""

Points = dict[str, list[float | None]]


class Evaluations:
    """The mean reward on held-out tasks, of all and by task source. When it is full, every second one is left out."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float, dict[str, float], float | None]] = []
        """(round, mean, {source: mean}, when in seconds since the epoch) of each."""

    def add(self, row: Mapping[str, Any]) -> None:
        """A row of kind evaluation. It replaces one of the same round."""
        number, mean, by_source = row.get("round"), row.get("accuracy_mean"), row.get("accuracy")
        if not isinstance(number, int) or number < 0 or not _is_number(mean):
            return
        self.undo(number)
        found = islice(by_source.items(), MAX_MEMBERS) if isinstance(by_source, Mapping) else ()
        known = {str(name)[:_MAX_NAME]: _short(value) for name, value in found if _is_number(value)}
        time_s = row.get("time_s")
        self._rows.append((number, _short(mean), known, time_s if _is_number(time_s) else None))
        if len(self._rows) > MAX_EVALUATIONS:
            self._rows = [*self._rows[:-1:2], self._rows[-1]]

    def undo(self, number: int) -> None:
        """Forget those of this round and later ones, which a restart from a checkpoint undoes."""
        while self._rows and self._rows[-1][0] >= number:
            self._rows.pop()

    def means(self, max_points: int) -> dict[str, list[Any]]:
        """{"start", "time_s", "reward"}: of at most so many evaluations, the newest among them."""
        step = -(-len(self._rows) // max_points) or 1
        chosen = self._rows[::-1][::step][::-1]
        return {
            "start": [number for number, *_ in chosen],
            "time_s": [_full_seconds(time_s) for *_, time_s in chosen],
            "reward": [mean for _, mean, *_ in chosen],
        }

    def points(self) -> dict[str, Any]:
        """{"start": rounds, "time_s", "mean", "sources": {name: values}}; None where a source was not evaluated."""
        names = list(dict.fromkeys(name for _, _, by_source, _ in self._rows for name in by_source))[:MAX_MEMBERS]
        return {
            "start": [number for number, *_ in self._rows],
            "time_s": [time_s for *_, time_s in self._rows],
            "mean": [mean for _, mean, *_ in self._rows],
            "sources": {name: [by_source.get(name) for _, _, by_source, _ in self._rows] for name in names},
        }


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
    spreads: dict[str, _Spread] = field(default_factory=dict[str, _Spread])
    end_s: float | None = None
    """When its last round ended, in seconds since the epoch."""

    def add(self, name: str, spread: _Spread) -> None:
        self.spreads.setdefault(name, _Spread()).add(spread)

    def values(self, name: str) -> tuple[float | None, float | None, float | None]:
        """(mean, min, max)"""
        spread = self.spreads.get(name)
        return spread.values() if spread else (None, None, None)


MAX_KEPT_ROUNDS = 1 << 17
"""That are kept one by one: 4 bytes for each value of each."""


class _Rounds:
    """The newest rounds, one by one and in order. When there are too many, the oldest eighth is forgotten."""

    def __init__(self, max_rounds: int) -> None:
        self._max_rounds = max_rounds
        self.numbers = array("q")
        self.times = array("d")
        """When each ended, in seconds since the epoch; NaN where that is not known."""
        self._columns: dict[str, array[float]] = {}
        """The values of each metric and member; NaN where there is none."""

    def add(self, number: int, time_s: float | None, values: Mapping[str, float]) -> None:
        """One whose number has been there before undoes what came after."""
        self._keep(0, bisect_left(self.numbers, number))
        if len(self.numbers) >= self._max_rounds:
            self._keep(len(self.numbers) // 8, len(self.numbers))
        count = len(self.numbers)
        self.numbers.append(number)
        self.times.append(math.nan if time_s is None else time_s)
        for name in values.keys() - self._columns.keys():
            self._columns[name] = array("f", [math.nan]) * count
        for name, column in self._columns.items():
            value = values.get(name)
            column.append(math.nan if value is None else max(-_MOST, min(_MOST, value)))

    def _keep(self, begin: int, end: int) -> None:
        for column in (self.numbers, self.times, *self._columns.values()):
            del column[end:]
            del column[:begin]

    def buckets(self, name: str, begin: int, end: int, places: "np.ndarray[Any, Any]") -> Points:
        """{"mean", "min", "max"} of a metric over the rounds [begin, end), in buckets that begin at `places` of these."""
        column = self._columns.get(name)
        if column is None:
            return {kind: [None] * len(places) for kind in ("mean", "min", "max")}
        values = np.frombuffer(column, np.float32)[begin:end].astype(np.float64)
        is_known = ~np.isnan(values)
        counts = np.add.reduceat(is_known.astype(np.int64), places)
        sums = np.add.reduceat(np.where(is_known, values, 0.0), places)
        with np.errstate(invalid="ignore"):
            found = {
                "mean": sums / counts,
                "min": np.fmin.reduceat(values, places),
                "max": np.fmax.reduceat(values, places),
            }
        return {kind: [None if math.isnan(v) else _short(v) for v in values.tolist()] for kind, values in found.items()}


class Series:
    """Every metric's mean, least and greatest value per bucket, over the whole run. Not safe from several threads."""

    def __init__(self, max_buckets: int = MAX_BUCKETS, max_rounds: int = MAX_KEPT_ROUNDS) -> None:
        self._max_buckets = max_buckets
        self._rounds = _Rounds(max_rounds)
        self._buckets: list[_Bucket] = []
        self._members: dict[str, list[str]] = {"sources": [], "signals": []}
        """Names that were seen, of task sources and of reward signals."""
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
        time_s = row.get("time_s")
        if _is_number(time_s):
            self._buckets[-1].end_s = time_s
        found = (*((name, row.get(entry)) for name, entry in METRICS.items()), *self._of_members(row))
        values = {name: value for name, value in found if _is_number(value)}
        for name, value in values.items():
            self._buckets[-1].add(name, _Spread(1, value, value, value))
        self._rounds.add(number, time_s if _is_number(time_s) else None, values)
        while len(self._buckets) > self._max_buckets:
            self._widen()

    def points(self, since: int = 0, until: int | None = None) -> dict[str, Any]:
        """Of the buckets from place `since` on, before `until`: {"width", "start": first rounds, "time_s": when the last round of
        each ended, of each metric "mean", "min" and "max", and "sources" and "signals": {name: mean rewards}}."""
        buckets = self._buckets[since:until]
        curves: dict[str, Points] = {}
        for name in METRICS:
            values = [bucket.values(name) for bucket in buckets]
            curves[name] = {kind: [v[place] for v in values] for place, kind in enumerate(("mean", "min", "max"))}
        members = {
            family: {name: [bucket.values(f"{family} {name}")[0] for bucket in buckets] for name in names}
            for family, names in self._members.items()
        }
        places = {"start": [bucket.start for bucket in buckets], "time_s": [bucket.end_s for bucket in buckets]}
        return {"width": self.width, **places, **curves, **members}

    def part(self, kind: str, first: float, last: float) -> dict[str, Any]:
        """As `points`, of a range of rounds or, where `kind` is "time", of seconds since the epoch, with a bucket on either side.

        The buckets are as fine as their number allows, or those of the whole run where rounds of the range are forgotten.
        """
        rounds = self._rounds
        place = rounds.times if kind == "time" else rounds.numbers
        begin, end = bisect_left(place, first), bisect_right(place, last)
        whole = [one.end_s or math.inf if kind == "time" else one.start for one in self._buckets]
        width = 1
        while (end - begin) // width > self._max_buckets:
            width *= 2
        is_forgotten = begin == 0 and (not rounds.numbers or rounds.numbers[0] >= self._buckets[0].start + self.width)
        if width >= self.width or is_forgotten:
            return self.points(max(0, bisect_left(whole, first) - 1), bisect_right(whole, last) + 1)
        begin, end = max(0, begin - width), min(len(rounds.numbers), end + width)
        starts = np.frombuffer(rounds.numbers, np.int64)[begin:end] // width * width
        places = np.flatnonzero(np.diff(starts, prepend=-1))
        times = np.frombuffer(rounds.times, np.float64)[begin:end][np.append(places[1:], len(starts)) - 1]
        members = {
            family: {name: rounds.buckets(f"{family} {name}", begin, end, places)["mean"] for name in names}
            for family, names in self._members.items()
        }
        return {
            "width": width,
            "start": starts[places].tolist(),
            "time_s": [None if math.isnan(time_s) else time_s for time_s in times.tolist()],
            **{name: rounds.buckets(name, begin, end, places) for name in METRICS},
            **members,
        }

    def last_point(self) -> dict[str, Any]:
        """As `points`, of the newest bucket alone."""
        return self.points(max(0, len(self._buckets) - 1))

    def rewards(self, max_points: int) -> dict[str, list[Any]]:
        """{"start", "time_s", "reward"}: means only, of at most so many buckets."""
        step = -(-len(self._buckets) // max_points) or 1
        groups = [self._buckets[place : place + step] for place in range(0, len(self._buckets), step)]
        merged = [_merged(group) for group in groups]
        places = {"start": [b.start for b in merged], "time_s": [_full_seconds(b.end_s) for b in merged]}
        return {**places, "reward": [b.values("reward")[0] for b in merged]}

    def _of_members(self, row: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """(name of the spread, mean reward) of each task source and reward signal of a row; names beyond the bound are left
        out."""
        by_source = row.get(_BY_SOURCE)
        found = {
            "sources": dict(by_source) if isinstance(by_source, Mapping) else {},
            "signals": {key.removeprefix(_OF_SIGNAL): row[key] for key in row if key.startswith(_OF_SIGNAL)},
        }
        told: list[tuple[str, Any]] = []
        for family, values in found.items():
            known = self._members[family]
            for name, value in ((str(name)[:_MAX_NAME], value) for name, value in values.items()):
                if name not in known and len(known) < MAX_MEMBERS:
                    known.append(name)
                if name in known:
                    told.append((f"{family} {name}", value))
        return told

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
            merged.add(name, spread)
        merged.end_s = bucket.end_s or merged.end_s
    return merged


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < 1e300  # NaN fails


def _full_seconds(time_s: float | None) -> int | None:
    return None if time_s is None else round(time_s)


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
