"""How far something is that takes long, with the time left: a bar on a terminal, a line now and then elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from swarm.observability.plain_text import for_how_long, plain, size

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_INTERVAL_S = 30.0
"""Between two lines where there is no terminal. What ends earlier says nothing."""
_shown: "list[Progress]" = []
"""The bars on the screen of this process: what is begun within something else gets a line under it."""

Item = TypeVar("Item")


@contextmanager
def progress(what: str, total: float, *, in_bytes: bool = False) -> Iterator[Callable[[float], None]]:
    """Show how much of `total` is done within this context, on stderr; yields the function that is told what was added."""
    if not _is_terminal():
        yield _Lines(what, total, in_bytes=in_bytes).add
        return
    bars = _shown[0] if _shown else _bars()
    is_first = not _shown
    if is_first:
        _shown.append(bars)
        bars.start()
    task = bars.add_task(plain(what), total=total, unit="bytes" if in_bytes else "")
    try:
        yield partial(bars.advance, task)
    finally:
        bars.remove_task(task)
        if is_first:
            bars.stop()
            _shown.clear()


def tracked(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """Yield items, and show how many of `total` have been dealt with."""
    with progress(what, total) as add:
        for item in items:
            yield item
            add(1)


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _bars() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Done(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_done(task.completed, task.total or 0, in_bytes=task.fields["unit"] == "bytes"))

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), Done(), TimeRemainingColumn(compact=True))
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)


def _done(done: float, total: float, *, in_bytes: bool) -> str:
    return f"{size(done)} of {size(total)}" if in_bytes else f"{done:.0f} of {total:.0f}"


class _Lines:
    """Progress where no bar can be drawn."""

    def __init__(self, what: str, total: float, *, in_bytes: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._total = total
        self._in_bytes = in_bytes
        self._clock = clock
        self._done = 0.0
        self._began_at = self._told_at = clock()

    def add(self, amount: float) -> None:
        self._done += amount
        now = self._clock()
        if now - self._told_at < LINE_INTERVAL_S or not self._done:
            return
        self._told_at = now
        left = (now - self._began_at) * max(0.0, self._total - self._done) / self._done
        done = _done(self._done, self._total, in_bytes=self._in_bytes)
        print(f"{plain(self._what)}: {done}, about {for_how_long(left)} left", file=sys.stderr, flush=True)
