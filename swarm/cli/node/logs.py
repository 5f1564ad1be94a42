"""`swarm logs`: the newest log of a node's folder."""

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.node.status import FOLDER
from swarm.errors import NodeNotRunningError

if TYPE_CHECKING:
    from swarm.observability.logging_setup import LogRecord


class Level(StrEnum):
    """Lowest severity to show."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def logs(
    folder: Path = FOLDER,
    follow: bool = typer.Option(False, "--follow", "-f", help="Also show new messages, over restarts, until Ctrl-C."),
    lines: int = typer.Option(50, "--lines", "-n", min=0, help="Number of earlier messages to show."),
    level: Level = typer.Option(Level.debug, help="Lowest severity to show."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per message."),
) -> None:
    """Show the last messages of a node."""
    from swarm.observability import logging_setup as log_reader
    from swarm.observability.status_file import way_to_a_node

    newest = log_reader.newest_log(folder / "logs")
    if newest is None and not follow:
        raise NodeNotRunningError(f"a node's folder must hold logs, got none in {folder}{way_to_a_node(folder)}")
    least = level.value.upper()
    last, num_read = log_reader.last_records(newest, lines, least) if newest else ([], 0)
    for record in last:
        _show(record, as_json)
    if not follow:
        return
    for record in log_reader.follow(folder / "logs", newest, num_read):
        if record.is_at_least(least):
            _show(record, as_json)


def _show(record: "LogRecord", as_json: bool) -> None:
    print(json.dumps(asdict(record)) if as_json else record.line(), flush=True)
