"""Runs the node processes of one testbed until they end.

    plans ─ first node ─ its address ─ other nodes ─┐
                                                    ├─ live table ─ summary, plot
    metrics.jsonl of each node ─ NodeHistory ───────┘

A node that dies is shown with the cause and does not stop the others. No node process outlives the testbed.
"""

import contextlib
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import psutil
from rich.console import Console

from swarm.config import without_settings
from swarm.errors import ConfigError, NodeNotRunningError, SwarmError
from swarm.machine import tethered
from swarm.machine.child_python import swarm_command
from swarm.machine.node_folder import TASKS, NodeFolder, set_aside
from swarm.machine.safe_files import check_no_links, open_to_append, open_to_read
from swarm.machine.stop_signals import sigterm_interrupts
from swarm.observability.plain_text import counted, plain
from swarm.observability.status_file import read_status
from swarm.report.live_table import LiveTable, NodeView
from swarm.report.node_history import NodeHistory
from swarm.report.summary import conclusion, exchange_table, learning_table, source_table, summarize, write_summary
from swarm.testbeds.profiles import NodePlan, PlanRequest, plan_nodes

STOP_GRACE_S = 4.0
"""How long nodes may finish their round after an interrupt; then they are killed."""
_KILL_WAIT_S = 0.5
_NUM_TAIL_BYTES = 8192
_MAX_TERMINAL_BYTES = 8 << 20
_BY_SIGNAL = 128
"""A supervisor ends with this plus the number of the signal that ended its node."""
SUPERVISOR = " supervisor: "
"""In each line that a supervisor prints among those of its node."""


