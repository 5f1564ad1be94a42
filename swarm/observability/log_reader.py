"""Reads the logs that `set_up_logging` writes: the last records, and then those that come, over rotations and restarts.

logs/run-0007.log.1 ─ older part ─┐
logs/run-0007.log ────────────────┴─▶ records of the newest run ─▶ follow: … ─▶ run-0008.log, once there is one
"""

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from swarm.observability.logging_setup import logs_of_runs
from swarm.observability.plain_text import plain
from swarm.safe_files import open_to_read

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ([A-Z]+) +(\S+?): (.*)", re.DOTALL)
_LOOK_INTERVAL_S = 0.2
MAX_BYTES = 64 << 20
"""That are read of the end of one file before the first record is shown."""
_MAX_LINES_PER_RECORD = 1000


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One message, with the traceback that may follow it. Control characters are written out."""

    time: str
    """Local, such as `2026-01-31 12:00:00,123`."""
    level: str
    logger: str
    message: str
    """Lines after the first one are those of a traceback or a stack."""

    def line(self) -> str:
        return f"{self.time} {self.level:<7} {self.logger}: {self.message}"

    def is_at_least(self, level: str) -> bool:
        return self.level not in LEVELS or LEVELS.index(self.level) >= LEVELS.index(level)


def newest_log(folder: Path) -> Path | None:
    """Of the last run; None where there is none."""
    return next(reversed(logs_of_runs(folder)), None)


def last_records(log: Path, count: int, level: str = "DEBUG") -> tuple[list[LogRecord], int]:
    """The newest `count` of at least `level`, oldest first, those of the part before a rotation included.

    Also how many bytes of `log` were read: `follow` goes on there.
    """
    kept: deque[LogRecord] = deque(maxlen=count)
    num_read = 0
    for path in (log.with_name(f"{log.name}.1"), log):
        with contextlib.suppress(FileNotFoundError):
            with open_to_read(path) as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - MAX_BYTES)
                file.seek(start)
                content = file.read(size - start)
            whole = content.rfind(b"\n") + 1
            num_read = start + whole
            lines = (line.decode(errors="replace") for line in content[:whole].splitlines())
            kept.extend(record for record in parse(lines) if record.is_at_least(level))
    return list(kept), num_read


def follow(
    folder: Path, log: Path | None, offset: int, look_interval_s: float = _LOOK_INTERVAL_S
) -> Iterator[LogRecord]:
    """Records after `offset` bytes of `log`, and then of what takes its place. Never ends.

    A record is given once the next one begins or nothing has come for a moment, as lines may follow it.
    """
    file = open_to_read(log) if log else None
    if file:
        file.seek(offset)
    unread, lines = b"", list[str]()
    while True:
        chunk = file.read() if file else b""
        *whole, unread = (unread + chunk).split(b"\n")
        lines += [line.decode(errors="replace") for line in whole]
        if chunk:
            *done, lines = _by_record(lines)
            yield from parse(line for block in done for line in block)
            continue
        yield from parse(lines)
        lines = []
        newest = newest_log(folder)
        if newest is not None and (file is None or _is_replaced(file, newest)):
            if file:
                with file:  # what was written to it since
                    yield from parse(line.decode(errors="replace") for line in (unread + file.read()).splitlines())
            file, unread = open_to_read(newest), b""
        else:
            time.sleep(look_interval_s)


def parse(lines: Iterable[str]) -> Iterator[LogRecord]:
    """Records of whole lines; those before the first record, as after a rotation within a traceback, are left out."""
    head: re.Match[str] | None = None
    more: list[str] = []
    for line in lines:
        if found := _LINE.match(line):
            if head:
                yield _record(head, more)
            head, more = found, []
        elif len(more) < _MAX_LINES_PER_RECORD:
            more.append(line)
    if head:
        yield _record(head, more)


def _record(head: re.Match[str], more: list[str]) -> LogRecord:
    time_text, level, name, message = head.groups()
    return LogRecord(plain(time_text), level, plain(name), "\n".join(plain(line) for line in [message, *more]))


def _by_record(lines: list[str]) -> list[list[str]]:
    """Lines by the record that they belong to; the last one may not be whole yet."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if _LINE.match(line) and blocks[-1]:
            blocks.append([])
        blocks[-1].append(line)
    return blocks


def _is_replaced(file: IO[bytes], newest: Path) -> bool:
    """Whether the newest log is another file than the open one: it was rotated, or the node started again."""
    try:
        return not os.path.samestat(os.fstat(file.fileno()), newest.stat())
    except FileNotFoundError:  # between the two steps of a rotation
        return False
