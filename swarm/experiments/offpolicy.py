"""Measures how far data may be off-policy, and which correction tolerates it best.

Data is delayed by 0 to 128 policy versions, or comes from another lineage of the same tokenizer, whose log-probs cannot weigh
anything. The policy trains on nothing else, which is harder than what a node does: it has its own fresh groups besides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarm.config import TrainingSection
from swarm.experiments.cells import Cell, Result
from swarm.extensions.points import CORRECTIONS as REGISTERED
from swarm.report.tables import Curves, Spread, Table

FOREIGN = "foreign"
DATA = ("0", "8", "32", "128", FOREIGN)
"""Versions of delay, or another lineage."""
CORRECTIONS: tuple[str, ...] = REGISTERED.names
DEFAULT: str = TrainingSection().correction


@dataclass(frozen=True, slots=True)
class OffPolicyPlan:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    num_steps: int = 192
    corrections: tuple[str, ...] = CORRECTIONS
    data: tuple[str, ...] = DATA
    groups_per_round: int = 4
    group_size: int = 8
    held_out_tasks: int = 32
    """Per source."""

    def cells(self) -> list[Cell]:
        """Seed after seed, so that an experiment cut short has whole seeds."""
        return [self._cell(c, d, seed) for seed in self.seeds for d in self.data for c in self.corrections]

    def _cell(self, correction: str, data: str, seed: int) -> Cell:
        settings = {
            "correction": correction,
            "data": data,
            "seed": seed,
            "num_steps": self.num_steps,
            "groups_per_round": self.groups_per_round,
            "group_size": self.group_size,
            "held_out_tasks": self.held_out_tasks,
        }
        return Cell("offpolicy", f"{correction} at {data}, seed {seed}", settings)


def has_collapsed(result: Result) -> bool:
    """Whether it ended below where it started, or below half of the best it had been."""
    best = max([result["start"], *result["curve"]])
    return result["end"] < result["start"] or result["end"] < best / 2


def reward_table(results: Sequence[Result]) -> Table:
    """Held-out reward at the end, and how many runs have collapsed, by correction and data."""
    data = _data_of(results)
    rows = []
    for correction in _corrections_of(results):
        cells = []
        for kind in data:
            runs = _runs(results, correction, kind)
            collapsed = sum(map(has_collapsed, runs))
            cells.append(
                Spread.of(run["end"] for run in runs).text(3) + (f" ({collapsed} collapsed)" if collapsed else "")
            )
        rows.append([correction, *cells, f"{mean_reward(results, correction):.3f}"])
    headers = ["correction", *(kind if kind == FOREIGN else f"delay {kind}" for kind in data), "mean"]
    return Table("Held-out reward at the end", headers, rows)


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """What a program reads; the winner has the largest mean over all data but the fresh one."""
    corrections = _corrections_of(results)
    table = {
        correction: {
            kind: {
                **Spread.of(run["end"] for run in _runs(results, correction, kind)).rounded(),
                "collapse_rate": _share(has_collapsed(run) for run in _runs(results, correction, kind)),
            }
            for kind in _data_of(results)
        }
        for correction in corrections
    }
    winner = max(corrections, key=lambda name: mean_reward(results, name)) if corrections else None
    start = Spread.of(result["start"] for result in results)
    return {"winner": winner, "default": DEFAULT, "start": start.rounded(), "corrections": table}


def mean_reward(results: Sequence[Result], correction: str) -> float:
    """Over the kinds of data that are off-policy, each alike, and seeds."""
    kinds = [kind for kind in _data_of(results) if kind != "0"] or _data_of(results)
    return Spread.of(Spread.of(run["end"] for run in _runs(results, correction, kind)).mean for kind in kinds).mean


def curves(results: Sequence[Result]) -> list[Curves]:
    """Held-out reward on the way, one picture per kind of data."""
    drawn = []
    for kind in _data_of(results):
        lines = {}
        for correction in _corrections_of(results):
            runs = _runs(results, correction, kind)
            rewards = [[run["start"], *run["curve"]] for run in runs]
            mean = [sum(column) / len(column) for column in zip(*rewards, strict=True)]
            lines[correction] = ([position * runs[0]["every"] for position in range(len(mean))], mean)
        title = "another lineage" if kind == FOREIGN else f"{kind} versions old"
        drawn.append(Curves(title, "step", "held-out reward", lines))
    return drawn


def _runs(results: Sequence[Result], correction: str, data: str) -> list[Result]:
    return [result for result in results if (result["correction"], result["data"]) == (correction, data)]


def _corrections_of(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result["correction"] for result in results))


def _data_of(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result["data"] for result in results))


def _share(flags: Any) -> float:
    values = list(flags)
    return round(sum(values) / len(values), 3) if values else 0.0
