"""Which of several adapters to merge, by how well each mixture does: the greedy soup (Wortsman et al., arXiv 2203.05482)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Soup:
    """The mixture that was kept."""

    weights: list[float]
    """By adapter, equal for those in it, 0 for the others; they sum to 1."""
    score: float
    alone: list[float]
    """Score of each adapter by itself."""


def greedy_soup(num_adapters: int, score: Callable[[Sequence[float]], float]) -> Soup:
    """Best adapter first, then each next one if the mean with it scores no worse. `score` takes weights.

    A tie takes the adapter in: the mean of more is the less noisy one.
    """
    alone = [score([float(i == one) for i in range(num_adapters)]) for one in range(num_adapters)]
    order = sorted(range(num_adapters), key=lambda one: -alone[one])
    members, best = {order[0]}, alone[order[0]]
    for candidate in order[1:]:
        tried = score(_equal_weights(members | {candidate}, num_adapters))
        if tried >= best:
            members, best = members | {candidate}, tried
    return Soup(_equal_weights(members, num_adapters), best, alone)


def _equal_weights(members: set[int], num_adapters: int) -> list[float]:
    return [1 / len(members) if i in members else 0.0 for i in range(num_adapters)]
