"""The node's side of the sandbox: it sends code and inputs and reads results.

    code, inputs ─▶ launcher (a fresh Python) ─▶ … ─▶ program
    results, how it ended ◀── bounded in bytes and time ──┘

The program never learns which results are expected, so it cannot forge them; it can only compute them.
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
"""The folder of this package; on the launcher's path only until it has read the modules in `inside`."""
_START = "import sys; home = sys.argv[1]; sys.path.insert(0, home); from swarm.sandbox.inside import launcher; " + (
    "sys.path.remove(home); launcher.main()"
)
_ISOLATED = ("-s", "-P", "-S")
"""As -I -S, except that the environment counts: it is `_ENVIRONMENT` and nothing of the node's."""
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Sets have the same order on every node."""
SURE_FRACTION = 0.25
"""Share of the processor time within which a program must end by itself, so that slower machines find the same."""
_GRACE_S = 5.0
"""Added to the program's wall time, for starting a process on a busy machine and for the launcher's own end."""
_MAX_REPORT_BYTES = 4096
_CHUNK_BYTES = 1 << 16


class SandboxError(Exception):
    """The sandbox could not be set up here. This says nothing about the code."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of one run. All nodes that compare rewards use the same ones."""

    cpu_s: int = 2
    """Processor time of the program, in whole seconds as the kernel counts them."""
    wall_s: float = 10.0
    """Time from start to end, for a program that waits."""
    memory_bytes: int = 256 << 20
    """Address space, with 40 MiB of the interpreter."""
    output_bytes: int = 64 << 10
    """Size of all results together."""
    file_bytes: int = 1 << 20
    """Size of the largest file, and of all files together."""
    open_files: int = 16


End = Literal["exit", "signal", "wall", "output"]
"""exit: ended by itself, with any exit code. signal: killed, mostly by a limit. wall, output: it exceeded that limit."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The output of a program."""

    lines: tuple[bytes, ...]
    """The result of each input, in order, as the program wrote it: it may write anything."""
    end: End
    cpu_s: float
    """Processor time; 0 where it exceeded `output`."""


class Sandbox:
    """Runs one function of a piece of code on many inputs, in processes of their own."""

    def __init__(self, limits: RunLimits, *, use_namespaces: bool = True) -> None:
        """Without `use_namespaces` only limits and, on Linux, the system call filter apply; the code may then read files."""
        self._limits = limits
        self._use_namespaces = use_namespaces

    @classmethod
    def strongest(cls, limits: RunLimits, *, may_be_unsandboxed: bool) -> "Sandbox":
        """Make a sandbox that works here. Raises SandboxError where it has no namespaces, unless it may do without."""
        try:
            sandbox = cls(limits)
            sandbox.check()
        except SandboxError as error:
            if not may_be_unsandboxed:
                raise
            logger.warning("code of strangers runs without a sandbox, as tasks.run_code_unsandboxed allows: %s", error)
            sandbox = cls(limits, use_namespaces=False)
            sandbox.check()
        return sandbox

    def check(self) -> None:
        """Raises SandboxError where code cannot be run here."""
        result = self.run("def answer():\n    return 42\n", "answer", [[]])
        if result.lines != (b"42",):
            raise SandboxError(f"a program that returns 42 gave {result.lines!r} and ended by {result.end}")

    def run(self, code: str, entry: str, inputs: Sequence[Sequence[Any]]) -> RunResult:
        """Call the function `entry` of `code` with each list of arguments. Blocks for at most wall_s and the grace time.

        Raises SandboxError where the sandbox fails; whatever the code does is a result.
        """
        limits = self._limits
        request = {"code": code, "entry": entry, "inputs": inputs, "limits": asdict(limits)}
        return self.exchange(request, limits.wall_s, limits.output_bytes, use_namespaces=self._use_namespaces)

    @classmethod
    def exchange(
        cls, request: dict[str, Any], wall_s: float, output_bytes: int, *, use_namespaces: bool = True
    ) -> RunResult:
        """Start a launcher with this request, and read what comes back, at most so much and so long. Raises SandboxError."""
        request = {**request, "use_namespaces": use_namespaces, "node": os.getpid()}
        with cls._launcher(use_namespaces=use_namespaces) as process:
            try:
                output, report = _exchange(process, json.dumps(request).encode(), wall_s, output_bytes)
            finally:
                _kill(process)
        return _result(output, report, output_bytes)

    @staticmethod
    def _launcher(*, use_namespaces: bool) -> "subprocess.Popen[bytes]":
        """Start the launcher. With namespaces both folders that it reads are named by open files, which reveal no paths."""
        folders = {name: str(path) for name, path in (("package", _HOME), ("python", sys.base_prefix))}
        handles: dict[str, int] = {}
        try:
            if use_namespaces and sys.platform == "linux":
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


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, wall_s: float, output_bytes: int
) -> tuple[bytes, bytes]:
    """Write the request and read both streams to their ends, or to their limits in bytes and time."""
    assert process.stdin and process.stdout and process.stderr, "all three are pipes"
    deadline = time.monotonic() + wall_s + _GRACE_S
    room = {process.stdout: output_bytes + 1, process.stderr: _MAX_REPORT_BYTES}
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
            if len(read[process.stdout]) > output_bytes:
                break
    return bytes(read[process.stdout]), bytes(read[process.stderr])


def _write(stream: Any, data: memoryview) -> int:
    """Return the number of bytes written, or all of them where nobody reads any more."""
    try:
        return os.write(stream.fileno(), data[:_CHUNK_BYTES])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher's group before waiting for the launcher; the kernel ends the program's process tree with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(output: bytes, report: bytes, max_output_bytes: int) -> RunResult:
    if len(output) > max_output_bytes:
        return RunResult((), "output", 0.0)
    try:
        facts = json.loads(report)
    except ValueError:
        raise SandboxError(f"the launcher must report how the program ended, got {report[-300:]!r}") from None
    if "error" in facts:
        raise SandboxError(facts["error"])
    return RunResult(tuple(output.split(b"\n")[:-1]), facts["end"], facts["cpu_s"])
