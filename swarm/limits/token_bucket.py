"""Rate limits with a burst: they tell what may happen now, and how long the rest has to wait."""

from swarm.limits.bounded_maps import BoundedMap


class TokenBucket:
    """Fills at `per_s` up to `burst`; a rate of 0 means no limit. It may be overdrawn, and then later takers wait.

    The time is an argument (seconds of any clock), so it works with virtual time, too. A clock that was set back adds nothing.
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

    def drain(self) -> None:
        """Take all that is left: whoever goes on at too high a rate gets nothing."""
        self._tokens = min(0.0, self._tokens)

    def take(self, amount: float, now: float) -> float:
        """Take `amount` in any case. Returns the seconds until it would have been available."""
        self._tokens -= amount
        return self.wait_s(now)

    def wait_s(self, now: float, amount: float = 0.0) -> float:
        """Return the seconds until `amount` can be taken; by default, until the bucket is no longer overdrawn."""
        if self._per_s <= 0:
            return 0.0
        self._fill(now)
        return max(0.0, (amount - self._tokens) / self._per_s)

    def _fill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._filled_at) * self._per_s)
        self._filled_at = now


class PeerBuckets:
    """One TokenBucket for each of at most `max_peers` peers. A peer that is forgotten begins with a full bucket again."""

    def __init__(self, per_s: float, burst: float, max_peers: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: BoundedMap[str, TokenBucket] = BoundedMap(max_peers)

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, peer_id: str, now: float) -> TokenBucket:
        """The bucket of a peer that takes from it now, which makes it the last peer to be forgotten."""
        bucket = self._buckets.get(peer_id) or TokenBucket(self._per_s, self._burst, now)
        self._buckets[peer_id] = bucket
        return bucket

    def wait_s(self, peer_id: str, now: float) -> float:
        """Seconds until what a peer took so far is paid for. Asking leaves no trace."""
        bucket = self._buckets.get(peer_id)
        return bucket.wait_s(now) if bucket is not None else 0.0
