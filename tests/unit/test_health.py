"""Each sickness is seen in time, told once per episode, and a healthy run is left in peace."""

import json
import logging
import math
import random
from typing import Any

import pytest

from swarm.node.round_metrics import evaluation_row
from swarm.training.health import CHECKS, HealthWatch
from swarm.types import Task, TaskRef

HEALTHY: dict[str, Any] = {
    "rollout/reward_mean": 0.5,
    "train/entropy": 1.0,
    "train/ess_fraction": 0.9,
    "train/kl": 0.2,
    "train/grad_norm": 1.0,
    "train/clip_fraction": 0.05,
    "train/skip_reason": "",
    "train/engine_kl": 0.002,
}


def healthy(i: int) -> dict[str, Any]:
    """Round i of a run that learns: reward, KL and gradient norm rise, entropy falls, all of them noisily."""
    noise = 1 + 0.2 * math.sin(7 * i)
    return {
        **HEALTHY,
        "round": i,
        "rollout/reward_mean": (0.2 + 0.005 * i) * noise,
        "train/entropy": 1.6 * math.exp(-i / 100) * noise,
        "train/kl": 0.008 * i * noise,
        "train/grad_norm": (0.3 + 0.01 * i) * noise,
    }


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "swarm.training.health"]


def test_a_run_that_learns_is_left_in_peace(caplog: pytest.LogCaptureFixture):
    watch = HealthWatch()
    assert not any(watch.observe(healthy(i)) for i in range(120))
    assert told(caplog) == []


SICK: dict[str, dict[str, Any]] = {
    "entropy_collapse": {"train/entropy": 0.3},
    "entropy_growth": {"train/entropy": 3.0},
    "few_effective_answers": {"train/ess_fraction": 0.49},
    "kl_runaway": {"train/kl": 1.1},
    "grad_norm_spike": {"train/grad_norm": 4.0},
    "reward_falling": {"rollout/reward_mean": 0.3},
    "many_clipped": {"train/clip_fraction": 0.5},
    "failing_tasks": {"rollout/failed_tasks": 2, "rollout/groups": 6},
    "engine_differs": {"train/engine_kl": 0.03},
    "steps_not_applied": {"train/skip_reason": "loss or gradient is not finite"},
}


SUMS = "64 tasks of sums"


