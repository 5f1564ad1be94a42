"""What a run has learned: the last lines of one node, and of a testbed the table per node and summary.json."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev

from rich.table import Table
from rich.text import Text

from swarm.machine.node_folder import NodeFolder
from swarm.machine.safe_files import SHARED, replace_file
from swarm.report.live_table import NodeView, compared_rounds
from swarm.report.node_history import MetricsRow, NodeHistory

_MAX_NODE_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node's run over all its processes."""

    name: str
    label: str
    state: str
    rounds: int
    reward_start: float | None
    """Mean reward of sampled answers over the first ten rounds, or over the first half of fewer than twenty."""
    reward_end: float | None
    """The same over as many rounds at the end."""
    cumulative_reward: float
    """Sum over rounds of the round's mean reward."""
    held_out_start: float | None
    """Mean reward on held-out tasks before the first round."""
    held_out_end: float | None
    """The same at the latest evaluation."""
    held_out_end_round: int | None
    held_out_by_source: Mapping[str, tuple[float | None, float | None]]
    """{task source: (start, end)}"""
    own_groups: int
    swarm_groups: int
    rejected: Mapping[str, int]
    """{reason: records of others}"""
    bytes_sent: int
    bytes_received: int
    tokens_per_s: float
    """While sampling."""
    merges: int | None
    """Outer steps with a partner; None where merging is off."""
    solo_steps: int | None
    """Outer steps alone."""
    final_places: int | None
    """Nodes in the final merge, this one included; None where there was none."""


def summarize(view: NodeView) -> NodeSummary:
    history = view.history
    rewards, row = history.rewards, history.last_round
    window = compared_rounds(len(rewards))
    start, end = history.accuracy("start"), history.accuracy("end", "interval")
    before, after = (start or {}).get("accuracy", {}), (end or {}).get("accuracy", {})
    return NodeSummary(
        name=view.name,
        label=view.label,
        state=view.state,
        rounds=history.round,
        reward_start=fmean(rewards[:window]) if rewards else None,
        reward_end=fmean(rewards[-window:]) if rewards else None,
        cumulative_reward=sum(rewards),
        held_out_start=start["accuracy_mean"] if start else None,
        held_out_end=end["accuracy_mean"] if end else None,
        held_out_end_round=end["round"] if end else None,
        held_out_by_source={s: (before.get(s), after.get(s)) for s in sorted(before.keys() | after.keys())},
        own_groups=row.get("train/own_groups_total", 0),
        swarm_groups=row.get("train/swarm_groups_total", 0),
        rejected=dict(sorted(history.rejected.items())),
        bytes_sent=history.totals["exchange/bytes_sent"],
        bytes_received=history.totals["exchange/bytes_received"],
        tokens_per_s=history.tokens_per_s,
        merges=row.get("merge/merges_total"),
        solo_steps=row.get("merge/solo_steps_total"),
        final_places=(history.final_merge or {}).get("final/places"),
    )


def last_words(folder: Path, max_rounds: int | None = None) -> list[str]:
    """What a person wants to know of a node that has ended: what it learned, from what, and how to go on. Empty without a round.

    `max_rounds`: as node.max_rounds. Raises OSError where its metrics.jsonl cannot be read.
    """
    history = NodeHistory(NodeFolder(folder).metrics)
    history.refresh()
    if not history.rounds:
        return []
    rewards, place = history.rewards, shlex.quote(str(folder))
    window = compared_rounds(len(rewards))
    start, end = history.accuracy("start"), history.accuracy("end", "interval")
    row, best = history.last_round, _better_than(end, history.evaluations)
    learned = [
        f"  sampled answers   reward {_spread(rewards[:window])} → {_spread(rewards[-window:])}, in the first and the last "
        f"{window} of {len(rewards)} rounds",
        f"  held-out tasks    reward {_with_error(start)} → {_with_error(end)}" if start and end else "",
        f"  did best          {_with_error(best)} after round {best['round']}: --best takes that one" if best else "",
        f"  trained on        {row.get('train/own_groups_total', 0)} own groups and "
        f"{row.get('train/swarm_groups_total', 0)} of others",
    ]
    return [
        f"what {place} has learned by round {history.round}:",
        *(line for line in learned if line),
        f"  go on             {NodeFolder(folder).run_command(history.round, max_rounds)}",
        f"  measure           swarm eval --dir {place} --compare",
        f"  take it out       swarm export OUT --dir {place}",
    ]


