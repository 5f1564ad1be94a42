"""Starts a stranger's program through three processes, each with fewer rights than the one before.

For programs in other languages than Python the first process of the tree starts compiler and program (`commands`).

    node ─ request on stdin ─▶ launcher ─▶ first process of the new tree ─▶ program
         ◀─ report on stderr ──┘ waits, kills                                   │
         ◀────────────────────── results on stdout ─────────────────────────────┘

The launcher stays outside: the program can neither see nor signal it. When the launcher ends, for any reason, the kernel ends
the first process and with it all others of its tree. The program cannot write to the report.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

from swarm.sandbox.inside import program

_IS_LINUX = sys.platform == "linux"
if _IS_LINUX:
    from swarm.sandbox.inside import commands, libc, namespaces, syscall_filter

_BY_SIGNAL = 4
_STANDARD_ERROR = 2


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    try:
        _supervise(request)
    except (OSError, ValueError) as error:
        _report(error=str(error))


def _supervise(request: dict[str, Any]) -> None:
    """Start the tree, wait for its end or the deadline, and report how it ended."""
    library = sysconfig.get_path("stdlib")
    os.chdir(library)
    use_namespaces = request["use_namespaces"]
    if use_namespaces:
        if not _IS_LINUX:
            raise OSError("namespaces are a part of Linux")
        _close_handles()
        if request.get("home"):
            os.chdir(request["home"])  # the current folder stays open to the user nobody, whatever is above it
        namespaces.leave_root()
        namespaces.enter_namespaces()
    _die_with_parent()
    if os.getppid() != request["node"]:
        return  # the node died before this process could be notified
    ready, when_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        _first_process(request, library, when_ready)
    os.close(when_ready)
    end = _wait(child, request.get("total_wall_s", request["limits"]["wall_s"]))
    if os.read(ready, 1):  # otherwise the process that failed has reported why
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        _report(end=end, cpu_s=usage.ru_utime + usage.ru_stime)
    if not use_namespaces:
        os.killpg(0, signal.SIGKILL)  # processes that the program left, and this one


def _close_handles() -> None:
    """Close all files but the three streams: from a handle on a folder, `..` leads out of the new root.

    The node's own files are closed already. Left are the two folders of the command line, whose numbers may be as high as
    the node has open files.
    """
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if number > _STANDARD_ERROR:
            with contextlib.suppress(OSError):  # the handle of this listing
                os.close(number)


def _wait(child: int, wall_s: float) -> str:
    """Wait for the end and return how it came: exit, signal, or wall (killed here)."""
    is_late = False

    def kill(*_: object) -> None:
        nonlocal is_late
        is_late = True
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    code = os.waitstatus_to_exitcode(status)
    if is_late:
        return "wall"
    return "signal" if code < 0 or code == _BY_SIGNAL else "exit"


def _first_process(request: dict[str, Any], library: str, when_ready: int) -> NoReturn:
    """Build the file system, start the program, and end as it ends."""
    try:
        _die_with_parent()
        if libc.has_no_reader(when_ready):
            os._exit(1)  # the launcher died before this process could be notified
        nowhere = os.open("/dev/null", os.O_RDWR)
        if "run" in request:
            size = request["limits"]["file_bytes"]
            namespaces.build_view(request["readable"], size, has_programs=True, current=request["home"])
            os.write(when_ready, b"1")
            os.close(when_ready)
            commands.run(request, nowhere)
            os._exit(0)
        if not request["use_namespaces"]:
            _become_program(request, nowhere, when_ready)
        namespaces.build_root(library, request["limits"]["file_bytes"])
        child = os.fork()
        if child == 0:
            _become_program(request, nowhere, when_ready)
        os.close(1)  # the node reads stdout to its end, which must be the program's end
        _, status = os.waitpid(child, 0)
        os._exit(_BY_SIGNAL if os.WIFSIGNALED(status) else 0)
    except BaseException as error:
        _report(error=str(error))
        os._exit(1)


def _become_program(request: dict[str, Any], nowhere: int, when_ready: int) -> NoReturn:
    """Give up all rights, report that, then run the stranger's code."""
    use_namespaces = request["use_namespaces"]
    try:
        if use_namespaces:
            os.setsid()
        program.limit(request["limits"], strict=use_namespaces)
        if _IS_LINUX:
            with contextlib.nullcontext() if use_namespaces else contextlib.suppress(OSError):
                libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
                libc.drop_capabilities()
                syscall_filter.allow_computing_only()
        os.write(
            when_ready, b"1"
        )  # only the launcher's code can: the pipe is closed next, and exit codes prove nothing
        program.keep_result_channel_only(nowhere)
    except BaseException as error:
        _report(error=str(error))
        os._exit(1)
    program.call(request["code"], request["entry"], request["inputs"])


def _die_with_parent() -> None:
    if _IS_LINUX:
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)


def _report(**facts: Any) -> None:
    os.write(2, json.dumps(facts).encode() + b"\n")
