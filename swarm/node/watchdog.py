"""Notices parts of a node that make no progress, logs where their threads are, and ends the process if a supervisor restarts it.

    compute thread ─ mark("round 13", limit) ─┐
    network loop ─── mark("network loop", 30 s) ─┴─▶ [watchdog thread] ─ stacks to the log · `stuck` in status and metrics
                                                            └── stuck for long, supervised ─▶ crash report, exit code 18

The watchdog has its own thread, as either side of the node may be the stuck one. Where even this thread does not run, because
native code holds the interpreter's lock, a timer of faulthandler writes the stacks, which needs no Python.
"""

import faulthandler
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from swarm.observability.plain_text import for_how_long

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
LOOP_LIMIT_S = 30.0
"""Limit for the network loop, which does nothing that takes longer than a fraction of a second."""
END_AFTER_S = 300.0
"""How long a part may stay stuck where a supervisor starts the node again."""
_FROZEN_AFTER_S = 600.0
"""After this time without a turn of the watchdog's own thread, faulthandler writes the stacks."""
_PAUSED_AFTER_S = 5.0
"""A longer pause between two looks means that the process itself was stopped, or the machine had no time for it."""


@dataclass(frozen=True, slots=True)
class _Mark:
    doing: str
    at: float
    limit_s: float | None
    thread: int


class Watchdog:
    """The watchdog of one process. As a context manager it looks from enter to exit; `mark` is safe from any thread."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        stacks: IO[str] | None = None,
        end: Callable[[str], None] | None = None,
        look_interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        """`clock`: seconds of a monotonic clock. `stacks`: an open file for what faulthandler writes.

        `end`: ends the process, and is given the reason; without it nothing is ended.
        """
        self._clock = clock
        self._stacks = stacks
        self._end = end
        self._look_interval_s = look_interval_s
        self._marks: dict[str, _Mark] = {}
        self._reported: dict[str, _Mark] = {}
        self._looked_at = clock()
        self._lost_s = 0.0  # time in which nothing of this process ran
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def mark(self, part: str, doing: str, limit_s: float | None) -> None:
        """The calling thread, which is `part` of the node, begins `doing`; the next mark is due within `limit_s`.

        None: there is no limit.
        """
        self._marks[part] = _Mark(doing, self.awake_s(), limit_s, threading.get_ident())

    async def loop_turns(self) -> None:
        """Note a turn of the network loop. To be called regularly by the loop."""
        self.mark("network loop", "one turn", LOOP_LIMIT_S)

    def stuck(self) -> list[str]:
        """A line for each part whose next mark is overdue, such as `compute thread: round 13 for 20 min`."""
        now = self.awake_s()
        return [
            _line(part, mark, now) for part, mark in sorted(self._marks.copy().items()) if _overdue_s(mark, now) > 0
        ]

    def look(self) -> None:
        """Report what is newly stuck, and end the process where that has lasted too long."""
        clock_s = self._clock()
        self._lost_s += self._paused_s(clock_s)
        self._looked_at = clock_s
        now = self.awake_s()
        for part, mark in self._marks.copy().items():
            overdue_s = _overdue_s(mark, now)
            if overdue_s <= 0:
                if self._reported.pop(part, None):
                    logger.warning("%s goes on", part)
            elif self._reported.get(part) is not mark:
                self._reported[part] = mark
                logger.error("no progress: %s; it is at\n%s", _line(part, mark, now), stack_of(mark.thread))
            elif overdue_s > END_AFTER_S and self._end is not None:
                self._end(_line(part, mark, now))

    def __enter__(self) -> Self:
        self._looked_at = self._clock()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def awake_s(self) -> float:
        """Seconds of the clock without those in which nothing of this process ran, as while a laptop sleeps."""
        now = self._clock()
        return now - self._lost_s - self._paused_s(now)

    def _paused_s(self, now: float) -> float:
        """How long nothing ran since the last look: nothing, where that is just late."""
        paused_s = now - self._looked_at - self._look_interval_s
        return paused_s if paused_s > _PAUSED_AFTER_S else 0.0

    def _watch(self) -> None:
        try:
            while True:
                if self._stacks is not None:
                    ends = self._end is not None
                    faulthandler.dump_traceback_later(_FROZEN_AFTER_S, exit=ends, file=self._stacks)
                if self._stop.wait(self._look_interval_s):
                    return
                self.look()
        finally:
            if self._stacks is not None:
                faulthandler.cancel_dump_traceback_later()


def stack_of(thread: int) -> str:
    """The stack of a thread, outermost call first."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame else "(the thread has ended)"


def _overdue_s(mark: _Mark, now: float) -> float:
    return 0.0 if mark.limit_s is None else now - mark.at - mark.limit_s


def _line(part: str, mark: _Mark, now: float) -> str:
    return f"{part}: {mark.doing} for {for_how_long(now - mark.at)}"
