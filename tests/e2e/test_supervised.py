"""`swarm run --supervised` as a process: a node that is killed comes back where it was, and ends when it is told to."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from swarm.observability.status_file import read_status
from tests.e2e.node_process import Process
from tests.swarm_process import SwarmProcess

PATIENCE_S = 120.0
SETTINGS = (
    "--network.backend", "off", "--sharing.swarm_groups", "0", "--evaluation.tasks_per_source", "0",
    "--observability.http", "false", "--checkpoint.interval_rounds", "1",
)  # fmt: skip


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Not a fork: what it starts again is the command that Python was called with."""
    command = [sys.executable, "-m", "swarm.cli.main", *run(tmp_path), "--supervised"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stderr=said, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


@pytest.fixture
def slow_node(tmp_path: Path) -> Iterator[SwarmProcess]:
    """In a round that takes longer than anybody waits for here."""
    said = {"output": tmp_path / "printed", "errors": tmp_path / "said"}
    with SwarmProcess(*run(tmp_path), "--rollouts.groups_per_round", "4000", **said) as process:
        yield process


def run(tmp_path: Path) -> list[str]:
    return ["run", "--node.dir", str(tmp_path / "n"), *SETTINGS]


def until(holds: Callable[[], bool], process: Process) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)  # nobody tells


def rounds(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["round"] for row in rows if row["kind"] == "round"]


def test_a_killed_node_is_started_again_and_an_interrupt_ends_it_for_good(
    tmp_path: Path, supervisor: "subprocess.Popen[str]"
) -> None:
    folder = tmp_path / "n"
    until(lambda: len(rounds(folder)) >= 3, supervisor)  # the third begins when the first is on the disk
    first = read_status(folder / "status.json").pid
    psutil.Process(first).kill()
    num_before = len(rounds(folder))
    until(lambda: len(rounds(folder)) > num_before, supervisor)
    assert rounds(folder)[num_before] > 1, "it went on from its checkpoint"
    second = read_status(folder / "status.json").pid
    assert second != first
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(PATIENCE_S) == 0
    assert not psutil.pid_exists(second)
    said = (tmp_path / "said").read_text()
    assert "supervisor: the node ended with code 137; it is started again in" in said
    assert said.count("stopping: the round in flight") == 1, "it was told once"


def test_a_node_that_is_interrupted_while_it_starts_is_no_crash(tmp_path: Path, slow_node: SwarmProcess) -> None:
    said, status = tmp_path / "said", tmp_path / "n" / "status.json"
    until(lambda: status.exists(), slow_node)
    slow_node.send_signal(signal.SIGINT)
    assert slow_node.wait(PATIENCE_S) == 0, said.read_text()
    assert read_status(status).phase == "ended"


def test_a_round_that_is_left_is_no_crash(tmp_path: Path, slow_node: SwarmProcess) -> None:
    said, status = tmp_path / "said", tmp_path / "n" / "status.json"
    until(lambda: status.exists() and read_status(status).phase == "learning", slow_node)
    slow_node.send_signal(signal.SIGINT)
    assert slow_node.wait(PATIENCE_S) == 0
    assert read_status(status).phase == "ended"
    assert "left round 1 unfinished" in said.read_text() and "could not be scored" not in said.read_text()


def test_a_second_interrupt_ends_a_node_at_once(tmp_path: Path, slow_node: SwarmProcess) -> None:
    said = tmp_path / "said"
    until(lambda: said.exists() and "policy ready" in said.read_text(), slow_node)
    until(lambda: read_status(tmp_path / "n" / "status.json").phase == "learning", slow_node)
    slow_node.send_signal(signal.SIGINT)
    until(lambda: "stopping: " in (tmp_path / "said").read_text(), slow_node)
    slow_node.send_signal(signal.SIGINT)
    assert slow_node.wait(PATIENCE_S) == 130
    assert "stopped; " not in said.read_text(), "it did not wait until the grace for the round in flight was over"
