"""How well a policy does on tasks, with confidence: mean reward, pass@k, and 95 % intervals of both.

rewards of n answers to each task ─▶ a value in [0, 1] per task ─▶ mean over the tasks of a source, with its interval
                                                              ─▶ mean over the sources, with its interval
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054
"""Quantile 0.975 of the normal distribution."""


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k): the probability that one of k answers is right, estimated without bias from n >= k.

    Chen et al. (2107.03374), in their form without large factorials.
    """
    assert 0 <= num_right <= num_answers and 1 <= k <= num_answers
    return 1.0 - math.prod(1.0 - k / i for i in range(num_answers - num_right + 1, num_answers + 1))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of values in [0, 1] with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def wilson(mean: float, count: int) -> Estimate:
    """Return Wilson's score interval of the mean of `count` independent values in [0, 1].

    It is made for values that are 0 or 1. Others with the same mean vary less, so for them it is rather too wide. It is never
    empty, also where all values are equal.
    """
    shrink = 1 + Z95**2 / count
    middle = (mean + Z95**2 / (2 * count)) / shrink
    half = Z95 / shrink * math.sqrt(mean * (1 - mean) / count + Z95**2 / (4 * count**2))
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half))


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of independent estimates; the distances to their bounds add up as squares (Newcombe 1998)."""
    count = len(estimates)
    mean = sum(one.mean for one in estimates) / count
    below = math.hypot(*(one.mean - one.low for one in estimates)) / count
    above = math.hypot(*(one.high - one.mean for one in estimates)) / count
    return Estimate(mean, max(0.0, mean - below), min(1.0, mean + above))


@dataclass(frozen=True, slots=True)
class SourceScore:
    """What a policy reached on the tasks of one source, or of all sources."""

    num_tasks: int
    reward: Estimate
    pass_at: Mapping[int, Estimate]
    """By k."""


def score(rewards: Sequence[Sequence[float]], ks: Sequence[int], threshold: float) -> SourceScore:
    """Score the answers to the tasks of one source, at least one task. An answer is right from reward `threshold` on."""
    count = len(rewards)

    def estimate(values: Sequence[float]) -> Estimate:
        return wilson(sum(values) / count, count)

    # a sum of weighted signals may miss a bound by its last bits
    right = [(len(answers), sum(reward >= threshold - 1e-9 for reward in answers)) for answers in rewards]
    return SourceScore(
        count,
        estimate([min(1.0, max(0.0, sum(answers) / len(answers))) for answers in rewards]),
        {k: estimate([pass_at_k(n, c, k) for n, c in right]) for k in ks},
    )


def overall(scores: Sequence[SourceScore]) -> SourceScore:
    """Return the mean over sources, each of which counts the same."""
    return SourceScore(
        sum(one.num_tasks for one in scores),
        mean_of([one.reward for one in scores]),
        {k: mean_of([one.pass_at[k] for one in scores]) for k in scores[0].pass_at},
    )
