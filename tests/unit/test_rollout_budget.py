"""How many answers each task gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.rollouts.rollout_round import second_round_size, sizes_by_variance

rates = st.floats(0.001, 0.999)
lengths = st.floats(1, 5000)


def test_alike_tasks_get_alike_many() -> None:
    assert sizes_by_variance([0.3] * 5, [40] * 5, group_size=8, smallest=4, largest=64) == [8] * 5


def test_more_answers_where_reward_varies_and_where_answers_are_short() -> None:
    assert sizes_by_variance([0.5, 0.1], [10, 10], group_size=8, smallest=2, largest=64) == [10, 6]  # √.25 : √.09
    assert sizes_by_variance([0.5, 0.5], [10, 40], group_size=8, smallest=2, largest=64) == [
        13,
        6,
    ]  # 2 : 1 at 400 tokens
    assert sizes_by_variance([0.999, 0.5], [10, 10], group_size=8, smallest=4, largest=64) == [4, 12]
    assert sizes_by_variance([0.999, 0.5], [10, 10], group_size=8, smallest=4, largest=10) == [4, 10]


@given(st.lists(st.tuples(rates, lengths), min_size=1, max_size=12), st.integers(2, 32), st.integers(2, 8))
def test_budget_holds_and_nobody_falls_below_the_smallest(
    tasks: list[tuple[float, float]], group_size: int, smallest: int
) -> None:
    success, tokens = [p for p, _ in tasks], [t for _, t in tasks]
    sizes = sizes_by_variance(success, tokens, group_size=group_size, smallest=smallest, largest=64)
    assert min(sizes) >= min(smallest, group_size)
    assert sum(n * t for n, t in zip(sizes, tokens, strict=True)) <= group_size * sum(tokens) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("rewards", "kind", "added"),
    [
        ([1, 0, 0, 0, 0, 0, 0, 0], "hard", 24),  # 8·(1/(2/8) − 1)
        ([1, 0, 0, 0, 0, 0, 0, 0], "equal", 11),  # 8·(1/(4·7/64) − 1) = 10.3
        ([1, 1, 1, 0, 0, 0, 0, 0], "hard", 3),  # 2.67
        ([1, 1, 1, 1, 0, 0, 0, 0], "hard", 0),
        ([0, 0, 0, 0], "hard", 30),
        ([0, 0, 0, 0], "equal", 30),
        ([1, 0, 0, 0], "off", 0),
        ([1, 1, 1, 1], "equal", 0),
    ],
)
def test_second_round_follows_the_formula(rewards: list[float], kind: str, added: int) -> None:
    assert second_round_size(rewards, kind, largest=30) == added  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=16))
def test_second_round_is_bounded(rewards: list[float]) -> None:
    for kind in ("hard", "equal"):
        assert 0 <= second_round_size(rewards, kind, largest=24) <= 24  # type: ignore[arg-type]
