"""`swarm report`: writes the history of one node, or of all nodes of a testbed, to one HTML file without scripts.

folder ─▶ metrics.jsonl, status.json, config.toml of each node ─▶ [NodeRun] ─▶ curves, tables ─▶ one file
"""

import html
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from swarm import __version__
from swarm.config.shareable import shareable
from swarm.dashboard.series import METRICS, MergeLog, Series
from swarm.dashboard.shown import WORDS, shown, shown_text
from swarm.errors import ConfigError, NodeNotRunningError
from swarm.machine.node_folder import MAX_CONFIG_BYTES, NodeFolder
from swarm.machine.safe_files import SHARED, read_file, read_json, replace_file
from swarm.records.identity import peer_name
from swarm.report.live_table import NodeView
from swarm.report.node_history import MAX_BYTES, NodeHistory
from swarm.report.summary import NodeSummary, summarize
from swarm.report.svg_curves import STYLE, Curve, smooth, svg_curves
from swarm.report.tables import Table

_MAX_NODES = 64
_MAX_METRICS_BYTES = 512 << 20
"""Limit for all nodes together. A byte of crafted metrics takes three bytes of memory."""
_MAX_PEERS = 300
_MAX_FILE_BYTES = 4 << 20
_CURVES = {
    "reward": ("Reward of sampled answers", "mean"),
    "entropy": ("Entropy", "nats"),
    "tokens_per_s": ("Throughput", "tokens/s"),
    "staleness": ("Staleness", "policy versions"),
}


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What one node's folder holds."""

    name: str
    history: NodeHistory
    summary: NodeSummary
    status: dict[str, Any]
    """As it was last written; empty where it cannot be read."""
    config: str
    """TOML of what others may see; empty where there is none."""


def write_report(folder: Path, path: Path) -> int:
    """Write it; how many nodes it is about. Raises NodeNotRunningError where the folder holds no run, ConfigError where the
    file cannot be written."""
    try:
        folders = node_folders(folder)
        max_bytes = min(MAX_BYTES, _MAX_METRICS_BYTES // len(folders))
        runs = [_read(NodeFolder(part), max_bytes) for part in folders]
        text = report_html(runs, folder.resolve().name)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"metrics.jsonl and status.json must be as a node writes them, got others in {folder}: {cause}; leave that node out"
        ) from error
    try:
        replace_file(path, text, SHARED)
    except OSError as error:
        raise ConfigError(
            f"a report must go to a file that can be written, got {path}: {error.strerror}; set --out"
        ) from None
    return len(runs)


def node_folders(folder: Path) -> list[Path]:
    """The folder itself where it is a node's, else those of nodes in it. Raises NodeNotRunningError where there are none."""
    if NodeFolder(folder).metrics.is_file():
        return [folder]
    found = sorted(part.parent for part in folder.glob("*/metrics.jsonl"))
    if not found:
        raise NodeNotRunningError(
            f"a report needs metrics.jsonl, got none in {folder} or the folders in it; name a node's or a testbed's folder"
        )
    return found[:_MAX_NODES]


def report_html(runs: Sequence[NodeRun], title: str) -> str:
    """The whole page."""
    parts = [
        _introduction(runs),
        "<h2>Curves</h2><div class='charts'>" + "".join(_curves(runs)) + "</div>",
        *(table.html() for table in (_learning(runs), _held_out(runs), *_exchange(runs)) if table.rows),
        *_merging(runs),
        *(table.html() for table in _peers(runs) if table.rows),
        "<h2>Configuration</h2>",
        *(f"<details><summary>{_name(run)}</summary><pre>{_text(run.config)}</pre></details>" for run in runs),
    ]
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta http-equiv='content-security-policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_text(title)} – swarm report</title><style>{STYLE}</style></head><body><main><h1>{_text(title)}</h1>"
        f"{''.join(parts)}</main><footer>swarm {__version__}, written {written}</footer></body></html>\n"
    )


def _read(folder: NodeFolder, max_bytes: int) -> NodeRun:
    folder.check()
    history = NodeHistory(folder.metrics, max_bytes)
    history.refresh()
    try:
        status = read_json(folder.status, _MAX_FILE_BYTES)
    except (OSError, ValueError):
        status = {}
    status = shown(status) if isinstance(status, dict) else {}
    try:
        config = tomli_w.dumps(shareable(tomllib.loads(read_file(folder.config, MAX_CONFIG_BYTES).decode())))
    except (OSError, ValueError, RecursionError):
        config = ""
    state = str(history.end["reason"]) if history.end else "none in order"
    view = NodeView(folder.path.resolve().name, str(status.get("peer_name", "")), 0, state, history)
    return NodeRun(view.name, history, summarize(view), status, config)


def _introduction(runs: Sequence[NodeRun]) -> str:
    times = [row["time_s"] for run in runs for row in run.history.rounds if "time_s" in row]
    rounds = sum(run.summary.rounds for run in runs)
    when = f" from {_moment(min(times))} to {_moment(max(times))}" if times else ""
    nodes = f"{len(runs)} nodes" if len(runs) > 1 else f"Node {_name(runs[0])}"
    return f"<p>{nodes}, {rounds:,} rounds in all{when}.</p>"


