"""Decides how long to wait before asking a peer again that did not answer: longer after each failure in a row."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from swarm.limits.bounded_maps import BoundedMap

SILENCE_PAUSE_S = 20.0
"""After the first failure of a peer that does not answer."""
BUSY_PAUSE_S = 1.0
"""After the first answer that says "busy"."""
UNREACHED_PAUSE_S = 4.0
"""After the first time that a peer could not be reached: gossip may know a new peer before its addresses are known."""
MAX_PAUSE_S = 900.0
_MAX_PEERS = 1024


@dataclass(frozen=True, slots=True)
class _Failure:
    num_in_a_row: int
    since: float
    """When the last failure that counted happened."""
    until: float
    """When the peer may be asked again."""


class PeerBackoff:
    """The peers that failed recently. Each failure in a row doubles the pause, with jitter: 0.5 to 1 times of it.

    A few silent peers therefore hold fewer and fewer of the places for requests. While nobody at all answers, no pause grows:
    then this node itself is probably cut off or too busy, and it must not stay alone for long once that is over.
    It runs on the node's loop.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._failures: BoundedMap[str, _Failure] = BoundedMap(_MAX_PEERS)
        self._answered_at = -math.inf  # by any peer

    def __len__(self) -> int:
        return len(self._failures)

    def __contains__(self, peer_id: str) -> bool:
        """Whether this peer should not be asked now."""
        failure = self._failures.get(peer_id)
        return failure is not None and failure.until > self._clock()

    def has_failed(self, peer_id: str) -> bool:
        """Whether this peer has not answered since its last failure."""
        return peer_id in self._failures

    def failed(self, peer_id: str, pause_s: float = SILENCE_PAUSE_S) -> None:
        """Note a failure. `pause_s`: how long to wait after a first one."""
        now, before = self._clock(), self._failures.get(peer_id)
        if before is None or self._is_over(before):
            before = _Failure(0, -math.inf, now)
        # Of several requests that were under way at the same time only the first counts.
        is_news = before.until <= now and before.since <= self._answered_at
        num_in_a_row = max(1, before.num_in_a_row + is_news)
        longest_s = min(pause_s * 2.0 ** min(num_in_a_row - 1, 32), MAX_PAUSE_S)
        until = max(before.until, now + longest_s * self._rng.uniform(0.5, 1.0))
        self._failures[peer_id] = _Failure(num_in_a_row, now if before.until <= now else before.since, until)
        self._failures.drop_oldest_while(self._is_over)

    def answered(self, peer_id: str) -> None:
        self._answered_at = self._clock()
        self._failures.pop(peer_id, None)

    def _is_over(self, failure: _Failure) -> bool:
        """Whether it was so long ago that it is forgotten."""
        return failure.until + MAX_PAUSE_S < self._clock()
