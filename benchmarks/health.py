"""How often a node warns in healthy runs, and how early in runs that go wrong.

    python benchmarks/health.py            60 healthy and 36 sick runs: an hour and a half on two cores
    python benchmarks/health.py --quick    one short swarm of each kind, under a minute

Swarms of four nodes; each node is one run. A sick swarm has one setting that a user may well choose wrong. A run has gone wrong
where the mean reward of eight rounds is .1 and three standard errors below that of the untrained policy or an earlier such mean,
and stays there. The metrics of every run are kept in --dir, so that other thresholds are judged without new runs. The last line
of the output is one JSON object: `false_alarms_per_run`, `share_warned`, `rounds_ahead_median`.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from swarm.config import parse
from swarm.experiments.learner_swarm import LearnerSwarm
from swarm.experiments.sharing.arms import overlaid
from swarm.experiments.sharing.cell import REGIMES
from swarm.training.health import CHECKS, COLUMNS, HealthWatch

SICK: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "learning rate × 8": {"training": {"lr": 8.0}},
    "learning rate × 3, four epochs": {"training": {"lr": 3.0, "inner_epochs": 4}},
    "no correction, old groups": {
        "training": {"lr": 3.0, "correction": "none", "lr_by_ess": False, "replay_groups": 24}
    },
}
"""Settings that go wrong; `lr` is a multiple of the usual one."""
SETTINGS = {
    **REGIMES,
    "few groups": {
        **REGIMES["short"],
        "rollouts": {"groups_per_round": 6, "group_size": 4, "max_new_tokens": 12},
        "sharing": {"own_groups": 3, "swarm_groups": 3},
    },
}
"""Short answers, long ones, and batches so small that every measure of a round is noisy."""
ROUNDS = {"short": 60, "reasoning": 24, "few groups": 120}
SEEDS = {
    ("short", True): 6, ("short", False): 1, ("reasoning", True): 3, ("reasoning", False): 1,
    ("few groups", True): 6, ("few groups", False): 1,
}  # fmt: skip
"""Swarms of a kind, {(regime, whether healthy): number}: for each of SICK where they are not."""
NUM_NODES = 4
_QUICK_ROUNDS, _QUICK_NODES = 16, 2
_MEAN_ROUNDS = 8
_FALL = 0.1
Rows = list[dict[str, Any]]
Runs = Sequence[tuple[Mapping[str, Any], Rows]]
"""(arguments of the swarm, rows of one of its nodes)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short swarm of each kind")
    parser.add_argument("--dir", type=Path, help="keep the metrics here, and go on with those that are there")
    parser.add_argument("--swarm", help=argparse.SUPPRESS)  # one swarm, in a process of its own
    options = parser.parse_args()
    if options.swarm:
        run_swarm(**json.loads(options.swarm))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = runs_of(swarms(is_quick=options.quick), options.dir or Path(folder))
    print(table(runs))
    print(json.dumps(figures(runs)))


def swarms(*, is_quick: bool) -> list[dict[str, Any]]:
    """Return the arguments of `run_swarm` for each swarm, but for its file."""
    if is_quick:
        return [
            {"regime": "short", "kind": kind, "seed": 0, "num_rounds": _QUICK_ROUNDS, "num_nodes": _QUICK_NODES}
            for kind in ("", "learning rate × 8")
        ]
    return [
        {"regime": regime, "kind": kind, "seed": seed, "num_rounds": ROUNDS[regime], "num_nodes": NUM_NODES}
        for kind in ("", *SICK)
        for regime in ROUNDS
        for seed in range(SEEDS[regime, not kind])
    ]


def run_swarm(path: str, regime: str, kind: str, seed: int, num_rounds: int, num_nodes: int) -> None:
    """Write the metrics of each node to `path`: what `HealthWatch` reads of them, a list of rows for each node."""
    usual = parse({}).training.lr
    chosen = {section: dict(settings) for section, settings in SICK.get(kind, {}).items()}
    if "training" in chosen:
        chosen["training"]["lr"] *= usual
    config = parse(overlaid({"node": {"seed": seed}}, SETTINGS[regime], chosen))
    swarm = LearnerSwarm([config] * num_nodes, seed)
    rows: list[Rows] = [[] for _ in range(num_nodes)]
    for number in range(1, num_rounds + 1):
        swarm.run_round()
        for of_node, row in zip(rows, swarm.last_rows, strict=True):
            of_node.append({name: row.get(name) for name in ("round", *COLUMNS)})
        print(f"round {number} of {num_rounds}", flush=True)
    Path(path).write_text(json.dumps(rows))


