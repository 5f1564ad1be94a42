"""The sharing experiment: what its arms differ in, which cells it has, and how its figures come about."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConfigError
from swarm.experiments.cells import Cell, Result
from swarm.experiments.sharing.arms import ARMS, ORACLE, SILO, MemberKind, SharingArm, chosen_arms
from swarm.experiments.sharing.cell import node_config
from swarm.experiments.sharing.figures import Curve, figures, summarize, table_of_means
from swarm.experiments.sharing.plan import SharingPlan, tuned_factors
from swarm.tasks.task_mixture import TaskMixture


def plan_of(*names: str, **settings: Any) -> SharingPlan:
    return SharingPlan(tuple(ARMS[name] for name in names), (0, 1), **settings)


def config_of(name: str, **settings: Any) -> Any:
    plan = plan_of(name, **settings)
    return node_config(plan.cell(ARMS[name], 0, 1.0).settings, MemberKind("", 8))


def member(rewards: list[float], kind: str = "", tokens: float = 10.0) -> dict[str, Any]:
    rounds = len(rewards) - 1
    spent = {"tokens": [tokens] * rounds, "tokens_trained": [tokens] * rounds, "processor_s": [2.0] * rounds}
    return {"kind": kind, "held_out": rewards, **spent}


def result_of(arm: str, rewards: list[float], seed: int = 0, **facts: Any) -> Result:
    """Held-out rewards of rounds 0, 1, 2, …; a round samples 10 tokens and takes two seconds."""
    rounds = list(range(len(rewards)))
    return {"arm": arm, "seed": seed, "lr_factor": 1.0, "evaluated": rounds, "members": [member(rewards)]} | facts


def test_every_member_samples_as_much_in_every_arm() -> None:
    for arm in ARMS.values():
        config = config_of(arm.name)
        members = arm.members(8)
        sampled = config.rollouts.groups_per_round + config.rollouts.hints
        assert sampled == (8 * members if arm.is_oracle else 8)
        assert config.sharing.swarm_groups <= 8 * (members - 1)
        assert config.sharing.publish == (config.sharing.swarm_groups > 0)
        assert config.training.filter_groups, "the control has the same filter"
    assert config_of("8/all").sharing.swarm_groups == 56 and config_of("8/all of 2").sharing.swarm_groups == 8


def test_every_arm_is_measured_on_the_same_held_out_tasks() -> None:
    sizes = {config_of(name).evaluation.tasks_per_source for name in (SILO, "8/24", ORACLE)}
    assert len(sizes) == 1


def test_the_published_arm_weighs_nothing_and_takes_one_step() -> None:
    config = config_of("4/4 as published")
    assert (config.sharing.own_groups, config.sharing.swarm_groups) == (4, 4)
    assert (
        config.training.correction == "none" and not config.training.lr_by_ess and not config.training.groups_per_step
    )
    assert config.sharing.likelihood_floor_quantile == config.sharing.success_quantile == 0


@pytest.mark.parametrize("regime", ["short", "reasoning"])
def test_what_is_held_out_was_never_drawn(regime: Any) -> None:
    config = config_of(SILO, regime=regime)
    assert config.tasks.held_out_share == 0.125
    mixture = TaskMixture(config.tasks)
    assert {task.ref.source for task in mixture.held_out(8)} == set(mixture.sources)


def test_learning_rates_are_tuned_on_a_seed_that_is_not_reported() -> None:
    plan = plan_of(SILO, "8/24", lr_factors=(1.0, 1.4, 2.0))
    tuning = plan.tuning_cells()
    assert {cell.settings["seed"] for cell in tuning} == {1000} and len(tuning) == 6
    # of silos the reward at the end counts, of others the mean
    early, late = [0.9] * 3 + [0.1] * 3, [0.1] * 3 + [0.4] * 3
    rewards = {SILO: {1.0: early, 1.4: late}, "8/24": {1.0: late, 1.4: early}}
    found = tuned_factors(plan, lambda cells: [result_at(cell, rewards) for cell in cells])
    assert found == {SILO: 1.4, "8/24": 1.4}
    reported = plan.reported_cells(found)
    assert [(cell.settings["seed"], cell.settings["arm"]) for cell in reported[:2]] == [(0, SILO), (0, "8/24")]
    assert {cell.settings["lr_factor"] for cell in reported if cell.settings["arm"] == SILO} == {1.4}
    assert len({cell.digest for cell in [*tuning, *reported]}) == 10
    assert plan_of(SILO, lr_factors=(1.0,)).tuning_cells() == []


def test_a_rate_counts_by_its_mean_over_the_tuning_seeds() -> None:
    plan = plan_of(SILO, lr_factors=(0.7, 1.0, 1.4), tuning_seeds=(1000, 1001))
    rewards = {1000: {0.7: 0.1, 1.0: 0.3, 1.4: 0.5}, 1001: {0.7: 0.1, 1.0: 0.4, 1.4: 0.1}}

    def results_of(cells: Sequence[Cell]) -> list[Result]:
        assert len(cells) == 6
        drawn = [(cell.settings["seed"], cell.settings["lr_factor"]) for cell in cells]
        return [result_of(SILO, [rewards[seed][factor]] * 3, seed, lr_factor=factor) for seed, factor in drawn]

    assert tuned_factors(plan, results_of) == {SILO: 1.0}


def result_at(cell: Cell, rewards: dict[str, dict[float, list[float]]]) -> Result:
    arm, factor = cell.settings["arm"], cell.settings["lr_factor"]
    return result_of(arm, rewards[arm].get(factor, [0.0, 0.0, 0.0]), lr_factor=factor)


def test_rates_beyond_the_grid_are_tried_where_the_best_is_at_its_edge() -> None:
    plan, asked = plan_of(SILO, "8/24", "8/all of 4", lr_factors=(1.0, 1.4)), list[list[str]]()
    rewards = {
        SILO: {0.7: [0.3] * 3, 1.0: [0.4] * 3, 1.4: [0.2] * 3},
        "8/24": {1.0: [0.1] * 3, 1.4: [0.2] * 3, 2.0: [0.3] * 3, 2.8: [0.4] * 3, 4.0: [0.3] * 3},
        "8/all": {0.7: [0.1] * 3, 1.0: [0.4] * 3, 1.4: [0.2] * 3},
    }

    def results_of(cells: Sequence[Cell]) -> list[Result]:
        asked.append([f"{cell.settings['arm']} {cell.settings['lr_factor']:g}" for cell in cells])
        return [result_at(cell, rewards) for cell in cells]

    assert tuned_factors(plan, results_of) == {SILO: 1.0, "8/24": 2.8, "8/all of 4": 1.0}
    assert asked[0] == ["silo 1", "silo 1.4", "8/24 1", "8/24 1.4", "8/all 1", "8/all 1.4"]
    assert asked[1][6:] == ["silo 0.7", "8/24 2", "8/all 0.7"] and asked[-1][-1] == "8/24 4" and len(asked) == 4
    never_there = [result_of(SILO, [0.4] * 3, lr_factor=1.0), result_of(SILO, [0.3] * 3, lr_factor=1.4)]
    assert tuned_factors(plan_of(SILO), lambda cells: never_there) == {SILO: 1.0}, "a report computes nothing"


def test_the_target_is_crossed_between_two_evaluations() -> None:
    curve = Curve((0.1, 0.3, 0.5), (0.0, 100.0, 200.0), (0.0, 1.0, 2.0), (0.0, 1.0, 2.0))
    assert curve.first(0.4, "tokens") == pytest.approx(150)
    assert curve.first(0.05, "tokens") == 0 and curve.first(0.6, "tokens") is None


def test_speedups_are_those_of_a_member_over_the_best_silo() -> None:
    results = [
        result_of(SILO, [0.1] * 3 + [0.4] * 3),
        result_of("silo, replay 8", [0.1] * 3 + [0.2] * 3),
        result_of("8/24", [0.1, 0.1, 0.4, 0.4, 0.4]),
        result_of("8/8", [0.1] * 5),
        result_of(ORACLE, [0.1, 0.4, 0.4, 0.4]),
    ]
    by_name = {one.arm: one for one in summarize(results)}
    # a point is the mean of three: .4 in rounds 3, 4, 5 of the silo, 2, 3, 4 of the sharing arm, and 1, 2, 3 of the oracle
    assert by_name[SILO].speedups["tokens"].mean == pytest.approx(1)
    assert by_name["8/24"].speedups["tokens"].mean == pytest.approx(4 / 3)
    assert by_name[ORACLE].speedups["tokens"].mean == pytest.approx(2)
    assert by_name["8/24"].share_of_oracle.mean == pytest.approx(2 / 3)
    assert by_name["8/24"].speedups["seconds"].mean == pytest.approx(4 / 3)
    assert (
        by_name["8/8"].num_missed == by_name["silo, replay 8"].num_missed == 1
        and by_name["8/8"].speedups["tokens"].values == ()
    )
    assert figures(results)["8/24"]["speedup_tokens"]["mean"] == pytest.approx(1.3333)


def test_mean_curves_are_compared_over_the_seeds_that_all_arms_have() -> None:
    silo = [0.2] * 3 + [0.4] * 3
    results = [
        result_of(SILO, silo),
        result_of(SILO, silo, seed=1),
        result_of(SILO, [0.9] * 6, seed=2),
        result_of("8/24", [0.2] + [0.54] * 5),
        result_of("8/24", [0.2] + [0.3] * 5, seed=1),
        result_of(ORACLE, [0.2] + [0.31] * 5),
        result_of(ORACLE, [0.2] + [0.31] * 5, seed=1),
    ]
    rows = {row[0]: row[1:] for row in table_of_means(results).rows}
    # a point is the mean of three evaluations; the silo has .2, .267, .333, .4 after 10, 20, 30, 40 tokens: .3, .35, .4 after 25,
    # 32.5, 40; the members of 8/24 have .347 and .42 after 10 and 20
    assert rows[SILO] == ["0.400 ± 0.000", "1.0, 1.0, 1.0", "1.0, 1.0, 1.0", "1.0, 1.0, 1.0", "8 s"]
    assert rows["8/24"] == ["0.420 ± 0.170", "2.5, 3.1, 2.3", "2.5, 3.1, 2.3", "2.5, 3.1, 2.3", "8 s"]
    assert rows[ORACLE][:2] == ["0.310 ± 0.000", "1.4, –, –"]
    assert table_of_means([results[2], results[3]]).rows == []
    unlike = [
        result_of(ORACLE, [0.0] * 6),
        result_of(ORACLE, [0.0] * 6, seed=1),
    ]  # one policy draws other held-out tasks
    again = {row[0]: row[1:] for row in table_of_means([*results[:5], *unlike]).rows}
    assert again["8/24"] == rows["8/24"], "no row depends on which others there are"


def test_from_three_seeds_on_the_table_says_how_much_hangs_on_a_single_one() -> None:
    silo = [0.2] * 3 + [0.4] * 3
    sharing = ([0.2] + [0.4] * 5, [0.2] + [0.4] * 5, [0.2] + [0.37] * 5)
    results = [
        result_of(arm, rewards, seed=seed)
        for arm, curves in ((SILO, [silo] * 3), ("8/24", sharing))
        for seed, rewards in enumerate(curves)
    ]
    rows = {row[0]: row[1:] for row in table_of_means(results).rows}
    # after 10 and 20 tokens it has .327 and .39, without the last seed .333 and .4, without another one .323 and .385
    assert rows[SILO][1] == "1.0, 1.0, 1.0"
    assert rows["8/24"][1] == "2.5 (2.5 to 2.5), 2.4 (2.3 to 2.6), – (– to 2.0)"
    assert "(" not in str(table_of_means([one for one in results if one["seed"] < 2]).rows)


def test_a_silo_that_goes_on_without_learning_makes_nobody_faster() -> None:
    short, long = (
        summarize([result_of(SILO, [0.1] * 3 + [0.4] * rounds), result_of("8/24", [0.1, 0.1, 0.4, 0.4, 0.4])])[1]
        for rounds in (3, 30)
    )
    assert short.speedups["tokens"] == long.speedups["tokens"]


def test_seeds_that_a_silo_lacks_are_left_out_and_arms_may_have_fewer() -> None:
    results = [
        result_of(SILO, [0.1, 0.4, 0.4, 0.4]),
        result_of(SILO, [0.9] * 4, seed=1),
        result_of("silo, replay 8", [0.4] * 4),
        result_of("8/8", [0.4] * 4, seed=1),
    ]
    assert {one.arm: one.num_seeds for one in summarize(results)} == {SILO: 1, "silo, replay 8": 1, "8/8": 0}
    assert {one.arm: one.num_seeds for one in summarize([results[0], results[1], results[3]])} == {SILO: 2, "8/8": 1}


def test_training_on_others_answers_counts_on_the_clock() -> None:
    silo = result_of(SILO, [0.1] * 3 + [0.4] * 3)
    sharing = result_of("8/24", [0.1] * 3 + [0.4] * 3)
    sharing["members"][0]["tokens_trained"] = [40.0] * 5
    by_name = {one.arm: one for one in summarize([silo, sharing])}
    assert by_name["8/24"].speedups["tokens"].mean == pytest.approx(1)
    # a round of 10 sampled tokens costs 10 + 10/4 alone, and 10 + 40/4 here
    assert by_name["8/24"].speedups["clock"].mean == pytest.approx(12.5 / 20)


def test_arms_are_chosen_by_name() -> None:
    assert [arm.name for arm in chosen_arms("8/24; silo;8/24")] == ["8/24", "silo"]
    with pytest.raises(ConfigError, match=r"arms must be among silo; .*, got 9/9; set --arms"):
        chosen_arms("silo; 9/9")


def test_unlike_members_rest_and_are_reported_by_kind(tmp_path: Path) -> None:
    late = MemberKind("late", 1, first_round=3, interval_rounds=2)
    assert [late.rests(number) for number in range(1, 7)] == [True, True, False, True, False, True]
    arm = SharingArm("one late, 8/all", "all", kinds=(MemberKind("first", 1), late))
    assert [kind.name for kind in arm.kinds_of_members(8)] == ["first", "late"] and arm.members(8) == 2
    results = [
        result_of(SILO, [0.1] * 3 + [0.4] * 3),
        result_of("one late, 8/all", [])
        | {"evaluated": [0, 1, 2, 3, 4, 5], "members": [
            member([0.1] * 3 + [0.4] * 3, "first"),
            member([0.1] * 3 + [0.4] * 3, "late") | {"tokens": [0, 0, 0, 10, 10]},
        ]},
    ]  # fmt: skip
    by_name = {one.arm: one for one in summarize(results)}
    assert set(by_name) == {SILO, "one late, 8/all: first", "one late, 8/all: late"}
    assert by_name["one late, 8/all: first"].speedups["tokens"].mean == pytest.approx(1)
    assert by_name["one late, 8/all: late"].speedups["tokens"].mean == pytest.approx(4)


def test_specialists_draw_their_own_tasks_and_know_all() -> None:
    plan = plan_of("specialists, 8/all")
    arm = ARMS["specialists, 8/all"]
    config = node_config(plan.cell(arm, 0, 1.0).settings, arm.kinds[1])
    weights = [source.weight for source in config.tasks.sources]
    assert weights[2] == weights[3] == 1 and sum(weights) < 2.01 and len(weights) == 6
    assert config.sharing.swarm_groups == 56
