"""The last of the three processes: it gives up all rights, then calls the function that a stranger wrote.

The stranger's code shares this interpreter, so nothing here is secret or trusted: expected results and verdict never enter
this process. The node compares what it writes to RESULT_FD.
"""

import contextlib
import json
import os
import resource
from typing import Any, NoReturn

RESULT_FD = 3


def keep_result_channel_only(nowhere: int) -> None:
    """Move standard output to RESULT_FD, connect 0, 1 and 2 to `nowhere`, and close everything else."""
    result = os.dup(1)
    nowhere = os.dup(nowhere)
    os.dup2(result, RESULT_FD)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.closerange(RESULT_FD + 1, 4096)


def limit(limits: dict[str, int], *, strict: bool) -> None:
    """Set soft and hard limits. Not `strict`: only those the system has; macOS has none of address space."""
    wanted = {
        "RLIMIT_CPU": limits["cpu_s"],
        "RLIMIT_AS": limits["memory_bytes"],
        "RLIMIT_FSIZE": limits["file_bytes"],
        "RLIMIT_NOFILE": limits["open_files"],
        "RLIMIT_STACK": 8 << 20,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": limits.get("processes", 0),
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 64,
    }
    for name, value in wanted.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.nullcontext() if strict else contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))


def call(code: str, entry: str, inputs: list[list[Any]]) -> NoReturn:
    """Write one line per input: the result as JSON, or an empty line without a result. Ends the process."""
    try:
        _call(code, entry, inputs)
    finally:
        os._exit(0)


def _call(code: str, entry: str, inputs: list[list[Any]]) -> None:
    names: dict[str, Any] = {"__name__": "answer"}
    if "random" in code:
        # without a seed, chance would decide whether another node finds an author's true claim false, and bans the author
        import random  # only here, since it takes longer than most programs

        random.seed(0)
    exec(compile(code, "answer.py", "exec"), names)  # noqa: S102  the purpose of the sandbox  # nosec B102
    function = names[entry]
    for arguments in inputs:
        try:
            line = json.dumps(function(*arguments))
        except BaseException:
            line = ""
        _write(line.encode() + b"\n")


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(RESULT_FD, data) :]
