"""What one node did so far, read from its metrics.jsonl while it grows, over restarts of the node."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from swarm.safe_files import open_to_read, parse_json

Row = dict[str, Any]
MAX_BYTES = 256 << 20
"""That are read of one file."""

_COUNTERS = (
    "exchange/bytes_sent",
    "exchange/bytes_received",
    "exchange/records_published",
    "exchange/records_admitted",
)


class NodeHistory:
    """Rounds and evaluations in order, without those that a restart from a checkpoint has undone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._forget()

    def _forget(self) -> None:
        self.rounds: list[Row] = []
        self.evaluations: list[Row] = []
        self.end: Row | None = None
        """Row of the last orderly end, None while the node runs or when it was killed."""
        self.final_merge: Row | None = None
        """Row of the last merge of all that ended together."""
        self.totals: Counter[str] = Counter()
        """Sums of counters over all processes of the node; each process counts from zero."""
        self.rejected: Counter[str] = Counter()
        """{reason: records} over all processes."""
        self._last_counts: dict[str, float] = {}

    def refresh(self) -> None:
        """Read what was appended since the last call. A line still being written is left for the next one.

        Raises OSError where it is no regular file.
        """
        try:
            with open_to_read(self._path) as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._offset:  # a restart has cut off a torn line, or begun a new file
                    self._offset = 0
                    self._forget()
                start = max(self._offset, size - MAX_BYTES)
                file.seek(start)
                content = file.read(size - start)
        except FileNotFoundError:
            return
        whole = content.rfind(b"\n") + 1
        begin = content.find(b"\n") + 1 if start > self._offset else 0  # of a longer file only the end is read
        self._offset = start + whole
        for line in content[begin:whole].splitlines():
            try:
                self._add(parse_json(line))
            except (
                ValueError,
                TypeError,
                KeyError,
                AttributeError,
            ):  # damaged, or not written by a node: that row is lost
                continue

    @property
    def round(self) -> int:
        return self.rounds[-1]["round"] if self.rounds else 0

    @property
    def last_round(self) -> Row:
        return self.rounds[-1] if self.rounds else {}

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each round."""
        return [row["rollout/reward_mean"] for row in self.rounds]

    def smoothed_rewards(self, window_rounds: int) -> list[float]:
        """Mean over the last `window_rounds` rounds, at each round."""
        rewards = self.rewards
        spans = [rewards[max(0, i + 1 - window_rounds) : i + 1] for i in range(len(rewards))]
        return [sum(span) / len(span) for span in spans]

    @property
    def tokens_per_s(self) -> float:
        """While sampling, over all rounds."""
        duration_s = sum(row["time/rollout_s"] for row in self.rounds)
        return sum(row["rollout/tokens"] for row in self.rounds) / duration_s if duration_s else 0.0

    def accuracy(self, *phases: str) -> Row | None:
        """Latest evaluation row of these phases (all if none is named)."""
        rows = [row for row in self.evaluations if not phases or row["phase"] in phases]
        return rows[-1] if rows else None

    def _add(self, row: Row) -> None:
        kind, number = row["kind"], row["round"]
        if kind == "end":
            self.end = row
        elif kind == "final_merge":
            self.final_merge = row
        elif kind == "evaluation":
            self.end = None
            self.evaluations = [r for r in self.evaluations if r["round"] < number or r["phase"] != row["phase"]] + [
                row
            ]
        elif kind == "round":
            self.end = None
            self._count(row)
            if number <= self.round:  # restarted from the checkpoint before it
                self.rounds = [r for r in self.rounds if r["round"] < number]
                self.evaluations = [r for r in self.evaluations if r["round"] < number]
            self.rounds.append(row)

    def _count(self, row: Row) -> None:
        counts: dict[str, float] = {name: row.get(name, 0) for name in _COUNTERS}
        counts |= {f"rejected {reason}": count for reason, count in row.get("exchange/rejected", {}).items()}
        is_new_process = any(counts.get(name, 0) < last for name, last in self._last_counts.items())
        for name, count in counts.items():
            increase = count if is_new_process else count - self._last_counts.get(name, 0)
            if name.startswith("rejected "):
                self.rejected[name.removeprefix("rejected ")] += int(increase)
            else:
                self.totals[name] += int(increase)
        self._last_counts = counts
