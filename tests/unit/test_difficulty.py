"""What a node believes of its task sources, and which it picks."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.tasks.task_cursor import DifficultyTable, ThompsonChoice

SOURCES: tuple[str, ...] = ("solved", "open", "hopeless")


def table(memory: float = 0.9) -> DifficultyTable:
    return DifficultyTable(SOURCES, memory=memory, default_tokens=20)


choose = ThompsonChoice().choose


def taught(memory: float = 0.9) -> DifficultyTable:
    """After 30 groups of 8 answers each: always right, half of them, never."""
    known = table(memory)
    for _ in range(30):
        for source, num_right in zip(SOURCES, (8, 4, 0), strict=True):
            known.observe(source, [1.0] * num_right + [0.0] * (8 - num_right), [10] * 8)
    return known


def test_nothing_known_is_one_half() -> None:
    assert {table().success_rate(source) for source in SOURCES} == {0.5}
    assert table().answer_tokens("open") == 20


def test_one_group_moves_belief_by_the_formula() -> None:
    known = table(memory=0.75)
    known.observe("open", [1.0, 0.5, 0.0], [4, 8, 6])
    assert known.success_rate("open") == pytest.approx(2.5 / 5)
    known.observe("open", [1.0, 1.0], [6, 6])  # α = .75·2.5 + .25 + 2, β = .75·2.5 + .25
    assert known.success_rate("open") == pytest.approx(4.125 / (4.125 + 2.125))
    assert known.answer_tokens("open") == pytest.approx(0.75 * (0.75 * 20 + 0.25 * 6) + 0.25 * 6)


def test_sources_that_are_neither_solved_nor_hopeless_come_first_but_none_starves() -> None:
    known, rng = taught(), random.Random(0)
    counts = Counter(choose(known, dict.fromkeys(SOURCES, 1.0), rng) for _ in range(2000))
    assert counts["open"] > 1800
    assert Counter(choose(table(), dict.fromkeys(SOURCES, 1.0), rng) for _ in range(900)).most_common()[-1][1] > 200


def test_old_answers_fade() -> None:
    known = taught()
    for _ in range(30):
        known.observe("hopeless", [1.0] * 8, [10] * 8)
    assert known.success_rate("hopeless") > 0.9


def test_weights_count() -> None:
    rng = random.Random(1)
    counts = Counter(choose(table(), {"solved": 1.0, "open": 100.0}, rng) for _ in range(500))
    assert counts["open"] > 480


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=9), max_size=30), st.floats(0, 1))
def test_rates_stay_within_bounds_and_state_goes_round(groups: list[list[float]], memory: float) -> None:
    known = table(memory)
    for rewards in groups:
        known.observe("open", rewards, [5] * len(rewards))
    assert 0 < known.success_rate("open") < 1
    other = table(memory)
    other.restore({**known.state(), "gone": [1.0, 1.0, 1.0]})
    weights = dict.fromkeys(SOURCES, 1.0)
    assert [choose(known, weights, random.Random(i)) for i in range(9)] == [
        choose(other, weights, random.Random(i)) for i in range(9)
    ]
