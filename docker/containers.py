"""Containers of nodes, as `check.py` looks at them from outside."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

WAIT_S = float(os.environ.get("CHECK_WAIT_S", "300"))
"""For what takes seconds on a quiet machine: four nodes and this script may have to share two busy cores. CHECK_WAIT_S sets it
for one that is busy with other things."""
PAUSE_S = 3.0
"""Between two looks at a container; each starts a program in it."""
CHECKPOINT_ROUNDS = 10
"""A node that is killed, or that leaves its round unfinished at a stop, goes on from its last checkpoint."""

Told = dict[str, Any]


class CheckFailed(Exception):
    """What was expected, and what was seen."""


def run(
    *command: str, may_fail: bool = False, timeout_s: float = 1800, variables: Mapping[str, str] | None = None
) -> str:
    """The program's output; with `may_fail` empty where it failed, as `docker exec` prints its own failures there.

    `variables` are over those of this process.
    """
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environment)
    if done.returncode and not may_fail:
        raise CheckFailed(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return "" if done.returncode else done.stdout


def compose_program() -> list[str]:
    """The plugin, or the program of its own that it was before."""
    docker, program = shutil.which("docker"), shutil.which("docker-compose")
    if docker and not subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        return [docker, "compose"]
    if docker and program:
        return [program]
    sys.exit(f"this needs docker and its compose, got {docker} and {program}; install them")


def wait_until(is_reached: Callable[[], bool], missed: Callable[[], str]) -> None:
    """Raises CheckFailed with what `missed` says after WAIT_S."""
    until = time.monotonic() + WAIT_S
    while not is_reached():
        if time.monotonic() > until:
            raise CheckFailed(f"within {WAIT_S:.0f} s {missed()}")
        time.sleep(PAUSE_S)


class Container:
    """Of one node."""

    def __init__(self, container_id: str) -> None:
        self.id = container_id
        self._folder = ""

    @property
    def name(self) -> str:
        return run("docker", "inspect", "--format", "{{.Name}}", self.id).strip().lstrip("/")

    @property
    def folder(self) -> str:
        """Its folder in the volume, empty until it has one; then containers keep theirs."""
        self._folder = self._folder or self.exec("start-swarm", "folder", may_fail=True).strip()
        return self._folder

    def exec(self, *command: str, may_fail: bool = False) -> str:
        return run("docker", "exec", self.id, *command, may_fail=may_fail, timeout_s=120)

    def status(self) -> Told:
        """Empty where there is none yet."""
        told = self.exec("cat", f"{self.folder}/status.json", may_fail=True) if self.folder else ""
        return json.loads(told) if told else {}

    def rows(self) -> list[Told]:
        """Of its rounds, from all of its runs."""
        rows = [json.loads(line) for line in self.exec("cat", f"{self.folder}/metrics.jsonl").splitlines()]
        return [row for row in rows if row["kind"] == "round"]

    def wait_for(self, what: str, is_reached: Callable[[Told], bool]) -> Told:
        """The status that has it."""

        def is_there() -> bool:
            status = self.status()
            return bool(status) and is_reached(status)

        def missed() -> str:
            logs = run("docker", "logs", "--tail", "20", self.id, may_fail=True)
            return f"{self.name}: no {what}, got {self.status()}\n{logs}"

        wait_until(is_there, missed)
        return self.status()

    def wait_for_growth(self, *names: str, by: int = 1) -> None:
        """Until these counters of its rounds have grown."""
        before = self.status()["last_round"]
        targets = {name: before.get(name, 0) + by for name in names}

        def is_reached(status: Told) -> bool:
            return all(status["last_round"].get(name, 0) >= target for name, target in targets.items())

        self.wait_for(f"{targets}", is_reached)


def came_back(node: Container, before: Told) -> str:
    """What it resumed. Raises CheckFailed where it is somebody else, or began anew."""

    def is_back(status: Told) -> bool:
        return status["started_at"] > before["started_at"] and status["phase"] == "learning" and status["round"] > 0

    now = node.wait_for("round of a new run", is_back)
    if now["peer_id"] != before["peer_id"]:
        raise CheckFailed(f"{node.name} must come back as {before['peer_name']}, came as {now['peer_name']}")
    if now["round"] <= before["round"] - CHECKPOINT_ROUNDS:
        raise CheckFailed(
            f"{node.name} must go on after its last checkpoint, was at {before['round']}, is at {now['round']}"
        )
    return f"{now['peer_name']}, round {before['round']} before, {now['round']} after"
