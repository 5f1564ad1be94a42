"""The metrics of one node: counters and gauges in Prometheus form, and the rows of `metrics.jsonl`, written and read.

Names are `area/name` with the unit last: `rollout/tokens_per_s`. `metrics.jsonl` has one JSON object per line, is appended to
while the node runs, and can be read at any time.
"""

import contextlib
import json
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from swarm.machine.safe_files import open_to_append, open_to_read, parse_json, read_file

logger = logging.getLogger(__name__)


RENAMED = {"train/answers_misspelt_total": "train/answers_text_mismatch_total"}
"""{old name: present name} of metrics. Old rows are read under the present name; Prometheus gets both for now."""
_OLD_NAMES = {new: old for old, new in RENAMED.items()}
MAX_BYTES = 1 << 30
"""Largest file that is read as a whole. A node begins a new one at 64 MiB, unless its settings say more."""
NEWEST_BYTES = 24 << 20
"""Some 15,000 rounds; parsing takes a second."""
_MAX_VALUES_PER_ROW = 10_000
"""A node writes about a hundred."""
_BLOCK_BYTES = 1 << 16


class MetricsLog:
    """Appends rows; a line that an earlier process, or a full disk, left torn is cut off.

    At `max_bytes` (0: never) the file becomes the older one, ending in `.1`, and begins anew. Rows that the disk does not take
    are counted and lost: a node learns on without them.
    """

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._path = path
        self._max_bytes = max_bytes
        self._file = open_to_append(path)
        self._num_bytes = path.stat().st_size
        """Of whole lines."""
        self._has_outgrown = False
        """Whether the last attempt to begin a new file failed."""
        self.num_lost = 0

    def write(self, row: dict[str, Any]) -> None:
        """One line, handed to the operating system at once: it survives the death of this process."""
        line = (json.dumps(row, allow_nan=True) + "\n").encode()
        try:
            if self._max_bytes and self._num_bytes and self._num_bytes + len(line) > self._max_bytes:
                self._begin_anew()
            if self._file.write(line) != len(line):
                raise OSError("the disk took a part of a row")
            self._num_bytes += len(line)
        except OSError as error:
            if not self.num_lost:
                logger.error("metrics are not written (%s): free disk space; the node goes on without them", error)
            self.num_lost += 1
            with contextlib.suppress(OSError):
                self._file.truncate(self._num_bytes)

    def close(self) -> None:
        self._file.close()

    def _begin_anew(self) -> None:
        """Go on in a new file. Where none can be made, rows are appended to the old one, and the next row tries again."""
        begun = self._path.with_name(f"{self._path.name}.new")
        try:
            file = open_to_append(begun)
            try:
                with contextlib.suppress(FileNotFoundError):  # an earlier attempt ended between the two
                    self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                begun.replace(self._path)
            except OSError:
                file.close()
                raise
        except OSError as error:
            if not self._has_outgrown:
                logger.error("%s grows beyond its bound, as no new file can be begun: %s", self._path, error)
            self._has_outgrown = True
            return
        self._file.close()
        self._file, self._num_bytes, self._has_outgrown = file, 0, False


def parse_row(line: bytes) -> dict[str, Any]:
    """One row with the present names of its metrics. Raises ValueError for a line that no node writes."""
    row: Any = parse_json(line, _MAX_VALUES_PER_ROW)
    if not isinstance(row, dict):
        raise ValueError("a row must be a JSON object")
    for old in RENAMED.keys() & row.keys():
        row[RENAMED[old]] = row.pop(old)
    return row


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """All complete rows; nothing where the file does not exist yet. A torn or damaged line is left out. Raises OSError."""
    try:
        content = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        return
    yield from _rows_in(content[: content.rfind(b"\n") + 1], path)


def last_rows(path: Path, max_bytes: int = NEWEST_BYTES) -> Iterator[dict[str, Any]]:
    """Rows of the newest `max_bytes`, oldest first, from the older file `.1` too if the newer one leaves room.

    A torn or damaged line is left out. Raises OSError where a file that is there cannot be read.
    """
    older, content = path.with_name(f"{path.name}.1"), _end_of(path, max_bytes)
    yield from _rows_in(_end_of(older, max_bytes - len(content)), older)
    yield from _rows_in(content, path)


def _rows_in(lines: bytes, path: Path) -> Iterator[dict[str, Any]]:
    num_damaged = 0
    for line in filter(None, lines.split(b"\n")):
        try:
            row = parse_row(line)
        except ValueError:
            num_damaged += 1
        else:
            yield row
    if num_damaged:
        logger.warning("%d damaged lines of %s are left out", num_damaged, path)


def _end_of(path: Path, max_bytes: int) -> bytes:
    """The last whole lines, at most `max_bytes`; nothing where the file does not exist."""
    if max_bytes <= 0:
        return b""
    try:
        with open_to_read(path) as file:
            start = max(0, file.seek(0, os.SEEK_END) - max_bytes)
            file.seek(start)
            content = file.read(max_bytes)
    except FileNotFoundError:
        return b""
    content = content[: content.rfind(b"\n") + 1]
    return content[content.find(b"\n") + 1 :] if start else content


def _cut_torn_line(path: Path) -> None:
    """Read backwards, as the rows before the last one may be many."""
    with open_to_append(path):  # refuses a link, and makes a file where there is none
        pass
    with open_to_read(path) as file:
        num_bytes = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n") + 1
            if found:
                end = start + found
                break
            end = start
    if end < num_bytes:
        os.truncate(path, end)


_MAX_LABEL_SETS = 64
_OVERFLOW = "other"


class Metrics:
    """A registry of its own per node, so that several nodes live in one process. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._metrics: dict[str, Counter | Gauge] = {}
        self._label_sets: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter. Label values must come from code; beyond 64 sets they are counted as `other`."""
        counter = self._labelled(Counter, name, labels)
        assert isinstance(counter, Counter), f"{name} is a gauge"
        counter.inc(amount)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        for one in filter(None, (name, _OLD_NAMES.get(name))):
            gauge = self._labelled(Gauge, one, labels)
            assert isinstance(gauge, Gauge), f"{name} is a counter"
            gauge.set(value)

    def value(self, name: str, **labels: str) -> float | None:
        """Current value, None where nothing was recorded."""
        with self._lock:
            is_counter = isinstance(self._metrics.get(name), Counter)
        return self._registry.get_sample_value(_prometheus_name(name) + "_total" * is_counter, labels)

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self._registry)

    def _labelled(self, kind: type[Counter] | type[Gauge], name: str, labels: dict[str, str]) -> Counter | Gauge:
        with self._lock:
            metric = self._metrics.get(name)
            if metric is None:
                metric = kind(_prometheus_name(name), name, tuple(labels), registry=self._registry)
                self._metrics[name] = metric
            if not labels:
                return metric
            known, values = self._label_sets[name], tuple(labels.values())
            if values not in known and len(known) >= _MAX_LABEL_SETS:
                values = (_OVERFLOW,) * len(values)
            known.add(values)
            return metric.labels(*values)


def _prometheus_name(name: str) -> str:
    return "swarm_" + "".join(c if c.isalnum() else "_" for c in name)
