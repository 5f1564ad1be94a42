"""`swarm peers`: lists the peers that the node of a folder knows, with their reputation."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.cli.node.status import FOLDER
from swarm.observability.plain_text import for_how_long, plain

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("name", "seen", "weight", "groups", "refused", "reward", "version", "policy", "peer id")
_LEFT = frozenset({"name", "policy", "peer id"})


def peers(
    folder: Path = FOLDER,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON array."),
) -> None:
    """List the peers of a node, last seen first: up to 256, with what was admitted of each and recomputed here.

    weight: reputation from 0 to 1, 0.5 for a stranger. groups: admitted. refused: records that were
    not. reward: mean of its groups of the last half hour. policy: the beginning of its lineage. --json has all of it.
    """
    from rich.console import Console

    from swarm.observability.status_file import read_status, shown_from

    current = read_status(folder / "status.json")
    if as_json:
        print(json.dumps(current.peers))
        return
    console = Console(highlight=False, markup=False)
    if not current.peers:
        console.print("no peer is known yet")
        return
    with shown_from(folder / "status.json"):
        console.print(_table(current.peers, time.time()))
    if not current.is_alive:
        ago = f" {for_how_long(time.time() - current.written_at)} ago" if current.written_at else ""
        console.print(f"the node is not running; this is what it knew{ago}")


def _table(listed: list[dict[str, Any]], now: float) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True, overflow="ellipsis")
    for peer in listed:
        is_banned = peer["banned_until"] > now
        style = "red" if is_banned else ""
        table.add_row(*(Text(plain(cell), style=style) for cell in _cells(peer, now, is_banned=is_banned)))
    return table


def _cells(peer: dict[str, Any], now: float, *, is_banned: bool) -> tuple[str, ...]:
    return (
        peer["name"],
        for_how_long(now - peer["last_seen_at"]),
        "banned" if is_banned else f"{peer['weight']:.2f}",
        str(peer["groups_admitted"]),
        str(peer["records_rejected"]),
        "–" if peer["reward_mean"] is None else f"{peer['reward_mean']:.3f}",
        "–" if peer["policy_version"] is None else str(peer["policy_version"]),
        peer["lineage"][:6] or "–",
        f"…{peer['peer_id'][-8:]}",
    )
