"""What the rounds of an exchange come to: a table for people and figures for machines."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from measuring.exchange_rounds import Case, Round
from measuring.node_processes import Footprint

HEADLINE_NODES = 8
_HEAD = (
    "system", "N", "body KiB", "bodies per node", "p50 s", "worst s", "complete", "KiB on the wire per node",
    "CPU ms per node", "of it Python", "MiB per node", "rounds",
)  # fmt: skip


@dataclass(slots=True)
class Measurement:
    """All rounds of one case, and what a node took when they were over."""

    case: Case
    rounds: list[Round] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Of the complete rounds."""
        return [one.seconds for one in self.rounds if one.seconds is not None]

    @property
    def p50_s(self) -> float | None:
        """Over all rounds, an incomplete one taking for ever: None where half of them were incomplete."""
        times = sorted(self.seconds)
        return statistics.median(times) if 2 * len(times) > len(self.rounds) else None

    @property
    def completeness(self) -> float:
        """Share of nodes that got all their bodies in time."""
        return sum(one.num_complete for one in self.rounds) / max(1, sum(one.num_nodes for one in self.rounds))

    @property
    def wire_kib(self) -> float | None:
        """Per node and round: sent, which on loopback is received. Of complete rounds."""
        sizes = [one.wire_bytes / one.num_nodes / 1024 for one in self._complete]
        return statistics.median(sizes) if sizes else None

    @property
    def cpu_ms(self) -> float | None:
        """Processor time per node and round. Of complete rounds."""
        return self._median_ms([one.python_cpu_s + one.children_cpu_s for one in self._complete])

    @property
    def python_cpu_ms(self) -> float | None:
        """The part of `cpu_ms` that the Python processes took; the rest is that of their daemons."""
        return self._median_ms([one.python_cpu_s for one in self._complete])

    @property
    def _complete(self) -> list[Round]:
        return [one for one in self.rounds if one.seconds is not None]

    def _median_ms(self, seconds_of_all: Sequence[float]) -> float | None:
        return 1000 * statistics.median(seconds_of_all) / self.case.num_nodes if seconds_of_all else None

    def payload_kib(self, name: str) -> float | None:
        """Mean of a node's own counter per round, where the system has one."""
        sizes = [reply[name] / 1024 for one in self.rounds for reply in one.replies if name in reply]
        return statistics.mean(sizes) if sizes else None

    @property
    def row(self) -> dict[str, Any]:
        case = self.case
        return {
            "system": case.system,
            "num_nodes": case.num_nodes,
            "body_kib": case.body_kib,
            "num_bodies": case.num_bodies,
            "p50_s": _rounded(self.p50_s),
            "worst_s": _rounded(max(self.seconds)) if len(self.seconds) == len(self.rounds) else None,
            "completeness": round(self.completeness, 4),
            "wire_kib_per_node": _rounded(self.wire_kib),
            "cpu_ms_per_node": _rounded(self.cpu_ms),
            "python_cpu_ms_per_node": _rounded(self.python_cpu_ms),
            "payload_sent_kib": _rounded(self.payload_kib("bytes_sent")),
            "payload_received_kib": _rounded(self.payload_kib("bytes_received")),
            "node_rss_mib": _rounded(max((one.rss_mib for one in self.footprints), default=None)),
            "node_pss_mib": _rounded(max((one.pss_mib for one in self.footprints), default=None)),
            "rounds": len(self.rounds),
            "failures": sorted({one.failure[:200] for one in self.rounds if one.failure}),
        }


def figures(measurements: Sequence[Measurement], idle_cpu_percent: float | None) -> dict[str, Any]:
    """The last line of the output. What was not measured is None."""
    ours = [one for one in measurements if one.case.system == "swarm"]
    peer = _find(measurements, "genrl, no sleep", 8)
    wanted, everything = _find(ours, "swarm", 8, last=False), _find(ours, "swarm", 8)
    return {
        "ratio_8kb": _ratio(peer, wanted),
        "ratio_8kb_all": _ratio(peer, everything),
        "bound_8kb": _ratio(peer, _find(measurements, "requests alone", 8)),
        "ratio_8kb_stock": _ratio(_find(measurements, "genrl", 8), wanted),
        "complete_64kb": _all_complete(ours, 64),
        "complete_512kb": _all_complete(ours, 512),
        "node_mib": wanted.row["node_rss_mib"] if wanted else None,
        "node_pss_mib": wanted.row["node_pss_mib"] if wanted else None,
        "idle_cpu_percent": _rounded(idle_cpu_percent),
        "profile": profile(wanted) if wanted else None,
        "table": [one.row for one in measurements],
    }


def profile(measurement: Measurement) -> dict[str, Any]:
    """Where the time of a round goes: medians over nodes and rounds, in milliseconds from the start signal."""
    replies = [reply for one in measurement.rounds if one.seconds is not None for reply in one.replies]
    steps = {
        f"{name}_ms": _rounded(1000 * statistics.median(times))
        for name in ("first_s", "seconds")
        if (times := [reply[name] for reply in replies if reply.get(name) is not None])
    }
    calls: dict[str, Any] = {}
    for name in sorted({name for reply in replies for name in reply["calls"]}):
        rows = [reply["calls"][name] for reply in replies if name in reply["calls"]]
        count, total_s = sum(row[0] for row in rows), sum(row[1] for row in rows)
        calls[name] = {
            "per_node": _rounded(count / len(replies)),
            "mean_ms": _rounded(1000 * total_s / count),
            "max_ms": _rounded(1000 * max(row[2] for row in rows)),
        }
    return {**steps, "calls": calls}


def print_table(measurements: Iterable[Measurement]) -> None:
    """Markdown."""
    print("| " + " | ".join(_HEAD) + " |\n" + "|---" * len(_HEAD) + "|")
    for row in (one.row for one in measurements):
        cells = (
            row["system"], row["num_nodes"], row["body_kib"], row["num_bodies"], _text(row["p50_s"]),
            _text(row["worst_s"]), f"{100 * row['completeness']:.0f} %", _text(row["wire_kib_per_node"]),
            _text(row["cpu_ms_per_node"]), _text(row["python_cpu_ms_per_node"]), _text(row["node_rss_mib"]), row["rounds"],
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")


def _find(measurements: Iterable[Measurement], system: str, body_kib: int, *, last: bool = True) -> Measurement | None:
    """With the most bodies per node (`last`), or the fewest."""
    found = [
        one
        for one in measurements
        if (one.case.system, one.case.num_nodes, one.case.body_kib) == (system, HEADLINE_NODES, body_kib)
    ]
    return sorted(found, key=lambda one: one.case.num_bodies)[-1 if last else 0] if found else None


def _ratio(slow: Measurement | None, fast: Measurement | None) -> float | None:
    if slow is None or fast is None or slow.p50_s is None or fast.p50_s is None:
        return None
    return round(slow.p50_s / fast.p50_s, 2)


def _all_complete(measurements: Iterable[Measurement], body_kib: int) -> int | None:
    found = [one.completeness for one in measurements if one.case.body_kib == body_kib]
    return int(min(found) == 1) if found else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}") if abs(value) < 100 else round(value)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
