"""`swarm status`: shows on one screen whether the node of a folder runs and contributes."""

import json
import os
import shlex
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.errors import NodeNotRunningError
from swarm.observability.plain_text import counted, for_how_long, plain, size

if TYPE_CHECKING:
    from swarm.observability.status_file import NodeHealth, NodeStatus

FOLDER = typer.Argument(Path("runs/node"), metavar="[DIR]", help="The node's folder.")
STYLES = {
    "contributing": "bold green",
    "serving": "bold green",
    "starting": "bold yellow",
    "learning alone": "bold yellow",
    "paused": "bold yellow",
    "stalled": "bold red",
    "not running": "bold red",
}
_SCREEN_LINES = 24
_NAME_COLUMNS = 13
_MAX_ADVICE = 3
_MAX_NAMES = 3
_MAX_REASONS = 3
_LEAST_TO_WRITE_BYTES = 1 << 16

Lines = list[tuple[str, str]]


def status(
    folder: Path = FOLDER,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show whether a node contributes, and what to do if not. Exit code 9 if it is not running, after its last known state."""
    from swarm.observability.status_file import judge, read_status, shown_from

    current = read_status(folder / "status.json")
    with shown_from(folder / "status.json"):
        verdict = judge(current, time.time())
        if not as_json:
            _print(folder, current, verdict)
    if as_json:
        facts = {"running": current.is_alive, "verdict": verdict.word.value, "why": verdict.why}
        crash = last_crash(folder)
        facts |= {"disk_bytes": folder_bytes(folder), "last_crash": None if crash is None else str(crash)}
        print(json.dumps(asdict(current) | facts))
    if not current.is_alive:
        raise NodeNotRunningError(
            f"the node in {folder} must be running, got process {current.pid}, which has ended; "
            f"start it again with {start_command(folder, current)}"
        )


def start_command(folder: Path, status: "NodeStatus") -> str:
    """What a person types to start it again, in back quotes; in words where nothing in the folder says it.

    It is built here, and takes no text of the folder: somebody else may have filled that.
    """
    if status.command == "bootstrap":
        command = f"`swarm bootstrap --dir {shlex.quote(str(folder))}`"
        is_kept = (folder / "bootstrap.toml").exists()
        return command if is_kept else f"{command} and the --manifest, --listen and other options of its first start"
    if status.command == "stage":
        return "`swarm stage` and the configuration of its first start"
    config = folder / "config.toml"
    return f"`swarm run {shlex.quote(str(config))}`" if config.exists() else "the command of its first start"


def folder_bytes(folder: Path) -> int:
    """Of all files in it, as far as they are still there."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:  # such as a checkpoint that has just been replaced
            continue
    return total


def last_crash(folder: Path) -> Path | None:
    """The newest report of an unexpected end."""
    return max(folder.glob("crash-*.txt"), key=lambda path: path.lstat().st_mtime, default=None)


def _print(folder: Path, current: "NodeStatus", verdict: "NodeHealth") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    word = Text(verdict.word.value, style=STYLES[verdict.word.value])
    advice = [f"! {plain(line)}" for line in next_actions(folder, current, verdict)]
    console.print(Text.assemble(word, ": ", plain(verdict.why)))
    for line in advice:
        console.print(Text(line, style="yellow"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    used = 2 if current.is_alive else 4  # the verdict, the prompt, and the error that follows
    room = _SCREEN_LINES - used - sum(_height(line, console.width) for line in advice)
    for name, value in _lines(folder, current):
        height = _height(plain(value), console.width - _NAME_COLUMNS)
        if height <= room:
            room -= height
            table.add_row(name, plain(value))
    console.print(table)


def next_actions(folder: Path, current: "NodeStatus", verdict: "NodeHealth") -> list[str]:
    """What to do where something is wrong, the gravest first."""
    if not current.is_alive:
        return []
    looks = f"`swarm logs {shlex.quote(str(folder))} --level warning` shows where; a restart goes on from the last checkpoint"
    first = [why_unwritten(folder) or looks] if verdict.word.value == "stalled" else []
    return (first + current.contribution.get("advice", []))[:_MAX_ADVICE]


def why_unwritten(folder: Path) -> str:
    """What a person can do where a node cannot write its state, and so looks frozen; empty where it can."""
    if shutil.disk_usage(folder).free < _LEAST_TO_WRITE_BYTES:
        return "the disk of its folder is full, so what is shown may be old, and nothing is saved: make room"
    if not os.access(folder, os.W_OK):
        return (
            "its folder cannot be written, so what is shown may be old, and nothing is saved: mount it writable, or change "
            "its permissions"
        )
    return ""


def _height(text: str, num_columns: int) -> int:
    """Lines that it takes; words are not broken, so a little more than its length says."""
    return 1 + int(1.1 * len(text) / max(num_columns, 20))


def _lines(folder: Path, current: "NodeStatus") -> Lines:
    """The most important first: what does not fit on the screen is left to --json."""
    now, row = time.time(), current.last_round
    state = f"{current.phase}, up for {for_how_long(now - current.started_at)}, process {current.pid}"
    was = "" if current.phase in ("ended", "failed") else f"; it was {current.phase} last"
    lines: Lines = [
        ("node", current.peer_name),
        ("state", state if current.is_alive else "not running" + was),
    ]
    if not current.command:  # a stage or bootstrap peer has no rounds
        lines.append(("round", f"{current.round}{_version(current)}{_speed(row)}"))
    if row:
        lines += [("reward", _reward(current, row)), ("learned", _learned(row))]
    lines += _exchange_lines(current, row, now)
    if crash := last_crash(folder):
        lines.append(("crash", f"{crash.name}, {for_how_long(now - crash.lstat().st_mtime)} ago"))
    lines.append(("disk", f"{size(folder_bytes(folder))} in its folder, {size(shutil.disk_usage(folder).free)} free"))
    lines += _merge_lines(current, row)
    if current.final_merge:
        final = current.final_merge
        applied = "applied" if final["final/is_taken"] else "not applied: worse on private tasks"
        of = f"{counted(final['final/places'], 'node')}, {counted(final['final/replicas'], 'adapter')}"
        lines.append(("final merge", f"{of}, {applied}"))
    lines.append(("peer id", current.peer_id))
    if current.addresses:
        first, *others = current.addresses
        lines.append(("address", f"{first} (+ {len(others)} in --json)" if others else first))
    if current.http_port and current.is_alive:
        name, path = (
            ("metrics", "metrics") if current.phase == "serving" else ("page", "")
        )  # which `swarm dashboard` opens
        lines.append((name, f"http://127.0.0.1:{current.http_port}/{path}"))
    return lines


def _version(current: "NodeStatus") -> str:
    return f", policy version {current.policy_version}" if current.policy_version else ""


def _speed(row: dict[str, Any]) -> str:
    return f", {row['time/round_s']:.2f} s per round, {row['rollout/tokens_per_s']:.0f} tokens/s" if row else ""


def _reward(current: "NodeStatus", row: dict[str, Any]) -> str:
    rank, ranked = current.contribution.get("reward_rank"), current.contribution.get("reward_rank_of")
    among = f"; rank {rank} of {ranked} among recent rewards" if rank else ""
    return f"{row['rollout/reward_mean']:.3f} in the last round{among}"


def _learned(row: dict[str, Any]) -> str:
    return f"from {row['train/own_groups_total']} own groups and {row['train/swarm_groups_total']} of peers"


def _exchange_lines(current: "NodeStatus", row: dict[str, Any], now: float) -> Lines:
    from swarm.observability.status_file import name_of

    facts = current.contribution
    lines: Lines = []
    if facts.get("last_taken_at") is not None:
        who, ago = name_of(current, facts["last_taken_by"]), for_how_long(now - facts["last_taken_at"])
        lines.append(("fetched", f"{facts['bodies_taken']} times by peers, last {ago} ago by {who}"))
    if "exchange/records_published" in row:
        sent, received = (size(row.get(f"exchange/bytes_{way}", 0)) for way in ("sent", "received"))
        lines += [
            ("published", f"{row['exchange/records_published']} records; {sent} sent, {received} received"),
            ("admitted", f"{row.get('exchange/records_admitted', 0)} records of peers"),
        ]
    if rejected := row.get("exchange/rejected"):
        commonest = sorted(rejected.items(), key=lambda item: -item[1])
        rest = sum(count for _, count in commonest[_MAX_REASONS:])
        named = [f"{reason} {count}" for reason, count in commonest[:_MAX_REASONS]] + (
            [f"others {rest}"] if rest else []
        )
        lines.append(("rejected", ", ".join(named)))
    if current.num_connected is not None:
        names = ", ".join(peer["name"] for peer in current.peers[:_MAX_NAMES])
        known = f"; known: {len(current.peers)}, last {names}" if names else ""
        were = "" if current.is_alive else " at its end"
        lines.append(("peers", f"{current.num_connected} connected{were}{known}"))
    return lines


def _merge_lines(current: "NodeStatus", row: dict[str, Any]) -> Lines:
    """For a node that merges: how often it did, and the weight of its last partner."""
    from swarm.observability.status_file import name_of

    if "merge/merges_total" not in row:
        return []
    alone = ", ".join(f"{why} {count}" for why, count in row["merge/reasons"].items() if why != "merged")
    lines = [("merged", f"{row['merge/merges_total']} times; outer steps without a partner: {alone or 'none'}")]
    if "merge/partner" in row:
        lines.append(
            (
                "last merge",
                f"with {name_of(current, row['merge/partner'])}, at a weight of {row['merge/partner_share']:.2f}",
            )
        )
    return lines
