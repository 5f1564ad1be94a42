"""When the index is read: as seldom as gossip allows.

gossip is silent, or there is none:  every poll; up to every MAX_LONELY_PAUSE_S where the index says nothing new either
gossip is alive:                     once per window; twice, four, at last eight times as long where that finds nothing
a sweep finds what gossip did not bring, or gossip falls silent:  back to the start
"""

import math
from collections.abc import Callable

from swarm.sharing.index import WINDOW_S

GOSSIP_IS_ALIVE_FOR_S = 30.0
"""After a gossiped header."""
MAX_LONELY_PAUSE_S = 5.0
"""An idle swarm costs next to nothing."""
MAX_DOUBLINGS = 3
_FRUITLESS_BEFORE_LONGER = 2


class SweepPace:
    """Of one reader."""

    def __init__(self, poll_interval_s: float, clock: Callable[[], float]) -> None:
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self._lonely_pause_s = poll_interval_s
        self._num_fruitless = 0  # sweeps in a row, while gossip was alive
        self._gossip_at = -math.inf
        self.swept_at = -math.inf

    @property
    def gossip_is_alive(self) -> bool:
        return self._clock() - self._gossip_at < GOSSIP_IS_ALIVE_FOR_S

    @property
    def interval_s(self) -> float:
        if not self.gossip_is_alive:
            return self._lonely_pause_s
        return WINDOW_S * 2.0 ** min(max(0, self._num_fruitless + 1 - _FRUITLESS_BEFORE_LONGER), MAX_DOUBLINGS)

    @property
    def is_due(self) -> bool:
        return self._clock() - self.swept_at >= self.interval_s

    def heard(self) -> None:
        """A header came by gossip."""
        if not self.gossip_is_alive:
            self._num_fruitless = 0
        self._gossip_at = self._clock()

    def swept(self, at: float, num_new: int) -> None:
        """A sweep that began `at` brought `num_new` headers that gossip had not."""
        self.swept_at = at
        self._num_fruitless = 0 if num_new or not self.gossip_is_alive else self._num_fruitless + 1
        longer_s = min(2 * self._lonely_pause_s, max(MAX_LONELY_PAUSE_S, self._poll_interval_s))
        self._lonely_pause_s = self._poll_interval_s if num_new else longer_s

    def start_anew(self) -> None:
        """The node listens elsewhere now."""
        self.swept_at = -math.inf
        self._num_fruitless = 0
