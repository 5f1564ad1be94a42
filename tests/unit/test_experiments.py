"""Experiments: arms, the exchange in memory, equal accounting, cells that are computed once, tables and reports."""

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConfigError, SwarmError
from swarm.experiments.cells import Cell, CellStore, compute
from swarm.experiments.sapo.report import sampling_table, task_table, training_table, write_all
from swarm.experiments.sapo.sapo import (
    ARMS,
    CONTROL,
    PUBLISHED,
    SHARING,
    SapoPlan,
    affordable_rounds,
    chosen_arms,
    figures,
    reward_at_equal_training,
    summarize,
)
from swarm.experiments.sapo.tasks import SAPO_TASKS, node_sources
from swarm.report.tables import Spread

NINE = {
    "base_conversion", "basic_arithmetic", "arc_1d", "bf", "propositional_logic", "fraction_simplification",
    "decimal_arithmetic", "calendar_arithmetic", "binary_matrix",
}  # fmt: skip
SETTINGS = {
    "base": "bundled",
    "seed": 0, "num_nodes": 2, "num_rounds": 2, "mix": "shared", "groups_per_round": 4, "group_size": 4, "held_out_tasks": 1,
}  # fmt: skip


def result(
    arm: str, seed: int, rewards: list[list[float]], trained_on: list[int], swarm_groups: int = 0
) -> dict[str, Any]:
    """As a cell gives it, of two sources."""
    return {
        "arm": arm, "seed": seed, "group_size": 8, "rewards": rewards, "answers_trained_on": trained_on,
        "answers_sampled": [128] * len(rewards), "swarm_groups": swarm_groups,
        "held_out_start": {"bf": 0.0, "arc_1d": 0.2}, "held_out_end": {"bf": 0.2, "arc_1d": 0.4},
    }  # fmt: skip


@pytest.fixture(scope="module")
def cells() -> dict[str, dict[str, Any]]:
    """{arm: result} of two learners over two rounds, computed here."""
    import torch

    from swarm.experiments.cell_process import run_cell

    torch.set_num_threads(1)
    names = (PUBLISHED, CONTROL, SHARING)
    return {name: run_cell(Cell("sapo", name, {**SETTINGS, "arm": name})) for name in names}


def test_tasks_are_the_nine_of_the_paper() -> None:
    assert {task.name for task in SAPO_TASKS} == NINE


def test_split_mix_gives_every_task_to_three_specialists_and_hides_none() -> None:
    nodes = [node_sources("split", number) for number in range(9)]
    for position in range(9):
        assert sum(sources[position].weight == 1 for sources in nodes) == 3
    assert all({task.name for task in sources} == NINE for sources in nodes)


def test_arms_are_chosen_by_name_and_unknown_ones_named() -> None:
    assert [arm.name for arm in chosen_arms("4/4, 8/0 + filter,4/4")] == [SHARING, CONTROL]
    with pytest.raises(ConfigError, match="3/5"):
        chosen_arms("4/4,3/5")


def test_every_arm_samples_the_same_answers(cells: dict[str, dict[str, Any]]) -> None:
    assert {tuple(cell["answers_sampled"]) for cell in cells.values()} == {(32, 32)}
    first = {tuple(cell["rewards"][0]) for cell in cells.values()}
    assert len(first) == 1, "equal identities draw equal tasks, and nobody has trained yet"


def test_the_filter_is_what_tells_the_silos_apart(cells: dict[str, dict[str, Any]]) -> None:
    assert cells[PUBLISHED]["answers_trained_on"] == cells[PUBLISHED]["answers_sampled"]
    with_signal = [4 * count for count in cells[CONTROL]["groups_with_signal"]]
    assert cells[CONTROL]["answers_trained_on"] == with_signal < cells[PUBLISHED]["answers_trained_on"]


def test_groups_of_others_pass_the_door_of_a_node(cells: dict[str, dict[str, Any]]) -> None:
    assert cells[SHARING]["swarm_groups"] > 0 and cells[SHARING]["rejected"] == {}
    assert cells[CONTROL]["swarm_groups"] == 0 and cells[CONTROL]["bytes_offered"] == 0


def test_a_forged_reward_is_turned_away_in_memory_as_on_the_wire() -> None:
    from dataclasses import replace

    from swarm.experiments.learner_swarm import LearnerSwarm
    from swarm.experiments.sapo.cell import node_config

    swarm = LearnerSwarm([node_config({**SETTINGS, "arm": SHARING}, number) for number in range(2)], seed=0)
    publish = swarm.exchange.publish

    def forge(identity: Any, groups: Any) -> None:
        publish(
            identity,
            [
                replace(group, rollouts=(replace(group.rollouts[0], reward=0.77), *group.rollouts[1:]))
                for group in groups
            ],
        )

    swarm.exchange.publish = forge  # type: ignore[method-assign]
    rows = [swarm.run_round() for _ in range(2)]
    assert swarm.rejected["reward_mismatch"] > 0 and sum(row.swarm_groups for row in rows) == 0