def _better_than(end: MetricsRow | None, evaluations: Sequence[MetricsRow]) -> MetricsRow | None:
    """The best earlier evaluation of a checkpoint on the same tasks, where it found more than the last one."""
    if end is None or not end["measured_on"]:
        return None
    found = [row for row in evaluations if row["round"] and row["measured_on"] == end["measured_on"]]
    best = max(found, key=lambda row: row["accuracy_mean"], default=end)
    return best if best["accuracy_mean"] > end["accuracy_mean"] else None


def _spread(rewards: Sequence[float]) -> str:
    return f"{fmean(rewards):.2f} ± {pstdev(rewards):.2f}"


def _with_error(evaluation: MetricsRow) -> str:
    """With the largest standard error that the mean of so many rewards within [0, 1] can have."""
    mean, num_tasks = evaluation["accuracy_mean"], evaluation["num_tasks"]
    return f"{mean:.2f} ± {math.sqrt(mean * (1 - mean) / num_tasks):.2f}" if num_tasks > 0 else f"{mean:.2f}"


def write_summary(summaries: Sequence[NodeSummary], path: Path) -> None:
    replace_file(path, json.dumps([asdict(summary) for summary in summaries], indent=2) + "\n", SHARED)


def learning_table(summaries: Sequence[NodeSummary]) -> Table:
    """What each node learned, and from whom."""
    table = Table(title="Learning", title_justify="left")
    table.add_column("node", no_wrap=True)
    for header in ("rounds", "sampled reward", "held-out tasks", "own + swarm groups"):
        table.add_column(header, justify="right")
    for node in summaries:
        table.add_row(
            Text(f"{node.name}, {node.label}"), str(node.rounds), _change(node.reward_start, node.reward_end),
            _change(node.held_out_start, node.held_out_end), f"{node.own_groups} + {node.swarm_groups}",
        )  # fmt: skip
    return table


def exchange_table(summaries: Sequence[NodeSummary]) -> Table:
    """What each node sampled, sent, received and refused, and how often it merged."""
    table = Table(title="Exchange", title_justify="left")
    table.add_column("node", no_wrap=True)
    merging = any(node.merges is not None for node in summaries)
    headers = ["merges + alone", "final merge of"] if merging else []
    for header in ("tokens/s", "MB sent", "MB received", *headers):
        table.add_column(header, justify="right")
    table.add_column("records rejected")
    for node in summaries:
        rejected = ", ".join(f"{count} {reason}" for reason, count in node.rejected.items() if count)
        table.add_row(
            node.name, f"{node.tokens_per_s:.0f}", _mega(node.bytes_sent), _mega(node.bytes_received),
            *(_merges(node) if merging else []), Text(rejected or "none"),
        )  # fmt: skip
    return table


def _merges(node: NodeSummary) -> tuple[str, str]:
    final = "" if node.final_places is None else str(node.final_places)
    return "" if node.merges is None else f"{node.merges} + {node.solo_steps}", final


def source_table(summaries: Sequence[NodeSummary]) -> Table:
    """Held-out reward per task source, start → end: of each node, or of all where they would not fit the screen."""
    sources = sorted({source for node in summaries for source in node.held_out_by_source})
    table = Table(title="Held-out tasks by source", title_justify="left")
    table.add_column("task source", no_wrap=True)
    each = summaries if len(summaries) <= _MAX_NODE_COLUMNS else ()
    for header in [node.name for node in each] or ["all nodes"]:
        table.add_column(header, justify="right", no_wrap=True)
    for source in sources:
        pairs = [node.held_out_by_source.get(source, (None, None)) for node in summaries]
        cells = [_change(*pair) for pair in pairs] if each else [_change(*_mean_pair(pairs))]
        table.add_row(Text(source), *cells)
    return table


def conclusion(summaries: Sequence[NodeSummary]) -> str:
    """One sentence over all nodes that have both values."""
    start, end = _mean_pair([(node.held_out_start, node.held_out_end) for node in summaries])
    if start is None or end is None:
        return "no node has been evaluated before and after"
    return f"mean reward on held-out tasks, all nodes: {start:.2f} before, {end:.2f} after"


def _mean_pair(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    """Means over the pairs that have both values."""
    known = [(start, end) for start, end in pairs if start is not None and end is not None]
    if not known:
        return None, None
    return fmean(start for start, _ in known), fmean(end for _, end in known)


def _change(start: float | None, end: float | None) -> str:
    return " → ".join("?" if value is None else f"{value:.2f}" for value in (start, end))


def _mega(count: int) -> str:
    return f"{count / 1e6:.1f}"
