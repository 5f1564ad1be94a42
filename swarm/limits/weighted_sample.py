"""Weighted sampling without replacement, and the random seeds of a node for each purpose and round."""

import hashlib
import random
from collections.abc import Sequence

from swarm.config import Config


def round_seed(config: Config, author: str, purpose: str, round_number: int = 0) -> int:
    """Return a 31-bit seed that differs between nodes, purposes and rounds, and that a resumed run draws again."""
    text = f"{author}/{config.node.seed}/{purpose}/{round_number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def weighted_order(weights: Sequence[float], rng: random.Random) -> list[int]:
    """Return all indices in the order of draws without replacement, each in proportion to its weight.

    It is a race: index i arrives after an exponential time of mean 1 / weight (Efraimidis and Spirakis, 2006). The
    first n are a weighted sample of n, for any n. Weights of 0 come last, in the order of their index.
    """
    times = [rng.expovariate(1.0) / weight if weight > 0 else float("inf") for weight in weights]
    return sorted(range(len(times)), key=times.__getitem__)