def runs_of(wanted: Sequence[Mapping[str, Any]], folder: Path) -> list[tuple[Mapping[str, Any], Rows]]:
    """Return (swarm, metrics) of every node; swarms that are not there are run, two at a time."""
    folder.mkdir(parents=True, exist_ok=True)

    def read(swarm: Mapping[str, Any]) -> list[Rows]:
        kind = swarm["kind"].replace(" ", "-").replace(",", "").replace("×", "x") or "healthy"
        path = folder / f"{swarm['regime'].replace(' ', '-')}-{kind}-{swarm['num_rounds']}-rounds-{swarm['seed']}.json"
        if not path.exists():
            arguments = json.dumps({**swarm, "path": str(path)})
            command = [sys.executable, __file__, "--swarm", arguments]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return json.loads(path.read_text())

    with ThreadPoolExecutor(2) as pool:
        return [(swarm, rows) for swarm, nodes in zip(wanted, pool.map(read, wanted), strict=True) for rows in nodes]


def warnings_of(rows: Rows) -> dict[str, list[int]]:
    """Return {check: rounds in which a new episode of it began}."""
    watch = HealthWatch()
    begun: dict[str, list[int]] = {}
    for row in rows:
        for name in watch.begun(row):
            begun.setdefault(name, []).append(row["round"])
    return begun


def gone_wrong_at(rows: Rows, base: float) -> int | None:
    """Return the round in which the mean reward of eight rounds had fallen; None where it did not fall, or rose again."""
    rewards = [row["rollout/reward_mean"] for row in rows]
    eights = [mean_of(rewards[end - _MEAN_ROUNDS : end]) for end in range(_MEAN_ROUNDS, len(rewards) + 1)]
    fallen = [
        place
        for place, now in enumerate(eights)
        if any(has_fallen(before, now) for before in ((base, 0.0), *eights[:place]))
    ]
    if not fallen or fallen[-1] != len(eights) - 1:
        return None
    return fallen[0] + _MEAN_ROUNDS


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean, standard error)."""
    return fmean(values), stdev(values) / math.sqrt(len(values))


def has_fallen(before: tuple[float, float], now: tuple[float, float]) -> bool:
    """Whether a mean is lower by more than .1 and three standard errors."""
    return before[0] - now[0] > max(_FALL, 3 * math.hypot(before[1], now[1]))


def base_rewards(runs: Runs) -> dict[str, float]:
    """Return the mean reward of the untrained policy by regime: that of the first rounds of all its runs."""
    regimes = {swarm["regime"] for swarm, _ in runs}
    return {
        regime: fmean(rows[0]["rollout/reward_mean"] for swarm, rows in runs if swarm["regime"] == regime)
        for regime in regimes
    }


def table(runs: Runs) -> str:
    """Return a row for each kind of swarm: its runs, how many went wrong, and how many warned of what."""
    kinds = dict.fromkeys((swarm["regime"], swarm["kind"]) for swarm, _ in runs)
    bases = base_rewards(runs)
    lines = ["| regime | swarm | runs | went wrong | " + " | ".join(CHECKS) + " | any, and rounds ahead |"]
    lines.append("|" + "---|" * (len(CHECKS) + 5))
    for kind in kinds:
        those = [rows for swarm, rows in runs if (swarm["regime"], swarm["kind"]) == kind]
        found = [warnings_of(rows) for rows in those]
        num_warned = Counter(name for one in found for name in one)
        ahead = [of_run for rows in those if (of_run := rounds_ahead(rows, bases[kind[0]])) is not None]
        told = f"{sum(map(bool, found))}" + (f", {median(ahead):+.0f}" if ahead else "")
        wrong = sum(gone_wrong_at(rows, bases[kind[0]]) is not None for rows in those)
        counts = " | ".join(str(num_warned[name]) for name in CHECKS)
        lines.append(f"| {kind[0]} | {kind[1] or 'as it comes'} | {len(those)} | {wrong} | {counts} | {told} |")
    return "\n".join(lines)


def rounds_ahead(rows: Rows, base: float) -> int | None:
    """Return how many rounds before the run had gone wrong it was first warned of; None where either is missing."""
    wrong_at, begun = gone_wrong_at(rows, base), warnings_of(rows)
    if wrong_at is None or not begun:
        return None
    return wrong_at - min(min(rounds) for rounds in begun.values())


def figures(runs: Runs) -> dict[str, float]:
    bases = base_rewards(runs)
    went_wrong = [gone_wrong_at(rows, bases[swarm["regime"]]) is not None for swarm, rows in runs]
    healthy = [
        rows for (swarm, rows), is_wrong in zip(runs, went_wrong, strict=True) if not swarm["kind"] and not is_wrong
    ]
    ahead = [of_run for swarm, rows in runs if (of_run := rounds_ahead(rows, bases[swarm["regime"]])) is not None]
    return {
        "healthy_runs": len(healthy),
        "false_alarms_per_run": round(sum(bool(warnings_of(rows)) for rows in healthy) / max(len(healthy), 1), 3),
        "runs_gone_wrong": sum(went_wrong),
        "share_warned": round(len(ahead) / max(sum(went_wrong), 1), 3),
        "rounds_ahead_median": median(ahead) if ahead else 0,
    }


if __name__ == "__main__":
    main()
