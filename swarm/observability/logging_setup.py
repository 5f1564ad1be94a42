"""Log lines on the terminal and in one file per run.

Text from peers may stand in a log line: control characters are replaced, and rich markup is never interpreted.
"""

import logging
import sys
from pathlib import Path

_NOISY = ("httpx", "uvicorn", "hivemind", "transformers", "matplotlib", "asyncio", "PIL")
_FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class _OneLine(logging.Formatter):
    """Escapes control characters of the message, so that no record forges another line or moves the cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.message)
        return super().formatMessage(record)


def set_up_logging(folder: Path, level: str) -> Path:
    """Send records to stderr and to a new `run-NNNN.log` in `folder`. Returns that file."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(p.stem[4:]) for p in folder.glob("run-[0-9]*.log")), default=0)
    path = folder / f"run-{number:04d}.log"
    to_file = logging.FileHandler(path, encoding="utf-8")
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