class NodeProcess:
    """One process in a session of its own, so that Ctrl-C reaches it through the testbed only."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        is_alone: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command` begins with the path of an executable; its output is appended to `terminal.log`.

        If that file has more than 8 MiB, it becomes `terminal.log.1` first.
        Its settings are complete: variables of the environment set none of them.
        `is_alone`: it may compute on all cores, which several nodes on one machine would only fight for.
        `environment`: variables over those of this process.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self._terminal = folder / "terminal.log"
        self._begins_at = 0
        shared = {} if is_alone else {"OMP_NUM_THREADS": "1"}
        variables = {**shared, **without_settings(os.environ), **(environment or {})}
        with contextlib.suppress(FileNotFoundError):
            if self._terminal.lstat().st_size > _MAX_TERMINAL_BYTES:
                self._terminal.replace(folder / "terminal.log.1")
        with open_to_append(self._terminal) as output:
            self._begins_at = output.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                tethered.command(os.getpid(), list(command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=variables,
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
        """Multiaddresses that this very process or one that it supervises has announced, none before that."""
        try:
            status = read_status(NodeFolder(self.folder).status)
        except NodeNotRunningError:
            return ()
        is_own = status.pid == self.pid or status.pid in {process.pid for process in self.descendants()}
        return status.addresses if is_own else ()

    def cause_of_death(self) -> str:
        """Last line that it printed, or the signal that ended it."""
        code = self.exit_code or 0
        if code < 0 or code > _BY_SIGNAL:  # of the node, or of one whose supervisor says so
            return f"killed by {signal.Signals(-code if code < 0 else code - _BY_SIGNAL).name}"
        said = [line for line in self._last_lines() if SUPERVISOR not in line]
        return plain(said[-1]) if said else f"exit code {code} without a word"

    def restarts(self) -> list[str]:
        """What its supervisor, if it has one, said lately."""
        return [plain(line) for line in self._last_lines() if SUPERVISOR in line]

    def _last_lines(self) -> list[str]:
        with open_to_read(self._terminal) as output:
            output.seek(max(self._begins_at, output.seek(0, os.SEEK_END) - _NUM_TAIL_BYTES))
            lines = output.read().decode(errors="replace").split("\n")
        return [line.strip() for line in lines if line.strip()]

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


_LOOK_INTERVAL_S = 0.25
_INTERRUPTED = 130
LOCK_FILE = "testbed.lock"

CommandOf = Callable[[NodePlan, str | None], list[str]]
"""(plan, address to join through) -> command line."""


def run_command(plan: NodePlan, address: str | None) -> list[str]:
    """`swarm run` in this interpreter."""
    command = swarm_command("run", str(plan.config_path))
    return command if address is None else [*command, "--network.initial_peers", json.dumps([address])]


class Testbed:
    """Nodes by plan; `run` blocks until all have ended, the time is up, or Ctrl-C."""

    def __init__(
        self,
        plans: Sequence[NodePlan],
        console: Console,
        command_of: CommandOf = run_command,
        *,
        grace_s: float = STOP_GRACE_S,
        beside: Mapping[str, NodeProcess] | None = None,
    ) -> None:
        """`beside`: further processes by name, which end with the nodes."""
        self.plans = plans
        self._console = console
        self._command_of = command_of
        self._grace_s = grace_s
        self._beside = dict(beside or {})
        self._processes: dict[str, NodeProcess] = {}
        self._histories = {plan.name: NodeHistory(NodeFolder(plan.folder).metrics) for plan in plans}
        self._reported: set[str] = set()
        self._said: set[tuple[str, str]] = set()

    def run(self, title: str, max_minutes: float | None = None) -> list[NodeView]:
        """Start what is not complete and show it until its end. Whatever happens, no process is left.

        Ctrl-C comes out as KeyboardInterrupt after all nodes have ended, and so does SIGTERM.
        """
        deadline = time.monotonic() + 60 * max_minutes if max_minutes else math.inf
        with sigterm_interrupts():
            try:
                with LiveTable(self._console, title) as table:
                    self._start(table, deadline)
                    self._watch(table, deadline)
            finally:
                if any(process.exit_code is None for process in self._processes.values()):
                    self._console.print("ending the nodes …", highlight=False)
                stop_all([*self._processes.values(), *self._beside.values()], self._grace_s)
        return self.views()

    def views(self) -> list[NodeView]:
        """State of all nodes as of now."""
        for history in self._histories.values():
            history.refresh()
        return [
            NodeView(
                plan.name, plan.label, plan.config.node.max_rounds or 0, self._state(plan), self._histories[plan.name]
            )
            for plan in self.plans
        ]

    def is_complete(self, plan: NodePlan) -> bool:
        """Whether the node has done all its rounds and the last evaluation."""
        history = self._histories[plan.name]
        return history.end is not None and history.round >= (plan.config.node.max_rounds or sys.maxsize)

    def _start(self, table: LiveTable, deadline: float) -> None:
        """The first node that comes up is the one that the others join through, however long it takes to come up."""
        self.views()
        waiting = [plan for plan in self.plans if not self.is_complete(plan)]
        address: str | None = None
        while waiting and time.monotonic() < deadline:
            plan = waiting.pop(0)
            plan.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            plan.write()
            command = self._command_of(plan, address)
            self._processes[plan.name] = process = NodeProcess(plan.folder, command, environment=plan.environment)
            network = plan.config.network
            if address is None and network.backend != "off" and not network.initial_peers and waiting:
                address = self._wait_for_address(process, table, deadline)
                if address:
                    table.say(f"{plan.name} listens on {address}; the others join through it")

    def _wait_for_address(self, process: NodeProcess, table: LiveTable, deadline: float) -> str | None:
        while process.exit_code is None and time.monotonic() < deadline:
            if addresses := process.addresses:
                return addresses[0]
            self._show(table)
            time.sleep(_LOOK_INTERVAL_S)
        return None

    def _watch(self, table: LiveTable, deadline: float) -> None:
        while any(process.exit_code is None for process in self._processes.values()):
            self._show(table)
            if time.monotonic() > deadline:
                table.say("the time is up")
                return
            time.sleep(_LOOK_INTERVAL_S)
        self._show(table)

    def _show(self, table: LiveTable) -> None:
        table.update(self.views())
        for name, process in (*self._processes.items(), *self._beside.items()):
            if process.exit_code and name not in self._reported:
                self._reported.add(name)
                table.say(f"{name} ended: {process.cause_of_death()}")
            for line in process.restarts():
                if (name, line) not in self._said:
                    self._said.add((name, line))
                    table.say(f"{name}: {line}")

    def _state(self, plan: NodePlan) -> str:
        process = self._processes.get(plan.name)
        if self.is_complete(plan):
            return "done"
        if process is None:
            return "waiting"
        if process.exit_code is None:
            return "learning" if self._histories[plan.name].rounds else "starting"
        return "stopped" if process.exit_code in (0, _INTERRUPTED) else process.cause_of_death()


def run_and_report(folder: Path, request: PlanRequest, console: Console, max_minutes: float | None = None) -> None:
    """Run the nodes of a testbed with a live table; then print what they learned, and write summary.json and a plot.

    Raises ConfigError, SwarmError where a node failed, and KeyboardInterrupt after all nodes have ended.
    """
    from swarm.report.plot import plot_testbed

    testbed = Testbed(plan_nodes(folder, request), console)
    before = testbed.views()
    if all(view.state == "done" for view in before):
        console.print(f"this run is complete; start anew with fresh, or go on beyond {before[0].max_rounds} rounds")
    elif any(view.history.rounds for view in before):
        console.print(f"resuming the run in {folder}; fresh would start anew", highlight=False)
    views = testbed.run(f"{counted(request.num_nodes, 'node')} in {folder}", max_minutes)
    summaries = [summarize(view) for view in views]
    write_summary(summaries, folder / "summary.json")
    console.print(learning_table(summaries), source_table(summaries), exchange_table(summaries))
    console.print(conclusion(summaries), highlight=False)
    if told := why_none_shared(testbed.plans, views):
        console.print(told, highlight=False)
    plot_testbed(views, folder / "progress.png")
    console.print(f"plot: {folder / 'progress.png'}", highlight=False, soft_wrap=True)
    if failed := [view for view in views if view.state not in ("done", "stopped")]:
        told = "; ".join(f"{view.name}: {view.state}" for view in failed)
        raise SwarmError(
            f"{counted(len(failed), 'node')} of {len(views)} failed: {told}; logs are in {folder}/node-*/logs"
        )


def why_none_shared(plans: Sequence[NodePlan], views: Sequence[NodeView]) -> str:
    """A line for a run in which nodes were to share, and no two of them trained at the same time; empty for any other."""
    shares = all(plan.config.sharing.swarm_groups for plan in plans)
    if not shares or any(view.history.last_round.get("train/swarm_groups_total") for view in views):
        return ""
    trained = sorted((view for view in views if view.history.rounds), key=lambda view: view.history.rounds[0]["time_s"])
    pairs = list(pairwise(trained))
    if not pairs or any(one.history.rounds[-1]["time_s"] > other.history.rounds[0]["time_s"] for one, other in pairs):
        return ""
    (one, other), *_ = pairs
    return (
        f"no node learned from another: {one.name} had made its last round before {other.name} made its first; give more "
        "rounds (--rounds)"
    )


@contextlib.contextmanager
def open_testbed(folder: Path, console: Console, *, fresh: bool) -> Iterator[None]:
    """Lock the folder for one run; `fresh` moves the earlier one aside. Raises ConfigError where another one runs in it."""
    with exclusive(folder):
        if fresh and (aside := set_aside(folder, {LOCK_FILE, TASKS})):
            console.print(f"earlier run moved to {aside}", highlight=False, soft_wrap=True)
        try:
            yield
        except KeyboardInterrupt:
            console.print(f"all nodes have ended; the same again resumes {folder}", highlight=False)
            raise


@contextlib.contextmanager
def exclusive(folder: Path, option: str = "--dir") -> Iterator[None]:
    """One testbed per folder. Raises ConfigError where another one runs in it, or it cannot be written.

    `option`: sets the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for checked in (folder, *folder.glob("seed-*")):
            check_no_links(checked)
        opened = open_to_append(folder / LOCK_FILE)
    except OSError as error:
        raise ConfigError(
            f"a testbed must have a folder that can be written, got {error.filename or folder}: {error.strerror}; set {option}"
        ) from None
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"a folder must hold one testbed at a time, got {folder} in use; wait for its end or set {option}"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n".encode())
        lock.flush()
        yield
