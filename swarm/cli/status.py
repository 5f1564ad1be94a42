"""`swarm status`: is the node of this folder running, and is it contributing?"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.errors import NodeNotRunningError
from swarm.observability.plain_text import plain

if TYPE_CHECKING:
    from swarm.observability.status_file import NodeStatus


def status(
    folder: Path = typer.Argument(Path("runs/node"), metavar="[DIR]", help="The node's folder."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show a node's state. Exit code 9 if it is not running, after its last known state."""
    from swarm.observability.status_file import read_status

    current = read_status(folder / "status.json")
    if as_json:
        print(json.dumps(asdict(current) | {"running": current.is_alive}))
    else:
        _print(current)
    if not current.is_alive:
        raise NodeNotRunningError(
            f"the node must be running, got process {current.pid} that has ended, in {folder}; start it again with `swarm run`"
        )


def _print(current: "NodeStatus") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=current.peer_name, title_justify="left")
    for name, value in _lines(current):
        table.add_row(name, plain(value))
    Console(markup=False).print(table)


def _lines(current: "NodeStatus") -> list[tuple[str, str]]:
    row: dict[str, Any] = current.last_round
    uptime_min = (time.time() - current.started_at) / 60
    lines = [
        ("peer id", current.peer_id),
        ("state", f"{current.phase}, {uptime_min:.0f} min" if current.is_alive else "not running"),
        ("round", f"{current.round}, policy version {current.policy_version}"),
    ]
    if row:
        rejected = ", ".join(f"{reason} {count}" for reason, count in row.get("exchange/rejected", {}).items())
        own, swarm = row["train/own_groups_total"], row["train/swarm_groups_total"]
        sent, received = (row.get(f"exchange/bytes_{way}", 0) / 1e6 for way in ("sent", "received"))
        lines += [
            ("reward", f"{row['rollout/reward_mean']:.3f} in the last round"),
            ("speed", f"{row['rollout/tokens_per_s']:.0f} tokens/s, {row['time/round_s']:.2f} s per round"),
            ("learned from", f"{own} own and {swarm} swarm groups"),
            ("published", f"{row.get('exchange/records_published', 0)} records"),
            (
                "admitted",
                f"{row.get('exchange/records_admitted', 0)} records of others; rejected: {rejected or 'none'}",
            ),
            ("traffic", f"{sent:.2f} MB sent, {received:.2f} MB received"),
            ("peers", f"{row['network/peers']}"),
            *_merge_lines(row),
        ]
    if current.final_merge:
        final = current.final_merge
        taken = "taken" if final["final/is_taken"] else "not taken: worse on private tasks"
        lines.append(("final merge", f"{final['final/places']} nodes, {final['final/replicas']} adapters, {taken}"))
    lines += [("address", address) for address in current.addresses]
    if current.http_port:
        lines.append(("metrics", f"http://127.0.0.1:{current.http_port}/metrics"))
    return lines


def _merge_lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Of a node that merges: how often, and what the last merge took of whom."""
    if "merge/merges_total" not in row:
        return []
    alone = ", ".join(f"{why} {count}" for why, count in row["merge/reasons"].items() if why != "merged")
    lines = [("merged", f"{row['merge/merges_total']} times; outer steps alone: {alone or 'none'}")]
    if "merge/partner" in row:
        lines.append(("last merge", f"{row['merge/partner_share']:.2f} of {row['merge/partner']}"))
    return lines
