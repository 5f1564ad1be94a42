"""How long the compute thread may take before it counts as stuck: by the longest round it has had."""

import time
from pathlib import Path
from typing import Any

import pytest

from swarm.adapters.checkpoint import CheckpointWriter
from swarm.config import parse
from swarm.machine.node_folder import NodeFolder
from swarm.node.controls import NodeControls
from swarm.node.report import NodeReport
from swarm.node.training_loop import TrainingRun
from swarm.node.watchdog import Watchdog
from swarm.observability.status_file import read_status
from swarm.records.identity import Identity
from swarm.sharing.totals import SharingPause


class Machine:
    """A learner whose rounds take what is said here, on a clock that only they move; after each second somebody looks."""

    merging = None

    def __init__(self, round_s: list[int], save_s: int = 0, sleep_s: int = 0, copy_s: int = 0) -> None:
        """`sleep_s`: in each round the whole machine sleeps so long. `copy_s`: of what a checkpoint holds."""
        self.now = 0.0
        self.round = 0
        self.dog = Watchdog(lambda: self.now)
        self.first_stuck: dict[int, list[str]] = {}
        self.saved: list[int] = []
        """Rounds after which a checkpoint was begun, but for the last one."""
        self._round_s = round_s
        self._save_s = save_s
        self._sleep_s = sleep_s
        self._copy_s = copy_s

    def run_round(self) -> dict[str, Any]:
        duration_s = self._round_s[self.round]
        self.work(duration_s)
        self.now += self._sleep_s
        self.round += 1
        row = {
            "kind": "round",
            "round": self.round,
            "policy_version": 0,
            "time/round_s": float(duration_s + self._sleep_s),
        }
        zeros = ("rollout/reward_mean", "rollout/tokens_per_s", "train/own_groups", "train/swarm_groups")
        return row | dict.fromkeys(zeros, 0.0)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.saved.append(self.round)
        self.work(self._copy_s)
        return {}, {}

    def save(self, store: CheckpointWriter) -> None:
        self.work(self._save_s)

    def work(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.dog.look()
            if self.dog.stuck():
                self.first_stuck.setdefault(self.round + 1, self.dog.stuck())


def train(folder: Path, machine: Machine, controls: NodeControls | None = None, duty_cycle: float = 1.0) -> NodeReport:
    config = parse(
        {
            "node": {"dir": str(folder), "max_rounds": len(machine._round_s), "duty_cycle": duty_cycle},
            "network": {"backend": "off"},
            "sharing": {"swarm_groups": 0, "publish": False},
            "evaluation": {"tasks_per_source": 0},
            "observability": {"http": False},
        }
    )
    paths = NodeFolder(config.node.dir)
    paths.create()
    report = NodeReport(config, paths, Identity(b"n" * 32), network=None, watchdog=machine.dog)
    TrainingRun(
        config,
        paths,
        machine,
        report=report,
        clock=time.time,
        watchdog=machine.dog,
        controls=controls or NodeControls(SharingPause()),  # type: ignore[arg-type]
    ).run()
    return report


@pytest.mark.parametrize(
    ("round_s", "stuck"),
    [
        ([1700, 5, 5], {}),  # nothing is known of the first round
        ([1801], {1: ["compute thread: round 1 for 30 min"]}),
        ([5, 600, 5], {}),
        ([5, 601], {2: ["compute thread: round 2 for 10 min"]}),
        ([100, 1999], {}),
        ([100, 2001], {2: ["compute thread: round 2 for 33 min"]}),
    ],
)
def test_a_round_is_stuck_after_twenty_times_the_longest(
    tmp_path: Path, round_s: list[int], stuck: dict[int, list[str]]
) -> None:
    machine = Machine(round_s)
    train(tmp_path / "n", machine)
    assert machine.first_stuck == stuck
    assert machine.dog.stuck() == [], "a run that is over is not stuck"


@pytest.mark.parametrize(
    ("round_s", "saved"),
    [
        ([1] * 21, [10, 20]),
        ([59, 1, 30, 61, 5], [2, 4]),  # a minute after the last one, at the end of a round
        ([600, 600], [1, 2]),
        ([7] * 11, [9, 10]),
    ],
)
def test_long_rounds_are_saved_a_minute_after_the_last_checkpoint(
    tmp_path: Path, round_s: list[int], saved: list[int]
) -> None:
    machine = Machine(round_s)
    train(tmp_path / "n", machine)
    assert machine.saved == saved


def test_a_slow_copy_is_asked_for_so_rarely_that_it_takes_a_twentieth_of_the_time(tmp_path: Path) -> None:
    machine = Machine([100] * 6, copy_s=10)
    train(tmp_path / "n", machine)
    assert machine.saved == [1, 3, 5]


class Rests(NodeControls):
    def __init__(self) -> None:
        super().__init__(SharingPause())
        self.taken_s: list[float] = []

    def wait_for_end(self, timeout_s: float) -> None:
        self.taken_s.append(timeout_s)


@pytest.mark.parametrize("sleep_s", [0, 3600])
def test_a_node_rests_by_what_it_worked_and_not_by_what_it_slept(tmp_path: Path, sleep_s: int) -> None:
    rests = Rests()
    train(tmp_path / "n", Machine([10, 20], sleep_s=sleep_s), rests, duty_cycle=0.2)
    assert rests.taken_s == pytest.approx([40, 80], abs=4)


def test_a_run_that_has_made_its_rounds_says_so_and_how_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    machine, folder = Machine([5, 5]), tmp_path / "a b"
    told = f"this run has made its 2 rounds (node.max_rounds); go on with `swarm run '{folder}/config.toml' --node.max_rounds 4`"
    for _ in range(2):  # at its end, and at a start that has nothing to do
        caplog.clear()
        train(folder, machine)
        assert [line for line in caplog.messages if line.startswith(told)] == [
            f"{told}; `swarm report '{folder}'` tells what it has learned"
        ]
    assert machine.round == 2


def test_a_checkpoint_that_the_disk_does_not_take_is_named(tmp_path: Path) -> None:
    machine = Machine([5], save_s=302)
    train(tmp_path / "n", machine)
    assert machine.first_stuck == {2: ["compute thread: writing the last checkpoint for 5 min"]}


def test_the_status_names_what_is_stuck(tmp_path: Path) -> None:
    machine = Machine([5])
    report = train(tmp_path / "n", machine)
    machine.dog.mark("network loop", "one turn", 30)
    machine.work(31)
    report.write_status()
    assert read_status(tmp_path / "n" / "status.json").stuck == ["network loop: one turn for 31 s"]
