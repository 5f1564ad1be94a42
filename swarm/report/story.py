"""Tells a run in sentences with its figures, and several runs beside each other.

[NodeRun] of one folder ─▶ Run ─┬─▶ `story`: when, what was learned, from whom, what was rejected, how it ended
                                └─▶ `beside`: what the runs have in common figures, and which settings differ
"""

import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from swarm.dashboard.shown import WORDS
from swarm.observability.plain_text import counted, for_how_long
from swarm.records.identity import peer_name
from swarm.report.live_table import compared_rounds
from swarm.report.node_history import NodeHistory
from swarm.report.summary import NodeSummary
from swarm.report.tables import Table

_UNCHANGED = 0.02
"""A smaller difference of mean rewards is told as none."""
_FELL = 0.05
_MAX_GIVERS = 3
_LONGEST_ROUND_S, _LONGEST_ROUNDS = 600.0, 20
"""A longer wait for a round, in seconds and in ordinary rounds, is told."""
_MAX_VALUE_CHARS = 120
_ENDS = {
    "max_rounds": "as node.max_rounds says",
    "final_at": "as merging.final_at says",
    "interrupted": "interrupted by a person or a signal",
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
    swarm: str = ""
    """The name of its swarm, and its id where that is set; empty where the configuration cannot be read."""

    @property
    def label(self) -> str:
        own = self.status.get("peer_name")
        return f"{self.name} ({own})" if own else self.name


@dataclass(frozen=True, slots=True)
class Run:
    """A node, or nodes of one swarm, as those of a testbed."""

    name: str
    nodes: Sequence[NodeRun]

    @property
    def times(self) -> tuple[float, float] | None:
        """When its first and its last round ended, in seconds since the epoch."""
        times = [row["time_s"] for node in self.nodes for row in node.history.rounds if "time_s" in row]
        return (min(times), max(times)) if times else None

    @property
    def rounds(self) -> int:
        return sum(node.summary.rounds for node in self.nodes)

    @property
    def held_out(self) -> list[tuple[int, float]]:
        """(round, mean over the nodes of their last evaluation until then), from where all that were evaluated have one."""
        rows = [
            (row["round"], place, row["accuracy_mean"])
            for place, node in enumerate(self.nodes)
            for row in node.history.evaluations
        ]
        latest: dict[int, float] = {}
        points: dict[int, float] = {}
        num_nodes = len({place for _, place, _ in rows})
        for number, place, value in sorted(rows, key=lambda row: row[:2]):
            latest[place] = value
            if len(latest) == num_nodes:
                points[number] = fmean(latest.values())
        return list(points.items())

    def mean(self, name: str) -> float | None:
        """Of a field of the nodes' summaries, over those that have it."""
        found = [value for node in self.nodes if (value := getattr(node.summary, name)) is not None]
        return fmean(found) if found else None

    def total(self, name: str) -> int:
        """As `mean`, the sum."""
        return sum(getattr(node.summary, name) or 0 for node in self.nodes)

    @property
    def rejected(self) -> Counter[str]:
        return sum((node.history.rejected for node in self.nodes), Counter[str]())

    @property
    def admitted(self) -> int:
        return sum(node.history.totals["exchange/records_admitted"] for node in self.nodes)


def story(run: Run) -> list[str]:
    """Paragraphs. A run without a round has one."""
    who = f"{len(run.nodes)} nodes" if len(run.nodes) > 1 else f"Node {run.nodes[0].label}"
    if run.times is None:
        return [f"{who}, {counted(run.rounds, 'round')} in all."]
    first, last = run.times
    begun = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first))
    when = f"{who} trained for {for_how_long(last - first)} from {begun} on, {run.rounds:,} rounds in all."
    told = [
        " ".join([when, *_ends(run)]),
        " ".join(_learned(run)),
        " ".join([*_taught(run), *_exchanged(run)]),
        " ".join([*_merged(run), *_troubles(run)]),
    ]
    return [text for text in told if text]


def beside(runs: Sequence[Run]) -> list[str]:
    """Sentences that compare the last run with the first one, as far as both were evaluated."""
    first, last = runs[0], runs[-1]
    if not first.held_out or not last.held_out:
        return ["The runs cannot be compared on held-out tasks, as not all of them were evaluated (evaluation)."]
    (_, a), (_, b) = first.held_out[-1], last.held_out[-1]
    if abs(b - a) < _UNCHANGED:
        told = [f"On held-out tasks {first.name} and {last.name} end alike, with {a:.2f} and {b:.2f}."]
    else:
        better = "higher" if b > a else "lower"
        told = [
            f"On held-out tasks {last.name} ends with {b:.2f}, {abs(b - a):.2f} {better} than {first.name} with {a:.2f}."
        ]
    slow, fast, goal = (first, last, a) if b >= a else (last, first, b)
    reached = next((number for number, value in fast.held_out if value >= goal), None)
    if reached is not None and abs(b - a) >= _UNCHANGED:
        told.append(f"What {slow.name} ends with, {fast.name} had by the evaluation after round {reached:,}.")
    sizes = {len(run.nodes) for run in runs}
    if len(sizes) > 1:
        told.append(
            "The runs have different numbers of nodes: rounds and groups are sums, rewards are means over nodes."
        )
    return told


