"""Turns at an event loop, so many per second: whoever asks for more than that waits, and holds up nobody else's work."""

import asyncio
from collections.abc import Callable, Hashable


class Turns:
    """At once while there are any left of a burst, then one after the other. For one loop."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._interval_s = 1.0 / per_second
        self._burst = burst
        self._num_left = float(burst)
        self._counted_at = 0.0
        self._waiting: dict[Hashable, Callable[[], None]] = {}  # oldest first
        self._timer: asyncio.TimerHandle | None = None

    def take(self, who: Hashable, action: Callable[[], None]) -> None:
        """Do it now, or when its turn comes. `who` waits for one turn at a time."""
        assert who not in self._waiting, "one turn at a time"
        self._refill()
        if not self._waiting and self._num_left >= 1:
            self._num_left -= 1
            action()
        else:
            self._waiting[who] = action
            self._wait()

    def leave(self, who: Hashable) -> None:
        """Give up a turn that has not come."""
        self._waiting.pop(who, None)

    def _refill(self) -> None:
        now = asyncio.get_running_loop().time()
        self._num_left = min(self._burst, self._num_left + (now - self._counted_at) / self._interval_s)
        self._counted_at = now

    def _wait(self) -> None:
        if self._timer is None and self._waiting:
            missing = max(0.0, 1.0 - self._num_left)
            self._timer = asyncio.get_running_loop().call_later(missing * self._interval_s, self._next)

    def _next(self) -> None:
        self._timer = None
        self._refill()
        action: Callable[[], None] | None = None
        if self._waiting and self._num_left >= 1:
            self._num_left -= 1
            action = self._waiting.pop(next(iter(self._waiting)))
        self._wait()
        if action is not None:
            action()
