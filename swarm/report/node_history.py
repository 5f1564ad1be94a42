"""The history of one node, read from its metrics.jsonl while the file grows, over restarts of the node.

When the node begins a new file, the older one ends in `.1`. That one is read first, as far as the bound leaves room for it.

The file may come from somebody else, so time and memory are linear in its bytes, and these are bounded.
"""

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import IO, Any

from swarm.machine.safe_files import open_to_read
from swarm.observability.metrics import parse_row

MetricsRow = dict[str, Any]
MAX_BYTES = 64 << 20
"""That are read at once, the newest; some 40,000 rounds."""
MAX_ROW_BYTES = 1 << 20
"""A longer row is left out; nodes write a few thousand bytes."""
MAX_REASONS = 256
"""For which records were rejected; a node has some thirty."""
PHASES = ("start", "interval", "end")
"""Of evaluations, in the order in which one round may have several."""
_KEPT = (
    "round", "time_s", "rollout/reward_mean", "rollout/tokens", "rollout/tokens_per_s", "time/rollout_s", "train/entropy",
    "train/staleness_mean", "train/own_groups", "train/swarm_groups", "train/loss", "train/grad_norm", "train/kl",
    "train/clip_fraction", "merge/merges_total", "merge/partner", "merge/partner_share", "merge/clipped_share",
    "merge/drift", "merge/lag_steps", "merge/last_step_s",
)  # fmt: skip
"""Numbers and names that are kept of every round; of the last one all is kept."""
_KEPT_OF_EVALUATION = ("round", "phase", "accuracy_mean", "accuracy")
_NOT_IN_OLDER_ROWS: MetricsRow = {"num_tasks": 0, "measured_on": ""}
"""What is kept of an evaluation besides, and what stands for it in the rows of older versions."""

_COUNTERS = (
    "exchange/bytes_sent",
    "exchange/bytes_received",
    "exchange/records_published",
    "exchange/records_admitted",
)


