"""Which authors are left alone for a while, and for how long: longer each time that they do not answer."""

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

SILENCE_PAUSE_S = 20.0
"""After the first failure of an author that does not answer."""
BUSY_PAUSE_S = 1.0
"""After the first answer that says: later."""
UNREACHED_PAUSE_S = 4.0
"""After the first time that there was no way to it: who has just come may be known to gossip before its addresses are."""
MAX_PAUSE_S = 900.0
_MAX_AUTHORS = 1024


@dataclass(frozen=True, slots=True)
class _Absence:
    num_in_a_row: int
    since: float
    """Its last failure that counted."""
    until: float


class PeerBackoff:
    """Authors that failed of late. The pause doubles with each failure in a row, with jitter: 0.5 to 1 times of it.

    A few that stay silent so hold fewer and fewer of the places for pulling. While nobody at all answers, no pause grows: then
    it is rather this node that is cut off or has no time, and it must not be alone for long once that is over.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._absences: OrderedDict[str, _Absence] = OrderedDict()  # the one that failed last at the end
        self._answered_at = -math.inf  # whoever it was

    def __len__(self) -> int:
        return len(self._absences)

    def __contains__(self, author: str) -> bool:
        absence = self._absences.get(author)
        return absence is not None and absence.until > self._clock()

    def has_failed(self, author: str) -> bool:
        """Whether it has not answered since its last failure."""
        return author in self._absences

    def failed(self, author: str, pause_s: float = SILENCE_PAUSE_S) -> None:
        """`pause_s`: of a first failure."""
        now, before = self._clock(), self._absences.pop(author, None)
        if before is None or self._is_over(before):
            before = _Absence(0, -math.inf, now)
        # Of several requests that were under way at the same time only the first counts.
        is_news = before.until <= now and before.since <= self._answered_at
        num_in_a_row = max(1, before.num_in_a_row + is_news)
        longest_s = min(pause_s * 2.0 ** min(num_in_a_row - 1, 32), MAX_PAUSE_S)
        until = max(before.until, now + longest_s * self._rng.uniform(0.5, 1.0))
        self._absences[author] = _Absence(num_in_a_row, now if before.until <= now else before.since, until)
        while len(self._absences) > _MAX_AUTHORS or self._is_over(next(iter(self._absences.values()))):
            self._absences.popitem(last=False)

    def answered(self, author: str) -> None:
        self._answered_at = self._clock()
        self._absences.pop(author, None)

    def _is_over(self, absence: _Absence) -> bool:
        """Whether it was so long ago that the author starts anew."""
        return absence.until + MAX_PAUSE_S < self._clock()
