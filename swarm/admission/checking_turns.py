"""Decides whose body is checked next, and whose body is pulled next while checking takes most of the time.

Bodies are checked one at a time, because a body takes ten times its size in memory while it is decoded. Most take milliseconds; a
body whose answers are programs may take half a minute. Without turns, the fast bodies of everybody would wait behind a few slow
ones. Therefore the author that recently took the least time comes first. Strangers count as one author, because names cost
nothing.

While there is time to spare nobody is left out, and authors with slow but honest answers get the share that they had anyway.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence

from swarm.limits.bounded_maps import FairMap
from swarm.types import Header

HALF_LIFE_S = 60.0
"""Time that was spent this long ago counts half."""
BUSY = 0.5
"""Checking counts as busy while it takes more than this part of the time."""
_SLACK_S = 1.0
_SLACK_FACTOR = 2.0
"""While checking is busy, an author may have taken this many times as much as the fastest author, and this many seconds more."""
_MAX_AUTHORS = 1024
_STRANGERS = "strangers"


class CheckingTurns:
    """The queue of one node's body checks. It runs on the node's loop."""

    def __init__(self, is_known: Callable[[str], bool], clock: Callable[[], float] = time.monotonic) -> None:
        """`is_known`: whether an author's probation is over. `clock`: seconds of a monotonic clock."""
        self._is_known = is_known
        self._clock = clock
        self._spent: FairMap[str, tuple[float, float]] = FairMap(_MAX_AUTHORS)
        """{author: (seconds, fading from this time on)}"""
        self._all_spent = (0.0, clock())
        self._is_taken = False
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def turn(self, author: str) -> AsyncIterator[None]:
        """Wait until a body of `author` may be checked; the time inside is counted as the author's."""
        if self._is_taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((author, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # the turn came at the same moment: pass it on
                    self._give_turn()
                raise
        self._is_taken = True
        started_at = self._clock()
        try:
            yield
        finally:
            self._spend(author, self._clock() - started_at)
            self._give_turn()

    def first(self, offered: Sequence[Header]) -> Sequence[Header]:
        """All of `offered`; while checking is busy, only headers whose authors recently took little time."""
        if not offered or not self.is_busy:
            return offered
        least_s = min(self.spent_s(header.author) for header in offered)
        return [header for header in offered if self.spent_s(header.author) <= _SLACK_FACTOR * least_s + _SLACK_S]

    @property
    def is_busy(self) -> bool:
        return self._faded(self._all_spent) > BUSY * HALF_LIFE_S / math.log(2)  # the sum of checking without a pause

    def spent_s(self, author: str) -> float:
        """Seconds that checking the bodies of `author` recently took."""
        return self._faded(self._spent.get(self._name(author)) or (0.0, 0.0))

    def _give_turn(self) -> None:
        """Let the waiting author check that recently took the least time; of several such the one that came first."""
        waiting = self._waiting = [place for place in self._waiting if not place[1].done()]
        self._is_taken = bool(waiting)
        if waiting:
            place = min(waiting, key=lambda place: self.spent_s(place[0]))
            waiting.remove(place)
            place[1].set_result(None)

    def _spend(self, author: str, duration_s: float) -> None:
        now, name = self._clock(), self._name(author)
        self._all_spent = self._faded(self._all_spent) + duration_s, now
        self._spent.add(name, name, (self.spent_s(author) + duration_s, now))

    def _faded(self, spent: tuple[float, float]) -> float:
        seconds, since = spent
        return seconds * 0.5 ** ((self._clock() - since) / HALF_LIFE_S)

    def _name(self, author: str) -> str:
        return author if self._is_known(author) else _STRANGERS
