"""`swarm top`: shows nodes of this machine live, from their folders or from the folder of a testbed.

status.json ──▶ NodeLook ─┐
metrics.jsonl ─▶ trends ──┴─▶ rows, sorted ─▶ table, redrawn every second and after a key
"""

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.errors import NodeNotRunningError
from swarm.machine.stop_signals import sigterm_interrupts
from swarm.observability.plain_text import counted, for_how_long, plain

if TYPE_CHECKING:
    from rich.console import Console, Group

    from swarm.observability.status_file import NodeHealth, NodeStatus
    from swarm.report.node_history import NodeHistory

_LEFT = frozenset({"node", "state", "trend"})
_MAX_ADVICE = 6
_NAME_COLUMNS = 16
_TREND_COLUMNS = 10
_SMOOTHING_ROUNDS = 10
_MAX_METRICS_BYTES = 4 << 20
"""That are read of one node's metrics at the start: the newest few thousand rounds."""
_KEYS = "q quit · s sort by the next column · r reverse · ↑ ↓ or k j scroll · p pause"
_ESCAPE_S = 0.05
_ARROWS = {"\x1b[A": "k", "\x1b[B": "j", "\x1bOA": "k", "\x1bOB": "j"}


class Order(StrEnum):
    """By which column the nodes are sorted."""

    node = "node"
    state = "state"
    round = "round"
    held_out = "held-out"
    reward = "reward"
    tokens = "tok/s"


@dataclass(frozen=True, slots=True)
class View:
    """What the keys have chosen."""

    order: Order
    reverse: bool = False
    skip: int = 0
    """Nodes that were scrolled past."""
    is_paused: bool = False

    def after(self, key: str, num_nodes: int) -> "View | None":
        """The view after a key; None: the end. Unknown keys change nothing."""
        if key in ("q", "Q", "\x03", "\x04"):
            return None
        orders = list(Order)
        if key == "s":
            return replace(self, order=orders[(orders.index(self.order) + 1) % len(orders)], skip=0)
        if key == "r":
            return replace(self, reverse=not self.reverse, skip=0)
        if key == "p":
            return replace(self, is_paused=not self.is_paused)
        if key in ("j", "k"):
            return replace(self, skip=min(max(0, self.skip + (1 if key == "j" else -1)), max(0, num_nodes - 1)))
        return self


@dataclass(frozen=True, slots=True)
class NodeLook:
    """One node at one moment."""

    folder: Path
    status: "NodeStatus"
    verdict: "NodeHealth"
    rewards: tuple[float, ...] = ()
    """Of its rounds, as far as its metrics were read."""
    held_out: float | None = None
    """At the last evaluation."""
    held_out_start: float | None = None
    """Before the first round."""

    @property
    def name(self) -> str:
        return self.folder.name if self.folder.name not in ("", ".") else self.status.peer_name

    @property
    def reward(self) -> float | None:
        """The mean of the last rounds: that of a single one is noise."""
        latest = self.rewards[-_SMOOTHING_ROUNDS:]
        return sum(latest) / len(latest) if latest else self.status.last_round.get("rollout/reward_mean")


class Trends:
    """What the metrics of nodes say. Of each file only what is new is read, on each call."""

    def __init__(self) -> None:
        self._histories: dict[Path, NodeHistory] = {}

    def of(self, look: NodeLook) -> NodeLook:
        from swarm.report.node_history import NodeHistory

        history = self._histories.get(look.folder)
        if history is None:
            history = self._histories[look.folder] = NodeHistory(look.folder / "metrics.jsonl", _MAX_METRICS_BYTES)
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):  # none yet, or not written by a node
            history.refresh()
            evaluation, first = history.accuracy(), history.accuracy("start")
            held_out = float(evaluation["accuracy_mean"]) if evaluation else None
            rewards = tuple(min(1.0, max(0.0, float(reward))) for reward in history.rewards)
            start = float(first["accuracy_mean"]) if first and first is not evaluation else None
            return replace(look, rewards=rewards, held_out=held_out, held_out_start=start)
        return look


