"""`swarm testbed` with real nodes and sockets: sharing, interrupted, resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm.observability.metrics import read_rows

DEADLINE_S = 120.0
QUICK = [
    "--nodes", "2", "--dir", "run", "--rollouts.groups_per_round", "4", "--rollouts.group_size", "4",
    "--sharing.own_groups", "2", "--sharing.swarm_groups", "2", "--rollouts.max_new_tokens", "8",
    "--evaluation.tasks_per_source", "1", "--training.micro_batch_sequences", "32", "--node.duty_cycle", "0.6",
]  # fmt: skip


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "swarm.cli.main", "testbed", *QUICK, *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )  # fmt: skip


@pytest.mark.alone
def test_testbed_shares_ends_within_five_seconds_and_resumes(tmp_path: Path) -> None:
    testbed = start(tmp_path, "--rounds", "1000000")
    rows = [wait_for_shared_round(testbed, tmp_path / "run" / name) for name in ("node-1", "node-2")]
    family = psutil.Process(testbed.pid).children(recursive=True)
    assert sum("p2pd" in process.name() for process in family) == 2
    started = time.monotonic()
    testbed.send_signal(signal.SIGINT)
    output, _ = testbed.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert testbed.returncode == 130, output
    assert "node-1 listens on /ip4/127.0.0.1/tcp/" in output
    assert "all nodes have ended" in output
    assert psutil.wait_procs(family, timeout=5)[1] == [], (
        "helpers of a node end with it, and the system takes them away"
    )

    enough = str(3 + max(last_row(tmp_path / "run" / name)["round"] for name in ("node-1", "node-2")))
    testbed = start(tmp_path, "--rounds", enough)
    output, _ = testbed.communicate(timeout=DEADLINE_S)
    assert testbed.returncode == 0, output
    assert "resuming the run" in output
    nodes = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(node["state"], node["rounds"]) for node in nodes] == [("done", int(enough))] * 2
    assert all(node["held_out_start"] is not None and node["held_out_end_round"] == int(enough) for node in nodes)
    assert all(node["bytes_sent"] > 0 and node["bytes_received"] > 0 for node in nodes)
    assert all(node["swarm_groups"] >= row["train/swarm_groups_total"] for node, row in zip(nodes, rows, strict=True))
    assert (tmp_path / "run" / "progress.png").read_bytes().startswith(b"\x89PNG")


def last_row(folder: Path) -> dict[str, Any]:
    rounds = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "round"]
    return rounds[-1] if rounds else {}


def wait_for_shared_round(testbed: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """The first round seen in which it has learned from the other node and served it."""
    until = time.monotonic() + DEADLINE_S
    while True:
        row = last_row(folder)
        if row.get("train/swarm_groups_total", 0) > 0 and row["exchange/bytes_sent"] > 0:
            return row
        assert testbed.poll() is None
        assert time.monotonic() < until, row
        time.sleep(0.1)  # between two looks at another process's file
