"""Weighted sampling without replacement takes what successive draws would take."""

import random
from collections import Counter

from swarm.config import Config
from swarm.limits.weighted_sample import round_seed, weighted_order

WEIGHTS = [1.0, 2.0, 5.0]


def test_every_index_comes_once_and_the_same_seed_gives_the_same_order() -> None:
    order = weighted_order([0.3] * 50, random.Random(3))
    assert sorted(order) == list(range(50)) and order != list(range(50))
    assert order == weighted_order([0.3] * 50, random.Random(3))
    assert weighted_order([], random.Random(0)) == []


def test_first_places_go_by_weight_and_second_ones_by_weight_among_the_rest() -> None:
    rng, draws = random.Random(0), 8000
    orders = Counter(tuple(weighted_order(WEIGHTS, rng)) for _ in range(draws))
    total = sum(WEIGHTS)
    for order, count in orders.items():
        first, second, _ = order
        expected = WEIGHTS[first] / total * WEIGHTS[second] / (total - WEIGHTS[first])
        assert abs(count / draws - expected) < 4 * (expected * (1 - expected) / draws) ** 0.5
    assert len(orders) == 6


def test_seeds_differ_by_node_purpose_and_round_and_fit_into_31_bits() -> None:
    cases = [
        (author, purpose, number) for author in ("a", "b") for purpose in ("tasks", "pairs") for number in range(64)
    ]
    seeds = [round_seed(Config(), *case) for case in cases]
    assert len(set(seeds)) == len(cases) and seeds == [round_seed(Config(), *case) for case in cases]
    assert 2**30 < max(seeds) < 2**31


def test_nothing_of_weight_zero_comes_before_the_others() -> None:
    for seed in range(50):
        assert set(weighted_order([0.0, 1e-9, 0.0, 1.0], random.Random(seed))[:2]) == {1, 3}
