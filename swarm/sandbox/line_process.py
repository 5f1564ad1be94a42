"""Runs a service that reads strangers' texts in a confined process of its own, which can be stopped at any time.

    start ───▶ {"ready": true} or {"error": text}
    question ▶ one reply in time, or the process is killed and started again for the next question

`swarm/sandbox/inside/confined.py` confines the process. It gets no environment variables of the node except those in
`_INHERITED_VARIABLES`, and no module is ever imported from the current folder.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from swarm.machine.safe_files import parse_json_text

_START_BUDGET_S = 60.0
_MAX_REPLY_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
_HOME = str(Path(__file__).parents[2])
"""The folder of this package."""
_INHERITED_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "SYSTEMROOT")
"""Where the system's libraries are. Nothing else is passed on, since operators keep secrets in the environment."""
_SET_VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class LineProcessError(Exception):
    """The process could not start, was late, or ended without an answer."""

    def __init__(self, message: str, *, by_question: bool = False, is_late: bool = False) -> None:
        """`by_question`: the process was running, and the question took too long (`is_late`) or ended it."""
        super().__init__(message)
        self.by_question = by_question
        self.is_late = is_late


@dataclass(frozen=True, slots=True)
class Confinement:
    """What the process may use."""

    memory_bytes: int | None
    """Most address space, or None without a limit; not enforced on macOS."""
    file_bytes: int | None = 0
    """Largest file that it may write, and size of its /tmp, the only folder that a sandboxed one may write; None: any."""
    namespaces: Literal["required", "if possible", "none"] = "required"
    """Namespaces without a network, without other processes, and with installed packages as the only files, read-only.

    "required": the process does not start where the system allows no namespaces. "if possible": without namespaces it has the
    limits and, on Linux, a filter against starting programs. "none": limits only, for code that the operator trusts.
    """
    readable: tuple[str, ...] = ()
    """Absolute paths of further files and folders that a sandboxed process may read."""


class LineProcess:
    """One service. It starts with the first question. Safe from any thread: questions are answered one at a time."""

    def __init__(self, module: str, opening: Any, confinement: Confinement) -> None:
        """`module` has a function `start(opening)` that returns a function from a question to a reply (a dict).

        It runs in the new process, already confined. `opening` is any JSON value. It is passed over a pipe, so it does not
        appear in the list of processes.
        """
        self._request = {"module": module, "opening": opening, **asdict(confinement)}
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None
        self._is_closed = False

    def close(self) -> None:
        """End the process, also during an answer. Threads that ask or wait get LineProcessError."""
        self._is_closed = True
        if (process := self._process) is not None:
            _kill(process)  # a thread that waits for it sees the end of its output and releases the lock
        with self._lock:
            self._end()

    def start(self) -> None:
        """Start the process before the first question. Raises LineProcessError."""
        with self._lock:
            if self._process is None:
                self._start()

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Hold the process for this thread, so that what follows can be timed without the waiting for other threads."""
        with self._lock:
            yield

    def renew(self) -> None:
        """Start a new process, after ending an old one. Raises LineProcessError."""
        with self._lock:
            self._end()
            self._start()

    def ask(self, question: Any, time_budget_s: float) -> dict[str, Any]:
        """Send `question`, any JSON value, and return the reply. The time excludes a start. Raises LineProcessError."""
        with self._lock:
            if self._process is not None and _has_written(self._process):
                self._end()  # an earlier question corrupted it, and this question must get neither that output nor the blame
            if self._process is None:
                self._start()
            return self._exchange(question, time_budget_s, is_question=True)

    def _start(self) -> None:
        if self._is_closed:
            raise LineProcessError("closed")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-c", "from swarm.sandbox.inside.confined import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=confined_environment(sys.path),
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the node, which ends this process itself
        )
        self._stop = weakref.finalize(self, _stop, self._process)
        if self._is_closed:  # another thread closed it during the start
            _kill(self._process)
        reply = self._exchange(self._request, _START_BUDGET_S, is_question=False)
        if "error" in reply:
            self._end()
            raise LineProcessError(str(reply["error"]))

    def _exchange(self, line: Any, time_budget_s: float, *, is_question: bool) -> dict[str, Any]:
        """Send one line and read one. A process that is late or breaks the protocol is killed."""
        process = self._process
        assert process and process.stdin and process.stdout, "started, with both pipes"
        deadline = time.monotonic() + time_budget_s
        data, why = b"", ""
        try:
            _write(
                process.stdin.fileno(), process.stdout.fileno(), json.dumps(line).encode() + b"\n", deadline=deadline
            )
            data = _read_line(process.stdout.fileno(), deadline)
            if data.endswith(b"\n"):
                reply = parse_json_text(data)
                if isinstance(reply, dict):
                    return reply
        except (OSError, ValueError) as error:  # the process is not trusted once it has read a text
            why = str(error)
        self._end()
        is_late = time.monotonic() >= deadline
        message = f"took longer than {time_budget_s:g} s" if is_late else f"ended with {why or data[:100]!r}"
        raise LineProcessError(message, by_question=is_question and not self._is_closed, is_late=is_late)

    def _end(self) -> None:
        self._stop()
        self._process = None


def confined_environment(paths: Sequence[str]) -> dict[str, str]:
    """Return all environment variables of the process. `paths` is where this process imports from.

    Relative paths and the current folder are left out: whoever can write there must not choose what runs.
    """
    here = os.path.realpath(Path.cwd())
    allowed = [path for path in paths if Path(path).is_absolute() and os.path.realpath(path) != here]
    own = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    return {**own, **_SET_VARIABLES, "PYTHONPATH": os.pathsep.join(allowed if _HOME in allowed else [_HOME, *allowed])}


def _has_written(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it wrote anything unasked, or ended."""
    with selectors.DefaultSelector() as selector:
        assert process.stdout is not None, "a pipe"
        selector.register(process.stdout, selectors.EVENT_READ)
        return bool(selector.select(0))


def _write(descriptor: int, replies: int, data: bytes, deadline: float) -> None:
    """Write to the process. Raises OSError where it writes without being asked, or does not read in time."""
    os.set_blocking(descriptor, False)
    unsent = memoryview(data)
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_WRITE)
        selector.register(replies, selectors.EVENT_READ)
        while unsent:
            ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
            if replies in ready:
                raise OSError("a reply without a question")
            if not ready:
                raise TimeoutError("the question was not read")
            unsent = unsent[os.write(descriptor, unsent[:_CHUNK_BYTES]) :]


def _read_line(descriptor: int, deadline: float) -> bytes:
    """Read to the end of a line, of the output, or of the time."""
    line = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
            data = os.read(descriptor, _CHUNK_BYTES)
            line += data
            if not data or len(line) > _MAX_REPLY_BYTES:
                break
    return bytes(line)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the whole group, with everything that a service without namespaces has started."""
    if process.returncode is None:  # not yet waited for, so its number cannot belong to another process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    _kill(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # unread input
                stream.close()