def test_reward_at_equal_training_weighs_rounds_by_what_they_trained_on() -> None:
    # 10 answers at reward 0, 30 at 1, 20 of the last round's 40 at 2: (0·10 + 1·30 + 2·20) / 60
    assert reward_at_equal_training([0.0, 1.0, 2.0], [10, 30, 40], until=60) == pytest.approx(70 / 60)
    assert reward_at_equal_training([0.5, 1.0], [0, 0], until=0) == 0.0


def test_ratios_are_paired_by_seed_and_incomplete_seeds_left_out() -> None:
    results = [
        result(CONTROL, 0, [[1.0, 1.0]], [8]), result(SHARING, 0, [[2.0, 1.0]], [16], 1),
        result(CONTROL, 1, [[1.0, 3.0]], [8]), result(SHARING, 1, [[4.0, 4.0]], [16], 1),
        result(CONTROL, 2, [[9.0, 9.0]], [8]),
    ]  # fmt: skip
    found = figures(summarize(results))
    assert found["ratio_sharing"] == 1.75 and found["ratio_sharing_std"] == pytest.approx(0.3536, abs=1e-4)
    assert found["ratio_published"] is None
    assert found["arms"][CONTROL]["cumulative_reward"]["mean"] == 3.0


def test_spread_of_one_seed_has_no_deviation() -> None:
    assert Spread.of([0.25]).text(2) == "0.25" and Spread.of([1.0, 3.0]).text(1) == "2.0 ± 1.4"


def test_a_finished_cell_is_never_computed_again(tmp_path: Path) -> None:
    store, said = CellStore(tmp_path), list[str]()
    cell = Cell("no-such-kind", "4/4, seed 0", {"seed": 0})
    store.write(cell, {"answer": 42})
    assert compute([cell], store, 2, said.append) == [{"answer": 42}]
    assert said == ["1 of 1 cells were finished earlier"]
    assert store.read(Cell("no-such-kind", "4/4, seed 0", {"seed": 1})) is None, "other settings are another cell"


def test_a_damaged_result_is_computed_again(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path), Cell("sapo", "x", {})
    store.write(cell, {})
    store.result_path(cell).write_text('{"result": {"rew')
    assert store.read(cell) is None


def test_a_cell_that_fails_ends_the_experiment_and_keeps_the_others(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    done, broken = Cell("sapo", "done", {"seed": 1}), Cell("no-such-kind", "broken", {})
    store.write(done, {"fine": True})
    with pytest.raises(SwarmError, match="no-such-kind"):
        compute([done, broken], store, 1, lambda _: None)
    assert store.read(done) == {"fine": True}


def test_rounds_of_a_budget_are_measured_once(tmp_path: Path) -> None:
    plan, said = SapoPlan(chosen_arms("8/0 + filter,4/4"), (0, 1), num_nodes=2), list[str]()
    store = CellStore(tmp_path / "calibration")
    for seed in (10_000, 10_001):
        store.write(plan.cell(SHARING, seed, 3), {"round_s": [9.0, 2.0, 1.5], "other_s": 10.0})
    # 4 cells on 2 workers: 0.9 · 600 s / 2 - 10 s = 260 s for each, at 2 s a round
    assert affordable_rounds(plan, tmp_path, 10.0, 2, said.append) == 130
    for path in store.folder.iterdir():
        path.unlink()
    assert affordable_rounds(plan, tmp_path, 10.0, 2, said.append) == 130


def test_report_holds_tables_and_picture_in_one_file(tmp_path: Path) -> None:
    plan = SapoPlan(chosen_arms("8/0 + filter,4/4"), (0, 1))
    results = [
        result(arm, seed, [[0.1 * seed, 0.2], [0.3, 0.4]], [64, 64], 4) for arm in (CONTROL, SHARING) for seed in (0, 1)
    ]
    summaries = summarize(results)
    page = write_all(tmp_path, plan, results, summaries).read_text()
    assert "data:image/png;base64," in page and "http" not in page.replace("<!doctype html>", "")
    assert [row[0] for row in sampling_table(summaries).rows] == [CONTROL, SHARING]
    assert training_table(summaries).rows[1][2] == "1.00 ± 0.00"
    assert task_table(results).rows[0] == ["arc_1d", "0.200", "0.400", "0.400"]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    json.dumps(figures(summaries))


def test_arms_differ_in_nothing_but_where_groups_come_from() -> None:
    from swarm.experiments.sapo.cell import node_config

    configs = {name: node_config({**SETTINGS, "arm": name}, 0) for name in ARMS}
    same = {"filter_groups": True, "replay_groups": 0}
    for config in configs.values():
        assert config.rollouts == configs[SHARING].rollouts and config.tasks == configs[SHARING].tasks
        assert config.training.model_copy(update=same) == configs[SHARING].training
    assert {name: config.sharing.swarm_groups for name, config in configs.items()} == {
        "8/0": 0, "8/0 + filter": 0, "8/0 + replay": 0, "6/2": 2, "4/4": 4, "4/4 informative": 4, "2/6": 6, "8/8": 8,
        "8/8 informative": 8,
    }  # fmt: skip
    assert [name for name, config in configs.items() if config.sharing.choice == "informative"] == [
        "4/4 informative",
        "8/8 informative",
    ]
    assert [name for name, config in configs.items() if config.training.replay_groups] == ["8/0 + replay"]
