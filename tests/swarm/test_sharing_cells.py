"""Cells of the sharing experiment, each a swarm of real learners in this process."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from swarm.config import parse
from swarm.experiments.cell_process import run_cell
from swarm.experiments.learner_swarm import LearnerSwarm
from swarm.experiments.sharing import cell
from swarm.experiments.sharing.arms import ARMS, ORACLE, SILO
from swarm.experiments.sharing.figures import write_all
from tests.unit.test_sharing_experiment import plan_of


def test_learners_that_merge_end_closer_to_each_other() -> None:
    """Two members that share no experience, alone and merging every second round."""

    def distance(**merging: Any) -> float:
        sizes = {"groups_per_round": 4, "group_size": 4}
        alone = {"swarm_groups": 0, "publish": False}
        swarm = LearnerSwarm([parse({"rollouts": sizes, "sharing": alone, "merging": merging})] * 2, seed=0)
        for _ in range(8):
            swarm.run_round()
        first, second = (learner._backend.optimizer.read() for learner in swarm.learners)
        return math.sqrt(sum(float((first[name] - second[name]).square().sum()) for name in first))

    apart = distance()
    assert 0 < distance(**ARMS["merging"].node_settings(2, 4)["merging"]) < 0.8 * apart


def test_a_swarm_and_its_oracle_are_computed_and_reported(tmp_path: Path) -> None:
    settings = {"num_members": 2, "num_rounds": 4, "groups_per_round": 2, "group_size": 4, "held_out_tasks": 1}
    plan = plan_of(SILO, "8/8", ORACLE, **settings)
    results = [run_cell(plan.cell(arm, 0, 1.0)) for arm in plan.arms]
    silo, sharing, _ = results
    assert silo["evaluated"] == [0, 2, 4] and sharing["evaluated"] == [0, 2]
    assert sum(silo["swarm_groups"]) == 0 and len(sharing["rewards"]) == 2 and not silo["rejected"]
    first = [[one["held_out"][0] for one in result["members"]] for result in (silo, sharing)]
    assert first[0] == first[1] and len(first[0]) == 2, "all begin from one policy"
    sampled = [sum(one["tokens"][0] for one in result["members"]) / len(result["members"]) for result in results]
    assert sampled[2] == pytest.approx(sampled[0], rel=0.5), "the oracle's samples are paid for by all members"
    assert all(seconds > 0 for one in silo["members"] for seconds in one["processor_s"])
    json.dumps(results)
    report, (table, means) = write_all(tmp_path, ["What was done."], results)
    assert "oracle" in report.read_text() and len(table.rows) == len(means.rows) == 3
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_token_counts_as_trained_in_each_pass_over_it() -> None:
    sizes = {"num_members": 1, "num_rounds": 3, "groups_per_round": 8, "group_size": 4, "held_out_tasks": 1}

    def trained_over_drawn(arm: str) -> list[float]:
        """By round: tokens that were trained on, over those of the new groups in the batch."""
        result = run_cell(plan_of(SILO, **sizes).cell(ARMS[arm], 0, 1.0))
        (member,) = result["members"]
        lengths = [tokens / (8 * 4) for tokens in member["tokens"]]
        drawn = [length * answers for length, answers in zip(lengths, result["answers_trained_on"], strict=True)]
        return [trained / new for trained, new in zip(member["tokens_trained"], drawn, strict=True)]

    assert trained_over_drawn(SILO) == pytest.approx([1, 1, 1], rel=1e-3)
    assert trained_over_drawn("silo, 2 epochs") == pytest.approx([2, 2, 2], rel=1e-3)
    first, *later = trained_over_drawn("silo, replay 8")
    assert first == pytest.approx(1, rel=1e-3) and all(ratio > 1 for ratio in later), "there is no old group at first"


def test_times_are_scaled_by_what_a_reference_round_takes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    task = plan_of(num_members=1, num_rounds=2, groups_per_round=2, group_size=4, held_out_tasks=1).cell(
        ARMS[SILO], 0, 1.0
    )
    measured_here = run_cell(task)
    assert measured_here["slowness"] > 0 and min(measured_here["members"][0]["processor_s"]) > 0
    usual = cell.REFERENCE_ROUND_S["short"]
    measured = iter([2e9 * usual, 4e9 * usual])
    monkeypatch.setattr(cell, "reference_round_s", lambda regime: next(measured))
    of_a_slow_machine = run_cell(task)
    assert of_a_slow_machine["slowness"] == 3e9 and of_a_slow_machine["members"][0]["processor_s"] == [0.0, 0.0]
    assert of_a_slow_machine["rewards"] == measured_here["rewards"], "the reference rounds change no result"
    assert of_a_slow_machine["members"][0]["held_out"] == measured_here["members"][0]["held_out"]
