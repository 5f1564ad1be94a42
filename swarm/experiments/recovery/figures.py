"""The results of the recovery experiment: figures for programs, and a page, tables and curves for people."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from swarm.experiments.cells import Result
from swarm.experiments.recovery import clocks
from swarm.experiments.recovery.plan import (
    ADAPTER,
    ADAPTER_RATE,
    CHECKFREE,
    CHECKFREE_PLUS,
    COPY,
    DERIVED,
    FULL,
    NONE,
    NUM_STAGES,
    OWN_COPY,
    POOR,
    RATES,
    REDUNDANT,
    STEP_S,
    SWAPPED,
    TUNED,
)
from swarm.machine.safe_files import SHARED, replace_file
from swarm.report.tables import Curves, Spread, Table, plot, write_report

MBIT_PER_S = (20.0, 100.0, 1000.0)
"""Upload speed of every machine."""
MBIT_IN_BETWEEN = 100.0
_POOR_INTERVAL_STEPS = 100
_TARGET_SHARE = 2 / 3
"""The target is the loss of the run without failure at this fraction of its steps, at the same seed."""
_SOURCES = {COPY: 1.0, CHECKFREE: 2.0, CHECKFREE_PLUS: 2.0, OWN_COPY: 0.5}
"""Neighbours' weights that a replacement reads; a stored copy is in half precision."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Finished runs, by their settings."""

    results: Sequence[Result]

    @classmethod
    def of_cells(cls, cells: Sequence[Result]) -> "Runs":
        """Collect all runs of all cells."""
        return cls([run for cell in cells for run in cell["runs"]])

    def of(self, training: str, arm: str, rate: float) -> list[Result]:
        """Return the runs of one kind in the order of seeds."""
        found = [r for r in self.results if (r["training"], r["arm"], r["rate"]) == (training, arm, rate)]
        return sorted(found, key=lambda result: result["seed"])

    def without_failure(self, training: str, seed: int) -> Result | None:
        """Return the run of the same seed that loses nothing."""
        return next((run for run in self.of(training, NONE, 0.0) if run["seed"] == seed), None)

    @property
    def rates(self) -> tuple[float, ...]:
        """All rates at which a whole model was trained."""
        found = {run["rate"] for run in self.results if run["training"] == "full" and run["rate"]}
        return tuple(sorted(found)) or RATES


def end_loss(run: Result) -> float:
    """Held-out loss after the last step."""
    return run["curve"][-1]


def excess(runs: Runs, run: Result) -> float | None:
    """Mean held-out loss over the run, minus that without failure at the same seed."""
    base = runs.without_failure(run["training"], run["seed"])
    return fmean(run["curve"]) - fmean(base["curve"]) if base else None


def step_reaching(run: Result, loss: float) -> int | None:
    """First step after which the held-out loss is at most `loss`, interpolated linearly between measurements."""
    every, curve = run["check_interval"], run["curve"]
    for place, (before, after) in enumerate(itertools.pairwise(curve)):
        if after <= loss:
            share = 1.0 if before == after else (before - loss) / (before - after)
            return max(1, round(every * (place + share)))
    return None


def target_loss(run: Result) -> float:
    """Target loss from a run without failures."""
    return run["curve"][round((len(run["curve"]) - 1) * _TARGET_SHARE)]


def hours_to_target(runs: Runs, arm: str, rate: float, mbit_per_s: float) -> list[float | None]:
    """Modelled hours to the target, by seed; None where it was not reached."""
    found = list[float | None]()
    for base in runs.of("full", NONE, 0.0):
        seed, num_steps = base["seed"], base["num_steps"]
        run = base if arm in (NONE, *DERIVED) else _with_seed(runs.of("full", arm, rate), seed)
        step = step_reaching(run, target_loss(base)) if run else None
        found.append(hours_of(arm, seed, rate, num_steps=num_steps, mbit_per_s=mbit_per_s)[step - 1] if step else None)
    return found


def hours_of(arm: str, seed: int, rate: float, num_steps: int, mbit_per_s: float) -> list[float]:
    """Modelled hours at the end of each step."""
    if arm in (NONE, SWAPPED):
        return clocks.replacing(num_steps, (), 0.0, mbit_per_s=mbit_per_s)
    if arm == REDUNDANT:
        return clocks.redundant(num_steps)
    if arm in (TUNED, POOR):
        interval = clocks.young_daly_steps(rate, mbit_per_s) if arm == TUNED else _POOR_INTERVAL_STEPS
        return clocks.checkpointing(num_steps, seed, rate, interval_steps=interval, mbit_per_s=mbit_per_s)
    lost = list(clocks.lost_stages(seed, rate, num_steps))
    return clocks.replacing(num_steps, lost, _SOURCES[arm] * clocks.WEIGHT_BYTES, mbit_per_s=mbit_per_s)


