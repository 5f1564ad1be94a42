"""Compiles a stranger's program and runs it once per input, as the first process of the sandbox's tree.

    text ─▶ file in /tmp ─▶ compiler ─▶ program ◀─ one input at a time
                                          └─▶ output ─▶ one line of JSON per run on stdout

Compiler and program are processes of their own, without rights, and everything that they started is killed before the next
run. Expected outputs never enter. The lines say how a run ended; a program can write no line itself, nor signal this process.
"""

import base64
import contextlib
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

from swarm.sandbox.inside import libc, program, syscall_filter

_CHUNK_BYTES = 1 << 16
_STOPPED = 0.5
"""A process that was killed after this share of its time was stopped at the limit, which the kernel measures in coarse ticks."""
_NOT_STARTED = 127
"""Exit code of a command that could not be started."""
_OWN_SIGNALS = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python treats in its own way, and programs must not."""


def run(request: dict[str, Any], nowhere: int) -> None:
    """Write one line for the compiler, if there is one, and one per input until a run takes too long.

    Raises OSError outside of a process tree of its own, where ending all other processes would end those of the user.
    """
    if os.getpid() != 1:
        raise OSError("programs must run in a process tree of their own")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the only one that a program could send to the first process
    folder = Path("/tmp")  # noqa: S108  of the sandbox  # nosec B108
    os.chdir(folder)
    (folder / request["file"]).write_bytes(request["code"].encode(errors="replace"))
    if request["compile"]:
        report = _execute(
            request["compile"], b"", request["compile_limits"], time.monotonic() + request["compile_wall_s"], nowhere
        )
        _write(report)
        if report["end"] != "exit" or report["code"]:
            return
    deadline = time.monotonic() + request["wall_s"]
    for text in request["inputs"]:
        report = _execute(request["run"], text.encode(errors="replace"), request["limits"], deadline, nowhere)
        _write(report)
        if report["end"] in ("limit", "wall") or report["cpu_s"] > request["sure_s"]:
            return


def _execute(
    command: dict[str, Any], text: bytes, limits: dict[str, int], deadline: float, nowhere: int
) -> dict[str, Any]:
    """Run one command with this input to its end, or to its limits."""
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    child = os.fork()
    if child == 0:
        _become(command, limits, (theirs_in, theirs_out, nowhere))
    os.close(theirs_in)
    os.close(theirs_out)
    handle = os.pidfd_open(child)
    output, end = _exchange(handle, ours_in, ours_out, text, limits["output_bytes"], deadline)
    os.close(handle)
    os.close(ours_out)
    _kill_all_others()
    _, status, usage = os.wait4(child, 0)
    _reap()
    code = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    if end == "exit" and code in (-signal.SIGKILL, -signal.SIGXCPU) and cpu_s > _STOPPED * limits["cpu_s"]:
        end = "limit"
    return {"end": end, "code": code, "cpu_s": cpu_s, "output": base64.b64encode(output).decode()}


def _exchange(
    handle: int, ours_in: int, ours_out: int, text: bytes, max_bytes: int, deadline: float
) -> tuple[bytes, str]:
    """(output, how it ended): exit, output (too much of it), or wall. Closes `ours_in`."""
    poll, output, unsent = select.poll(), bytearray(), memoryview(text)
    os.set_blocking(ours_in, False)
    os.set_blocking(ours_out, False)
    poll.register(handle, select.POLLIN)
    poll.register(ours_out, select.POLLIN)
    poll.register(ours_in, select.POLLOUT)
    is_reading = is_writing = True
    end = "wall"
    while end == "wall" and (left_s := deadline - time.monotonic()) > 0:
        events = dict(poll.poll(left_s * 1000))
        if is_writing and ours_in in events:
            unsent = unsent[_send(ours_in, unsent) :]
            if not unsent:
                is_writing = False
                poll.unregister(ours_in)
                os.close(ours_in)  # the end of its input
        if is_reading and (ours_out in events or handle in events):
            is_reading = _receive(ours_out, output, max_bytes)
            if not is_reading:
                poll.unregister(ours_out)
        if len(output) > max_bytes:
            end = "output"
        elif handle in events:
            end = "exit"
    if is_writing:
        os.close(ours_in)
    return bytes(output), end


def _send(number: int, data: memoryview) -> int:
    """The number of bytes written, or all of them where nobody reads any more."""
    try:
        return os.write(number, data[:_CHUNK_BYTES]) if data else 0
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)


def _receive(number: int, output: bytearray, max_bytes: int) -> bool:
    """Read what is there, up to one byte too many. Returns whether more may come."""
    while len(output) <= max_bytes:
        try:
            data = os.read(number, min(_CHUNK_BYTES, max_bytes + 1 - len(output)))
        except BlockingIOError:
            return True
        if not data:
            return False
        output += data
    return True


def _become(command: dict[str, Any], limits: dict[str, int], streams: tuple[int, int, int]) -> NoReturn:
    """Give up all rights and become the command."""
    try:
        os.setsid()
        for number in _OWN_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 4096)
        program.limit(limits, strict=True)
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        libc.drop_capabilities()
        if limits["processes"]:
            syscall_filter.allow_processes()
        else:
            syscall_filter.allow_computing_only(starts_program=True)
        os.execve(command["binary"], command["arguments"], command["environment"])  # noqa: S606  the purpose  # nosec B606
    except BaseException:
        os._exit(_NOT_STARTED)


def _kill_all_others() -> None:
    """The first process of a tree reaches all others of it, and nobody else."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def _reap() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _write(report: dict[str, Any]) -> None:
    data = json.dumps(report).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]
