"""Modelled, not measured: one sync of N nodes over the internet, by an exchange in pairs and by a tree all-reduce.

A message of S bytes takes (latency + S / bandwidth) · LogNormal(0, σ), independently. An exchange in pairs: a wait drawn evenly
up to a quarter of the search time, as `PartnerSearch` has it, four small messages, then both adapters at once. A tree all-reduce:
up a binary tree, each parent after its slower child, and down again. Nobody fails, nobody computes, all begin at once.
"""

import random
import statistics
from dataclasses import dataclass

_SMALL_MESSAGES = 4
"""The list of who is ready, the proposal, its answer, and the request for the adapter; a there-and-back each."""
_SHYNESS = 0.25


@dataclass(frozen=True, slots=True)
class Line:
    """Between any two nodes."""

    latency_s: float = 0.05
    bytes_per_s: float = 2.5e6
    """20 Mbit/s."""
    sigma: float = 0.5


@dataclass(frozen=True, slots=True)
class ModelledSync:
    """Means over draws."""

    num_nodes: int
    pair_s: float
    """Of the mean node; training waits for none of it."""
    tree_s: float
    """Of all nodes: everybody waits for the slowest."""


def modelled_sync(num_nodes: int, num_bytes: int, search_s: float, line: Line, num_draws: int = 20) -> ModelledSync:
    """`num_nodes` a power of two."""
    rng = random.Random(num_nodes)

    def message(size: int) -> float:
        return (line.latency_s + size / line.bytes_per_s) * rng.lognormvariate(0.0, line.sigma)

    def pair() -> float:
        small = sum(message(0) for _ in range(2 * _SMALL_MESSAGES))
        return rng.uniform(0.0, _SHYNESS * search_s) + small + max(message(num_bytes), message(num_bytes))

    def tree() -> float:
        ready = [0.0] * num_nodes
        step = 1
        while step < num_nodes:
            for i in range(0, num_nodes, 2 * step):
                ready[i] = max(ready[i], ready[i + step] + message(num_bytes))
            step *= 2
        while step > 1:
            step //= 2
            for i in range(0, num_nodes, 2 * step):
                ready[i + step] = ready[i] + message(num_bytes)
        return max(ready)

    pairs = [statistics.fmean(pair() for _ in range(max(1, num_nodes // 2))) for _ in range(num_draws)]
    return ModelledSync(num_nodes, statistics.fmean(pairs), statistics.fmean(tree() for _ in range(num_draws)))
