"""Runs one service of the node in a process of its own, with limits and, where possible, namespaces.

    node ─ request on stdin ─▶ supervisor ─▶ service, the first process of its own tree
         ◀──── one line per question on stdout ────┘

A service answers questions about strangers' texts. It needs Python packages, so it sees the folders of the interpreter, of
installed packages and of system libraries, all read-only, and nothing else: no home, no network, no other process. The
supervisor is outside: when it or the node ends, the kernel ends the service and everything that it started.
"""

import importlib
import json
import os
import resource
import select
import signal
import site
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_IS_LINUX = sys.platform == "linux"
if _IS_LINUX:
    from swarm.sandbox.inside import libc, namespaces, syscall_filter

_MAX_MESSAGE_CHARS = 300
_OPEN_FILES = 256
"""Most open files: each pipe or pair of sockets takes kernel memory that does not count as the service's own."""
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")

Service = Callable[[Any], dict[str, Any]]


def main() -> None:
    """Read the request, confine this process, then answer questions until the node closes its end."""
    request = json.loads(sys.stdin.buffer.readline())
    replies = os.dup(1)
    os.dup2(2, 1)  # discard what packages print
    # packages ask for it when they are imported, and Python would try to write there
    tempfile.tempdir = "/tmp"  # noqa: S108  of the sandbox  # nosec B108
    try:
        _confine(request, replies)
        service: Service = importlib.import_module(request["module"]).start(request["opening"])
    except Exception as error:  # the process's outer boundary; packages may fail to import in any way
        return _reply(replies, {"error": f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]})
    _reply(replies, {"ready": True})
    for line in sys.stdin.buffer:
        _reply(replies, service(json.loads(line)))
    return None


def _confine(request: dict[str, Any], replies: int) -> None:
    """Give up everything a service does not need. Raises OSError where "required" namespaces cannot be set up."""
    is_required, is_wanted = request["namespaces"] == "required", request["namespaces"] != "none"
    use_namespaces = is_wanted and _enter_sandbox(request, replies, is_required=is_required)
    limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": request["file_bytes"], "RLIMIT_AS": request["memory_bytes"]}
    if is_wanted:
        limits["RLIMIT_NOFILE"] = _OPEN_FILES
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None and value is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
    if not (_IS_LINUX and is_wanted):
        return
    try:
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        if use_namespaces:
            libc.drop_capabilities()
        syscall_filter.deny_new_processes()
    except OSError:
        if is_required:
            raise


def _enter_sandbox(request: dict[str, Any], replies: int, *, is_required: bool) -> bool:
    """Continue as the first process of a new tree with its own file system. False where the system does not allow it."""
    if not _IS_LINUX:
        if is_required:
            raise OSError("namespaces are a part of Linux")
        return False
    try:
        namespaces.enter_namespaces()
    except OSError:
        if is_required:
            raise
        return False
    child = os.fork()
    if child:
        _supervise(child, replies)
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    if libc.has_no_reader(replies):
        os._exit(1)  # the node and the supervisor died before this process could be notified
    namespaces.build_view(_readable(request["readable"]), request["file_bytes"] or 0)
    return True


def _supervise(child: int, replies: int) -> None:
    """Wait for the service or the node to end, and end with it."""
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(replies, 0)  # POLLERR is reported in any case, once the node no longer reads
    events = dict(poll.poll())
    if handle not in events:
        os.kill(child, signal.SIGKILL)
    os._exit(0 if events.get(handle) else 1)


def _readable(more: list[str]) -> Iterator[str]:
    """Yield the folders of Python and its packages, and the requested ones."""
    own_home = str(Path(__file__).parents[3])
    yield from (sys.base_prefix, sys.prefix, sys.exec_prefix, *site.getsitepackages(), *_LIBRARIES, *more)
    for path in sys.path:  # of a source tree of this project only the package, since node folders may lie beside it
        is_source_tree = path == own_home and Path(path).name not in ("site-packages", "dist-packages")
        yield str(Path(path, "swarm")) if is_source_tree else path


def _reply(channel: int, reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(channel, data) :]