def _curves(runs: Sequence[NodeRun]) -> list[str]:
    all_points: dict[str, dict[str, Any]] = {}
    for run in runs:
        series = Series()
        for row in run.history.rounds:
            series.add(row)
        all_points[_label(run)] = series.points()
    figures: list[str] = []
    for name in METRICS:
        title, unit = _CURVES[name]
        curves = {
            label: Curve(points["start"], smooth(points[name]["mean"], max(1, len(points["start"]) // 20)))
            for label, points in all_points.items()
        }
        figures.append(svg_curves(title, unit, curves))
    return figures


def _learning(runs: Sequence[NodeRun]) -> Table:
    headers = (
        "node",
        "rounds",
        "reward",
        "own groups",
        "peers' groups",
        "tokens/s",
        "MB sent",
        "MB received",
        "end",
    )
    rows: list[list[str]] = []
    for run in runs:
        s = run.summary
        reward = f"{_number(s.reward_start, 3)} → {_number(s.reward_end, 3)}"
        traffic = [f"{count / 1e6:,.2f}" for count in (s.bytes_sent, s.bytes_received)]
        numbers = [f"{s.own_groups:,}", f"{s.swarm_groups:,}", f"{s.tokens_per_s:,.0f}"]
        rows.append([_label(run), f"{s.rounds:,}", reward, *numbers, *traffic, s.state])
    return Table("Learning", headers, rows)


def _held_out(runs: Sequence[NodeRun]) -> Table:
    rows = [
        [_label(run), f"{row['round']:,}", str(row["phase"]), f"{row['accuracy_mean']:.3f}"]
        for run in runs
        for row in run.history.evaluations
    ]
    return Table("Held-out tasks", ("node", "round", "when", "mean reward"), rows)


def _exchange(runs: Sequence[NodeRun]) -> list[Table]:
    shared = [
        [_label(run), *(f"{run.history.totals[f'exchange/records_{what}']:,}" for what in ("published", "admitted"))]
        for run in runs
    ]
    rejected = sum((run.history.rejected for run in runs), Counter[str]())
    words = {reason.value: cause for reason, cause in WORDS.items()}
    away = [
        [shown_text(reason, 80), words.get(reason, ""), f"{count:,}"]
        for reason, count in rejected.most_common()
        if count
    ]
    return [
        Table("Exchange", ("node", "records published", "records admitted"), shared),
        Table("Rejected records", ("reason", "meaning", "count"), away),
    ]


def _merging(runs: Sequence[NodeRun]) -> list[str]:
    """Tables of merges; empty if no node merged."""
    names = {run.status["peer_id"]: _label(run) for run in runs if run.status.get("peer_id")}
    steps: list[list[str]] = []
    merges: list[list[str]] = []
    for run in runs:
        log, row = MergeLog(), run.history.last_round
        for one in run.history.rounds:
            log.add(one, one.get("time_s", 0.0))
        if "merge/merges_total" in row:
            alone = [
                f"{why} {count}" for why, count in row.get("merge/reasons", {}).items() if why != "merged" and count
            ]
            counts = [f"{row[f'merge/{what}_total']:,}" for what in ("merges", "solo_steps")]
            steps.append([_label(run), *counts, ", ".join(alone) or "–"])
        for merge in log.newest_first():
            partner = names.get(str(merge["partner"])) or peer_name(str(merge["partner"]))
            numbers = [_number(merge["share"], 2), _number(merge["drift"], 3), _moment(merge["time_s"])]
            merges.append([_label(run), f"{merge['round']:,}", partner, *numbers])
    tables = [
        Table("Merging", ("node", "merges", "steps without partner", "reasons"), steps),
        Table("Last merges", ("node", "round", "partner", "weight", "drift", "when"), merges),
    ]
    return [table.html() for table in tables if table.rows]


def _peers(runs: Sequence[NodeRun]) -> list[Table]:
    """The peers that each node knew last."""
    headers = ("name", "lineage", "trust", "reward", "groups admitted", "records rejected")
    tables: list[Table] = []
    for run in runs:
        known = [peer for peer in run.status.get("peers") or [] if isinstance(peer, dict)]
        rows = [
            [
                str(peer.get("name") or peer.get("peer_id") or "–"),
                str(peer.get("lineage") or "–")[:8],
                *(_number(peer.get(key), 2) for key in ("weight", "reward_mean")),
                *(_number(peer.get(key), 0) for key in ("groups_admitted", "records_rejected")),
            ]
            for peer in known[:_MAX_PEERS]
        ]
        tables.append(Table(f"Peers of {_label(run)}", headers, rows))
    return tables


def _label(run: NodeRun) -> str:
    own = run.status.get("peer_name")
    return f"{run.name} ({own})" if own else run.name


def _name(run: NodeRun) -> str:
    return _text(_label(run))


def _text(text: str) -> str:
    return html.escape(shown_text(text, 200_000))


def _number(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "–"


def _moment(time_s: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(time_s)) if isinstance(time_s, int | float) else "–"
