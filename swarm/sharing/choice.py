"""Which of the headers on offer is pulled next.

uniform       every author alike but for its standing, so a prolific one gets no larger share; of one author the newest first;
              of those of whom nothing is known every other time the one that has waited longest
informative   every author one ticket, weighted by how useful its headers are expected to be; nobody beyond its share
"""

import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from swarm.config import SharingSection
from swarm.pool.experience_pool import ExperiencePool
from swarm.sharing.author_shares import AuthorShares
from swarm.sharing.reputation import Reputation
from swarm.sharing.usefulness import Usefulness
from swarm.types import Header

READ_AHEAD_BATCHES = 3
"""A node pulls so many batches of groups of others ahead of their use."""


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
    """Informative where there is a `usefulness`. `shares`: by the standing of authors; without it all stand alike."""
    if usefulness is None:
        return UniformChoice(rng, shares)
    return InformativeChoice(config, pool, usefulness, rng, shares)


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
        pool: ExperiencePool,
        usefulness: Usefulness,
        rng: random.Random,
        shares: AuthorShares | None = None,
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
