"""A Python process that answers one line of JSON with another, for work that must be possible to stop.

start ─▶ {"ready": true} or {"error": text}
line ──▶ one line back, within its time, or the process is killed and started anew for the next one
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

_START_BUDGET_S = 60.0
_MAX_REPLY_BYTES = 1 << 20


class LineProcessError(Exception):
    """The process could not start, was late, or ended without an answer."""

    def __init__(self, message: str, *, by_question: bool = False) -> None:
        """`by_question`: it was there, and what it was asked took too long or ended it."""
        super().__init__(message)
        self.by_question = by_question


class LineProcess:
    """Started with the first line. Safe from any thread: lines are answered one after the other."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        """`module`: whose `main` speaks the protocol. `arguments`: its command line."""
        self._command = [sys.executable, "-c", f"from {module} import main; main()", *arguments]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None
        self._is_closed = False

    def close(self) -> None:
        """End the process, also in the middle of an answer; whoever asks or waits then meets LineProcessError."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # whoever waits for it sees the end of its output, and leaves the lock
        with self._lock:
            self._end()

    def start(self) -> None:
        """Before the first line. Raises LineProcessError."""
        with self._lock:
            if self._process is None:
                self._start()

    def ask(self, question: Any, time_budget_s: float) -> dict[str, Any]:
        """`question`: anything that JSON holds. The time does not count a start. Raises LineProcessError."""
        with self._lock:
            if self._process is None:
                self._start()
            return self._exchange(json.dumps(question).encode() + b"\n", time_budget_s)

    def _start(self) -> None:
        if self._is_closed:
            raise LineProcessError("closed")
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the node, which then ends this one in good order
        )
        self._stop = weakref.finalize(self, _stop, self._process)
        if self._is_closed:  # meanwhile, by another thread
            self._process.kill()
        reply = self._exchange(b"", _START_BUDGET_S)
        if "error" in reply:
            self._end()
            raise LineProcessError(str(reply["error"]))

    def _exchange(self, line: bytes, time_budget_s: float) -> dict[str, Any]:
        """One line out and one in. A process that is late or breaks the protocol is killed."""
        process = self._process
        assert process and process.stdin and process.stdout, "started, with both pipes"
        deadline = time.monotonic() + time_budget_s
        reply, why = b"", ""
        try:
            process.stdin.write(line)  # it reads this at once: it waits for nothing else
            reply = _read_line(process.stdout.fileno(), deadline)
            if reply.endswith(b"\n"):
                return dict(json.loads(reply))
        except (OSError, ValueError) as error:
            why = str(error)
        self._end()
        is_late = time.monotonic() >= deadline
        message = f"took longer than {time_budget_s:g} s" if is_late else f"ended with {why or reply[:100]!r}"
        raise LineProcessError(message, by_question=bool(line) and not self._is_closed)

    def _end(self) -> None:
        self._stop()
        self._process = None


def _read_line(descriptor: int, deadline: float) -> bytes:
    """What came until the end of a line, of the output or of the time."""
    line = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
            data = os.read(descriptor, 1 << 16)
            line += data
            if not data or len(line) > _MAX_REPLY_BYTES:
                break
    return bytes(line)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # what was never read
                stream.close()
