"""How useful experience of others is expected to be here: informative × fresh × from an author whose word has held.

    own difficulty table ─ snapshot ─┐
    claimed or recomputed reward ────┼─▶ 4 · E[p(1 − p)] ─┐
    age ─────────────────────────────┼────────────────────┼─▶ weight in [.05, 1] ─▶ which header is pulled, which group drawn
    own reputation of the author ────┘────────────────────┘

p(1 − p) is the variance of the reward, which bounds what a group can teach (as for the own tasks, VADE, 2511.18902). Its
expectation is over the own belief Beta(α, β): high at the frontier, low for what is solved or hopeless, and in between
(2/3) for what is not known yet. What others say moves it little: a header's mean reward counts as one answer, the
recomputed rewards of a group, which its author may have picked, as four.
"""

from collections.abc import Callable, Mapping

from swarm.pool.experience_pool import PooledGroup
from swarm.types import Header

Beliefs = Mapping[str, tuple[float, float]]
"""(α, β) of the reward by task source, as this node's own answers tell."""

_PRIOR = (1.0, 1.0)
_CLAIM_ANSWERS = 1.0
_RECOMPUTED_ANSWERS = 4.0
_FLOOR = 0.05
"""Least weight: nothing and nobody is left out, which is how a node finds out that its beliefs have aged."""


class Usefulness:
    """Weights of headers and groups; the compute thread brings beliefs, any thread asks."""

    def __init__(self, max_age_s: float, clock: Callable[[], float], reputation: Callable[[str], float]) -> None:
        """`reputation`: weight in [0, 1] of an author, safe from any thread."""
        self._max_age_s = max_age_s
        self._clock = clock
        self._reputation = reputation
        self._beliefs: Beliefs = {}

    def learn(self, beliefs: Beliefs) -> None:
        """Take a snapshot, which nobody may change from now on: it is swapped as a whole, so that none has to wait."""
        self._beliefs = beliefs

    def of_header(self, header: Header) -> float:
        """Mean over the groups that it announces."""
        values = [self._informative(group.task.source, group.mean_reward, _CLAIM_ANSWERS) for group in header.groups]
        return self._weight(sum(values) / len(values), header.created_at, header.author)

    def of_group(self, group: PooledGroup) -> float:
        value = self._informative(group.source, group.mean_reward, _RECOMPUTED_ANSWERS)
        return self._weight(value, group.created_at, group.author)

    def _informative(self, source: str, mean_reward: float, num_answers: float) -> float:
        """4 E[p(1 − p)] under Beta(α, β) with so many further answers of that mean; in (0, 1)."""
        successes, failures = self._beliefs.get(source, _PRIOR)
        successes += num_answers * mean_reward
        failures += num_answers * (1 - mean_reward)
        total = successes + failures
        return 4 * successes * failures / (total * (total + 1))

    def _weight(self, informative: float, created_at: float, author: str) -> float:
        left = 1 - (self._clock() - created_at) / self._max_age_s
        return max(_FLOOR, informative * min(1.0, max(0.0, left)) * self._reputation(author))
