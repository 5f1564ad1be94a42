"""Draws the curves of a testbed and of a comparison as PNG. matplotlib is imported only when something is drawn."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.errors import SwarmError
from swarm.machine.child_python import pip_install
from swarm.machine.safe_files import SHARED, replace_file
from swarm.report.live_table import SMOOTHING_ROUNDS, NodeView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 120
_PAUSE_S = 60.0
"""A longer silence of all nodes is a pause between two runs of the testbed."""


def new_figure(num_axes: int, width_in: float = 11.0, height_in: float = 4.2) -> tuple["Figure", Sequence["Axes"]]:
    """A figure without any window system. Raises SwarmError where matplotlib is not installed."""
    try:
        with contextlib.chdir(
            Path(__file__).parent
        ):  # its import reads and evaluates a matplotlibrc of the current folder
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
    except ImportError:
        raise SwarmError(f"plots need matplotlib, got none; {pip_install('matplotlib')}") from None
    figure = Figure(figsize=(width_in, height_in), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, num_axes, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_testbed(views: Sequence[NodeView], path: Path) -> None:
    """Sampled reward over time, and held-out reward over rounds, one line per node."""
    figure, (left, right) = new_figure(2)
    minutes_at = running_minutes([row["time_s"] for view in views for row in view.history.rounds])
    for view in views:
        history, label = view.history, f"{view.name} ({view.label})"
        minutes = [minutes_at[row["time_s"]] for row in history.rounds]
        left.plot(minutes, history.smoothed_rewards(SMOOTHING_ROUNDS), label=label)
        held_out = history.evaluations
        right.plot([r["round"] for r in held_out], [r["accuracy_mean"] for r in held_out], marker="o", label=label)
    _dress(left, f"sampled answers, mean of {SMOOTHING_ROUNDS} rounds", "minutes")
    _dress(right, "held-out tasks", "round")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    replace_file(path, drawn.getvalue(), SHARED)


def running_minutes(times_s: Sequence[float]) -> dict[float, float]:
    """{time: minutes since the first one}, without the pauses in which no node ran."""
    moments, elapsed_s = {}, 0.0
    ordered = sorted(set(times_s))
    for before, now in zip([ordered[0], *ordered] if ordered else [], ordered, strict=False):
        elapsed_s += now - before if now - before < _PAUSE_S else 0.0
        moments[now] = elapsed_s / 60
    return moments


def _dress(axis: Any, title: str, x_label: str) -> None:
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlabel(x_label)
    axis.set_ylabel("mean reward")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
