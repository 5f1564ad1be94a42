"""Effective sample size: by plain arithmetic, and what it makes of noise and of stale data at any length of answers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.training.losses import ess_fraction, ess_weights, lr_factor

LENGTHS = (24, 768, 2048, 8192, 16384)
NUM_ANSWERS = 16


def test_ess_of_uneven_weights():
    # weights 1, 2, 5: (8)² / (3 · (1 + 4 + 25)) = 64 / 90
    assert ess_fraction(8.0, 30.0, 3) == pytest.approx(64 / 90)
    assert ess_fraction(8e6, 30e12, 3) == pytest.approx(64 / 90)  # only ratios count


def test_ess_of_one_dominating_token_is_one_in_n():
    assert ess_fraction(50.0 + 3e-9, 2500.0, 4) == pytest.approx(0.25)


def test_ess_without_tokens_is_one():
    assert ess_fraction(0.0, 0.0, 0) == 1.0


def test_ess_is_zero_when_every_token_was_dropped():
    assert ess_fraction(0.0, 0.0, 3) == 0.0


def test_a_dropped_token_counts_in_n_but_carries_nothing():
    assert ess_fraction(3.0, 3.0, 4) == pytest.approx(3 / 4)


def test_the_weight_of_a_token_is_its_ratio_cut_at_the_cap_and_nothing_where_it_is_dropped():
    log_w = torch.tensor([[0.2, 3.0, 0.0], [-1.0, -2.0, 0.5]], dtype=torch.float64)
    factors = torch.tensor([[1.0, 2.0, 9.0], [1.0, 0.0, 0.3]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    first, second = ess_weights(log_w, factors, mask, 2.0).tolist()
    assert first == pytest.approx([math.exp(0.2), 2.0, 0.0])
    assert second == pytest.approx([math.exp(-1), 0.0, math.exp(0.5)])


def test_lr_goes_with_the_square_root_and_never_below_one_answer():
    assert lr_factor(1.0, 16) == 1.0
    assert lr_factor(0.25, 16) == 0.5
    assert lr_factor(0.0, 16) == 0.25
    assert lr_factor(0.0, 0) == 1.0


# --- what an answer's length does to the step size; the table of docs/algorithms.md


def noise(size: float, length: int) -> np.ndarray:
    """[B, T] log w of data that are not stale: engine and trainer round differently."""
    return np.random.default_rng(length).normal(0.0, size, (NUM_ANSWERS, length)).astype(np.float32)


def drifted(kl: float, length: int) -> np.ndarray:
    """[B, T] log w of stale data: `kl` nats per token on average, differing by prompt (exponential), E[w] = 1 per token."""
    rng = np.random.default_rng(length)
    of_answer = kl * rng.exponential(1.0, (NUM_ANSWERS, 1)).astype(np.float32)
    spread = rng.standard_normal((NUM_ANSWERS, length), dtype=np.float32)
    return -of_answer + np.sqrt(2 * of_answer) * spread + noise(0.05, length)


def shifted(drift: float, length: int) -> np.ndarray:
    """[B, T] log w, smaller by `drift` per token on average, by the same amount at all tokens of an answer."""
    of_answer = np.random.default_rng(length).exponential(1.0, (NUM_ANSWERS, 1)).astype(np.float32)
    return -drift * of_answer + noise(0.05, length)


def factor(weights: np.ndarray) -> float:
    """sqrt(ESS / count), not below that of one answer."""
    weights = np.minimum(weights.astype(np.float64), 2.0)
    return max(math.sqrt(weights.sum() ** 2 / (weights.size * (weights**2).sum())), 1 / math.sqrt(NUM_ANSWERS))


def by_product(log_w: np.ndarray) -> float:
    total = np.minimum(log_w.sum(1), math.log(2.0))
    return factor(np.exp(total - total.max()))


def by_geometric_mean(log_w: np.ndarray) -> float:
    return factor(np.exp(log_w.mean(1)))


def by_token(log_w: np.ndarray) -> float:
    """As the trainer computes it."""
    weights = ess_weights(torch.from_numpy(log_w), torch.ones(log_w.shape), torch.ones(log_w.shape), 2.0)
    return lr_factor(ess_fraction(weights.sum().item(), weights.square().sum().item(), weights.numel()), len(log_w))


@pytest.mark.parametrize("length", LENGTHS)
def test_the_trainers_statistic_is_the_plain_formula(length: int):
    log_w = drifted(0.2, length)
    assert by_token(log_w) == pytest.approx(factor(np.exp(log_w)), rel=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [0.02, 0.05, 0.1])
def test_rounding_alone_never_lowers_the_learning_rate(size: float, length: int):
    assert by_token(noise(size, length)) > 0.99
    assert by_product(noise(0.1, length)) < 0.95, "the product over an answer would"


@pytest.mark.parametrize("length", LENGTHS)
def test_stale_data_lower_the_learning_rate_at_any_length(length: int):
    by_drift = [by_token(drifted(kl, length)) for kl in (0.05, 0.2, 0.5, 1.0)]
    assert by_drift == sorted(by_drift, reverse=True)
    assert by_drift[0] < 0.98 and by_drift[1] < 0.94 and by_drift[2] < 0.89 and by_drift[3] < 0.82
    assert by_token(shifted(1.0, length)) < 0.93
    for kl in (0.05, 0.2, 0.5):
        assert by_token(drifted(kl, length)) < by_geometric_mean(drifted(kl, length)), "a mean hides what tokens show"


ROWS = {
    "rounding, σ = .05": lambda length: noise(0.05, length),
    "drift of .05 nats": lambda length: drifted(0.05, length),
    "drift of .2 nats": lambda length: drifted(0.2, length),
    "drift of 1 nat": lambda length: drifted(1.0, length),
    "shift of 1 nat": lambda length: shifted(1.0, length),
}
COLUMNS = {"product": by_product, "geometric mean": by_geometric_mean, "tokens": by_token}


def test_the_table_of_the_documentation_is_this_simulation():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    table = page[page.index("| log w per token |") :].split("\n\n")[0].splitlines()[2:]
    data, checked = "", 0
    for row in table:
        name, statistic, *values = [cell.strip(" *") for cell in row.strip("|").split("|")]
        data = name or data
        got = [COLUMNS[statistic](ROWS[data](length)) for length in LENGTHS]
        assert [float(value) for value in values] == pytest.approx(got, abs=0.0051), (data, statistic)
        checked += 1
    assert checked == len(ROWS) * len(COLUMNS)
