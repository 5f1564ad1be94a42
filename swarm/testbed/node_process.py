"""Node processes of a testbed: start, watch, end. None outlives the testbed, however that ends."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from swarm.errors import NodeNotRunningError
from swarm.node_folder import NodeFolder
from swarm.observability.plain_text import plain
from swarm.observability.status_file import read_status
from swarm.safe_files import open_to_append, open_to_read
from swarm.testbed import tethered

STOP_GRACE_S = 4.0
"""How long nodes may finish their round after an interrupt; then they are killed."""
_KILL_WAIT_S = 0.5
_NUM_TAIL_BYTES = 8192


class NodeProcess:
    """One process in a session of its own, so that Ctrl-C reaches it through the testbed only."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        """`command` begins with the path of an executable; its output is appended to `terminal.log`."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self._terminal = folder / "terminal.log"
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        with open_to_append(self._terminal) as output:
            self._process = subprocess.Popen(
                tethered.command(os.getpid(), list(command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses that this very process has announced, none before that."""
        try:
            status = read_status(NodeFolder(self.folder).status)
        except NodeNotRunningError:
            return ()
        return status.addresses if status.pid == self.pid else ()

    def cause_of_death(self) -> str:
        """Last line that it printed, or the signal that ended it."""
        code = self.exit_code or 0
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        with open_to_read(self._terminal) as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _NUM_TAIL_BYTES))
            lines = output.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return plain(said[-1]) if said else f"exit code {code} without a word"

    def interrupt(self) -> None:
        """Ask for an end after the round in flight."""
        self._process.send_signal(signal.SIGINT)  # does nothing once it has been waited for

    def wait(self, deadline: float) -> None:
        """Until it has ended, or `time.monotonic()` passes the deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))

    def descendants(self) -> list[psutil.Process]:
        """Everything it has started, the libp2p daemon among them, which has a session of its own."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        if self.exit_code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()


def stop_all(nodes: Iterable[NodeProcess], grace_s: float = STOP_GRACE_S) -> None:
    """Interrupt all, wait, kill what is left with everything it started. A second Ctrl-C skips the wait."""
    running = [node for node in nodes if node.exit_code is None]
    started = [process for node in running for process in node.descendants()]
    deadline = time.monotonic() + grace_s
    try:
        for node in running:
            node.interrupt()
        for node in running:
            node.wait(deadline)
    finally:
        for node in running:
            node.kill()
        _, left = psutil.wait_procs(started, _KILL_WAIT_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
