"""How far an author's word has held: bodies of it that this node has admitted, and those it has turned away."""

import threading
from collections import OrderedDict

from swarm.records.rejection import Rejection

_MAX_AUTHORS = 1024
_MAX_BODIES = 100.0
"""That count of one author: what was long ago fades, for the better and for the worse."""
_NOT_THE_AUTHORS_FAULT = frozenset(
    {
        Rejection.UNAVAILABLE,  # absences deal with that
        Rejection.UNKNOWN_TASK,
        Rejection.TASK_MISMATCH,  # another version of a task package
        Rejection.TASK_FAILED,
        Rejection.TOO_SLOW,  # as fast as this machine is now
    }
)


class Acceptance:
    """Counts per author, of this node alone: nobody else's word is taken. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # author -> (admitted, turned away)

    def admitted(self, author: str) -> None:
        """A body of it held what its header promised."""
        self._count(author, 1.0, 0.0)

    def refused(self, author: str, reason: Rejection) -> None:
        """A body of it was turned away; reasons that say nothing about the author do not count."""
        if reason not in _NOT_THE_AUTHORS_FAULT:
            self._count(author, 0.0, 1.0)

    def weight(self, author: str) -> float:
        """Posterior mean of the share of its bodies that are good, from Beta(1, 1): ½ for a stranger, within (0, 1)."""
        with self._lock:
            good, bad = self._counts.get(author, (0.0, 0.0))
        return (1 + good) / (2 + good + bad)

    def _count(self, author: str, good: float, bad: float) -> None:
        with self._lock:
            before = self._counts.pop(author, (0.0, 0.0))
            fade = min(1.0, (_MAX_BODIES - 1) / max(sum(before), 1.0))
            self._counts[author] = (fade * before[0] + good, fade * before[1] + bad)
            if len(self._counts) > _MAX_AUTHORS:
                self._counts.popitem(last=False)
