"""Writes a report of an unexpected end: one text file in the node's folder that helps to find the cause.

version · why · configuration without secrets · stacks of all threads · last log records · last metrics rows
"""

import contextlib
import faulthandler
import logging
import os
import platform
import re
import threading
import time
import tomllib
import traceback
from collections import deque
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import IO

import tomli_w

from swarm import __version__
from swarm.config.shareable import shareable
from swarm.errors import ConfigError, StuckError, SwarmError, UnexpectedError
from swarm.machine.node_folder import MAX_CONFIG_BYTES, NodeFolder
from swarm.machine.safe_files import new_file, open_to_read, read_file, why_refused
from swarm.node.watchdog import stack_of
from swarm.observability.plain_text import plain

logger = logging.getLogger(__name__)

_MAX_REPORTS = 10
_NUM_RECORDS = 100
_NUM_ROWS = 5
_TAIL_BYTES = 1 << 16
_PASSWORD_IN_ADDRESS = re.compile(r"(\w+://)[^/@\s]+@")


class RecentRecords(logging.Handler):
    """Keeps the last hundred log records as lines."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        self._lines: deque[str] = deque(maxlen=_NUM_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))

    def lines(self) -> list[str]:
        return list(self._lines)


class CrashReports:
    """The crash reports in one node's folder, of which the newest ten are kept."""

    def __init__(self, folder: NodeFolder) -> None:
        """Turn a fault of native code that ended the previous process into a report."""
        self._folder = folder
        self._recent = RecentRecords()
        logging.getLogger().addHandler(self._recent)
        fatal = folder.logs / "fatal.txt"
        fatal.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(fatal) and fatal.lstat().st_size:
            logger.warning("an earlier process of this node was frozen, or ended by a fault: see %s", self._keep(fatal))
        fatal.unlink(missing_ok=True)
        self.stacks: IO[str] = TextIOWrapper(new_file(fatal), encoding="utf-8")
        """The open file into which faulthandler writes: segmentation faults and the like, and the stacks of a frozen process."""
        faulthandler.enable(self.stacks)

    def write(self, why: str, error: BaseException | None = None) -> Path:
        """Write one report and return its file. Raises OSError where it cannot be written, and leaves no part of it then."""
        path = self._path()
        text = "\n".join(plain(line, keep="\t") for line in self._lines(why, error))
        text = _PASSWORD_IN_ADDRESS.sub(r"\1…@", text)
        file = new_file(path)
        try:
            with file:
                file.write(f"{text}\n".encode())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._prune()
        return path

    def end_stuck(self, why: str) -> None:
        """Write a last report and end the process, whatever its threads are doing."""
        logger.critical("%s: ending, so that the supervisor starts the node again", why)
        try:
            logger.critical("details in %s", self.write(why))
        except OSError as error:
            logger.critical("no crash report was written: %s", error)
        logging.shutdown()
        os._exit(StuckError.exit_code)

    def close(self) -> None:
        logging.getLogger().removeHandler(self._recent)
        faulthandler.disable()
        self.stacks.close()

    def _lines(self, why: str, error: BaseException | None) -> Iterator[str]:
        yield f"swarm {__version__}, Python {platform.python_version()}, {platform.platform()}"
        yield f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}: {why}"
        if error is not None:
            yield from _section("error", "".join(traceback.format_exception(error)))
        for thread in threading.enumerate():
            yield from _section(f"thread {thread.name}", stack_of(thread.ident or 0))
        yield from _section("last log records", "\n".join(self._recent.lines()))
        yield from _section("last metrics rows", _last_lines(self._folder.metrics, _NUM_ROWS))
        yield from _section("configuration, without secrets", _settings(self._folder.config))

    def _path(self) -> Path:
        """A new file name. Names sort by time; two in the same second differ by a number."""
        stem = f"crash-{time.strftime('%Y%m%d-%H%M%S')}"
        paths = (self._folder.path / f"{stem}{suffix}.txt" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
        return next(path for path in paths if not os.path.lexists(path))

    def _keep(self, fatal: Path) -> Path:
        target = self._path()
        fatal.rename(target)
        self._prune()
        return target

    def _prune(self) -> None:
        reports = sorted(self._folder.path.glob("crash-*.txt"), key=lambda path: path.stat().st_mtime)
        for old in reports[:-_MAX_REPORTS]:
            old.unlink(missing_ok=True)


@contextlib.contextmanager
def crash_reports(folder: NodeFolder) -> Iterator[CrashReports]:
    """Report errors of the code within: anything but a SwarmError leaves it as an UnexpectedError that names the report.

    A place that cannot be read or written is no bug: it becomes a ConfigError.
    """
    reports = CrashReports(folder)
    try:
        yield reports
    except SwarmError:
        raise
    except Exception as error:  # the outermost handler: the user sees one line, and the details go to the file
        if isinstance(error, OSError) and (refused := why_refused(error)):
            raise ConfigError(refused) from None
        summary = f"{type(error).__name__}: {error}"
        try:
            details = f"details in {reports.write(summary, error)}"
        except OSError as refused:
            details = f"and no report of it was written: {refused}"
        raise UnexpectedError(f"unexpected {summary}; {details}") from error
    finally:
        reports.close()


def _settings(path: Path) -> str:
    try:
        return tomli_w.dumps(shareable(tomllib.loads(read_file(path, MAX_CONFIG_BYTES).decode())))
    except (OSError, ValueError, RecursionError) as error:
        return f"({error})"


def _section(title: str, text: str) -> Iterator[str]:
    yield ""
    yield f"── {title}"
    yield from text.rstrip().split("\n")


def _last_lines(path: Path, count: int) -> str:
    try:
        with open_to_read(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])
    except OSError as error:
        return f"({error})"
