"""`swarm experiment`: what sharing and merging are worth, old data, unlike models, hostile peers, lost stages.

What all experiments do with their cells: compute what is missing, report what there is, once per folder.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from swarm.cli.arguments import seed_list
from swarm.errors import ConfigError, SwarmError
from swarm.experiments.cells import Cell, CellStore, Result, compute
from swarm.machine.safe_files import SHARED, replace_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from swarm.experiments.cells import Result
    from swarm.experiments.sapo.sapo import SapoPlan
    from swarm.experiments.sapo.tasks import Mix
    from swarm.report.tables import Curves, Table


def run_cells(
    folder: Path,
    cells: Sequence[Cell],
    write: Callable[[Sequence[Result]], "tuple[Path, list[Table]]"],
    figures: Callable[[Sequence[Result]], Mapping[str, Any]],
    *,
    workers: int,
    as_json: bool,
    report_only: bool = False,
    first: Sequence[Cell] = (),
) -> None:
    """`write`: the report of what there is. `first`: cells that the others need, one at a time. Raises SwarmError where a
    report finds nothing."""
    with contextlib.nullcontext(console()) if report_only else one_run(folder) as screen:
        store = CellStore(folder / "cells")
        if not report_only:
            compute(first, store, 1, screen.print)
            compute(cells, store, workers, screen.print)
        results = store.read_all(cells)
        if not results:
            raise SwarmError(f"a report needs finished cells, got none in {folder}; leave --report out")
        report, tables = write(results)
        screen.print(*(table.rich() for table in tables), f"report: {report}")
    finish(folder, figures(results), as_json)


def write_one(
    folder: Path, title: str, told: str, table: "Table", lines: "Sequence[Curves]"
) -> "tuple[Path, list[Table]]":
    """report.html and table.md of an experiment with one table."""
    from swarm.report.tables import plot, write_report

    report = folder / "report.html"
    write_report(report, title, [told], [table], plot(lines))
    replace_file(folder / "table.md", table.markdown() + "\n", SHARED)
    return report, [table]


@contextlib.contextmanager
def one_run(folder: Path) -> "Iterator[Console]":
    """One run per folder; says how to go on when it is interrupted."""
    from swarm.testbed.testbed import exclusive

    screen = console()
    with exclusive(folder):
        try:
            yield screen
        except KeyboardInterrupt:
            screen.print(f"stopped; the same command goes on in {folder}")
            raise


def console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def finish(folder: Path, figures: Mapping[str, Any], as_json: bool) -> None:
    from swarm.machine.safe_files import SHARED, replace_file

    replace_file(folder / "figures.json", json.dumps(figures, indent=1) + "\n", SHARED)
    if as_json:
        print(json.dumps(figures))


app = typer.Typer(
    help="Controlled experiments on this machine: sharing, merging, old data, unlike models, attacks, lost stages; resumable.",
    no_args_is_help=True,
)

_JSON = typer.Option(False, "--json", help="End with one line that holds all figures as a JSON object.")
_QUICK = typer.Option(False, "--quick", help="Under a minute and too short to tell anything: does it run?")
_WORKERS = typer.Option(2, min=1, help="Processes at a time, one thread each.")
_MIXES = ("shared", "split")


@app.command()
def sapo(
    folder: Path = typer.Option(
        Path("runs/sapo"), "--dir", metavar="DIR", help="Folder of the results; finished cells are not run again."
    ),
    minutes: float = typer.Option(40.0, min=0.5, help="Time budget; sets the number of rounds."),
    rounds: int = typer.Option(None, min=1, help="Rounds of each cell, whatever time that takes."),
    seeds: str = typer.Option("0,1,2", help="Seeds, with commas."),
    nodes: int = typer.Option(8, min=2, help="Nodes of each swarm."),
    arms: str = typer.Option(None, help="Own/others' groups of a batch.", show_default="8/0,8/0 + filter,6/2,4/4,2/6"),
    mix: str = typer.Option("shared", help="shared: all nodes draw all tasks. split: each mostly three of them."),
    base: str = typer.Option(
        "nine-tasks",
        help="nine-tasks: the bundled policy after lessons in them. Or as policy.base: bundled, a folder, a hub id.",
    ),
    workers: int = _WORKERS,
    report_only: bool = typer.Option(False, "--report", help="Compute nothing, report what --rounds has by now."),
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """Sharing against silos on the nine tasks of the SAPO paper.

    With the control that the paper lacks.

    Reads: cells that are in --dir already.
    Writes: cells and report.html, with its curves, in --dir.

    Examples:
      swarm experiment sapo --rounds 30
      swarm experiment sapo --quick

    Exit codes: 0 done, 1 a cell failed, 3 wrong choice, 130 interrupted.
    """
    from swarm.experiments.sapo.sapo import CONTROL, DEFAULT_ARMS, SHARING, SapoPlan, affordable_rounds, chosen_arms

    if mix not in _MIXES:
        raise ConfigError(f"mix must be one of {', '.join(_MIXES)}, got {mix}; set --mix")
    plan = SapoPlan(chosen_arms(arms or ",".join(DEFAULT_ARMS)), tuple(seed_list(seeds)), nodes, cast("Mix", mix), base)
    if quick:
        short = chosen_arms(f"{CONTROL},{SHARING}")
        plan, rounds = SapoPlan(short, (0,), 2, cast("Mix", mix), base, groups_per_round=4, held_out_tasks=1), 2
    if report_only:
        if rounds is None:
            raise ConfigError("a report needs the rounds of its cells, got none; set --rounds as in the run")
        _report_sapo(folder, plan, rounds, console(), as_json)
        return
    with one_run(folder) as screen:
        rounds = rounds or affordable_rounds(plan, folder, minutes, workers, screen.print)
        compute(plan.cells(rounds), CellStore(folder / "cells"), workers, screen.print)
        _report_sapo(folder, plan, rounds, screen, as_json)


def _report_sapo(folder: Path, plan: "SapoPlan", rounds: int, screen: "Console", as_json: bool) -> None:
    """Of the cells that are there."""
    from swarm.experiments.sapo.report import tables_of, write_all
    from swarm.experiments.sapo.sapo import figures, summarize

    results = CellStore(folder / "cells").read_all(plan.cells(rounds))
    if not results:
        raise SwarmError(f"a report needs finished cells, got none of {rounds} rounds in {folder}; leave --report out")
    summaries = summarize(results)
    report = write_all(folder, plan, results, summaries)
    screen.print(*(table.rich() for table in tables_of(results, summaries)), f"report: {report}")
    finish(folder, figures(summaries), as_json)


@app.command()
def offpolicy(
    folder: Path = typer.Option(
        Path("runs/offpolicy"), "--dir", metavar="DIR", help="Folder of the results; finished cells are kept."
    ),
    steps: int = typer.Option(192, min=1, help="Training steps of each cell."),
    seeds: str = typer.Option("0,1,2", help="Seeds, with commas."),
    workers: int = _WORKERS,
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """Old data and data of another lineage, with each correction.

    Reward and collapse with data that is 0 to 128 policy versions old.

    Reads: cells that are in --dir already.
    Writes: cells and report.html, with its curves, in --dir.

    Examples:
      swarm experiment offpolicy
      swarm experiment offpolicy --quick

    Exit codes: 0 done, 1 a cell failed, 3 wrong choice, 130 interrupted.
    """
    from swarm.experiments.offpolicy import OffPolicyPlan, curves, figures, reward_table

    plan = OffPolicyPlan(tuple(seed_list(seeds)), steps)
    if quick:
        plan = OffPolicyPlan((0,), 3, ("none", "tis"), ("8",), held_out_tasks=2)
    told = (
        f"The policy trains on {plan.groups_per_round} groups of {plan.group_size} answers a step and on nothing else. "
        "Collapsed: ended below its start or below half of its best."
    )

    def write(results: "Sequence[Result]") -> "tuple[Path, list[Table]]":
        return write_one(folder, "How far data may be off-policy", told, reward_table(results), curves(results))

    run_cells(folder, plan.cells(), write, figures, workers=workers, as_json=as_json)


@app.command()
def heterogeneous(
    folder: Path = typer.Option(
        Path("runs/heterogeneous"), "--dir", metavar="DIR", help="Folder of the results; finished cells are kept."
    ),
    rounds: int = typer.Option(60, min=1, help="Rounds of each cell."),
    learn_steps: int = typer.Option(600, min=1, help="Supervised steps of the second policy, once."),
    seeds: str = typer.Option("0,1,2", help="Seeds, with commas."),
    workers: int = _WORKERS,
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """Two architectures in one swarm, each against its silo.

    Each has a tokenizer of its own.

    Reads: cells that are in --dir already.
    Writes: cells and report.html, with its curves, in --dir.

    Examples:
      swarm experiment heterogeneous
      swarm experiment heterogeneous --quick

    Exit codes: 0 done, 1 a cell failed, 3 wrong choice, 130 interrupted.
    """
    from swarm.experiments.heterogeneous import heterogeneous as experiment

    base = (folder / "second_policy").resolve()
    plan = experiment.HeterogeneousPlan(base, tuple(seed_list(seeds)), rounds)
    if quick:
        learn_steps = 3
        plan = experiment.HeterogeneousPlan(base, (0,), 2, groups_per_round=4, held_out_tasks=2)
    told = "One node of each model. In the mixed swarm every group of others comes from the other model, as text."

    def write(results: "Sequence[Result]") -> "tuple[Path, list[Table]]":
        table, lines = experiment.model_table(results), experiment.curves(results)
        return write_one(folder, "Unlike models in one swarm", told, table, lines)

    first = [experiment.second_policy_cell(base, learn_steps)]
    run_cells(folder, plan.cells(), write, experiment.figures, workers=workers, as_json=as_json, first=first)


@app.command()
def merging(
    folder: Path = typer.Option(
        Path("runs/merging"), "--dir", metavar="DIR", help="Folder of the results; finished cells are not run again."
    ),
    parts: str = typer.Option("learning,faults,rl", help="Which tables, with commas: also attacks, settings, hostile."),
    attacks: bool = typer.Option(False, "--attacks", help="The table of liars as well."),
    steps: int = typer.Option(120, min=1, help="Inner steps of each replica, supervised."),
    rounds: int = typer.Option(72, min=1, help="Rounds of each replica, under RL."),
    seeds: str = typer.Option("0,1,2", help="Seeds, with commas."),
    workers: int = _WORKERS,
    report_only: bool = typer.Option(False, "--report", help="Compute nothing, report the cells that are there."),
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """Eight replicas that merge in pairs, all at once or never.

    And partners that fail, are slow, or lie.

    Reads: cells that are in --dir already.
    Writes: cells and report.html, with its curves, in --dir.

    Examples:
      swarm experiment merging
      swarm experiment merging --quick
      swarm experiment merging --parts hostile --workers 2

    Exit codes: 0 done, 1 a cell failed, 3 wrong choice, 130 interrupted.
    """
    from swarm.experiments.merging.arms import DILOCO, NOLOCO
    from swarm.experiments.merging.figures import figures, write_all
    from swarm.experiments.merging.plan import KNOWN, MergingPlan, chosen_parts

    chosen = chosen_parts(f"{parts},attacks" if attacks else parts)
    plan = MergingPlan(chosen, tuple(seed_list(seeds)), num_steps=steps, num_rounds=rounds)
    if quick and "hostile" in chosen:
        plan = MergingPlan(
            ("hostile",), (0,), (KNOWN,), inner_steps=5, num_examples=16, held_out_examples=2,
            warm_steps=5, hostile_steps=10, backdoor_steps=10,
        )  # fmt: skip
    elif quick:
        plan = MergingPlan(
            ("learning", "rl"), (0,), (NOLOCO, DILOCO), num_steps=8, inner_steps=4, num_examples=16, held_out_examples=4,
            num_rounds=2, inner_rounds=1, groups_per_round=2, held_out_tasks=1,
        )  # fmt: skip
    run_cells(
        folder, plan.all_cells(), lambda results: write_all(folder, plan.parts, results), figures,
        workers=workers, report_only=report_only, as_json=as_json,
    )  # fmt: skip


@app.command()
def recovery(
    folder: Path = typer.Option(
        Path("runs/recovery"), "--dir", metavar="DIR", help="Folder of the results; finished cells are not run again."
    ),
    steps: int = typer.Option(300, min=20, help="Training steps of each whole model; half as many of each adapter."),
    seeds: str = typer.Option("0,1,2", help="Seeds, with commas."),
    workers: int = _WORKERS,
    report_only: bool = typer.Option(False, "--report", help="Compute nothing, report the cells that are there."),
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """A model in six stages that loses some: ways of rebuilding.

    All of them on one trace of failures.

    Reads: cells that are in --dir already.
    Writes: cells and report.html, with its curves, in --dir.

    Examples:
      swarm experiment recovery
      swarm experiment recovery --quick

    Exit codes: 0 done, 1 a cell failed, 3 wrong choice, 130 interrupted.
    """
    from swarm.experiments.recovery.figures import Runs, figures, write_all
    from swarm.experiments.recovery.plan import ADAPTER_RATE, CHECKFREE_PLUS, NONE, OWN_COPY, RecoveryPlan

    base = str((folder / "base").resolve())
    plan = RecoveryPlan(base, tuple(seed_list(seeds)), num_steps=steps, adapter_steps=steps // 2)
    if quick:
        plan = RecoveryPlan(
            base, (0,), (ADAPTER_RATE,), (NONE, CHECKFREE_PLUS), (NONE, OWN_COPY), num_steps=50, adapter_steps=50
        )  # fmt: skip
    first = [plan.base_cell()] if plan.adapter_arms else []
    run_cells(
        folder, plan.cells(), lambda results: write_all(folder, Runs.of_cells(results)),
        lambda results: figures(Runs.of_cells(results)), workers=workers, report_only=report_only, as_json=as_json, first=first,
    )  # fmt: skip


@app.command()
def attacks(
    folder: Path = typer.Option(
        Path("runs/attacks"), "--dir", metavar="DIR", help="Folder of the results; finished cells are not run again."
    ),
    rounds: int = typer.Option(24, min=1, help="Rounds of each cell."),
    seeds: str = typer.Option("0,1", help="Seeds, with commas; without a defence the first one only."),
    alone: str = typer.Option(None, "--attacks", help="Attacks to run alone, with commas.", show_default="all"),
    hostile: str = typer.Option("1,2,4", help="Hostile nodes of eight, with commas, where all attacks come in turn."),
    workers: int = _WORKERS,
    report_only: bool = typer.Option(False, "--report", help="Compute nothing, report the cells that are there."),
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """Hostile nodes among eight, attack by attack.

    What they cost honest ones, and those that defend nothing.

    Reads: cells that are in --dir already.
    Writes: cells and report.html, with its curves, in --dir.

    Examples:
      swarm experiment attacks
      swarm experiment attacks --quick

    Exit codes: 0 done, 1 a cell failed, 3 wrong choice, 130 interrupted.
    """
    from swarm.experiments.attacks.attacks_report import figures, write_all
    from swarm.experiments.attacks.plan import ATTACKS, AttackPlan, chosen_attacks

    chosen = chosen_attacks(alone or ",".join(ATTACKS))
    plan = AttackPlan(tuple(seed_list(seeds)), tuple(seed_list(hostile)), chosen, num_rounds=rounds)
    if quick:
        plan = AttackPlan(
            (0,), (1,), ("wrong rewards",), num_nodes=3, num_rounds=2, groups_per_round=2, group_size=4,
            hostile_groups=2, num_sybils=5, held_out_tasks=1,
        )  # fmt: skip
    run_cells(
        folder, plan.cells(), lambda results: write_all(folder, results), figures,
        workers=workers, report_only=report_only, as_json=as_json,
    )  # fmt: skip