def tables(runs: Runs) -> list[Table]:
    """Return all tables that have rows."""
    found = [loss_table(runs), hours_table(runs), upload_table(runs), jump_table(runs), adapter_table(runs)]
    return [table for table in found if table.rows]


def loss_table(runs: Runs) -> Table:
    """Loss against steps: what each way of recovery costs in learning."""
    rows = list[list[str]]()
    for arm, how in FULL.items():
        at_rates = [runs.of("full", arm, rate if how.fails else 0.0) for rate in runs.rates]
        if not any(at_rates):
            continue
        ends = [_text(map(end_loss, some)) for some in at_rates]
        more = [_text(value for run in some if (value := excess(runs, run)) is not None) for some in at_rates]
        rows.append([arm, *ends, *more])
    at = [f"{rate:.0%}" for rate in runs.rates]
    headers = ["whole model trains", *(f"end, {one}" for one in at), *(f"excess, {one}" for one in at)]
    return Table("Held-out loss after the last step, and mean excess over no failure", headers, rows)


def hours_table(runs: Runs) -> Table:
    """Modelled hours to the target, by failure rate."""
    rows = [
        [arm, *(_hours(hours_to_target(runs, arm, rate, mbit_per_s=MBIT_IN_BETWEEN)) for rate in runs.rates)]
        for arm in _timed(runs)
    ]
    title = f"Modelled hours to the loss that no failure has at {_TARGET_SHARE:.0%} of its steps, {MBIT_IN_BETWEEN:g} Mbit/s up"
    return Table(title, ["", *(f"{rate:.0%} per hour" for rate in runs.rates)], rows)


def upload_table(runs: Runs) -> Table:
    """Modelled hours to the target, by upload speed."""
    rate = _middle(runs.rates)
    rows = [
        [arm, *(_hours(hours_to_target(runs, arm, rate, mbit_per_s=mbit)) for mbit in MBIT_PER_S)]
        for arm in _timed(runs)
    ]
    return Table(
        f"The same at {rate:.0%} per hour, by upload", ["", *(f"{mbit:g} Mbit/s" for mbit in MBIT_PER_S)], rows
    )


def jump_table(runs: Runs) -> Table:
    """Change of the loss when a stage is rebuilt, over all rates and seeds."""
    rows = list[list[str]]()
    for arm, how in FULL.items():
        jumps = [
            jump for run in runs.results for jump in run["jumps"] if (run["training"], run["arm"]) == ("full", arm)
        ]
        if how.fails and jumps:
            first, last = (_jump(jumps, lambda stage, edge=edge: stage == edge) for edge in (0, NUM_STAGES - 1))
            rows.append([arm, first, _jump(jumps, lambda stage: 0 < stage < NUM_STAGES - 1), last])
    headers = ["mean jump of the loss", "first stage", "middle", "last"]
    return Table("Held-out loss right after a stage is rebuilt, less that before (number of losses)", headers, rows)


def adapter_table(runs: Runs) -> Table:
    """Results for a frozen base, of which only the adapter can be lost."""
    rows = list[list[str]]()
    for arm, how in ADAPTER.items():
        found = runs.of("adapter", arm, ADAPTER_RATE if how.fails else 0.0)
        if found:
            more = _text(value for run in found if (value := excess(runs, run)) is not None)
            rows.append([arm, _text(map(end_loss, found)), more])
    return Table(f"An adapter trains, {ADAPTER_RATE:.0%} per hour", ["", "end", "excess"], rows)


def figures(runs: Runs) -> dict[str, Any]:
    """Return the results as data."""
    full = {
        arm: {
            f"{rate:.0%}": _arm_figures(runs, some)
            for rate in (runs.rates if how.fails else (0.0,))
            if (some := runs.of("full", arm, rate))
        }
        for arm, how in FULL.items()
    }
    hours = {
        arm: {
            f"{rate:.0%}": {
                f"{mbit:g}": _rounded(hours_to_target(runs, arm, rate, mbit_per_s=mbit)) for mbit in MBIT_PER_S
            }
            for rate in runs.rates
        }
        for arm in _timed(runs)
    }
    adapter = {
        arm: _arm_figures(runs, some)
        for arm, how in ADAPTER.items()
        if (some := runs.of("adapter", arm, ADAPTER_RATE if how.fails else 0.0))
    }
    full = {arm: by_rate for arm, by_rate in full.items() if by_rate}
    return {"full": full, "hours_to_target": hours, "adapter": adapter}


