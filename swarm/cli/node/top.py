"""`swarm top`: shows nodes of this machine live, from their folders or from the folder of a testbed."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.errors import NodeNotRunningError
from swarm.machine.stop_signals import sigterm_interrupts
from swarm.observability.plain_text import counted, for_how_long, plain

if TYPE_CHECKING:
    from rich.console import Console, Group

    from swarm.observability.status_file import NodeHealth, NodeStatus

_COLUMNS = ("node", "state", "round", "reward", "rank", "own+swarm", "fetched", "peers", "tok/s")
_LEFT = frozenset({"node", "state"})
_MAX_ADVICE = 6
_NAME_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class NodeLook:
    """One node at one moment."""

    folder: Path
    status: "NodeStatus"
    verdict: "NodeHealth"


def top(
    folders: list[Path] = typer.Argument(None, metavar="[DIR]...", help="Nodes' folders, or one of a testbed."),
    interval_s: float = typer.Option(1.0, "--interval", min=0.1, help="Seconds between two updates."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per node, once."),
) -> None:
    """Show nodes of this machine live until Ctrl-C, or once if the output is not a terminal."""
    from rich.console import Console

    folders = folders or [Path("runs/node")]
    if as_json:
        for look in _look(folders):
            print(json.dumps(_facts(look)))
        for line in _without_nodes(folders):
            print(line, file=sys.stderr)
        return
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        _watch(folders, console, interval_s)
    else:
        console.print(_screen(folders, console))


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


def _look(folders: Sequence[Path]) -> list[NodeLook]:
    """Looks for nodes anew each time: those of a testbed come one by one."""
    from swarm.observability.status_file import judge, read_status, shown_from

    now = time.time()
    looks: list[NodeLook] = []
    for folder in node_folders(folders):
        with contextlib.suppress(NodeNotRunningError):  # removed or damaged since
            status = read_status(folder / "status.json")
            with shown_from(folder / "status.json"):
                look = NodeLook(folder, status, judge(status, now))
                _cells(look)  # which is drawn later, outside of this
                looks.append(look)
    return looks


def _watch(folders: Sequence[Path], console: "Console", interval_s: float) -> None:
    """On the terminal's second screen, so that the first one is as it was afterwards."""
    from rich.live import Live

    first = _screen(folders, console)  # before the screen is switched, as it may raise
    live = Live(first, console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), sigterm_interrupts(), live:
        while True:
            time.sleep(interval_s)
            live.update(_screen(folders, console), refresh=True)


def _screen(folders: Sequence[Path], console: "Console") -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from swarm.cli.node.status import STYLES, next_actions

    looks = _look(folders)
    num_running = sum(look.status.is_alive for look in looks)
    title = f"{time.strftime('%H:%M:%S')}  {counted(len(looks), 'node')}, {num_running} running"
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    for column in _COLUMNS:
        max_width = _NAME_COLUMNS if column == "node" else None
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True, max_width=max_width)
    for look in looks[: max(1, console.height - _MAX_ADVICE - 4)] if console.is_terminal else looks:
        word = look.verdict.word.value
        cells = [Text(plain(cell)) for cell in _cells(look)]
        table.add_row(cells[0], Text(word, style=STYLES[word]), *cells[1:])
    advice = [Text(plain(line), style="yellow", overflow="fold") for line in _without_nodes(folders)]
    advice += [
        Text(plain(f"{look.folder.name}: {line}"), style="yellow", no_wrap=True, overflow="ellipsis")
        for look in looks
        for line in next_actions(look.folder, look.status, look.verdict)
    ]
    whys = [Text(plain(looks[0].verdict.why))] if len(looks) == 1 else []
    return Group(Text(title, style="bold"), *whys, table, *advice[:_MAX_ADVICE])


def _cells(look: NodeLook) -> tuple[str, ...]:
    status, row = look.status, look.status.last_round
    facts = status.contribution
    rank, taken_at = facts.get("reward_rank"), facts.get("last_taken_at")
    return (
        look.folder.name if look.folder.name not in ("", ".") else status.peer_name,
        str(status.round),
        f"{row['rollout/reward_mean']:.3f}" if row else "–",
        f"{rank}/{facts['reward_rank_of']}" if rank else "–",
        f"{row['train/own_groups_total']}+{row['train/swarm_groups_total']}" if row else "–",
        "–" if taken_at is None else for_how_long(time.time() - taken_at),
        "off" if status.num_connected is None else str(status.num_connected),
        f"{row['rollout/tokens_per_s']:.0f}" if row else "–",
    )


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
        "tokens_per_s": row.get("rollout/tokens_per_s"),
        "num_connected": status.num_connected,
        "contribution": status.contribution,
    }
