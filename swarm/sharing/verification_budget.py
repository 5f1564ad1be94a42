"""How much of this node's time the answers of one author may take to check.

Most verifiers take microseconds. One that runs code takes as long as a stranger likes, up to its limit, for every answer.
"""

from collections import OrderedDict
from collections.abc import Callable

from swarm.network.token_bucket import TokenBucket
from swarm.records.rejection import InvalidRecord, Rejection

BURST_S = 30.0
"""At once: hundreds of honest code answers."""
PER_S = 0.25
"""Over time."""
_MAX_AUTHORS = 1024


class VerificationBudget:
    """A token bucket of seconds per author, the latest 1024 of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds, never backwards."""
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def check(self, author: str) -> None:
        """Raises InvalidRecord with TOO_SLOW while the author has taken more than it gets."""
        bucket = self._buckets.get(author)
        wait_s = bucket.wait_s(self._clock()) if bucket is not None else 0.0
        if wait_s > 0:
            raise InvalidRecord(Rejection.TOO_SLOW, f"its answers took too long to check; again in {wait_s:.0f} s")

    def spend(self, author: str, duration_s: float) -> None:
        now = self._clock()
        bucket = self._buckets.pop(author, None) or TokenBucket(PER_S, BURST_S, now)
        bucket.take(duration_s, now)
        self._buckets[author] = bucket
        while len(self._buckets) > _MAX_AUTHORS:
            self._buckets.popitem(last=False)
