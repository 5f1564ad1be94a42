"""Try a merge before it is taken: none, a quarter, half or all of the partner's part, on something private."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

SHARES = (1.0, 0.5, 0.25, 0.0)
"""λ, in the order of preference."""

Candidate = TypeVar("Candidate")


@dataclass(frozen=True, slots=True)
class GateResult(Generic[Candidate]):
    """What the gate chose."""

    share: float
    """λ of the partner's weight; 0 is a step alone."""
    candidate: Candidate
    scores: dict[float, float]
    """Score by λ, of all that were tried."""


def choose_share(
    candidate_of: Callable[[float], Candidate],
    score: Callable[[Candidate], float],
    shares: Sequence[float] = SHARES,
) -> GateResult[Candidate]:
    """The candidate with the best score; larger is better, and a score that is not finite is the worst there is.

    Of equal scores the largest share wins: on a few tasks ties are common and say that no harm is seen, while what a
    merge is for, less noise and replicas that stay together, does not show there. If no score is finite the smallest
    share wins. Score all candidates on the same tasks with the same seed, or the gate chooses among noise.
    """
    if not shares:
        raise ValueError("a gate must have shares to try, got none; pass gate.SHARES")
    ordered = sorted(set(shares), reverse=True)
    scores = {share: score(candidate_of(share)) for share in ordered}
    finite = [share for share in ordered if math.isfinite(scores[share])]
    best = max(finite, key=lambda share: scores[share]) if finite else ordered[-1]  # max takes the first of equals
    return GateResult(best, candidate_of(best), scores)