def evaluation(
    right: int, round: int, measured_on: str = SUMS, first: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `evaluated` takes of 64 tasks, of which so many are right, from number `first` on."""
    rewards = [float(first <= number < first + right) for number in range(64)]
    return {"accuracy_mean": right / 64, "round": round, "measured_on": measured_on}, {"sums": rewards}


def test_every_check_has_a_case():
    assert set(SICK) | {"held_out_falling"} == set(CHECKS)


@pytest.mark.parametrize(
    ("evaluations", "told_of"),
    [
        # of two, 2.81 standard errors: 7 tasks less and none more are 2.65, and 20 less and 12 more are 1.4
        ([evaluation(40, 0), evaluation(33, 50)], ""),
        ([evaluation(40, 0), evaluation(32, 50)], "0.5 at the newest evaluation, after 0.62 at round 0"),
        ([evaluation(40, 0), evaluation(32, 50, first=12)], ""),
        # of twenty, 4.06: 16 tasks less are 4
        ([evaluation(40, 0), *[evaluation(38, 50)] * 18, evaluation(24, 950)], ""),
        ([evaluation(40, 0), *[evaluation(38, 50)] * 18, evaluation(23, 950)], "0.36 at the newest evaluation"),
        ([evaluation(20, 0), evaluation(40, 50), evaluation(20, 100)], "after 0.62 at round 50"),
        ([evaluation(20, 0), evaluation(40, 50), evaluation(20, 100), evaluation(38, 150)], ""),  # it has come back
        ([evaluation(40, 0), evaluation(20, 50, "64 tasks of products")], ""),  # of other tasks
        ([evaluation(40, 0), evaluation(20, 50, "")], ""),  # a source could not be scored
        ([], ""),
    ],
)
def test_held_out_reward_below_the_best_is_told(evaluations: list[tuple[dict[str, Any], dict[str, Any]]], told_of: str):
    watch = HealthWatch()
    for found in evaluations:
        watch.evaluated(*found)
    again = HealthWatch()
    again.restore(json.loads(json.dumps(watch.state())))
    for one in (watch, again):
        texts = one.observe(HEALTHY)
        assert len(texts) == bool(told_of) and all(told_of in text and "training.lr" in text for text in texts)


def test_a_fall_by_less_than_a_twentieth_is_not_told_however_surely_it_is_one():
    watch = HealthWatch()
    for right in (600, 552, 548):
        row = {"accuracy_mean": right / 1000, "round": right, "measured_on": SUMS}
        watch.evaluated(row, {"sums": [1.0] * right + [0.0] * (1000 - right)})
        assert bool(watch.observe(HEALTHY)) == (right == 548)


@pytest.mark.parametrize(
    ("few", "many", "is_told"), [(1, 56, False), (0, 56, True), (8, 49, False), (8, 48, True), (8, 56, False)]
)
def test_evaluations_are_compared_task_by_task_and_sources_count_alike(few: int, many: int, is_told: bool):
    """Of 8 tasks of one source, or 56 of the other, 8 less are 2.83 standard errors and 7 less are 2.65, of 2.81."""
    watch = HealthWatch()
    for round, (few_right, many_right) in enumerate([(8, 56), (few, many)]):
        rewards = {
            "few": [1.0] * few_right + [0.0] * (8 - few_right),
            "many": [1.0] * many_right + [0.0] * (56 - many_right),
        }
        mean = (few_right / 8 + many_right / 56) / 2
        watch.evaluated({"accuracy_mean": mean, "round": round, "measured_on": SUMS}, rewards)
    assert bool(watch.observe(HEALTHY)) == is_told


@pytest.mark.parametrize("missing", ["evaluations", "best rewards"])
def test_a_checkpoint_that_does_not_have_all_of_an_evaluation_begins_a_new_comparison(missing: str):
    watch = HealthWatch()
    watch.evaluated(*evaluation(40, 0))
    watch.observe(HEALTHY)
    state = json.loads(json.dumps(watch.state()))
    for held in (state["held_out"], *state["rows"]):
        held.pop(missing, None)
        held.pop(f"held out {missing}", None)
    again = HealthWatch()
    again.restore(state)
    assert again.observe(HEALTHY) == []
    for right, told in ((20, False), (38, False), (20, True)):
        again.evaluated(*evaluation(right, 50))
        assert bool(again.observe(HEALTHY)) == told


def test_a_policy_that_stays_as_it_is_hardly_ever_seems_to_unlearn():
    """However often it is evaluated. Three standard errors, whatever the number, told of every seventh of these runs."""
    rng, num_told = random.Random(0), 0
    tasks = [Task(TaskRef("sums", "cd" * 8, 1, index), "", lambda answer: 0.0) for index in range(192)]
    for _ in range(40):
        watch, abilities, texts = HealthWatch(), [rng.random() for _ in tasks], set[str]()
        for number in range(80):
            scores = {"sums": [float(rng.random() < ability) for ability in abilities]}
            watch.evaluated({**evaluation_row(tasks, 1.0, scores), "round": 50 * number}, scores)
            texts.update(watch.observe(HEALTHY))
        num_told += bool(texts)
    assert num_told <= 1


@pytest.mark.parametrize("name", sorted(SICK))
def test_each_sickness_is_told_once_with_a_setting_to_change(name: str, caplog: pytest.LogCaptureFixture):
    watch = HealthWatch()
    for i in range(20):
        assert watch.observe({**HEALTHY, "round": i}) == []
    found = [watch.observe({**HEALTHY, **SICK[name], "round": 20 + i}) for i in range(8)]
    assert any(found)
    (message,) = told(caplog)
    text = next(row for row in found if row)[0]
    assert message.startswith("round 2") and message.endswith(text)
    assert ("training." in text or "tasks." in text) and ":" in text
    assert json.loads(json.dumps(watch.state())) == watch.state()


def test_one_task_that_fails_now_and_then_is_no_sickness():
    watch = HealthWatch()
    for i in range(20):
        assert watch.observe({**HEALTHY, "round": i, "rollout/groups": 8, "rollout/failed_tasks": int(i == 9)}) == []


def test_half_of_the_tokens_is_enough():
    watch = HealthWatch()
    assert not any(watch.observe({**HEALTHY, "train/ess_fraction": 0.51}) for _ in range(20))


def test_a_new_episode_is_told_again(caplog: pytest.LogCaptureFixture):
    watch = HealthWatch()
    for rows in (20, 20):
        for _ in range(rows):
            watch.observe(HEALTHY)
        watch.observe({**HEALTHY, "train/grad_norm": 5.0})
        watch.observe(HEALTHY)
        watch.observe({**HEALTHY, "train/grad_norm": 5.0})  # the same episode
    assert len(told(caplog)) == 2


def test_one_large_gradient_is_the_luck_of_a_batch():
    watch = HealthWatch()
    for i in range(60):
        assert watch.observe({**HEALTHY, "train/grad_norm": 5.0 if i % 12 == 11 else 1.0}) == []


def test_low_entropy_is_no_sickness_where_the_reward_pays_for_it():
    watch = HealthWatch()
    for i in range(40):
        row = {**HEALTHY, "train/entropy": 1.0 * 0.9**i, "rollout/reward_mean": min(0.2 + 0.02 * i, 0.97)}
        assert watch.observe(row) == []


def test_distance_from_the_base_is_no_sickness_where_the_run_has_paid_for_it():
    watch = HealthWatch()
    for i in range(120):
        row = {**HEALTHY, "rollout/reward_mean": min(0.2 + 0.01 * i, 0.7), "train/kl": 0.02 * i}
        assert watch.observe(row) == [], "its reward has stopped rising within the window, not since the start"


@pytest.mark.parametrize(
    ("before", "after", "is_told"),
    [(0.6, 0.9, False), (0.6, 1.2, True), (1.9, 1.95, False), (1.9, 2.05, True)],
    ids=["near", "moved", "far but not very", "very far"],
)
def test_kl_is_told_where_it_moved_half_a_nat_or_is_beyond_two(before: float, after: float, is_told: bool):
    watch = HealthWatch()
    seen = [watch.observe({**HEALTHY, "train/kl": before if i < 30 else after}) for i in range(34)]
    assert any(seen) == is_told


def is_seen(name: str, column: str, older: list[float], recent: list[float], **others: tuple[float, float]) -> bool:
    """Whether a check warns: `older` and `recent` are the values of a column, after which rows have none up to eight newest ones.

    `others`: (older, newest) values of the reward.
    """
    rows = [{**HEALTHY, column: value} for value in [*older, *recent]]
    rows += [{**HEALTHY, column: None}] * (8 - len(recent))
    for place, row in enumerate(rows):
        row.update({"rollout/reward_mean": others["reward"][place >= len(older)]} if others else {})
    return bool(CHECKS[name](rows))


@pytest.mark.parametrize(
    ("name", "column", "older", "at_bound", "beyond"),
    [
        ("entropy_collapse", "train/entropy", 2.0, 1.0, 0.99),
        ("few_effective_answers", "train/ess_fraction", 0.9, 0.5, 0.49),
        ("kl_runaway", "train/kl", 0.0, 0.5, 0.51),
        ("kl_runaway", "train/kl", 2.0, 2.0, 2.01),
        ("grad_norm_spike", "train/grad_norm", 2.0, 7.0, 7.01),
        ("reward_falling", "rollout/reward_mean", 0.05, 0.0, -0.01),
        ("many_clipped", "train/clip_fraction", 0.1, 0.3, 0.31),
    ],
)
def test_each_bound_is_where_the_check_says(name: str, column: str, older: float, at_bound: float, beyond: float):
    assert not is_seen(name, column, [older] * 8, [at_bound] * 8)
    assert is_seen(name, column, [older] * 8, [beyond] * 8)


@pytest.mark.parametrize(
    ("name", "column", "older", "recent", "num_older", "num_recent"),
    [
        ("entropy_collapse", "train/entropy", 1.0, 0.3, 4, 4),
        ("few_effective_answers", "train/ess_fraction", 0.9, 0.1, 0, 4),
        ("kl_runaway", "train/kl", 0.1, 1.1, 2, 3),
        ("grad_norm_spike", "train/grad_norm", 1.0, 5.0, 4, 5),
        ("reward_falling", "rollout/reward_mean", 0.5, 0.3, 8, 8),
        ("many_clipped", "train/clip_fraction", 0.1, 0.5, 0, 4),
    ],
)
def test_each_check_waits_for_enough_rows(
    name: str, column: str, older: float, recent: float, num_older: int, num_recent: int
):
    assert is_seen(name, column, [older] * num_older, [recent] * num_recent)
    if num_older:
        assert not is_seen(name, column, [older] * (num_older - 1), [recent] * num_recent)
    if name != "grad_norm_spike":  # two of its newest rows are enough
        assert not is_seen(name, column, [older] * num_older, [recent] * (num_recent - 1))


@pytest.mark.parametrize(
    ("entropy", "reward", "is_told"),
    [
        ((0.06, 0.04), (0.89, 0.89), True),
        ((0.06, 0.04), (0.9, 0.9), False),  # nearly all is solved
        ((1.0, 0.4), (0.0, 0.02), True),
        ((1.0, 0.4), (0.0, 0.03), False),  # it has risen
        ((1.0, 0.4), (0.95, 0.95), True),
    ],
)
def test_entropy_may_fall_where_the_reward_is_high_or_rises(
    entropy: tuple[float, float], reward: tuple[float, float], is_told: bool
):
    older, recent = entropy
    assert is_seen("entropy_collapse", "train/entropy", [older] * 8, [recent] * 8, reward=reward) == is_told


@pytest.mark.parametrize(
    ("start", "now", "is_told"), [(0.06, 0.04, False), (0.06, 0.016, False), (0.06, 0.014, True), (0.3, 0.05, False)]
)
def test_a_base_that_begins_with_little_entropy_is_told_of_a_quarter_of_it(start: float, now: float, is_told: bool):
    """Over so many rounds that nothing halves within the window."""
    watch = HealthWatch()
    values = [start * (now / start) ** (i / 200) for i in range(201)]
    seen = [watch.observe({**HEALTHY, "train/entropy": value}) for value in values]
    assert any(seen) == is_told


@pytest.mark.parametrize(
    ("entropies", "rewards", "is_told"),
    [
        ([0.1, 0.1, *[0.21] * 4], [0.5] * 6, True),
        ([0.1, 0.1, *[0.2] * 4], [0.5] * 6, False),
        ([0.1, 0.1, *[0.21] * 2], [0.5] * 4, False),  # too few to tell
        ([0.1, None, 0.1, 0.3, None, 0.3, 0.3], [0.5] * 7, True),  # rounds without a step
        ([0.1, 0.1, *[0.4] * 4], [0.5, 0.5, *[0.53] * 4], False),  # it looks for new answers, and finds them
        ([0.1, 0.1, *[0.4] * 4], [0.5, 0.5, *[0.51] * 4], True),
    ],
)
def test_entropy_that_doubles_without_a_gain_is_told_within_a_few_rounds(
    entropies: list[float | None], rewards: list[float], is_told: bool
):
    watch = HealthWatch()
    columns = ("train/entropy", "rollout/reward_mean")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(entropies, rewards, strict=True)]
    assert bool([watch.observe({**HEALTHY, **row}) for row in rows][-1]) == is_told


def test_reward_that_falls_within_its_noise_is_no_sickness():
    """Standard deviation .1069 of eight alternating values, so three standard errors of the difference are .16."""
    older = [0.5, 0.7] * 4
    assert not is_seen("reward_falling", "rollout/reward_mean", older, [0.35, 0.55] * 4)
    assert is_seen("reward_falling", "rollout/reward_mean", older, [0.33, 0.53] * 4)


def test_rounds_without_a_reward_excuse_nothing():
    watch = HealthWatch()
    for _ in range(20):
        watch.observe(HEALTHY)
    sick = {**HEALTHY, "rollout/reward_mean": None, "train/kl": 1.1, "train/entropy": 0.3}
    found = [watch.observe(sick) for _ in range(12)]
    assert [len(texts) for texts in found[-4:]] == [2] * 4
    rewarded_again = [watch.observe({**sick, "rollout/reward_mean": 0.5}) for _ in range(8)]
    assert len(rewarded_again[-1]) == 2


def test_norms_of_zero_are_no_scale_for_a_spike():
    assert not is_seen("grad_norm_spike", "train/grad_norm", [0.0] * 8, [1.0] * 8)


def test_three_of_eight_steps_that_were_not_applied_are_told():
    skipped = {**HEALTHY, "train/skip_reason": "because"}
    check = CHECKS["steps_not_applied"]
    assert check([HEALTHY] * 6 + [skipped] * 2) == "" == check([skipped] * 8 + [HEALTHY] * 6 + [skipped] * 2)
    assert check([HEALTHY] * 5 + [skipped] * 3).startswith("3 of the last 8 steps were not applied")


@pytest.mark.parametrize(("num_quiet", "num_told"), [(7, 1), (8, 2)])
def test_an_episode_is_over_after_eight_rows_without_it(
    num_quiet: int, num_told: int, caplog: pytest.LogCaptureFixture
):
    watch = HealthWatch()
    clipped = {**HEALTHY, "train/clip_fraction": 0.5}
    # the median of eight rows follows after four healthy and after five clipped ones
    for row in [clipped] * 8 + [HEALTHY] * (3 + num_quiet - 4) + [clipped] * 5:
        watch.observe(row)
    assert len(told(caplog)) == num_told


@pytest.mark.parametrize(("start", "now", "is_told"), [(0.5, 0.5, True), (0.0, 0.1, True), (0.0, 0.11, False)])
def test_gain_counts_from_the_first_eight_rewards_of_the_run(start: float, now: float, is_told: bool):
    watch = HealthWatch()
    for reward in (start, None, *[start] * 7, *[now] * 60):
        watch.observe({**HEALTHY, "rollout/reward_mean": reward})
    far = {**HEALTHY, "rollout/reward_mean": now, "train/kl": 1.1}
    assert any(watch.observe(far) for _ in range(4)) == is_told


def test_rounds_without_a_step_and_nan_are_no_rows_to_judge():
    watch = HealthWatch()
    for i in range(30):
        assert watch.observe({"round": i, "rollout/reward_mean": 0.5}) == []
        assert watch.observe({**HEALTHY, "train/kl": math.nan, "train/grad_norm": math.inf}) == []


def test_an_episode_and_its_window_outlive_a_restart(caplog: pytest.LogCaptureFixture):
    first, second = HealthWatch(), HealthWatch()
    for _ in range(20):
        first.observe(HEALTHY)
    for _ in range(2):
        first.observe({**HEALTHY, "train/grad_norm": 5.0})
    caplog.clear()
    second.restore(json.loads(json.dumps(first.state())))
    assert logging.getLogger("swarm.training.health").isEnabledFor(logging.WARNING)
    assert second.observe({**HEALTHY, "train/grad_norm": 5.0}) != []
    assert told(caplog) == []


def test_a_step_that_was_not_finite_can_be_checkpointed_and_is_known_afterwards():
    watch = HealthWatch()
    for i in range(20):
        watch.observe(healthy(i))
    for norm in (math.nan, math.inf):
        watch.observe({**healthy(20), "train/grad_norm": norm, "train/skip_reason": "loss or gradient is not finite"})
    again = HealthWatch()
    again.restore(json.loads(json.dumps(watch.state(), allow_nan=False)))
    assert again.state() == watch.state()
