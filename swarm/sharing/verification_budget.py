"""How much of this node's time the answers of others may take to check: of one author, and of all strangers together.

Most verifiers take microseconds. One that runs code takes as long as a stranger likes, up to its limit, for every answer. Names
cost nothing, so strangers share one budget beside their own; a stranger that the others use it up for can only wait.
"""

from collections import OrderedDict
from collections.abc import Callable

from swarm.network.token_bucket import TokenBucket
from swarm.records.rejection import InvalidRecord, Rejection

BURST_S = 30.0
"""At once: hundreds of honest code answers."""
PER_S = 0.25
"""Over time."""
STRANGERS_BURST_S = 60.0
STRANGERS_PER_S = 0.5
"""Of one processor, for all whose probation is not over."""
_MAX_AUTHORS = 1024


class VerificationBudget:
    """A token bucket of seconds per author, the latest 1024 of them, and one for all strangers."""

    def __init__(self, clock: Callable[[], float], is_known: Callable[[str], bool] = lambda author: False) -> None:
        """`clock`: seconds, never backwards. `is_known`: whether an author's probation is over."""
        self._clock = clock
        self._is_known = is_known
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._strangers = TokenBucket(STRANGERS_PER_S, STRANGERS_BURST_S, clock())

    def check(self, author: str) -> None:
        """Raises InvalidRecord: TOO_SLOW while the author has taken more than it gets, STRANGERS_BUSY while strangers have."""
        now, bucket = self._clock(), self._buckets.get(author)
        wait_s = bucket.wait_s(now) if bucket is not None else 0.0
        if wait_s > 0:
            raise InvalidRecord(Rejection.TOO_SLOW, f"its answers took too long to check; again in {wait_s:.0f} s")
        wait_s = 0.0 if self._is_known(author) else self._strangers.wait_s(now)
        if wait_s > 0:
            raise InvalidRecord(Rejection.STRANGERS_BUSY, f"again in {wait_s:.0f} s")

    def spend(self, author: str, duration_s: float) -> None:
        now = self._clock()
        bucket = self._buckets.pop(author, None) or TokenBucket(PER_S, BURST_S, now)
        bucket.take(duration_s, now)
        self._buckets[author] = bucket
        if not self._is_known(author):
            self._strangers.take(duration_s, now)
        while len(self._buckets) > _MAX_AUTHORS:
            self._buckets.popitem(last=False)
