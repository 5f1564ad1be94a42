"""Log lines on the terminal and in one file per run.

Text from peers may stand in a log line: control characters are replaced, and rich markup is never interpreted.
"""

import logging
import re
import sys
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

from swarm.observability.plain_text import plain
from swarm.safe_files import open_to_append

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
    """Follows no link that somebody has put in its place."""

    def _open(self) -> TextIO:
        return TextIOWrapper(open_to_append(Path(self.baseFilename)), encoding="utf-8", write_through=True)


def logs_of_runs(folder: Path) -> list[Path]:
    """Oldest run first; what others put beside them, under other names or as folders, is none."""
    found = [path for path in folder.glob("run-*.log") if _RUN.fullmatch(path.name) and path.is_file()]
    return sorted(found, key=lambda path: int(path.stem[4:]))


def set_up_logging(folder: Path, level: str, max_bytes: int = 0) -> Path:
    """Send records to stderr and to a new `run-NNNN.log` in `folder`. Returns that file.

    At `max_bytes` (0: never) it becomes `run-NNNN.log.1` and begins anew; the logs of the last 16 runs are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = logs_of_runs(folder)
    for old in earlier[: -(_MAX_RUNS - 1)]:
        old.unlink(missing_ok=True)
        old.with_name(f"{old.name}.1").unlink(missing_ok=True)
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
