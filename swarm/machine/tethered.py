"""Runs a command that dies with its parent: `python -P -m swarm.machine.tethered PARENT_PID COMMAND ARGUMENT...`.

Linux sends the signal even when the parent was killed with SIGKILL and could not clean up. Elsewhere it is a plain
exec.
"""

import ctypes
import os
import signal
import sys

from swarm.machine.child_python import module_command

_MODULE = "swarm.machine.tethered"
_PR_SET_PDEATHSIG = 1


def command(parent_pid: int, arguments: list[str]) -> list[str]:
    """Return `arguments` as a command that dies with `parent_pid`."""
    return module_command(_MODULE, str(parent_pid), *arguments)


def main() -> None:
    parent_pid, arguments = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # survives the exec below
        if os.getppid() != parent_pid:  # it died before prctl was called
            sys.exit(1)
    os.execv(arguments[0], arguments)  # noqa: S606 - replacing this process is the point  # nosec B606


if __name__ == "__main__":
    main()
