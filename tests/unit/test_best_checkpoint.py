"""A run keeps the checkpoint that did best on held-out tasks, whatever comes after it."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.adapters.checkpoint import BestRound, CheckpointStore, CheckpointWriter
from swarm.config import parse
from swarm.errors import CheckpointError
from swarm.machine.node_folder import NodeFolder
from swarm.node.controls import NodeControls
from swarm.node.report import NodeReport
from swarm.node.training_loop import TrainingRun
from swarm.node.watchdog import Watchdog
from swarm.records.identity import Identity
from swarm.sharing.totals import SharingPause

TASKS = "8 tasks of sums at temperature 1"


class Scripted:
    """A learner whose evaluations find what is said here: {round: (reward, what it was measured on)}."""

    merging = None

    def __init__(self, found: dict[int, tuple[float, str]], *, round: int = 0, refused_at: int = -1) -> None:
        self.round = round
        self._found = found
        self._refused_at = refused_at

    def run_round(self) -> dict[str, Any]:
        self.round += 1
        zeros = ("rollout/reward_mean", "rollout/tokens_per_s", "train/own_groups", "train/swarm_groups")
        row = {"kind": "round", "round": self.round, "policy_version": 0, "time/round_s": 1.0}
        return row | dict.fromkeys(zeros, 0.0)

    def evaluate(self, phase: str) -> dict[str, Any]:
        reward, measured_on = self._found.get(self.round, (0.0, TASKS))
        row = {"kind": "evaluation", "phase": phase, "accuracy_mean": reward, "accuracy_error": 0.1, "accuracy": {}}
        return {**row, "num_tasks": 8, "measured_on": measured_on, "round": self.round, "policy_version": 0}

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.round == self._refused_at:
            raise CheckpointError("stage 2 gave no state")
        return {"adapter": {"weight": torch.tensor([float(self.round)])}}, {"round": self.round}

    def save(self, store: CheckpointWriter) -> None:
        store.save(self.round, *self.state())


def kept(folder: Path, learner: Scripted, max_rounds: int) -> tuple[BestRound | None, list[str]]:
    """The best round of a run that keeps one newest checkpoint, and the names of all that are there in the end."""
    config = parse(
        {
            "node": {"dir": str(folder), "max_rounds": max_rounds},
            "network": {"backend": "off"},
            "sharing": {"swarm_groups": 0, "publish": False},
            "checkpoint": {"keep": 1, "interval_rounds": 4},
            "evaluation": {"tasks_per_source": 8, "interval_rounds": 2},
            "observability": {"http": False},
        }
    )
    paths = NodeFolder(config.node.dir)
    paths.create()
    dog = Watchdog(time.monotonic)
    report = NodeReport(config, paths, Identity(b"n" * 32), network=None, watchdog=dog)
    controls = NodeControls(SharingPause())
    run = TrainingRun(config, paths, learner, report=report, clock=time.time, watchdog=dog, controls=controls)  # type: ignore[arg-type]
    run.run()
    return CheckpointStore(paths.checkpoints, 1).best(), sorted(path.name for path in paths.checkpoints.glob("round-*"))


@pytest.mark.parametrize(
    ("found", "best", "names"),
    [
        ({2: (0.3, TASKS), 4: (0.6, TASKS), 6: (0.5, TASKS)}, 4, ["round-000004", "round-000009"]),  # of the interval
        ({2: (0.3, TASKS), 6: (0.6, TASKS), 8: (0.5, TASKS)}, 6, ["round-000006", "round-000009"]),  # saved for it
        (
            {2: (0.6, TASKS), 9: (0.7, TASKS)},
            9,
            ["round-000002", "round-000009"],
        ),  # of the end: the next save removes 2
        ({0: (0.9, TASKS), 2: (0.6, TASKS)}, 2, ["round-000002", "round-000009"]),  # nothing is saved before round 1
        ({2: (0.6, TASKS), 4: (0.6, TASKS)}, 4, ["round-000004", "round-000009"]),  # of equals the newest
        ({2: (0.6, TASKS), 4: (0.9, "")}, 2, ["round-000002", "round-000009"]),  # a source could not be scored
    ],
)
def test_the_best_of_a_run_stays(
    tmp_path: Path, found: dict[int, tuple[float, str]], best: int, names: list[str]
) -> None:
    told, there = kept(tmp_path / "n", Scripted(found), 9)
    assert told is not None and (told.round, told.reward, there) == (best, found[best][0], names)


def test_a_run_that_goes_on_keeps_the_best_of_before_unless_its_tasks_are_others(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    kept(folder, Scripted({2: (0.6, TASKS)}), 4)
    best, names = kept(folder, Scripted({6: (0.5, TASKS)}, round=4), 8)
    assert best == BestRound(2, 0.6, TASKS) and names == ["round-000002", "round-000008"]
    others = "8 tasks of products at temperature 1"
    best, names = kept(folder, Scripted({10: (0.2, others), 12: (0.1, others)}, round=8), 12)
    assert best == BestRound(10, 0.2, others) and names == ["round-000010", "round-000012"]


def test_a_best_round_that_was_not_saved_takes_nothing_from_the_one_before(tmp_path: Path) -> None:
    learner = Scripted({2: (0.3, TASKS), 6: (0.6, TASKS)}, refused_at=6)
    best, names = kept(tmp_path / "n", learner, 9)
    assert best == BestRound(2, 0.3, TASKS) and names == ["round-000002", "round-000009"]


def test_what_the_final_merge_made_of_a_marked_round_is_measured_anew(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    kept(folder, Scripted({2: (0.3, TASKS), 4: (0.6, TASKS)}), 4)
    best, _ = kept(folder, Scripted({4: (0.5, TASKS)}, round=4), 4)
    assert best == BestRound(4, 0.5, TASKS), "the round was saved again, and is no longer what had .6"
