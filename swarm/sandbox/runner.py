"""The node's side of the sandbox: code and inputs out, results back.

    code, inputs ─▶ launcher (a fresh Python) ─▶ … ─▶ program
    results, how it ended ◀── bounded in bytes and time ──┘

The program never learns what results are expected, so there is nothing it could forge: it can only compute them.
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

_HOME = Path(__file__).parents[2]
"""Where this package lies; on the launcher's path only until it has read what is in `inside`."""
_START = "import sys; home = sys.argv[1]; sys.path.insert(0, home); from swarm.sandbox.inside import launcher; " + (
    "sys.path.remove(home); launcher.main()"
)
_ISOLATED = ("-s", "-P", "-S")
"""As -I -S, but that the environment counts: it is this one and nothing of the node's."""
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Sets come in the same order on every node."""
_GRACE_S = 5.0
"""Beyond the program's wall time, for the start of a process on a busy machine and the launcher's own end."""
_MAX_REPORT_BYTES = 4096
_CHUNK_BYTES = 1 << 16


class SandboxError(Exception):
    """The sandbox could not be set up here; says nothing about the code."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Of one run. All nodes that compare rewards use the same ones."""

    cpu_s: int = 2
    """Processor time of the program, in whole seconds as the kernel counts them."""
    wall_s: float = 10.0
    """From start to end, for a program that waits."""
    memory_bytes: int = 256 << 20
    """Address space, the interpreter's 40 MiB included."""
    output_bytes: int = 64 << 10
    """All results together."""
    file_bytes: int = 1 << 20
    """Largest file, and all files together."""
    open_files: int = 16


End = Literal["exit", "signal", "wall", "output"]
"""exit: by itself, whatever its exit code. signal: killed, most of all by a limit. wall, output: it passed that limit."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a program left."""

    lines: tuple[bytes, ...]
    """What it gave as the result of each input, in order; anything, since the program may write what it likes."""
    end: End
    cpu_s: float
    """Processor time; 0 where it passed `output`."""


class Sandbox:
    """Runs one function of a piece of code on many inputs, in processes of their own."""

    def __init__(self, limits: RunLimits, *, is_fenced: bool = True) -> None:
        """Not `is_fenced`: limits keep the code, and on Linux the filter of system calls; it may then read files."""
        self._limits = limits
        self._is_fenced = is_fenced

    @classmethod
    def strongest(cls, limits: RunLimits, *, may_be_unfenced: bool) -> "Sandbox":
        """A sandbox that works here. Raises SandboxError where it would be unfenced, unless it may be."""
        try:
            sandbox = cls(limits)
            sandbox.check()
        except SandboxError as error:
            if not may_be_unfenced:
                raise
            logger.warning("code of strangers runs without a fence, as run_code_unsandboxed allows: %s", error)
            sandbox = cls(limits, is_fenced=False)
            sandbox.check()
        return sandbox

    def check(self) -> None:
        """Raises SandboxError where code cannot be run here."""
        result = self.run("def answer():\n    return 42\n", "answer", [[]])
        if result.lines != (b"42",):
            raise SandboxError(f"a program that returns 42 gave {result.lines!r} and ended by {result.end}")

    def run(self, code: str, entry: str, inputs: Sequence[Sequence[Any]]) -> RunResult:
        """Call the function `entry` of `code` with each list of arguments. Blocks for at most wall_s and the grace.

        Raises SandboxError where the sandbox fails; whatever the code does is a result.
        """
        limits = self._limits
        request = {
            "code": code, "entry": entry, "inputs": inputs,
            "limits": asdict(limits), "is_fenced": self._is_fenced, "node": os.getpid(),
        }  # fmt: skip
        with self._launcher() as process:
            try:
                output, report = _exchange(process, json.dumps(request).encode(), limits)
            finally:
                _kill(process)
        return _result(output, report, limits.output_bytes)

    def _launcher(self) -> "subprocess.Popen[bytes]":
        """Behind a fence both folders that it reads have names that say nothing of this machine: those of two open files."""
        folders = {name: str(path) for name, path in (("package", _HOME), ("python", sys.base_prefix))}
        handles: dict[str, int] = {}
        try:
            if self._is_fenced and sys.platform == "linux":
                handles = {name: os.open(path, os.O_PATH) for name, path in folders.items()}
                folders = {name: f"/proc/self/fd/{handle}" for name, handle in handles.items()}
            return subprocess.Popen(
                ["python", *_ISOLATED, "-c", _START, folders["package"]],  # noqa: S607  the name that it sees  # nosec B607
                executable=sys.executable,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env={**_ENVIRONMENT, "PYTHONHOME": folders["python"]},
                pass_fds=tuple(handles.values()),
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"a process must be startable, got {error}") from None
        finally:
            for handle in handles.values():
                os.close(handle)


def _exchange(process: subprocess.Popen[bytes], request: bytes, limits: RunLimits) -> tuple[bytes, bytes]:
    """Write the request, read both streams to their ends, or to their bounds in bytes and time."""
    assert process.stdin and process.stdout and process.stderr, "all three are pipes"
    deadline = time.monotonic() + limits.wall_s + _GRACE_S
    room = {process.stdout: limits.output_bytes + 1, process.stderr: _MAX_REPORT_BYTES}
    read: dict[Any, bytearray] = {stream: bytearray() for stream in room}
    unsent = memoryview(request)
    with selectors.DefaultSelector() as selector:
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        for stream in room:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                stream: Any = key.fileobj
                if stream is process.stdin:
                    unsent = unsent[_write(stream, unsent) :]
                    is_done = not unsent
                else:
                    data = os.read(stream.fileno(), min(_CHUNK_BYTES, room[stream] - len(read[stream])))
                    read[stream] += data
                    is_done = not data or len(read[stream]) >= room[stream]
                if is_done:
                    selector.unregister(stream)
                    stream.close()
            if len(read[process.stdout]) > limits.output_bytes:
                break
    return bytes(read[process.stdout]), bytes(read[process.stderr])


def _write(stream: Any, data: memoryview) -> int:
    """Bytes that are done with; all of them where nobody reads any more."""
    try:
        return os.write(stream.fileno(), data[:_CHUNK_BYTES])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The launcher's group, the launcher not yet waited for; the kernel takes the program's tree along."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(output: bytes, report: bytes, max_output_bytes: int) -> RunResult:
    if len(output) > max_output_bytes:
        return RunResult((), "output", 0.0)
    try:
        facts = json.loads(report)
    except ValueError:
        raise SandboxError(f"the launcher must tell how the program ended, got {report[-300:]!r}") from None
    if "error" in facts:
        raise SandboxError(facts["error"])
    return RunResult(tuple(output.split(b"\n")[:-1]), facts["end"], facts["cpu_s"])