class NodeHistory:
    """Rounds and evaluations in order, without those that a restart from a checkpoint has undone."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._offset = 0
        self._inode: int | None = None
        """Of the file that was read up to `_offset`."""
        self._forget()

    def _forget(self) -> None:
        self.rounds: list[MetricsRow] = []
        """Their numbers rise. What is kept of each is named above."""
        self.last_round: MetricsRow = {}
        """The last row of a round, with all that it says."""
        self._evaluations: dict[str, list[MetricsRow]] = {phase: [] for phase in PHASES}
        self.end: MetricsRow | None = None
        """Row of the last orderly end, None while the node runs or when it was killed."""
        self.final_merge: MetricsRow | None = None
        """Row of the last merge of all that ended together."""
        self.totals: Counter[str] = Counter()
        """Sums of counters over all processes of the node; each process counts from zero."""
        self.num_undone = 0
        """Rounds that were done again after a restart from a checkpoint."""
        self.rejected: Counter[str] = Counter()
        """{reason: records} over all processes."""
        self._last_counts: dict[str, float] = {}

    def refresh(self) -> None:
        """Read what was appended since the last call. A line still being written is left for the next one.

        Raises OSError where it is no regular file.
        """
        try:
            with open_to_read(self._path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:  # a new file, or a torn line cut off
                    self._inode, self._offset = status.st_ino, 0
                    self._forget()
                    self._read_older(self._max_bytes - status.st_size)
                self._offset = self._read(file, self._offset, status.st_size, self._max_bytes)
        except FileNotFoundError:
            return

    def _read_older(self, max_bytes: int) -> None:
        """Read the end of the file before the present one, if there is one."""
        with contextlib.suppress(FileNotFoundError), open_to_read(self._path.with_name(f"{self._path.name}.1")) as file:
            status = os.fstat(file.fileno())
            if max_bytes > 0 and status.st_ino != self._inode:  # else the node has begun a new file just now
                self._read(file, 0, status.st_size, max_bytes)

    def _read(self, file: IO[bytes], start: int, size: int, max_bytes: int) -> int:
        """Read the whole rows between `start` and `size`, of more than `max_bytes` the last ones. Returns where that ended."""
        if size - start > max_bytes:
            start = size - max_bytes
            file.seek(start)
            start += _pass_line(file)
        file.seek(start)
        while start < size:
            line = file.readline(MAX_ROW_BYTES)
            num_bytes = len(line)
            if not line.endswith(b"\n"):
                if num_bytes < MAX_ROW_BYTES:
                    return start  # still being written
                num_bytes += _pass_line(file)
                line = b""
            start += num_bytes
            try:
                self._add(parse_row(line))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                continue  # damaged, too long, or not written by a node: that row is lost
        return start

    @property
    def round(self) -> int:
        return self.rounds[-1]["round"] if self.rounds else 0

    @property
    def first_round(self) -> int:
        """The round of the first row that was read. It is above 1 where earlier rows are no longer there, or were too many."""
        return self.rounds[0]["round"] if self.rounds else 0

    @property
    def evaluations(self) -> list[MetricsRow]:
        """In order of their rounds."""
        return sorted((row for rows in self._evaluations.values() for row in rows), key=lambda row: row["round"])

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

    def accuracy(self, *phases: str) -> MetricsRow | None:
        """Latest evaluation row of these phases (all if none is named)."""
        rows = [row for row in self.evaluations if not phases or row["phase"] in phases]
        return rows[-1] if rows else None

    def _add(self, row: MetricsRow) -> None:
        kind, number = row["kind"], row["round"]
        if type(number) is not int:
            raise TypeError("rounds are counted")
        if kind == "end":
            self.end = row
        elif kind == "final_merge":
            self.final_merge = row
        elif kind == "evaluation":
            self.end = None
            rows = self._evaluations[row["phase"]]
            drop_from(rows, number)
            for earlier in rows[-1:]:  # only the last one tells of each source
                earlier.pop("accuracy", None)
            rows.append(
                {key: row[key] for key in _KEPT_OF_EVALUATION}
                | {key: row.get(key, default) for key, default in _NOT_IN_OLDER_ROWS.items()}
            )
        elif kind == "round":
            self.end = None
            self._count(row)
            num_rounds = len(self.rounds)
            for rows in (self.rounds, *self._evaluations.values()):  # it restarted from the checkpoint before it
                drop_from(rows, number)
            self.num_undone += num_rounds - len(self.rounds)
            self.rounds.append({key: row[key] for key in _KEPT if isinstance(row.get(key), int | float | str)})
            self.last_round = row

    def _count(self, row: MetricsRow) -> None:
        counts: dict[str, float] = {name: row.get(name, 0) for name in _COUNTERS}
        counts |= {f"rejected {reason}": count for reason, count in row.get("exchange/rejected", {}).items()}
        is_new_process = any(counts.get(name, 0) < last for name, last in self._last_counts.items())
        for name, count in counts.items():
            increase = count if is_new_process else count - self._last_counts.get(name, 0)
            if name.startswith("rejected "):
                reason = name.removeprefix("rejected ")
                if reason in self.rejected or len(self.rejected) < MAX_REASONS:
                    self.rejected[reason] += int(increase)
            else:
                self.totals[name] += int(increase)
        self._last_counts = counts


def drop_from(rows: list[MetricsRow], number: int) -> None:
    """Drop the rows of round `number` and later ones, which are the last."""
    while rows and rows[-1]["round"] >= number:
        rows.pop()


def _pass_line(file: IO[bytes]) -> int:
    """Read up to the end of the line, keeping nothing; returns how many bytes that were."""
    num_bytes = 0
    while part := file.readline(MAX_ROW_BYTES):
        num_bytes += len(part)
        if part.endswith(b"\n"):
            break
    return num_bytes
