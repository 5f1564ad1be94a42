"""How many answers each task gets, so that a round's tokens go where they teach most.

equal      every task group_size answers
variance   more for sources whose reward varies and whose answers are short, at the same number of tokens
second     after the first answers: more for tasks that turned out hard (DARS, 2508.13755)
"""

import math
from collections.abc import Sequence
from typing import Literal

SecondRound = Literal["off", "hard", "equal"]


def sizes_by_variance(
    success_rates: Sequence[float], answer_tokens: Sequence[float], *, group_size: int, smallest: int, largest: int
) -> list[int]:
    """Answers per task that cost what `group_size` for each would, in expected tokens, or less.

    The variance of a mean of n answers is p(1 − p)/n; for a given sum of tokens it is smallest, summed over tasks, with
    n ∝ √(p(1 − p) / tokens) (Neyman's allocation with costs). Every task keeps `smallest` (or group_size, if less), and
    what would go beyond `largest` is not spent.
    """
    num_tasks = len(success_rates)
    smallest = min(smallest, group_size)
    wishes = [math.sqrt(p * (1 - p) / tokens) for p, tokens in zip(success_rates, answer_tokens, strict=True)]
    budget = group_size * sum(answer_tokens)
    sizes, open_tasks = [float(smallest)] * num_tasks, set(range(num_tasks))
    while open_tasks:  # those that the rule would give less than the smallest leave the others less
        spare = budget - sum(smallest * answer_tokens[i] for i in range(num_tasks) if i not in open_tasks)
        share = spare / sum(wishes[i] * answer_tokens[i] for i in open_tasks)
        too_small = {i for i in open_tasks if wishes[i] * share < smallest}
        if not too_small:
            for i in open_tasks:
                sizes[i] = wishes[i] * share
            break
        open_tasks -= too_small
    return [min(largest, math.floor(size + 1e-9)) for size in sizes]


def second_round_size(rewards: Sequence[float], kind: SecondRound, *, largest: int) -> int:
    """Answers to add to a task whose first ones got `rewards`, at most `largest`; none to one that is not hard.

    With p the mean reward and N the answers so far: hard N(1/(2p) − 1), after which N/2 right ones are expected in all,
    as for a task of p = 1/2; equal N(1/(4p(1 − p)) − 1), which does that for the summed variance. Where nothing was right
    both say infinitely many, so: as many as may be.
    """
    num, rate = len(rewards), sum(rewards) / len(rewards)
    if kind == "off" or rate >= 0.5:
        return 0
    if rate == 0:
        return largest
    factor = 1 / (2 * rate) if kind == "hard" else 1 / (4 * rate * (1 - rate))
    return math.ceil(min(largest, num * (factor - 1) - 1e-9))
