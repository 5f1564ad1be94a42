"""Reward functions that installed packages offer under the entry point group `swarm.rewards`.

    def reward(prompt: str, expected: str, answer: str, **parameters) -> float      # in [0, 1]

The function runs in a process of its own (`plugin_process`): one that takes too long is stopped, and one that crashes takes
nothing along. It costs its task then, never the node.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from swarm.errors import TaskError
from swarm.tasks.plugin_process import GROUP
from swarm.tasks.task_source import TaskFailure

MAX_ANSWER_CHARS = 16_384
"""Longer answers have the value 0 without a look."""
TIME_BUDGET_S = 5.0
"""For one answer. The function is then started anew."""
_LOAD_BUDGET_S = 60.0
_MAX_REPLY_BYTES = 4096
_START = "from swarm.tasks.plugin_process import main; main()"


def installed_rewards() -> dict[str, EntryPoint]:
    """Every reward function that can be named, by its name. Raises TaskError where two packages offer one name."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = found.setdefault(entry.name, entry)
        if _origin(other) != _origin(entry):
            raise TaskError(
                f"a reward function must come from one package, got {entry.name!r} of {_origin(other)} and "
                f"{_origin(entry)}; remove one"
            )
    return found


class RewardPlugin:
    """One reward function with its parameters, called by several threads one after the other."""

    def __init__(
        self, source: str, entry: EntryPoint, parameters: dict[str, Any], time_budget_s: float = TIME_BUDGET_S
    ) -> None:
        """Raises TaskError where the function cannot be loaded."""
        self.version = _origin(entry)
        """Package and its version: nodes with others do not compare rewards."""
        self._source = source
        self._entry = entry
        self._parameters = parameters
        self._time_budget_s = time_budget_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None
        try:
            with self._lock:
                self._start()
        except TaskFailure as failure:
            raise TaskError(
                f"reward function {entry.name} of {self.version} must be loadable, got {failure}; mend or remove it"
            ) from None

    def __call__(self, prompt: str, expected: str, answer: str) -> float:
        """Whatever number the function gives. Raises TaskFailure where it fails or takes too long."""
        if len(answer) > MAX_ANSWER_CHARS:
            return 0.0
        with self._lock:
            if self._process is None:
                self._start()
            reply = self._ask(json.dumps([prompt, expected, answer]).encode() + b"\n", self._time_budget_s)
        if "value" not in reply:
            raise self._failure(str(reply.get("error")))
        return float(reply["value"])

    def _start(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, self._entry.name, self._entry.value, json.dumps(self._parameters)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"},
            bufsize=0,
        )
        self._stop = weakref.finalize(self, _stop, self._process)
        reply = self._ask(b"", _LOAD_BUDGET_S)
        if "error" in reply:
            self._stop()
            raise self._failure(str(reply["error"]))

    def _ask(self, line: bytes, time_budget_s: float) -> dict[str, Any]:
        """Send one line and read one back. A function that is late or breaks the protocol is stopped."""
        process, reply = self._process, b""
        assert process and process.stdin and process.stdout, "started, with both pipes"
        deadline = time.monotonic() + time_budget_s
        try:
            process.stdin.write(line)  # the function reads it at once: it waits for nothing else
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while not reply.endswith(b"\n") and selector.select(deadline - time.monotonic()):
                    data = os.read(process.stdout.fileno(), _MAX_REPLY_BYTES)
                    reply += data
                    if not data or len(reply) > _MAX_REPLY_BYTES:
                        break
            if reply.endswith(b"\n"):
                return dict(json.loads(reply))
        except (OSError, ValueError) as error:
            reply = str(error).encode()
        self._stop()
        self._process = None
        is_late = time.monotonic() >= deadline
        raise self._failure(f"took longer than {time_budget_s:g} s" if is_late else f"ended with {reply[:100]!r}")

    def _failure(self, message: str) -> TaskFailure:
        return TaskFailure(self._source, f"reward function {self._entry.name}: {message}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _origin(entry: EntryPoint) -> str:
    """NAME==VERSION of the package. Raises TaskError where that is not told."""
    name = entry.dist.name if entry.dist is not None else None
    version = entry.dist.version if entry.dist is not None else None
    if not name or not version:
        raise TaskError(f"a reward function must come from a package with a version, got {entry}; mend its metadata")
    return f"{name}=={version}"