def figures(runs: Sequence[Run]) -> Table:
    """A row for each figure, a column for each run, and the difference where there are two."""
    rows: list[list[str]] = []

    def add(what: str, values: Sequence[float | None], digits: int = 0) -> None:
        texts = ["–" if value is None else f"{value:,.{digits}f}" for value in values]
        if len(runs) == 2:
            a, b = values
            texts.append("–" if a is None or b is None else f"{b - a:+,.{digits}f}")
        rows.append([what, *texts])

    add("nodes", [len(run.nodes) for run in runs])
    add("rounds", [run.rounds for run in runs])
    add("minutes", [(run.times[1] - run.times[0]) / 60 if run.times else None for run in runs], 1)
    for what, name in (("held-out reward", "held_out"), ("sampled reward", "reward")):
        add(f"{what}, first", [run.mean(f"{name}_start") for run in runs], 3)
        add(f"{what}, last", [run.mean(f"{name}_end") for run in runs], 3)
    add("own groups trained on", [run.total("own_groups") for run in runs])
    add("peers' groups trained on", [run.total("swarm_groups") for run in runs])
    add("tokens/s of a node", [run.mean("tokens_per_s") for run in runs])
    add("MB sent", [run.total("bytes_sent") / 1e6 for run in runs], 2)
    add("MB received", [run.total("bytes_received") / 1e6 for run in runs], 2)
    add("records admitted", [run.admitted for run in runs])
    add("records rejected", [run.rejected.total() for run in runs])
    add("merges", [run.mean("merges") and float(run.total("merges")) for run in runs])
    headers = ["", *(run.name for run in runs), *(["difference"] if len(runs) == 2 else [])]
    return Table("Beside each other", headers, rows)


def sources(runs: Sequence[Run]) -> Table:
    """Held-out reward by task source, start → end, of each run."""
    names = sorted({name for run in runs for node in run.nodes for name in node.summary.held_out_by_source})
    rows = [[name, *(_change(*_source(run, name)) for run in runs)] for name in names]
    return Table("Held-out reward by task", ["task", *(run.name for run in runs)], rows)


def differing_settings(runs: Sequence[Run]) -> Table:
    """Settings of the runs' first nodes that are not the same in all runs, as far as others may see them."""
    settings = [dict(_leaves(tomllib.loads(run.nodes[0].config))) for run in runs]
    keys = dict.fromkeys(key for one in settings for key in one)
    rows = [
        [key, *(_cut(one.get(key)) for one in settings)]
        for key in keys
        if any(one.get(key) != settings[0].get(key) for one in settings)
    ]
    return Table("Settings that differ", ["setting", *(run.name for run in runs)], rows)


def _ends(run: Run) -> Iterator[str]:
    ends = Counter(str(node.history.end["reason"]) if node.history.end else "" for node in run.nodes)
    for reason, count in ends.most_common():
        is_all = count == len(run.nodes)
        who = "It" if len(run.nodes) == 1 else "All" if is_all else counted(count, "node")
        if reason:
            yield f"{who} ended {_ENDS.get(reason, f'with {reason[:40]!r}')}."
        else:
            yield "None of them ended in order so far." if who == "All" else f"{who} did not end in order so far."


def _learned(run: Run) -> Iterator[str]:
    held_out = run.held_out
    if len(held_out) > 1:
        (_, start), (_, end) = held_out[0], held_out[-1]
        if abs(end - start) < _UNCHANGED:
            yield f"The mean reward on held-out tasks, which nobody trains on, stayed at {start:.2f} ({end:.2f} at the end)."
        else:
            half = next(number for number, value in held_out if (value - start) / (end - start) >= 0.5)
            yield (
                f"The mean reward on held-out tasks, which nobody trains on, went from {start:.2f} to {end:.2f}; at least half "
                f"of that was there at the evaluation after round {half:,}."
            )
        best_round, best = max(held_out, key=lambda point: point[1])
        if best - end > _FELL:
            yield f"That was highest after round {best_round:,} with {best:.2f}, and fell since."
        yield from _by_source(run)
    else:
        yield "Held-out tasks were not measured before and after, so nothing is known of tasks that nobody trained on."
    start, end = run.mean("reward_start"), run.mean("reward_end")
    if start is not None and end is not None:
        windows = sorted({compared_rounds(len(node.history.rounds)) for node in run.nodes if node.history.rounds})
        span = f"{windows[0]}" if len(windows) == 1 else f"{windows[0]} to {windows[-1]}"
        first, last = ("round", "last") if span == "1" else (f"{span} rounds", f"last {span}")
        yield f"Sampled answers earned {start:.2f} in the first {first} and {end:.2f} in the {last}."
    if len(run.nodes) > 1 and (ranked := [node for node in run.nodes if node.summary.held_out_end is not None]):
        ranked.sort(key=lambda node: node.summary.held_out_end or 0.0)
        worst, best_node = ranked[0], ranked[-1]
        yield (
            f"The best node is {best_node.name} with {best_node.summary.held_out_end:.2f}, the last {worst.name} with "
            f"{worst.summary.held_out_end:.2f}."
        )


