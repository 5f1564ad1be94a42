"""How long a person waits: for `swarm --help`, for `swarm status`, and for the first trained step of the demo.

    python benchmarks/cli.py            the demo's four nodes, too; about half a minute
    python benchmarks/cli.py --quick    two nodes instead of four

Each command is started several times, and the fastest counts: that is what it costs where nothing else runs. Before that it is
started once, so that files are in memory and compiled. The first step is counted from the start of the testbed's command to the
first row of a round in any node's metrics. `--imports` lists the slowest imports of `swarm --help` instead.
On a machine that has other work the processor time of the same runs says more: on an idle one a command takes hardly longer.
The last line of the output is one JSON object: `help_s`, `status_s`, `first_step_s`, `help_cpu_s`, `status_cpu_s`.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from swarm.observability.status_file import NodeStatus

_SWARM = (sys.executable, "-m", "swarm.cli.main")
_TIMES = 7
_TARGETS = {"help_s": 0.3, "status_s": 0.5, "first_step_s": 20.0}
_PATIENCE_S = 300.0
_NUM_IMPORTS = 25


def main() -> None:
    """Measure, print a table, print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two nodes instead of the demo's four")
    parser.add_argument("--imports", action="store_true", help="list the slowest imports of `swarm --help`, and end")
    options = parser.parse_args()
    if options.imports:
        print_imports()
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        help_s, help_cpu_s = fastest("--help")
        shown_s, shown_cpu_s = status_s(folder / "node")
        first_s = first_step_s(folder / "testbed", 2 if options.quick else 4)
    figures = {"help_s": help_s, "status_s": shown_s, "first_step_s": first_s}
    for what, seconds in figures.items():
        print(f"{what:14}{seconds:8.3f}  target {_TARGETS[what]:g}{'' if seconds <= _TARGETS[what] else '  MISSED'}")
    figures |= {"help_cpu_s": help_cpu_s, "status_cpu_s": shown_cpu_s}
    print(f"processor time: {help_cpu_s:.3f} s of --help, {shown_cpu_s:.3f} s of status")
    print(json.dumps({what: round(seconds, 3) for what, seconds in figures.items()}))


def fastest(*arguments: str) -> tuple[float, float]:
    """Least wall time and least processor time of several runs of a command, after one that does not count."""
    times: list[tuple[float, float]] = []
    for _ in range(_TIMES + 1):
        started, before = time.perf_counter(), children_cpu_s()
        subprocess.run([*_SWARM, *arguments], stdout=subprocess.DEVNULL, check=True)
        times.append((time.perf_counter() - started, children_cpu_s() - before))
    return min(wall for wall, _ in times[1:]), min(cpu for _, cpu in times[1:])


def children_cpu_s() -> float:
    """Of all that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def status_s(folder: Path) -> tuple[float, float]:
    """Of a node that knows as many peers as it may."""
    folder.mkdir()
    peer = {
        "peer_id": "12D3KooWHuyjSeqdBGJ8bD2DEXiSyP8jJwtbgpQpXBr3UiD3nwMe", "name": "lively-badger-1c", "lineage": "ab" * 16,
        "weight": 0.9, "banned_until": 0.0, "groups_admitted": 9, "records_rejected": 0, "last_seen_at": time.time(),
        "reward_mean": 0.5, "policy_version": 9,
    }  # fmt: skip
    now = time.time()
    NodeStatus(
        peer["peer_id"], peer["name"], os.getpid(), now, "learning", written_at=now + 3600, peers=[peer] * 256
    ).write(folder / "status.json")
    return fastest("status", str(folder))


def first_step_s(folder: Path, num_nodes: int) -> float:
    """From the start of the command to the first row of a round."""
    command = [*_SWARM, "testbed", "--nodes", str(num_nodes), "--rounds", "150", "--dir", str(folder)]
    started = time.perf_counter()
    testbed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while time.perf_counter() - started < _PATIENCE_S and testbed.poll() is None:
            if any('"kind": "round"' in path.read_text() for path in folder.glob("node-*/metrics.jsonl")):
                return time.perf_counter() - started
            time.sleep(0.05)
        sys.exit(f"no step was trained; the logs were in {folder}")
    finally:
        testbed.send_signal(signal.SIGINT)
        testbed.wait(60)


def print_imports() -> None:
    """By `python -X importtime`, the slowest with what they import themselves."""
    command = [sys.executable, "-X", "importtime", *_SWARM[1:], "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    rows = [
        line.removeprefix("import time:").split("|") for line in told.splitlines() if line.startswith("import time:")
    ]
    slowest = sorted(rows[1:], key=lambda row: -int(row[1]))[:_NUM_IMPORTS]
    for own, total, module in slowest:
        print(f"{int(total) / 1000:8.1f} ms  {int(own) / 1000:8.1f} ms of its own  {module.strip()}")


if __name__ == "__main__":
    main()
