"""Formulas of `swarm eval` against values worked by hand and by counting."""

import itertools
import json

import pytest

from swarm.cli.policy import evaluate
from swarm.rollouts.pass_at_k import Estimate, mean_of, overall, pass_at_k, score, wilson


@pytest.mark.parametrize(
    ("num_answers", "num_right", "k", "expected"),
    [(5, 2, 3, 0.9), (4, 1, 1, 0.25), (10, 0, 5, 0.0), (10, 10, 1, 1.0), (8, 7, 2, 1.0), (200, 1, 100, 0.5), (3, 1, 2, 2 / 3)],
)  # fmt: skip
def test_pass_at_k_is_one_minus_a_ratio_of_binomials(num_answers: int, num_right: int, k: int, expected: float) -> None:
    assert pass_at_k(num_answers, num_right, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_choices_of_k_with_a_right_one() -> None:
    for num_answers in range(1, 8):
        for num_right, k in itertools.product(range(num_answers + 1), range(1, num_answers + 1)):
            chosen = list(itertools.combinations(range(num_answers), k))
            share = sum(min(one) < num_right for one in chosen) / len(chosen)
            assert pass_at_k(num_answers, num_right, k) == pytest.approx(share, abs=1e-12)


def test_wilson_is_that_of_the_literature() -> None:
    """Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20 and 1 of 29, to four digits."""
    table = ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718))
    for right, count, low, high in table:
        found = wilson(right / count, count)
        assert (found.low, found.high) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))


def test_the_bounds_of_a_mean_add_up_as_squares() -> None:
    found = mean_of([Estimate(0.5, 0.2, 0.7), Estimate(0.9, 0.5, 1.0)])
    assert found.mean == pytest.approx(0.7)
    assert found.low == pytest.approx(0.7 - 0.25)  # √(0.3² + 0.4²) / 2
    assert found.high == pytest.approx(0.7 + (0.2**2 + 0.1**2) ** 0.5 / 2)


def test_scores_of_tasks_and_of_sources() -> None:
    few = score([[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0, 1.0]], [1, 2], threshold=1.0)
    assert few.num_tasks == 2
    assert few.reward.mean == pytest.approx((0.375 + 1) / 2)
    assert few.pass_at[1].mean == pytest.approx((0.25 + 1) / 2)
    assert few.pass_at[2].mean == pytest.approx((0.5 + 1) / 2)
    assert (few.pass_at[2].low, few.pass_at[2].high) == (wilson(0.75, 2).low, wilson(0.75, 2).high)
    assert score([[1.0, 0.0, 0.0, 0.5]], [1], threshold=0.5).pass_at[1].mean == 0.5
    both = overall([few, score([[0.0, 0.0, 0.0, 0.0]] * 6, [1, 2], threshold=1.0)])
    assert both.num_tasks == 8
    assert both.reward.mean == pytest.approx(few.reward.mean / 2), "each source counts the same"


def test_a_reward_that_misses_its_bound_by_rounding_is_right() -> None:
    assert score([[0.1 + 0.2 + 0.7 - 1e-16]], [1], threshold=1.0).pass_at[1].mean == 1.0
    assert json.dumps(score([[0.9]], [1], threshold=1.0).pass_at[1].mean) == "0.0"


@pytest.mark.parametrize(
    ("num_answers", "temperature", "how"),
    [
        (1, 0.0, "one greedy answer each"),
        (4, 0.0, "4 greedy answers each"),
        (1, 0.7, "one answer each at temperature 0.7"),
        (16, 1.0, "16 answers each at temperature 1"),
    ],
)
def test_the_title_says_how_the_answers_were_sampled(
    capsys: pytest.CaptureFixture[str], num_answers: int, temperature: float, how: str
) -> None:
    """A greedy number is often twice the one that a node prints while it samples at temperature 1."""
    scores = {"sums": score([[1.0], [0.0]], (1,), 1.0)}
    evaluate._print({"round 5": scores}, 1, evaluate._how(num_answers, temperature))
    assert f"held-out tasks, round 5, {how}" in " ".join(capsys.readouterr().out.split())
