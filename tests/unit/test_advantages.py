"""Golden values worked out by hand."""

import math

import numpy as np
import pytest
import torch

from swarm.extensions.points import ADVANTAGES
from swarm.training.advantages import Advantage, Gdpo, GroupRewards


def advantages(rewards: torch.Tensor, kind: str) -> torch.Tensor:
    """With one reward per rollout, and tokens that tell the answers apart; nan counts as 0."""
    tokens = tuple((number,) for number in range(len(rewards)))
    group = GroupRewards(rewards, rewards[None], torch.ones(1, dtype=torch.float64), tokens)
    values: torch.Tensor = ADVANTAGES.make(kind, {}, "").of_group(group)
    return values.nan_to_num(0.0)


def gdpo(signals: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return Gdpo().of_group(GroupRewards(signals[0], signals, weights, ((),) * signals.shape[1]))


gdpo_batch = Gdpo().of_batch
REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64)  # mean 0.375, deviations .625 -.375 -.375 .125


def test_dr_grpo_is_the_deviation_from_the_mean():
    assert advantages(REWARDS, "dr_grpo").tolist() == [0.625, -0.375, -0.375, 0.125]


def test_grpo_divides_by_the_sample_standard_deviation():
    # squares .390625 + .140625 + .140625 + .015625 = .6875; / 3 = .2291666…
    std = math.sqrt(0.6875 / 3)
    expected = [d / (std + 1e-6) for d in (0.625, -0.375, -0.375, 0.125)]
    assert advantages(REWARDS, "grpo").tolist() == pytest.approx(expected, rel=1e-14)


def test_grpo_on_one_success_of_eight():
    rewards = torch.tensor([1.0] + [0.0] * 7, dtype=torch.float64)
    # mean 1/8, variance (7/8)²·1/7 + 7·(1/8)²/7 = 1/8, std .35355…
    got = advantages(rewards, "grpo")
    assert got[0].item() == pytest.approx(0.875 / (math.sqrt(0.125) + 1e-6), rel=1e-14)
    assert got[1].item() == pytest.approx(-0.125 / (math.sqrt(0.125) + 1e-6), rel=1e-14)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "median"])
def test_equal_rewards_give_no_advantage(kind: str):
    assert advantages(torch.full((5,), 0.3, dtype=torch.float64), kind).abs().max().item() < 1e-9


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "median"])
def test_order_of_siblings_does_not_matter(kind: str):
    order = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(advantages(REWARDS[order], kind), advantages(REWARDS, kind)[order], rtol=1e-14)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "median", "gdpo"])
def test_each_form_says_whether_it_is_centred_and_reads_signals(kind: str):
    form: Advantage = ADVANTAGES.make(kind, {}, "")
    one, other = (
        form.of_group(GroupRewards(REWARDS, signals[None], torch.ones(1), tuple((n,) for n in range(4)))).nan_to_num(
            0.0
        )
        for signals in (REWARDS, REWARDS.flip(0))
    )
    assert form.is_centred == (abs(one.sum().item()) < 1e-9)
    assert form.uses_signals == (not torch.equal(one, other))


def test_median_is_the_deviation_from_the_middle_reward():
    rewards = torch.tensor([1.0, 0.0, 0.25, 0.5, 0.0], dtype=torch.float64)  # sorted 0 0 .25 .5 1
    assert advantages(rewards, "median").tolist() == [0.75, -0.25, 0.0, 0.25, -0.25]


def test_median_of_an_even_group_lies_between_two_rewards():
    assert advantages(REWARDS, "median").tolist() == [0.75, -0.25, -0.25, 0.25]  # sorted 0 0 .5 1


def test_median_on_binary_rewards_stays_bounded():
    rewards = torch.tensor([1.0] + [0.0] * 8, dtype=torch.float64)  # median absolute deviation 0
    assert advantages(rewards, "median").tolist() == rewards.tolist()


def test_gdpo_normalises_each_signal_before_the_weighted_sum():
    signals = np.array([[1.0, 0.0, 0.0, 1.0], [10.0, 30.0, 20.0, 40.0], [0.3, 0.3, 0.3, 0.3]])
    weights = np.array([1.0, 0.5, 7.0])
    expected = np.zeros(4)
    for values, weight in zip(signals[:2], weights[:2], strict=True):  # the third does not vary: no word in it
        expected += weight * (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    got = gdpo(torch.tensor(signals), torch.tensor(weights))
    assert got.tolist() == pytest.approx(expected.tolist(), rel=1e-13)


def test_gdpo_keeps_apart_what_a_sum_of_rewards_would_confuse():
    # correct without format and format without correctness have equal sums, but here format is rare
    signals = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    got = gdpo(signals, torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert got[0] > got[1]


def test_gdpo_batch_has_no_mean_and_unit_spread():
    values = np.array([3.0, -1.0, 0.5, 2.5, -4.0])
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    assert gdpo_batch(torch.tensor(values)).tolist() == pytest.approx(expected.tolist(), rel=1e-13)


def test_answers_of_others_are_compared_with_what_own_ones_earn():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    # V = .2, deviation sqrt(.2 · .8) = .4: .8 / .4 = 2 and -.2 / .4 = -.5
    assert ADVANTAGES.make("grpo", {}, "").of_others(rewards, 0.2).tolist() == pytest.approx([2, -0.5, 2, 2, -0.5])
    # V = .01: .99 / .0995 = 9.95 is more than the sqrt(5 - 1) = 2 that one success among five can give
    assert ADVANTAGES.make("grpo", {}, "").of_others(rewards, 0.01)[0].item() == 2
    assert ADVANTAGES.make("dr_grpo", {}, "").of_others(rewards, 0.2).tolist() == pytest.approx(
        [0.8, -0.2, 0.8, 0.8, -0.2]
    )
