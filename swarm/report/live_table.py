"""Shows the progress of running nodes: a table that is redrawn on a terminal or in a notebook, or plain lines elsewhere."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean as mean
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarm.report.node_history import NodeHistory

SMOOTHING_ROUNDS = 10
"""Rewards of single rounds are noisy; tables and plots show the mean of the last ten."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 16
_LINE_INTERVAL_S = 10.0
_CELL_INTERVAL_S = 1.0
_WIDE_COLUMNS = 110


@dataclass(frozen=True, slots=True)
class NodeView:
    """What is shown of one node."""

    name: str
    label: str
    max_rounds: int
    """0: without end."""
    state: str
    history: NodeHistory

    @property
    def progress(self) -> str:
        return f"{self.history.round}/{self.max_rounds}" if self.max_rounds else str(self.history.round)


class LiveTable:
    """Context manager; `update` is called as often as the caller likes."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._started = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._cell: Any = None
        """The output of a notebook that is redrawn."""
        self._line_due = 0.0
        self._unshown: Sequence[NodeView] = ()
        """The newest state, where it came before its line was due."""

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        elif self._unshown:
            self._print(self._unshown)

    def update(self, views: Sequence[NodeView]) -> None:
        elapsed_s = time.monotonic() - self._started
        if self._live:
            is_wide = self._console.width >= _WIDE_COLUMNS
            self._live.update(_table(f"{self._title}  {_clock(elapsed_s)}", views, is_wide))
        elif elapsed_s >= self._line_due:
            self._line_due = elapsed_s + (_CELL_INTERVAL_S if self._console.is_jupyter else _LINE_INTERVAL_S)
            self._print(views)
        else:
            self._unshown = views

    def _print(self, views: Sequence[NodeView]) -> None:
        self._unshown = ()
        elapsed_s = time.monotonic() - self._started
        if not self._console.is_jupyter:
            self._console.print(_line(elapsed_s, views), markup=False, highlight=False, soft_wrap=True)
        elif not self._console.quiet:
            self._draw_in_notebook(_table(f"{self._title}  {_clock(elapsed_s)}", views, is_wide=False))

    def _draw_in_notebook(self, table: Table) -> None:
        from IPython.display import display  # there is one where the console says that it writes to a notebook

        if self._cell is None:
            self._cell = display(table, display_id=True)
        else:
            self._cell.update(table)

    def say(self, text: str) -> None:
        """One line that stays on the screen above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def compared_rounds(num_rounds: int) -> int:
    """How many rounds at either end the first and the last mean reward cover: ten, or half of a run of fewer than twenty."""
    return min(SMOOTHING_ROUNDS, max(1, num_rounds // 2))


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Values in [0, 1] as blocks; each block is the mean of an equal share of them."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    levels = [int(max(0.0, mean(values[a:b])) * len(_BLOCKS)) for a, b in pairwise(edges)]
    return "".join(_BLOCKS[min(level, len(_BLOCKS) - 1)] for level in levels)


def _table(title: str, views: Sequence[NodeView], is_wide: bool) -> Table:
    """Two columns fewer on a terminal of the usual 80."""
    table = Table(title=Text(title), title_justify="left")
    for header in ("node", "round", "mean reward", "", "own + swarm", "rejected"):
        table.add_column(header, no_wrap=True)
    for header in ("profile", "tokens/s") if is_wide else ():
        table.add_column(header, no_wrap=True)
    table.add_column("state")
    for view in views:
        history, row = view.history, view.history.last_round
        own, swarm = row.get("train/own_groups_total", 0), row.get("train/swarm_groups_total", 0)
        extra = (view.label, f"{row.get('rollout/tokens_per_s', 0):.0f}") if is_wide else ()
        table.add_row(
            view.name, view.progress, _reward(history),
            Text(sparkline(history.rewards), style="green"), f"{own} + {swarm}", str(history.rejected.total()),
            *extra, Text(view.state),
        )  # fmt: skip
    return table


def _reward(history: NodeHistory) -> str:
    rewards = history.rewards
    if not rewards:
        return "…"
    window = compared_rounds(len(rewards))
    return f"{mean(rewards[:window]):.2f} → {mean(rewards[-window:]):.2f}"


def _line(elapsed_s: float, views: Sequence[NodeView]) -> str:
    parts = []
    for view in views:
        rewards = view.history.rewards[-SMOOTHING_ROUNDS:]
        now = f"{view.progress} reward {mean(rewards):.2f}" if rewards else view.state
        parts.append(f"{view.name} {now}")
    return f"{_clock(elapsed_s)}  " + " · ".join(parts)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
