"""How hard each task source is for the policy of this node, as far as its own answers tell.

    rewards, lengths of answers ─▶ Beta(α, β) and mean length per source ─▶ which source next · how many answers

Old answers fade, since the policy that gave them has moved on: a source that was solved or hopeless is looked at again.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PRIOR_SUCCESSES = 1.0
PRIOR_FAILURES = 1.0
"""α₀, β₀: before any answer every rate of success is equally likely."""


class DifficultyTable:
    """Beta posterior of the reward and mean answer length, by source. Rewards in [0, 1] count as fractions of a success."""

    def __init__(self, sources: Iterable[str], *, memory: float, default_tokens: float) -> None:
        """`memory`: λ in [0, 1], what one group leaves of those before. `default_tokens`: length until one was seen."""
        self._memory = memory
        self._beliefs = {name: [PRIOR_SUCCESSES, PRIOR_FAILURES, float(default_tokens)] for name in sources}

    def observe(self, source: str, rewards: Sequence[float], num_tokens: Sequence[int]) -> None:
        """One group: α ← λα + (1 − λ)α₀ + successes, β likewise (VADE, 2511.18902). Unknown sources are passed over."""
        belief = self._beliefs.get(source)
        if belief is None or not rewards:
            return
        kept, fresh = self._memory, 1 - self._memory
        successes = sum(rewards)
        belief[0] = kept * belief[0] + fresh * PRIOR_SUCCESSES + successes
        belief[1] = kept * belief[1] + fresh * PRIOR_FAILURES + len(rewards) - successes
        belief[2] = kept * belief[2] + fresh * sum(num_tokens) / len(num_tokens)

    def success_rate(self, source: str) -> float:
        """Posterior mean, strictly within (0, 1)."""
        successes, failures, _ = self._beliefs[source]
        return successes / (successes + failures)

    def answer_tokens(self, source: str) -> float:
        """Mean length of an answer."""
        return self._beliefs[source][2]

    def choose(self, weights: Mapping[str, float], rng: random.Random) -> str:
        """Thompson sampling: draw a success rate p for each source, take the largest weight · p(1 − p).

        p(1 − p) is the variance of the reward, which bounds what a group can teach: sources neither solved nor hopeless.
        """

        def value(source: str) -> float:
            successes, failures, _ = self._beliefs[source]
            rate = rng.betavariate(successes, failures)
            return weights[source] * rate * (1 - rate)

        return max(weights, key=value)

    def state(self) -> dict[str, list[float]]:
        return {name: list(belief) for name, belief in self._beliefs.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue a saved table; sources that were added since start at the prior."""
        self._beliefs |= {name: list(belief) for name, belief in state.items() if name in self._beliefs}
