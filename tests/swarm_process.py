"""`swarm` commands and modules of tests, each in a process of its own that need not import torch and its friends first.

    with SwarmProcess("run", "node.toml", output=Path("node.out")) as node: ...
    swarm("status", "--json", cwd=folder).stdout
    ModuleProcess("tests.e2e.merge_process", "folder").answer(60)

A fork server has imported them once, and every command is a fork of it: with a process id, a folder, an environment,
files and signals of its own. It differs from `python -m swarm.cli.main` in the order of imports alone, and takes two
seconds instead of eight to its first round. What is about that order, or weighs a process, starts Python itself.
"""

import atexit
import ctypes
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.e2e.audited_node import note_contacts

IMPORTED_ONCE = "tests.swarm_imports"


class SwarmProcess:
    """One command while it runs; what tests use of `subprocess.Popen`. As a context manager it kills what still runs."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: Path = Path(os.devnull),
        output: Path,
        errors: Path | None = None,
        contacts: Path | None = None,
    ) -> None:
        """`output` is appended to, and takes what goes to stderr, too, unless `errors` does.

        `environment`: in place of this process's own. `contacts`: a file for every address that the command contacts.
        """
        variables = {**(os.environ if environment is None else environment), "OMP_NUM_THREADS": "1"}
        files = (stdin, output, errors or output, contacts)
        self._process = _fork_server().Process(target=_be_swarm, args=(arguments, cwd or Path.cwd(), variables, files))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.wait(10)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("swarm", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ModuleProcess:
    """`python -m MODULE ARGUMENT…` in a process of its own, with a socket to the test as its stdin and stdout.

    It answers each line with a line of JSON. A method that waits blocks its thread.
    """

    def __init__(
        self, module: str, *arguments: str, errors: Path | None = None, network_namespace: str | None = None
    ) -> None:
        """`errors` takes its stderr. `network_namespace`: the name of the one that it runs in, as `ip netns` lists it."""
        ours, theirs = multiprocessing.Pipe()
        self._process = _fork_server().Process(
            target=_be_module, args=(module, arguments, dict(os.environ), (theirs, errors), network_namespace)
        )
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._socket = socket.socket(fileno=os.dup(ours.fileno()))
        ours.close()
        self._lines = self._socket.makefile("r", encoding="utf-8")

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def tell(self, line: str) -> None:
        """Send a line without waiting for its answer."""
        self._socket.sendall(line.encode() + b"\n")

    def answer(self, timeout_s: float) -> Any:
        """Wait for the next answer. Raises TimeoutError, and EOFError where the process has ended."""
        self._socket.settimeout(timeout_s)
        if not (line := self._lines.readline()):
            raise EOFError("the process has ended")
        return json.loads(line)

    def ask(self, line: str, timeout_s: float) -> Any:
        self.tell(line)
        return self.answer(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """End its stdin, which asks for an end in good order, and wait for that. Raises subprocess.TimeoutExpired."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_WR)
        self._process.join(timeout_s)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("module", timeout_s)
        self._close()

    def kill(self) -> None:
        """End it as `kill -9` does, if it still runs."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.join()
        self._close()

    def _close(self) -> None:
        self._lines.close()
        self._socket.close()


def swarm(
    *arguments: str, cwd: Path | None = None, stdin: str = "", timeout_s: float = 120.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The outcome of a whole command; `environment` on top of this process's own."""
    with tempfile.TemporaryDirectory() as name:
        given, output, errors = (Path(name) / part for part in ("stdin", "stdout", "stderr"))
        given.write_text(stdin)
        with SwarmProcess(
            *arguments, cwd=cwd, environment=os.environ | environment, stdin=given, output=output, errors=errors
        ) as process:
            code = process.wait(timeout_s)
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())


@cache
def _fork_server() -> ForkServerContext:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the server's own, before it imports
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([IMPORTED_ONCE])
    return context


def _be_swarm(
    arguments: tuple[str, ...], cwd: Path, environment: dict[str, str], files: tuple[Path, Path, Path, Path | None]
) -> None:
    """In the fork. `files`: as in the constructor, in its order."""
    stdin, output, errors, contacts = files
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path, flags in ((0, stdin, os.O_RDONLY), (1, output, append), (2, errors, append)):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put another in its place
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    random.seed()  # every fork would draw the same
    from swarm.cli import main

    if contacts is not None:
        note_contacts(str(contacts))
    sys.argv = [main.__file__, *arguments]
    try:
        main.main()
    finally:
        atexit._run_exitfuncs()  # which forks of multiprocessing leave out


_CLONE_NEWNET = 0x40000000


def _be_module(
    module: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    outside: tuple[Connection, Path | None],
    network_namespace: str | None,
) -> None:
    """In the fork, which has one thread: the namespace holds for all that it starts. `outside`: the lines and stderr."""
    lines, errors = outside
    os.environ.clear()
    os.environ.update(environment)
    for number in (0, 1):
        os.dup2(lines.fileno(), number)
    lines.close()
    if errors is not None:
        opened = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, 2)
        os.close(opened)
    if network_namespace is not None:
        with Path("/run/netns", network_namespace).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {network_namespace}")
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put another in its place
    random.seed()  # every fork would draw the same
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which forks of multiprocessing leave out
