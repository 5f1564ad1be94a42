"""Try a merge before it is taken: none, a quarter, half or all of the partner's part, on something private.

All of it is taken unless none of it is clearly better: by more than one standard error of the difference, task by task. On a
few tasks the best of four is mostly the luckiest, and what a merge is for, less noise and replicas that stay together, does
not show there. Only what is clearly harmful is tried in smaller parts.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

SHARES = (1.0, 0.5, 0.25, 0.0)
"""λ, in the order of preference."""

Candidate = TypeVar("Candidate")
Scores = Sequence[float]
"""One number for each private task, larger is better; for all candidates of a merge the same tasks with the same seed."""


@dataclass(frozen=True, slots=True)
class GateResult(Generic[Candidate]):
    """What the gate chose."""

    share: float
    """λ of the partner's weight; 0 is a step alone."""
    candidate: Candidate
    scores: dict[float, float]
    """Mean score by λ, of all that were tried."""


def choose_share(
    candidate_of: Callable[[float], Candidate],
    score: Callable[[Candidate], Scores],
    shares: Sequence[float] = SHARES,
) -> GateResult[Candidate]:
    """The candidate of the largest share, or where the smallest share is clearly better, that with the best mean.

    Scores that are not finite are the worst there are; of equal means the larger share wins, and if none is finite the
    smallest one.
    """
    if not shares:
        raise ValueError("a gate must have shares to try, got none; pass gate.SHARES")
    ordered = sorted(set(shares), reverse=True)
    most, least = ordered[0], ordered[-1]
    scores = {share: score(candidate_of(share)) for share in (most, least)}
    if not is_clearly_better(scores[least], scores[most]):
        return GateResult(most, candidate_of(most), _means(scores))
    scores |= {share: score(candidate_of(share)) for share in ordered[1:-1]}
    means = _means(scores)
    finite = [share for share in ordered if math.isfinite(means[share])]
    best = max(finite, key=lambda share: means[share]) if finite else least  # max takes the first of equals
    return GateResult(best, candidate_of(best), means)


def is_clearly_better(first: Scores, second: Scores) -> bool:
    """Whether `first` is better by more than the standard error of the difference; anything is better than not finite."""
    if not all(map(math.isfinite, second)):
        return True
    if not first or not second or not all(map(math.isfinite, first)):
        return False
    gain = statistics.fmean(first) - statistics.fmean(second)
    if len(first) == len(second):
        return gain > _error([a - b for a, b in zip(first, second, strict=True)])
    return gain > math.hypot(_error(first), _error(second))  # a verifier failed on the one's answer and not the other's


def _error(values: Scores) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _means(scores: dict[float, Scores]) -> dict[float, float]:
    return {share: statistics.fmean(values) if values else 0.0 for share, values in scores.items()}
