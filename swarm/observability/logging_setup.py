"""Writes log lines to the terminal and to one file per run, and reads these files.

A log line may contain text from peers: control characters are replaced, and rich markup is never interpreted. `last_records`
and `follow` read the last records and the following ones, over rotations and restarts:

logs/run-0007.log.1 ─ older part ─┐
logs/run-0007.log ────────────────┴─▶ records of the newest run ─▶ follow: … ─▶ run-0008.log, once there is one
"""

import contextlib
import logging
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any, TextIO

from swarm.machine.safe_files import open_to_append, open_to_read
from swarm.observability.plain_text import plain

_NOISY = ("httpx", "uvicorn", "hivemind", "transformers", "matplotlib", "asyncio", "PIL")
_MAX_RUNS = 16
_RUN = re.compile(r"run-[0-9]{4,9}\.log")
_FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class _OneLine(logging.Formatter):
    """Escapes control characters of the message, so that no record forges another line or moves the cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = plain(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """Without what another formatter, which escapes nothing, has kept of the traceback."""
        fresh = logging.makeLogRecord(record.__dict__)
        fresh.exc_text = None
        return super().format(fresh)

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    """Lines of a traceback: the text of an exception may be a stranger's, and none of its lines may look like a record."""
    return "\n".join(f"  {plain(line)}" for line in text.splitlines())


class _LogFile(RotatingFileHandler):
    """Follows no link that somebody has put in its place. With its older part it may take all bytes that logs may take."""

    def _open(self) -> TextIO:
        return TextIOWrapper(open_to_append(Path(self.baseFilename)), encoding="utf-8", write_through=True)

    def doRollover(self) -> None:
        super().doRollover()
        log = Path(self.baseFilename)
        _remove_oldest([run for run in logs_of_runs(log.parent) if run != log], _MAX_RUNS, 0)

    def handleError(self, record: logging.LogRecord) -> None:
        """Leave out a record where the disk is full. Whoever noticed that says so on the terminal, which shows all records."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def logs_of_runs(folder: Path) -> list[Path]:
    """Oldest run first; what others put beside them, under other names or as folders, is none."""
    found = [path for path in folder.glob("run-*.log") if _RUN.fullmatch(path.name) and path.is_file()]
    return sorted(found, key=lambda path: int(path.stem[4:]))


def set_up_logging(folder: Path, level: str, max_bytes: int = 0) -> Path:
    """Send records to stderr and to a new `run-NNNN.log` in `folder`. Returns that file.

    At `max_bytes` (0: never) it becomes `run-NNNN.log.1` and begins anew. The logs of the last 16 runs are kept, as long as all
    logs together take at most twice `max_bytes`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = logs_of_runs(folder)
    _remove_oldest(earlier, _MAX_RUNS - 1, max_bytes or math.inf)
    number = 1 + (int(earlier[-1].stem[4:]) if earlier else 0)
    path = folder / f"run-{number:04d}.log"
    to_file = _LogFile(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
    to_file.setFormatter(_OneLine(_FILE_FORMAT))
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(to_file)
    root.addHandler(_terminal_handler())
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    return path


def _remove_oldest(runs: list[Path], num_kept: int, max_bytes: float) -> None:
    """Keep the newest logs: those of `num_kept` runs, and of these at most `max_bytes`."""
    num_bytes = 0
    for number, log in enumerate(reversed(runs), start=1):
        for part in (log, log.with_name(f"{log.name}.1")):
            num_bytes += part.lstat().st_size if os.path.lexists(part) else 0
            if number > num_kept or num_bytes > max_bytes:
                part.unlink(missing_ok=True)


def _terminal_handler() -> logging.Handler:
    if not sys.stderr.isatty():
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(_OneLine("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
        return handler
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(console=Console(stderr=True), markup=False, show_path=False, log_time_format="%H:%M:%S")
    handler.setFormatter(_OneLine("%(message)s"))
    return handler


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


def last_records(
    log: Path, count: int, level: str = "DEBUG", max_bytes: int = MAX_BYTES
) -> tuple[list[LogRecord], int]:
    """The newest `count` of at least `level`, oldest first, those of the part before a rotation included.

    Of the end of each part `max_bytes` are read. Also where that reading of `log` ended: `follow` goes on there.
    """
    kept: deque[LogRecord] = deque(maxlen=count)
    num_read = 0
    for path in (log.with_name(f"{log.name}.1"), log):
        with contextlib.suppress(FileNotFoundError):
            with open_to_read(path) as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - max_bytes)
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
