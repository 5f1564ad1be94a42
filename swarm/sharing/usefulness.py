"""Expects how useful experience of others is for this node: informative × fresh × from an author with a good reputation.

    own difficulty table ─ snapshot ─┐
    claimed or recomputed reward ────┼─▶ 4 · E[p(1 − p)] ─┐
    age ─────────────────────────────┼────────────────────┼─▶ weight in [.05, 1] ─▶ which header is pulled, which group drawn
    own reputation of the author ────┘────────────────────┘

p(1 − p) is the variance of the reward, which bounds what a group can teach (as for the own tasks, VADE, 2511.18902). Its
expectation is over the node's belief Beta(α, β): high at the frontier, low for tasks that are solved or hopeless, and in between
(2/3) where nothing is known yet. Claims of others move it little: a header's mean reward counts as one answer, and the
recomputed rewards of a group, which its author may have picked, as four.

The choice of the next header to pull (`HeaderChoice`):

uniform       all authors alike except for their standing, so a prolific one gets no larger share; of one author the newest
header; of unknown authors every other time the one that has waited longest
informative   one ticket per author, weighted by the expected usefulness of its headers; nobody gets more than its share
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from swarm.config import SharingSection
from swarm.pool.experience_pool import ExperiencePool, PooledGroup
from swarm.sharing.reputation import AuthorShares, Reputation
from swarm.types import Header

Beliefs = Mapping[str, tuple[float, float]]
"""(α, β) of the reward by task source, from this node's own answers."""

_PRIOR = (1.0, 1.0)
_CLAIM_ANSWERS = 1.0
_RECOMPUTED_ANSWERS = 4.0
_FLOOR = 0.05
"""Smallest weight. Nothing is left out entirely, so a node finds out when its beliefs are out of date."""


class Usefulness:
    """Weights of headers and groups. The compute thread sets the beliefs; any thread may ask."""

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


READ_AHEAD_BATCHES = 3
"""How many batches of groups of others a node pulls ahead of their use."""


class HeaderChoice(Protocol):
    def choose(self, offered: Sequence[Header], being_pulled: Collection[Header]) -> Header | None:
        """One of `offered`, which is not empty and as they came in; None to wait for better ones."""
        ...


def make_choice(
    config: SharingSection,
    pool: ExperiencePool,
    usefulness: Usefulness | None,
    rng: random.Random,
    shares: AuthorShares | None = None,
) -> HeaderChoice:
    """Make an `InformativeChoice` where there is a `usefulness`, else a `UniformChoice`.

    Without `shares` all authors are alike.
    """
    if usefulness is None:
        return UniformChoice(rng, shares)
    return InformativeChoice(config, pool=pool, usefulness=usefulness, rng=rng, shares=shares)


class UniformChoice:
    def __init__(self, rng: random.Random, shares: AuthorShares | None = None) -> None:
        self._rng = rng
        self._shares = shares

    def choose(self, offered: Sequence[Header], being_pulled: Collection[Header]) -> Header:
        authors = sorted({header.author for header in offered})
        if self._shares is None:
            author = self._rng.choice(authors)
        else:
            standing = self._shares.standing(authors)
            (author,) = self._rng.choices(authors, [standing[author] for author in authors])
            author = self._first_of_untried(author, offered, self._shares.reputation)
        return max((h for h in offered if h.author == author), key=lambda h: (h.created_at, h.sequence))

    def _first_of_untried(self, author: str, offered: Sequence[Header], reputation: Reputation) -> str:
        """In place of one of whom nothing is known, every other time the one of these that has waited longest: fresh names by
        the hundred push in before nobody."""
        if not reputation.is_untried(author) or self._rng.random() < 0.5:
            return author
        return next(header.author for header in offered if reputation.is_untried(header.author))


class InformativeChoice:
    """Draws an author by the mean weight of its headers, then one of them by weight.

    An author's ticket is divided by the groups that its headers bring, so neither many headers nor long ones gain
    anything: what is pulled of each author is in proportion to how useful it is.

    Shares are of what a node reads ahead, pool and pulls under way together. Beyond them it only pulls what the next
    batch lacks, where nobody else offers.
    """

    def __init__(
        self,
        config: SharingSection,
        *,
        pool: ExperiencePool,
        usefulness: Usefulness,
        rng: random.Random,
        shares: AuthorShares | None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._usefulness = usefulness
        self._rng = rng
        self._shares = shares

    def choose(self, offered: Sequence[Header], being_pulled: Collection[Header]) -> Header | None:
        held = self._held(being_pulled)
        candidates = self._within_shares(offered, held)
        if not candidates and held.total() < self._config.swarm_groups:
            candidates = offered
        if not candidates:
            return None
        by_author: dict[str, list[tuple[Header, float]]] = {}
        for header in candidates:
            by_author.setdefault(header.author, []).append((header, self._usefulness.of_header(header)))
        authors = sorted(by_author)
        # the reputation itself is in the usefulness; what is left is probation
        factors = self._shares.factors(authors) if self._shares else dict.fromkeys(authors, 1.0)
        tickets = [factors[author] * _ticket(by_author[author]) for author in authors]
        (author,) = self._rng.choices(authors, tickets)
        headers, weights = zip(*by_author[author], strict=True)
        return self._rng.choices(headers, weights)[0]

    def _held(self, being_pulled: Collection[Header]) -> Counter[tuple[str, str]]:
        """Groups in the pool and under way, by (author, policy lineage)."""
        held = Counter(self._pool.fresh_counts())
        for header in being_pulled:
            held[header.author, header.lineage.policy] += len(header.groups)
        return held

    def _within_shares(self, offered: Sequence[Header], held: Counter[tuple[str, str]]) -> list[Header]:
        """Those whose author and lineage have not had their share of what is read ahead."""
        of_author: Counter[str] = Counter()
        of_lineage: Counter[str] = Counter()
        for (author, policy), count in held.items():
            of_author[author] += count
            of_lineage[policy] += count
        ahead = READ_AHEAD_BATCHES * self._config.swarm_groups
        per_author, per_lineage = self._config.max_share_per_peer * ahead, self._config.max_share_per_lineage * ahead
        return [
            header
            for header in offered
            if of_author[header.author] < per_author and of_lineage[header.lineage.policy] < per_lineage
        ]


def _ticket(offers: Sequence[tuple[Header, float]]) -> float:
    """Mean weight of one author's headers over their mean number of groups."""
    return sum(weight for _, weight in offers) / sum(len(header.groups) for header, _ in offers)
