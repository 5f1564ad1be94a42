"""What a node has published and received since its process began, and whether a person has paused sharing.

Both exist before the policy is loaded: the exchange counts and obeys, the directory, the report and the page read and ask.
"""

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from swarm.limits.bounded_maps import ExpiringKeys

_MAX_AUTHORS = 1024
_RECENT_S = 120.0


class SharingTotals:
    """Counters of one node. They are changed on the node's loop and may be read from any thread."""

    def __init__(self, clock: Callable[[], float], *, publishes: bool = True, reads: bool = True) -> None:
        """`clock`: swarm time. `publishes`, `reads`: whether this node shares its own groups, and pulls those of others."""
        self.publishes = publishes
        self.reads = reads
        self.num_published = 0
        """Own records announced by gossip, ..."""
        self.num_indexed = 0
        """... and those of them that the index accepted."""
        self.num_rounds_not_published = 0
        """Rounds that were dropped because the network lagged behind."""
        self.num_headers_gossiped = 0
        """Headers of others that gossip brought first, ..."""
        self.num_headers_swept = 0
        """... and those that only the index brought."""
        self.num_records_admitted = 0
        self.num_groups_admitted = 0
        self.rejected: Counter[str] = Counter()
        """Records, bodies and groups of others that were turned away, by reason."""
        self._heard: ExpiringKeys[str] = ExpiringKeys(clock, _MAX_AUTHORS)
        self._clock = clock

    def heard(self, author: str) -> None:
        """A header of this author was admitted."""
        self._heard.add(author, self._clock() + _RECENT_S)

    def num_authors_heard(self) -> int:
        """Authors of whom a header was admitted in the last two minutes."""
        return self._heard.num_alive()

    def row(self) -> dict[str, Any]:
        """Metrics."""
        return {
            "exchange/records_published": self.num_published,
            "exchange/records_indexed": self.num_indexed,
            "exchange/rounds_not_published": self.num_rounds_not_published,
            "exchange/records_admitted": self.num_records_admitted,
            "exchange/groups_admitted": self.num_groups_admitted,
            "exchange/headers_gossiped": self.num_headers_gossiped,
            "exchange/headers_swept": self.num_headers_swept,
        }


class SharingPause:
    """Whether a person has paused sharing. `pause` and `resume` may be called from any thread, also before a loop runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_paused = False
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self.num_pauses = 0
        """What was to be published before the last pause is too old after it."""

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def pause(self) -> None:
        self._set(True)

    def resume(self) -> None:
        self._set(False)

    def held(self, step: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """`step`, which waits while sharing is paused and is cancelled when a pause begins."""

        @functools.wraps(step)
        async def run() -> None:
            await self._until(is_paused=False)
            working = asyncio.ensure_future(step())
            pausing = asyncio.ensure_future(self._until(is_paused=True))
            try:
                await asyncio.wait({working, pausing}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                for task in (working, pausing):
                    task.cancel()
                await asyncio.gather(working, pausing, return_exceptions=True)

        return run

    def _set(self, is_paused: bool) -> None:
        with self._lock:
            self.num_pauses += is_paused and not self._is_paused
            self._is_paused = is_paused
            waiting, self._waiting = self._waiting, set()
        for loop, changed in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

    async def _until(self, *, is_paused: bool) -> None:
        while self._is_paused is not is_paused:
            waiter = asyncio.get_running_loop(), asyncio.Event()
            with self._lock:
                if self._is_paused is is_paused:
                    return
                self._waiting.add(waiter)
            try:
                await waiter[1].wait()
            finally:
                with self._lock:
                    self._waiting.discard(waiter)