def curves(runs: Runs) -> list[Curves]:
    """Loss against steps at the highest rate, and against modelled hours at the middle one; means over seeds."""
    highest, middle = runs.rates[-1], _middle(runs.rates)
    by_step = {arm: runs.of("full", arm, highest if how.fails else 0.0) for arm, how in FULL.items()}
    lines = {arm: (_checked_steps(some), _mean_curve(some)) for arm, some in by_step.items() if some}
    drawn = [Curves(f"{highest:.0%} per hour", "step", "held-out loss", lines=lines)]
    timed = dict[str, tuple[Sequence[float], Sequence[float]]]()
    for arm in _timed(runs):
        some = runs.of("full", arm, middle) if arm in FULL and FULL[arm].fails else runs.of("full", NONE, 0.0)
        if some:
            clock = [
                hours_of(arm, run["seed"], middle, num_steps=run["num_steps"], mbit_per_s=MBIT_IN_BETWEEN)
                for run in some
            ]
            at = [fmean(one[step - 1] for one in clock) if step else 0.0 for step in _checked_steps(some)]
            timed[arm] = (at, _mean_curve(some))
    if timed:
        drawn.append(
            Curves(f"{middle:.0%} per hour, {MBIT_IN_BETWEEN:g} Mbit/s", "modelled hours", "held-out loss", lines=timed)
        )
    return drawn


def _timed(runs: Runs) -> list[str]:
    found = {run["arm"] for run in runs.results if run["training"] == "full"}
    trained = [arm for arm in FULL if arm != SWAPPED and arm in found]
    return [*trained, *DERIVED] if NONE in trained else []


def _arm_figures(runs: Runs, some: Sequence[Result]) -> dict[str, Any]:
    more = Spread.of(value for run in some if (value := excess(runs, run)) is not None)
    losses = [len(run["jumps"]) for run in some]
    return {
        "end_loss": Spread.of(map(end_loss, some)).rounded(),
        "excess": more.rounded(),
        "num_losses": losses,
        "num_seeds": len(some),
    }


def _with_seed(some: Sequence[Result], seed: int) -> Result | None:
    return next((run for run in some if run["seed"] == seed), None)


def _middle(rates: Sequence[float]) -> float:
    return rates[len(rates) // 2]


def _mean_curve(some: Sequence[Result]) -> list[float]:
    return [fmean(column) for column in zip(*(run["curve"] for run in some), strict=True)]


def _checked_steps(some: Sequence[Result]) -> list[int]:
    return [some[0]["check_interval"] * place for place in range(len(some[0]["curve"]))]


def _jump(jumps: Sequence[dict[str, float]], is_meant: Callable[[float], bool]) -> str:
    found = [jump["after"] - jump["before"] for jump in jumps if is_meant(jump["stage"])]
    return f"{fmean(found):+.2f} ({len(found)})" if found else "none lost"


def _hours(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "not reached"
    missing = f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""
    return Spread.of(known).text(1) + missing


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 2) for value in values]


def _text(values: Iterable[float]) -> str:
    spread = Spread.of(values)
    return spread.text(3) if spread.values else "-"


def write_all(folder: Path, runs: Runs) -> tuple[Path, list[Table]]:
    """Write report.html, curves.png and table.md into `folder`. Returns the report and its tables."""
    found, picture = tables(runs), plot(curves(runs))
    replace_file(folder / "curves.png", picture, SHARED)
    text = "\n\n".join(f"{table.title}\n\n{table.markdown()}" for table in found)
    replace_file(folder / "table.md", text + "\n", SHARED)
    report = folder / "report.html"
    write_report(
        report, "What losing a stage costs, by the way it is rebuilt", description(), tables=found, picture=picture
    )
    return report, found


def description() -> list[str]:
    """Describe the experiment in sentences."""
    state_gb, weight_gb = clocks.STATE_BYTES / 1e9, clocks.WEIGHT_BYTES / 1e9
    return [
        f"A toy of {NUM_STAGES} stages with one layer each learns generated text. All ways of recovery get the same trace of "
        "failures. A lost stage gets fresh moments and a learning rate that is a tenth higher; the other stages continue "
        "unchanged. Neighbours hold replicas of embedding and head, so these are never lost.",
        "Plain CheckFree has no average for an edge stage, which becomes a copy of its only neighbour. CheckFree+ trains half "
        "of the micro-batches with the edge stages in swapped order, so the copy has learned to replace the edge.",
        f"Hours are modelled, not measured: a step takes {STEP_S:g} s. A model of 500 million parameters is divided into the "
        f"stages, each of which saves {state_gb:.1f} GB for a checkpoint while training waits. A replacement takes "
        f"{clocks.REPLACE_S:g} s and {weight_gb:.2f} GB for each neighbour that it reads. No machine fails during a pause. "
        "Checkpoints and redundant computation lose no learning: they have the curve of the run without failure on another "
        "clock.",
    ]
