"""`swarm join --gpus all` as processes. A stand-in for nvidia-smi lists two GPUs, and the nodes compute on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.swarm_process import swarm

PATIENCE_S = 240.0
SETTINGS = (
    "--node.device", "cpu", "--node.dir", "mine", "--evaluation.tasks_per_source", "0",
    "--network.listen", '["/ip4/127.0.0.1/tcp/0"]', "--network.poll_interval_s", "0.2", "--checkpoint.interval_rounds", "1",
    "--rollouts.groups_per_round", "4", "--node.duty_cycle", "0.3",  # nothing here needs more
)  # fmt: skip


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, GPU-aa, RTX 4090, 24564'\necho '1, GPU-bb, RTX 4090, 24564'\n")
    tool.chmod(0o755)
    made = swarm("create", "friends", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    command = [sys.executable, "-m", "swarm.cli.main", "join", "friends.swarm.toml", "--gpus", "all", *SETTINGS]
    environment = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}", "SWARM_NODE__SEED": "7"}
    environment |= {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=said, text=True, env=environment)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


def is_running(pid: int) -> bool:
    """Not so where only its entry is left, which the first process of a container may not remove."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def status(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}


def groups_of_others(folder: Path) -> int:
    return status(folder).get("last_round", {}).get("train/swarm_groups_total", 0)


def on_the_page(said: str) -> list[dict[str, Any]]:
    address = next((line.split()[-1] for line in said.splitlines() if line.startswith("all nodes on ")), None)
    if address is None:
        return []
    try:
        with urllib.request.urlopen(f"{address}api/nodes", timeout=5) as answer:
            return json.load(answer)["nodes"]
    except OSError:
        return []


def test_a_node_on_each_gpu_learns_from_the_other_comes_back_and_ends_with_ctrl_c(
    nodes: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    folders = [tmp_path / "mine" / f"gpu-{number}" for number in (0, 1)]
    said = tmp_path / "said"

    def until(holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert nodes.poll() is None, said.read_text()
            assert time.monotonic() < deadline, f"no {what}: {said.read_text()}"
            time.sleep(0.1)  # nobody tells

    until(lambda: all(groups_of_others(folder) for folder in folders), "node that learns from the other")
    until(lambda: sum(node["is_alive"] for node in on_the_page(said.read_text())) == 2, "page with both nodes")
    before = [status(folder) for folder in folders]
    assert before[0]["peer_id"] != before[1]["peer_id"]
    gpus = [psutil.Process(node["pid"]).environ()["CUDA_VISIBLE_DEVICES"] for node in before]
    assert gpus == ["GPU-aa", "GPU-bb"]
    assert all((folder / "manifest.toml").read_bytes() == (tmp_path / "friends.swarm.toml").read_bytes()
               for folder in folders)  # fmt: skip
    assert tomllib.loads((folders[1] / "config.toml").read_text())["node"]["seed"] == 7

    os.kill(before[1]["pid"], signal.SIGKILL)
    until(lambda: status(folders[1]).get("pid") != before[1]["pid"], "second start")
    until(lambda: status(folders[1]).get("last_round"), "rounds after it")
    assert "gpu-1: " in said.read_text() and "started again" in said.read_text()
    assert status(folders[1])["peer_id"] == before[1]["peer_id"]

    pids = [process.pid for process in psutil.Process(nodes.pid).children(recursive=True)]
    assert len(pids) >= 5, "two nodes, their supervisors, the page"
    nodes.send_signal(signal.SIGINT)
    assert nodes.wait(60) == 0, said.read_text()
    assert "all nodes have ended; the same command resumes mine" in said.read_text()
    assert [pid for pid in pids if is_running(pid)] == []
    assert [status(folder)["phase"] for folder in folders] == ["ended", "ended"]
