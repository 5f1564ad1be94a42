"""What is going to happen on an in-memory network, in order of time.

One timer of the loop stands for all of it: a swarm of thousands has a hundred thousand messages under way, and a heap of
tuples takes a tenth of the time of that many asyncio timers.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

_TICK_S = 1e-3
"""Events happen at multiples of it: in a large swarm many at once, for one turn of the loop."""
_MAX_EVENTS_AT_ONCE = 1000
"""Then the loop's tasks have a turn, though the clock may not move."""


class Calendar:
    """Actions at their time. Events of one time happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._events)

    def schedule(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """`action` must not raise. What is scheduled on one loop is forgotten when another one schedules."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._timer = loop, None
            self._events.clear()
        when = math.ceil((loop.time() + delay_s) / _TICK_S - 1e-6) * _TICK_S
        heapq.heappush(self._events, (when, next(self._numbers), action, arguments))
        if self._timer is None or when < self._timer.when():
            self._set_timer(loop)

    async def sleep(self, duration_s: float) -> None:
        """As `asyncio.sleep`, at the cost of an event."""
        future = asyncio.get_running_loop().create_future()
        self.schedule(duration_s, _wake, future)
        await future

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._events[0][0], self._happen, loop)

    def _happen(self, loop: asyncio.AbstractEventLoop) -> None:
        events, now, num_done = self._events, loop.time() + 1e-9, 0
        while events and events[0][0] <= now and num_done < _MAX_EVENTS_AT_ONCE:
            _, _, action, arguments = heapq.heappop(events)
            action(*arguments)
            num_done += 1
        self._timer = None
        if events:
            self._set_timer(loop)


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():  # else whoever slept was cancelled
        future.set_result(None)
