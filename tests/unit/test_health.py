"""Each sickness is seen in time, told once per episode, and a healthy run is left in peace."""

import json
import logging
import math
from typing import Any

import pytest

from swarm.training.health import CHECKS, HealthWatch

HEALTHY: dict[str, Any] = {
    "rollout/reward_mean": 0.5,
    "train/entropy": 1.0,
    "train/ess_fraction": 0.9,
    "train/kl": 0.2,
    "train/grad_norm": 1.0,
    "train/clip_fraction": 0.05,
    "train/skip_reason": "",
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
    "few_effective_answers": {"train/ess_fraction": 0.49},
    "kl_runaway": {"train/kl": 1.1},
    "grad_norm_spike": {"train/grad_norm": 4.0},
    "reward_falling": {"rollout/reward_mean": 0.3},
    "many_clipped": {"train/clip_fraction": 0.5},
    "steps_not_applied": {"train/skip_reason": "loss or gradient is not finite"},
}


def test_every_check_has_a_case():
    assert set(SICK) == set(CHECKS)


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
    assert "training." in text and ":" in text
    assert json.loads(json.dumps(watch.state())) == watch.state()


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