def top(
    folders: list[Path] = typer.Argument(None, metavar="[DIR]...", help="Nodes' folders, or one of a testbed."),
    interval_s: float = typer.Option(1.0, "--interval", min=0.1, help="Seconds between two updates."),
    order: Order = typer.Option(Order.node, "--sort", help="Column to sort by; numbers fall."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per node, once."),
) -> None:
    """Show nodes of this machine live until q or Ctrl-C, or once if the output is not a terminal.

    reward is the mean of the last ten rounds, and trend all of them. Keys: q quits, s sorts by the next column, r reverses,
    the arrows or k and j scroll, p pauses.
    """
    from rich.console import Console

    folders, view, trends = folders or [Path("runs/node")], View(order), Trends()
    if as_json:
        for look in _look(folders, trends, view):
            print(json.dumps(_facts(look)))
        for line in _without_nodes(folders):
            print(line, file=sys.stderr)
        return
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        _watch(folders, console, interval_s, view)
    else:
        console.print(_screen(_look(folders, trends, view), _without_nodes(folders), console, view))


def node_folders(folders: Sequence[Path]) -> list[Path]:
    """Those that are a node's, and the nodes' in those that are a testbed's. Raises NodeNotRunningError where there is none."""
    found = [node for folder in folders for node in _nodes_in(folder)]
    if not found:
        named = ", ".join(map(str, folders))
        raise NodeNotRunningError(f"a node's folder must hold status.json, got none in {named}; name a node's folder")
    return found


def _nodes_in(folder: Path) -> list[Path]:
    from swarm.observability.status_file import inner_folders

    return [folder] if (folder / "status.json").exists() else inner_folders(folder)


def _without_nodes(folders: Sequence[Path]) -> list[str]:
    """A line on each that shows nothing, such as one that is misspelt or whose node has not begun."""
    return [f"{folder}: no node is there, as it has no status.json" for folder in folders if not _nodes_in(folder)]


def _look(folders: Sequence[Path], trends: Trends, view: View) -> list[NodeLook]:
    """Looks for nodes anew each time: those of a testbed come one by one."""
    from swarm.observability.status_file import judge, read_status, shown_from

    now = time.time()
    looks: list[NodeLook] = []
    for folder in node_folders(folders):
        with contextlib.suppress(NodeNotRunningError):  # removed or damaged since
            status = read_status(folder / "status.json")
            with shown_from(folder / "status.json"):
                look = trends.of(NodeLook(folder, status, judge(status, now)))
                _cells(look)  # which is drawn later, outside of this
                looks.append(look)
    return _sorted(looks, view)


_VALUES: dict[Order, Callable[[NodeLook], float | None]] = {
    Order.round: lambda look: look.status.round,
    Order.held_out: lambda look: look.held_out,
    Order.reward: lambda look: look.reward,
    Order.tokens: lambda look: look.status.last_round.get("rollout/tokens_per_s"),
}


def _sorted(looks: list[NodeLook], view: View) -> list[NodeLook]:
    """By name as the folders are named; numbers fall, and what has none comes last."""
    value_of = _VALUES.get(view.order)
    if value_of is not None:
        known = [look for look in looks if value_of(look) is not None]
        unknown = [look for look in looks if value_of(look) is None]
        return sorted(known, key=lambda look: value_of(look) or 0.0, reverse=not view.reverse) + unknown
    if view.order is Order.state:
        looks = sorted(looks, key=lambda look: look.verdict.word.value)
    return looks[::-1] if view.reverse else looks


def _watch(folders: Sequence[Path], console: "Console", interval_s: float, view: View) -> None:
    """On the terminal's second screen, so that the first one is as it was afterwards."""
    from rich.live import Live

    trends = Trends()
    looks, missing = (
        _look(folders, trends, view),
        _without_nodes(folders),
    )  # before the screen is switched, as it may raise
    live = Live(_screen(looks, missing, console, view), console=console, screen=True, auto_refresh=False)
    with (
        contextlib.suppress(KeyboardInterrupt),
        sigterm_interrupts(),
        _keys() as read_key,
        contextlib.ExitStack() as ends,
    ):
        ends.callback(live.stop)  # also where a signal comes while it starts
        live.start(refresh=True)
        due = time.monotonic() + interval_s
        while True:
            key = read_key(max(0.0, due - time.monotonic()))
            after = view.after(key, len(looks))
            if after is None:
                return
            if not key:
                due = time.monotonic() + interval_s
            if not after.is_paused or after.order is not view.order or after.reverse is not view.reverse:
                looks, missing = _look(folders, trends, after), _without_nodes(folders)
            view = after
            live.update(_screen(looks, missing, console, view), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits so many seconds for a key and returns it, or "" where none was pressed."""

    def sleep(timeout_s: float) -> str:
        time.sleep(timeout_s)
        return ""

    if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        yield sleep
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def read(timeout_s: float) -> str:
        if not select.select([terminal], [], [], timeout_s)[0]:
            return ""
        key = os.read(terminal, 1).decode("latin-1")
        while key.startswith("\x1b") and len(key) < 3 and select.select([terminal], [], [], _ESCAPE_S)[0]:
            key += os.read(terminal, 1).decode("latin-1")
        return _ARROWS.get(key, key) or "q"  # the end of the input

    try:
        tty.setcbreak(terminal)
        yield read
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _screen(looks: Sequence[NodeLook], missing: Sequence[str], console: "Console", view: View) -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from swarm.cli.node.status import STYLES, next_actions

    num_running = sum(look.status.is_alive for look in looks)
    paused = ", paused" if view.is_paused else ""
    title = f"{time.strftime('%H:%M:%S')}  {counted(len(looks), 'node')}, {num_running} running{paused}"
    room = max(1, console.height - _MAX_ADVICE - 5) if console.is_terminal else len(looks)
    shown = looks[view.skip : view.skip + room]
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    for column in _columns(console):
        mark = ("↑" if view.reverse else "↓") if column == view.order.value and console.is_terminal else ""
        is_left, is_name = column in _LEFT, column == "node"
        table.add_column(
            column + mark,
            justify="left" if is_left else "right",
            no_wrap=True,
            max_width=_NAME_COLUMNS if is_name else None,
        )
    for look in shown:
        word = look.verdict.word.value
        cells = {column: Text(plain(cell)) for column, cell in _cells(look).items()}
        cells |= {"state": Text(word, style=STYLES[word]), "trend": Text(_trend(look, console), style="green")}
        table.add_row(*(cells[column] for column in _columns(console)))
    advice = [Text(plain(line), style="yellow", overflow="fold") for line in missing]
    if len(looks) > 1:  # of one node it is told above
        advice += [
            Text(plain(f"{look.name}: {look.verdict.why}"), style="red", no_wrap=True, overflow="ellipsis")
            for look in looks
            if look.verdict.word.value in ("stalled", "not running") and look.status.phase != "ended"
        ]
    advice += [
        Text(plain(f"{look.folder.name}: {line}"), style="yellow", no_wrap=True, overflow="ellipsis")
        for look in looks
        for line in next_actions(look.folder, look.status, look.verdict)
    ]
    whys = [Text(plain(looks[0].verdict.why))] if len(looks) == 1 else []
    more = f"{len(shown)} of {len(looks)} nodes · " if len(shown) < len(looks) else ""
    keys = [Text(more + _KEYS, style="dim", no_wrap=True, overflow="ellipsis")] if console.is_terminal else []
    return Group(Text(title, style="bold"), *whys, table, *advice[:_MAX_ADVICE], *keys)


_WIDE_COLUMNS = 100


def _columns(console: "Console") -> tuple[str, ...]:
    """Those that fit: a terminal of the usual 80 columns has no room for all."""
    wide = ("rank", "fetched") if console.width >= _WIDE_COLUMNS else ()
    return ("node", "state", "round", "held-out", "reward", "trend", "own+swarm", *wide, "peers", "tok/s")


def _trend(look: NodeLook, console: "Console") -> str:
    from swarm.report.live_table import sparkline

    return sparkline(look.rewards, 2 * _TREND_COLUMNS if console.width >= _WIDE_COLUMNS else _TREND_COLUMNS)


def _cells(look: NodeLook) -> dict[str, str]:
    """{column: text}"""
    status, row = look.status, look.status.last_round
    facts = status.contribution
    rank, taken_at = facts.get("reward_rank"), facts.get("last_taken_at")
    return {
        "node": look.name,
        "round": str(status.round),
        "held-out": _held_out(look),
        "reward": "–" if look.reward is None else f"{look.reward:.3f}",
        "own+swarm": f"{row['train/own_groups_total']}+{row['train/swarm_groups_total']}" if row else "–",
        "rank": f"{rank}/{facts['reward_rank_of']}" if rank else "–",
        "fetched": "–" if taken_at is None else f"{for_how_long(time.time() - taken_at)} ago",
        "peers": "off" if status.num_connected is None else str(status.num_connected),
        "tok/s": f"{row['rollout/tokens_per_s']:.0f}" if row else "–",
    }


def _held_out(look: NodeLook) -> str:
    if look.held_out is None:
        return "–"
    return f"{look.held_out:.3f}" if look.held_out_start is None else f"{look.held_out_start:.2f}→{look.held_out:.2f}"


def _facts(look: NodeLook) -> dict[str, Any]:
    status, row = look.status, look.status.last_round
    return {
        "folder": os.fspath(look.folder),
        "peer_id": status.peer_id,
        "running": status.is_alive,
        "verdict": look.verdict.word.value,
        "why": look.verdict.why,
        "phase": status.phase,
        "round": status.round,
        "reward_mean": row.get("rollout/reward_mean"),
        "smoothed_reward": look.reward,
        "held_out_reward": look.held_out,
        "held_out_start": look.held_out_start,
        "tokens_per_s": row.get("rollout/tokens_per_s"),
        "num_connected": status.num_connected,
        "contribution": status.contribution,
    }
