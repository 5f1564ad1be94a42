"""Effective sample size by plain arithmetic."""

import math

import pytest
import torch

from swarm.training.losses import ess_fraction, lr_factor, sequence_log_weights


def test_ess_of_uneven_weights():
    # weights 1, 2, 5: (8)² / (3 · (1 + 4 + 25)) = 64 / 90
    logs = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log()
    assert ess_fraction(logs) == pytest.approx(64 / 90)
    assert ess_fraction(logs + 700) == pytest.approx(
        64 / 90
    )  # only ratios count; exp(705) would overflow a sum of squares


def test_ess_of_one_dominating_answer_is_one_in_b():
    assert ess_fraction(torch.tensor([50.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)


def test_ess_without_sequences_is_one():
    assert ess_fraction(torch.tensor([])) == 1.0


def test_ess_is_zero_when_every_answer_was_dropped():
    assert ess_fraction(torch.full((3,), -torch.inf)) == 0.0


def test_a_dropped_answer_counts_in_b_but_carries_nothing():
    assert ess_fraction(torch.tensor([0.0, 0.0, -torch.inf, 0.0])) == pytest.approx(3 / 4)


def test_the_weight_of_an_answer_is_the_cut_product_of_its_tokens():
    log_w = torch.tensor([[0.2, 0.3, 0.0], [1.0, 1.0, 1.0], [-1.0, -2.0, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    factors = torch.tensor([[1.0, 1.0, 9.0], [1.0, 0.0, 1.0], [2.0, 1.0, 1.0], [0.0, 0.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    got = sequence_log_weights(log_w, factors, mask, 2.0).tolist()
    # e^.5 as it is, e^3 cut at 2, e^-2.5 as it is; of the last answer the correction keeps nothing
    assert got == pytest.approx([0.5, math.log(2), -2.5, -math.inf])


def test_lr_goes_with_the_square_root_and_never_below_one_answer():
    assert lr_factor(1.0, 16) == 1.0
    assert lr_factor(0.25, 16) == 0.5
    assert lr_factor(0.0, 16) == 0.25
    assert lr_factor(0.0, 0) == 1.0
