"""Real node processes for end-to-end tests: start, watch their metrics, end them as a machine would."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from swarm.config import dump_toml, parse
from swarm.errors import NodeNotRunningError
from swarm.observability.metrics import read_rows
from swarm.observability.status_file import NodeStatus, read_status
from tests.swarm_process import SwarmProcess

DEADLINE_S = 90.0
T = TypeVar("T")


def node_settings(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Small and quick, on one thread; `sections` are merged over it.

    A node with a network rests half of its time: rounds that it computes while it waits for others take time from them.
    """
    is_alone = sections.get("network", {}).get("backend") == "off"
    base: dict[str, dict[str, Any]] = {
        "node": {"dir": str(folder), "threads": 1, "duty_cycle": 1.0 if is_alone else 0.5},
        "network": {"poll_interval_s": 0.2},
        "rollouts": {"groups_per_round": 6, "group_size": 4, "max_new_tokens": 12},
        "sharing": {"own_groups": 3, "swarm_groups": 3},
        "training": {"micro_batch_sequences": 32},
        "checkpoint": {"interval_rounds": 3},
        "evaluation": {"tasks_per_source": 0},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return base


class Process(Protocol):
    """What `SwarmProcess` and `subprocess.Popen` have in common."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


class WatchedProcess(Protocol):
    """A process whose output goes to a file."""

    process: Process
    output: Path


class NodeProcess:
    """One `swarm run` process; killed on exit if it still runs."""

    process: Process

    def __init__(self, settings: dict[str, Any], *arguments: str) -> None:
        self.folder = Path(settings["node"]["dir"])
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        config = self.folder.parent / f"{self.folder.name}.toml"
        config.write_text(dump_toml(parse(settings)))
        self.output = self.folder.parent / f"{self.folder.name}.out"
        self.process = SwarmProcess("run", str(config), *arguments, output=self.output)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.folder / "metrics.jsonl") if row["kind"] == "round"]

    @property
    def last_round(self) -> dict[str, Any]:
        rounds = self.rounds
        return rounds[-1] if rounds else {}

    def status(self) -> NodeStatus | None:
        try:
            return read_status(self.folder / "status.json")
        except NodeNotRunningError:
            return None

    def address(self) -> str:
        """First address others can join through; waits until this process has announced one."""

        def announced() -> str | None:
            status = self.status()
            own = status is not None and status.pid == self.process.pid and bool(status.addresses)
            return status.addresses[0] if own and status else None

        return wait_for(announced, "an address", self)

    def wait_for_round(self, number: int) -> dict[str, Any]:
        return wait_for(
            lambda: self.last_round if self.last_round.get("round", 0) >= number else None, f"round {number}", self
        )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill_9(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        return self.process.wait(timeout_s)


def wait_for(probe: Callable[[], T | None], what: str, *watched: "WatchedProcess", deadline_s: float = DEADLINE_S) -> T:
    """Poll until `probe` gives something; fails with the node's output when it died or the deadline passed."""
    until = time.monotonic() + deadline_s
    while (found := probe()) is None:
        died = [node for node in watched if node.process.poll() is not None]
        if died or time.monotonic() > until:
            tails = "\n".join(node.output.read_text()[-2000:] for node in watched)
            raise AssertionError(f"no {what} within {deadline_s:.0f} s (died: {bool(died)})\n{tails}")
        time.sleep(0.05)  # between two looks at another process's files
    return found
