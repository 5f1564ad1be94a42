"""Weighted sampling without replacement, for whoever chooses among experience."""

import random
from collections.abc import Sequence


def weighted_order(weights: Sequence[float], rng: random.Random) -> list[int]:
    """All indices, in the order in which draws without replacement take them, each in proportion to its weight.

    A race: index i arrives after an exponential time of mean 1 / weight (Efraimidis and Spirakis, 2006). The first n are
    a weighted sample of n, and how many are wanted does not matter. Weights of 0 come last, in the order of their index.
    """
    times = [rng.expovariate(1.0) / weight if weight > 0 else float("inf") for weight in weights]
    return sorted(range(len(times)), key=times.__getitem__)
