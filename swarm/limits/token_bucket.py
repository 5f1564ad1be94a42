"""A rate limit with a burst: it tells what may happen now, and how long the rest has to wait."""


class TokenBucket:
    """Fills at `per_s` up to `burst`; a rate of 0 means no limit. It may be overdrawn, and then later takers wait.

    The time is an argument (seconds of any clock that does not run backwards), so it works with virtual time, too.
    """

    __slots__ = ("_burst", "_filled_at", "_per_s", "_tokens")

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = burst
        self._filled_at = now

    def try_take(self, amount: float, now: float) -> bool:
        """Take `amount` if it is available. Returns whether it was."""
        if self._per_s <= 0:
            return True
        self._fill(now)
        if self._tokens < amount:
            return False
        self._tokens -= amount
        return True

    def take(self, amount: float, now: float) -> float:
        """Take `amount` in any case. Returns the seconds until it would have been available."""
        self._tokens -= amount if self._per_s > 0 else 0.0
        return self.wait_s(now)

    def wait_s(self, now: float, amount: float = 0.0) -> float:
        """Return the seconds until `amount` can be taken; by default, until the bucket is no longer overdrawn."""
        if self._per_s <= 0:
            return 0.0
        self._fill(now)
        return max(0.0, (amount - self._tokens) / self._per_s)

    def _fill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_s)
        self._filled_at = now
