"""Golden values worked out by hand."""

import math

import pytest
import torch

from swarm.training.advantages import advantages

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


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_equal_rewards_give_no_advantage(kind: str):
    assert advantages(torch.full((5,), 0.3, dtype=torch.float64), kind).abs().max().item() < 1e-9


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_order_of_siblings_does_not_matter(kind: str):
    order = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(advantages(REWARDS[order], kind), advantages(REWARDS, kind)[order], rtol=1e-14)
