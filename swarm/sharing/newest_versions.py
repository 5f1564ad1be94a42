"""The newest policy version that each author has announced of late: what its older experience is measured against."""

from collections.abc import Callable

from swarm.records.fair_map import FairMap
from swarm.types import Header

_MAX_VERSIONS = 4096
_MAX_LINEAGES_PER_AUTHOR = 4
"""A lineage is anybody's claim. An honest author changes its own when its configuration changes."""


class NewestVersions:
    """By author and policy lineage, since versions are each author's own count. Bounded, and forgotten with age.

    An author that starts anew from version 0 is heard again `remember_s` after the last header of its earlier life.
    """

    def __init__(self, max_staleness: int, remember_s: float, clock: Callable[[], float]) -> None:
        """`max_staleness`: 0 for no bound."""
        self._max_staleness = max_staleness
        self._remember_s = remember_s
        self._clock = clock
        self._newest: FairMap[tuple[str, str], tuple[int, float]] = FairMap(_MAX_VERSIONS, _MAX_LINEAGES_PER_AUTHOR)
        """{(author, policy lineage): (version, seen at)}"""

    def note(self, header: Header) -> None:
        key, now = (header.author, header.lineage.policy), self._clock()
        version, seen_at = self._newest.get(key) or (-1, 0.0)
        is_news = header.policy_version >= version or seen_at <= now - self._remember_s
        self._newest.add(header.author, key, (header.policy_version, now) if is_news else (version, seen_at))

    def is_stale(self, header: Header) -> bool:
        """Whether its author has announced versions that far beyond it."""
        version, seen_at = self._newest.get((header.author, header.lineage.policy)) or (-1, 0.0)
        if not self._max_staleness or seen_at <= self._clock() - self._remember_s:
            return False
        return header.policy_version < version - self._max_staleness