def _by_source(run: Run) -> Iterator[str]:
    gains: list[tuple[float, str, float, float]] = []
    for name in {name for node in run.nodes for name in node.summary.held_out_by_source}:
        start, end = _source(run, name)
        if start is not None and end is not None:
            gains.append((end - start, name, start, end))
    if len(gains) > 1:
        (_, most, a, b), (_, least, c, d) = max(gains), min(gains)
        yield f"{_who(run)} gained most on {most} ({a:.2f} → {b:.2f}) and least on {least} ({c:.2f} → {d:.2f})."


def _taught(run: Run) -> Iterator[str]:
    own, others = run.total("own_groups"), run.total("swarm_groups")
    if not others:
        yield f"{_who(run)} trained on {own:,} own groups, and on none of others."
        return
    yield f"{_who(run)} trained on {own:,} own groups and {others:,} of others, {others / (own + others):.0%} of all."
    if len(run.nodes) == 1:
        peers = [peer for peer in run.nodes[0].status.get("peers") or [] if isinstance(peer, dict)]
        given = {
            str(peer.get("name") or peer_name(str(peer.get("peer_id")))): count
            for peer in peers
            if isinstance(count := peer.get("groups_admitted"), int) and count > 0
        }
        most = sorted(given.items(), key=lambda item: -item[1])[:_MAX_GIVERS]
        if most:
            yield f"Most came from {', '.join(f'{name} ({count:,})' for name, count in most)}."


def _exchanged(run: Run) -> Iterator[str]:
    rejected = run.rejected
    if not run.admitted and not rejected.total():
        return
    admitted = f"{_who(run)} admitted {counted(run.admitted, 'record')} of others"
    if not rejected.total():
        yield f"{admitted} and turned none away."
        return
    words = {reason.value: cause for reason, cause in WORDS.items()}
    reason, count = rejected.most_common(1)[0]
    share = "all" if count == rejected.total() else f"{count:,} of them"
    cause = words.get(reason, "a reason of another version")
    yield f"{admitted} and turned {rejected.total():,} away, {share} as {reason[:40]}: {cause}."


def _who(run: Run) -> str:
    return "They" if len(run.nodes) > 1 else "It"


def _merged(run: Run) -> Iterator[str]:
    if any(node.summary.merges is not None for node in run.nodes):
        alone = run.total("solo_steps")
        yield f"{_who(run)} merged {run.total('merges'):,} times with a partner, and took {counted(alone, 'outer step')} alone."


def _pauses(run: Run) -> Iterator[str]:
    """The longest time in which no round of a node ended, where it is no ordinary one."""
    for node in run.nodes:
        times = [one for row in node.history.rounds if isinstance(one := row.get("time_s"), int | float)]
        waits = [(after - before, after) for before, after in pairwise(times)]
        if not waits:
            continue
        wait_s, until_s = max(waits)
        if wait_s > max(_LONGEST_ROUND_S, _LONGEST_ROUNDS * median(one for one, _ in waits)):
            until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(until_s))
            yield f"No round of {node.name} ended for {for_how_long(wait_s)}, until {until}."


def _troubles(run: Run) -> Iterator[str]:
    yield from _pauses(run)
    undone = sum(node.history.num_undone for node in run.nodes)
    if undone:
        yield f"{counted(undone, 'round')} had to be done again after a restart from a checkpoint."
    warnings = [
        warning
        for node in run.nodes
        for warning in node.history.last_round.get("health/warnings") or []
        if isinstance(warning, str)
    ]
    if warnings:
        yield f"The last round warns: {'; '.join(dict.fromkeys(warnings))}."


def _source(run: Run, name: str) -> tuple[float | None, float | None]:
    pairs = [node.summary.held_out_by_source.get(name, (None, None)) for node in run.nodes]
    known = [(start, end) for start, end in pairs if start is not None and end is not None]
    return (fmean(start for start, _ in known), fmean(end for _, end in known)) if known else (None, None)


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _change(start: float | None, end: float | None) -> str:
    return " → ".join("?" if value is None else f"{value:.2f}" for value in (start, end))


def _cut(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"
