"""`swarm report`: writes the history of a node or of a testbed, or several of these beside each other, to one HTML file without
scripts.

folders ─▶ metrics.jsonl, status.json, config.toml of each node ─▶ [Run] ─▶ story, curves, tables ─▶ one file
"""

import html
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
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
from swarm.report.story import NodeRun, Run, beside, differing_settings, figures, sources, story
from swarm.report.summary import summarize
from swarm.report.svg_curves import STYLE, Curve, smooth, svg_curves
from swarm.report.tables import Table

_MAX_NODES = 64
_MAX_METRICS_BYTES = 512 << 20
"""Limit for all nodes together. A byte of crafted metrics takes three bytes of memory."""
_MAX_PEERS = 300
_MAX_FILE_BYTES = 4 << 20
_MAX_RUNS = 8
_CURVES = {
    "reward": ("Reward of sampled answers", "mean"),
    "own": ("Own groups trained on", "a round"),
    "swarm": ("Groups of peers trained on", "a round"),
    "loss": ("Loss", "mean"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "kl": ("KL to the base", "nats"),
    "entropy": ("Entropy", "nats"),
    "clipped": ("Clipped tokens", "share"),
    "staleness": ("Staleness", "policy versions"),
    "tokens_per_s": ("Throughput", "tokens/s"),
}


def write_report(folders: Sequence[Path], path: Path) -> int:
    """Write a report about one run, or about several beside each other; how many nodes it is about.

    Raises NodeNotRunningError where a folder holds no run, ConfigError where the file cannot be written.
    """
    parts = [node_folders(folder) for folder in folders]
    max_bytes = min(MAX_BYTES, _MAX_METRICS_BYTES // sum(map(len, parts)))
    runs = [
        run
        for name, folder, inner in zip(_names(folders), folders, parts, strict=True)
        for run in _by_swarm(name, _read_all(folder, inner, max_bytes))
    ]
    if len(runs) > _MAX_RUNS:
        raise ConfigError(
            f"a report is about at most {_MAX_RUNS} runs, got {len(runs)}; name fewer folders, or those of fewer swarms"
        )
    if len(runs) > 1:  # in which nodes may have the same names
        runs = [
            Run(
                run.name,
                [
                    replace(node, name=run.name if len(run.nodes) == 1 else f"{run.name}/{node.name}")
                    for node in run.nodes
                ],
            )
            for run in runs
        ]
    try:
        replace_file(path, report_html(runs), SHARED)
    except OSError as error:
        raise ConfigError(
            f"a report must go to a file that can be written, got {path}: {error.strerror}; set --out"
        ) from None
    return sum(len(run.nodes) for run in runs)


def _names(folders: Sequence[Path]) -> list[str]:
    """What to call the runs: the last parts of their paths that tell them apart."""
    paths = [folder.resolve() for folder in folders]
    for count in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{place}: {path}" for place, path in enumerate(paths, 1)]


def _by_swarm(name: str, nodes: Sequence[NodeRun]) -> list[Run]:
    """One run, or one for each swarm of nodes that lie beside each other: they have not learned together."""
    names = list(dict.fromkeys(node.swarm for node in nodes))
    if len([one for one in names if one]) < 2:
        return [Run(name, nodes)]
    return [Run(f"{name}, swarm {one or 'unknown'}", [node for node in nodes if node.swarm == one]) for one in names]


def _read_all(folder: Path, inner: Sequence[Path], max_bytes: int) -> list[NodeRun]:
    try:
        return [_read(NodeFolder(part), max_bytes) for part in inner]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"metrics.jsonl and status.json must be as a node writes them, got others in {folder}: {cause}; leave that node out"
        ) from error


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


def report_html(runs: Sequence[Run]) -> str:
    """The whole page."""
    title = " beside ".join(run.name for run in runs)
    nodes = [node for run in runs for node in run.nodes]
    parts = [*_introduction(runs), *(_beside(runs) if len(runs) > 1 else ())]
    parts += [
        "<h2>Curves</h2><div class='charts'>" + "".join(_curves(runs)) + "</div>",
        *(table.html() for table in (_learning(nodes), *_exchange(nodes)) if table.rows),
        *(table.html() for table in (_merging(nodes),) if table.rows),
        "<h2>In detail</h2>",
        *(table.folded_html() for table in (_held_out(nodes), _last_merges(nodes), *_peers(nodes)) if table.rows),
        "<h2>Configuration</h2>",
        *(f"<details><summary>{_name(run)}</summary><pre>{_text(run.config)}</pre></details>" for run in nodes),
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
    settings: dict[str, Any] = {}
    with suppress(OSError, ValueError, RecursionError):
        settings = shareable(tomllib.loads(read_file(folder.config, MAX_CONFIG_BYTES).decode()))
    of_swarm = settings.get("swarm", {})
    swarm = " ".join(of_swarm[key] for key in ("name", "id") if of_swarm.get(key))
    state = str(history.end["reason"]) if history.end else "none in order"
    view = NodeView(folder.path.resolve().name, str(status.get("peer_name", "")), 0, state, history)
    return NodeRun(view.name, history, summarize(view), status, tomli_w.dumps(settings), swarm)


def _introduction(runs: Sequence[Run]) -> list[str]:
    """The story of each run."""
    parts: list[str] = []
    for run in runs:
        if len(runs) > 1:
            parts.append(f"<h2>{_text(run.name)}</h2>")
        parts += [f"<p>{_text(text)}</p>" for text in (*story(run), *_missing(run))]
    return parts


def _missing(run: Run) -> list[str]:
    """Which rounds the report does not cover, as rows before them are no longer there or were not read."""
    return [
        f"The report covers {node.name} from round {node.history.first_round:,} on: where it speaks of the first rounds, of the "
        "duration or of the state before training, it means those rounds. Earlier ones are no longer in metrics.jsonl and "
        "metrics.jsonl.1, or are more than a report reads."
        for node in run.nodes
        if node.history.first_round > 1
    ]


def _beside(runs: Sequence[Run]) -> list[str]:
    told = [f"<p>{_text(text)}</p>" for text in beside(runs)]
    table, *more = figures(runs), sources(runs), differing_settings(runs)
    return [
        f"<h2>{_text(table.title)}</h2>",
        *told,
        table.html(with_title=False),
        *(one.html() for one in more if one.rows),
    ]


def _curves(runs: Sequence[Run]) -> list[str]:
    """Of one run a line for each node, of several the mean of the nodes of each."""
    held_out: dict[str, Curve] = {}
    points: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for node in run.nodes:
            series = Series()
            for row in node.history.rounds:
                series.add(row)
            label = node.label if len(runs) == 1 else run.name
            points.setdefault(label, []).append(series.points())
            if len(runs) == 1:
                rows = node.history.evaluations
                held_out[label] = Curve([row["round"] for row in rows], [row["accuracy_mean"] for row in rows])
        if len(runs) > 1:
            held_out[run.name] = Curve(*zip(*run.held_out, strict=True)) if run.held_out else Curve([], [])
    figures = [svg_curves("Reward on held-out tasks", "mean", held_out)]
    for name in METRICS:
        title, unit = _CURVES[name]
        figures.append(svg_curves(title, unit, {label: _mean_curve(found, name) for label, found in points.items()}))
    return figures


def _mean_curve(points: Sequence[dict[str, Any]], name: str) -> Curve:
    """The smoothed mean over nodes."""
    values: dict[int, list[float]] = {}
    for one in points:
        for start, value in zip(one["start"], one[name]["mean"], strict=True):
            values.setdefault(start, [])
            if value is not None:
                values[start].append(value)
    rounds = sorted(values)
    means = [fmean(found) if (found := values[number]) else None for number in rounds]
    if name == "kl":  # which few rounds have
        rounds = [number for number in rounds if values[number]]
        means = [value for value in means if value is not None]
    return Curve(rounds, smooth(means, max(1, len(rounds) // 20)))


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
        rows.append([run.label, f"{s.rounds:,}", reward, *numbers, *traffic, s.state])
    return Table("Learning", headers, rows)


def _held_out(runs: Sequence[NodeRun]) -> Table:
    rows = [
        [run.label, f"{row['round']:,}", str(row["phase"]), f"{row['accuracy_mean']:.3f}"]
        for run in runs
        for row in run.history.evaluations
    ]
    return Table("Held-out tasks", ("node", "round", "when", "mean reward"), rows)


def _exchange(runs: Sequence[NodeRun]) -> list[Table]:
    shared = [
        [run.label, *(f"{run.history.totals[f'exchange/records_{what}']:,}" for what in ("published", "admitted"))]
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


def _merging(runs: Sequence[NodeRun]) -> Table:
    rows: list[list[str]] = []
    for run in runs:
        row = run.history.last_round
        if "merge/merges_total" in row:
            alone = [
                f"{why} {count}" for why, count in row.get("merge/reasons", {}).items() if why != "merged" and count
            ]
            counts = [f"{row[f'merge/{what}_total']:,}" for what in ("merges", "solo_steps")]
            rows.append([run.label, *counts, ", ".join(alone) or "–"])
    return Table("Merging", ("node", "merges", "steps without partner", "reasons"), rows)


def _last_merges(runs: Sequence[NodeRun]) -> Table:
    names = {run.status["peer_id"]: run.label for run in runs if run.status.get("peer_id")}
    rows: list[list[str]] = []
    for run in runs:
        log = MergeLog()
        for one in run.history.rounds:
            log.add(one, one.get("time_s", 0.0))
        for merge in log.newest_first():
            partner = names.get(str(merge["partner"])) or peer_name(str(merge["partner"]))
            numbers = [_number(merge["share"], 2), _number(merge["drift"], 3), _moment(merge["time_s"])]
            rows.append([run.label, f"{merge['round']:,}", partner, *numbers])
    return Table("Last merges", ("node", "round", "partner", "weight", "drift", "when"), rows)


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
        tables.append(Table(f"Peers of {run.label}", headers, rows))
    return tables


def _name(run: NodeRun) -> str:
    return _text(run.label)


def _text(text: str) -> str:
    return html.escape(shown_text(text, 200_000))


def _number(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "–"


def _moment(time_s: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(time_s)) if isinstance(time_s, int | float) else "–"
