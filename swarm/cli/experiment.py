"""`swarm experiment`: what sharing and merging are worth, old data, unlike models, hostile peers, lost stages."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from swarm.cli.arguments import seed_list
from swarm.errors import ConfigError, SwarmError
from swarm.experiments.cells import CellStore, compute

if TYPE_CHECKING:
    from rich.console import Console

    from swarm.experiments.sapo import SapoPlan
    from swarm.experiments.sapo_tasks import Mix

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
        Path("runs/sapo"), "--dir", help="Folder of the results; finished cells are not run again."
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
    """Sharing against silos on the nine tasks of the SAPO paper, with the control that the paper lacks."""
    from swarm.experiments.arms import CONTROL, DEFAULT_ARMS, SHARING, chosen_arms
    from swarm.experiments.sapo import SapoPlan, affordable_rounds

    if mix not in _MIXES:
        raise ConfigError(f"mix must be one of {', '.join(_MIXES)}, got {mix}; set --mix")
    plan = SapoPlan(chosen_arms(arms or ",".join(DEFAULT_ARMS)), tuple(seed_list(seeds)), nodes, cast("Mix", mix), base)
    if quick:
        short = chosen_arms(f"{CONTROL},{SHARING}")
        plan, rounds = SapoPlan(short, (0,), 2, cast("Mix", mix), base, groups_per_round=4, held_out_tasks=1), 2
    if report_only:
        if rounds is None:
            raise ConfigError("a report needs the rounds of its cells, got none; set --rounds as in the run")
        _report_sapo(folder, plan, rounds, _console(), as_json)
        return
    with _experiment(folder) as console:
        rounds = rounds or affordable_rounds(plan, folder, minutes, workers, console.print)
        compute(plan.cells(rounds), CellStore(folder / "cells"), workers, console.print)
        _report_sapo(folder, plan, rounds, console, as_json)


def _report_sapo(folder: Path, plan: "SapoPlan", rounds: int, console: "Console", as_json: bool) -> None:
    """Of the cells that are there."""
    from swarm.experiments.sapo import figures, summarize
    from swarm.experiments.sapo_report import tables_of, write_all

    results = CellStore(folder / "cells").read_all(plan.cells(rounds))
    if not results:
        raise SwarmError(f"a report needs finished cells, got none of {rounds} rounds in {folder}; leave --report out")
    summaries = summarize(results)
    report = write_all(folder, plan, results, summaries)
    console.print(*(table.rich() for table in tables_of(results, summaries)), f"report: {report}")
    _finish(folder, figures(summaries), as_json)


@app.command()
def offpolicy(
    folder: Path = typer.Option(
        Path("runs/offpolicy"), "--dir", help="Folder of the results; finished cells are kept."
    ),
    steps: int = typer.Option(192, min=1, help="Training steps of each cell."),
    seeds: str = typer.Option("0,1,2", help="Seeds, with commas."),
    workers: int = _WORKERS,
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """Data that is 0 to 128 policy versions old or of another lineage, with each correction: reward and collapse."""
    from swarm.experiments.offpolicy import OffPolicyPlan, curves, figures, reward_table
    from swarm.experiments.report import plot, write_report

    plan = OffPolicyPlan(tuple(seed_list(seeds)), steps)
    if quick:
        plan = OffPolicyPlan((0,), 3, ("none", "tis"), ("8",), held_out_tasks=2)
    with _experiment(folder) as console:
        results = compute(plan.cells(), CellStore(folder / "cells"), workers, console.print)
        table = reward_table(results)
        picture = plot(curves(results))
        told = [
            f"The policy trains on {plan.groups_per_round} groups of {plan.group_size} answers a step and on nothing else. "
            "Collapsed: ended below its start or below half of its best."
        ]
        write_report(folder / "report.html", "How far data may be off-policy", told, [table], picture)
        (folder / "table.md").write_text(table.markdown() + "\n", encoding="utf-8")
        console.print(table.rich(), f"report: {folder / 'report.html'}")
    _finish(folder, figures(results), as_json)


@app.command()
def heterogeneous(
    folder: Path = typer.Option(
        Path("runs/heterogeneous"), "--dir", help="Folder of the results; finished cells are kept."
    ),
    rounds: int = typer.Option(60, min=1, help="Rounds of each cell."),
    learn_steps: int = typer.Option(600, min=1, help="Supervised steps of the second policy, once."),
    seeds: str = typer.Option("0,1,2", help="Seeds, with commas."),
    workers: int = _WORKERS,
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """Two architectures with tokenizers of their own in one swarm, each against its silo."""
    from swarm.experiments import heterogeneous as experiment
    from swarm.experiments.report import plot, write_report

    base = (folder / "second_policy").resolve()
    plan = experiment.HeterogeneousPlan(base, tuple(seed_list(seeds)), rounds)
    if quick:
        learn_steps = 3
        plan = experiment.HeterogeneousPlan(base, (0,), 2, groups_per_round=4, held_out_tasks=2)
    with _experiment(folder) as console:
        store = CellStore(folder / "cells")
        compute([experiment.second_policy_cell(base, learn_steps)], store, 1, console.print)
        results = compute(plan.cells(), store, workers, console.print)
        table, picture = experiment.model_table(results), plot(experiment.curves(results))
        told = ["One node of each model. In the mixed swarm every group of others comes from the other model, as text."]
        write_report(folder / "report.html", "Unlike models in one swarm", told, [table], picture)
        (folder / "table.md").write_text(table.markdown() + "\n", encoding="utf-8")
        console.print(table.rich(), f"report: {folder / 'report.html'}")
    _finish(folder, experiment.figures(results), as_json)


@app.command()
def merging(
    folder: Path = typer.Option(
        Path("runs/merging"), "--dir", help="Folder of the results; finished cells are not run again."
    ),
    parts: str = typer.Option("learning,faults,rl", help="Which tables, with commas: also attacks, settings."),
    attacks: bool = typer.Option(False, "--attacks", help="The table of liars as well."),
    steps: int = typer.Option(120, min=1, help="Inner steps of each replica, supervised."),
    rounds: int = typer.Option(72, min=1, help="Rounds of each replica, under RL."),
    seeds: str = typer.Option("0,1,2", help="Seeds, with commas."),
    workers: int = _WORKERS,
    report_only: bool = typer.Option(False, "--report", help="Compute nothing, report the cells that are there."),
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """Eight replicas that merge in pairs, all at once or never; partners that fail, are slow, or lie."""
    from swarm.experiments.merging.arms import DILOCO, NOLOCO
    from swarm.experiments.merging.figures import figures
    from swarm.experiments.merging.merging_report import write_all
    from swarm.experiments.merging.plan import MergingPlan, chosen_parts

    chosen = chosen_parts(f"{parts},attacks" if attacks else parts)
    plan = MergingPlan(chosen, tuple(seed_list(seeds)), num_steps=steps, num_rounds=rounds)
    if quick:
        plan = MergingPlan(
            ("learning", "rl"), (0,), (NOLOCO, DILOCO), num_steps=8, inner_steps=4, num_examples=16, held_out_examples=4,
            num_rounds=2, inner_rounds=1, groups_per_round=2, held_out_tasks=1,
        )  # fmt: skip
    with contextlib.nullcontext(_console()) if report_only else _experiment(folder) as console:
        store = CellStore(folder / "cells")
        if not report_only:
            compute(plan.all_cells(), store, workers, console.print)
        results = store.read_all(plan.all_cells())
        if not results:
            raise SwarmError(f"a report needs finished cells, got none in {folder}; leave --report out")
        report, tables = write_all(folder, plan.parts, results)
        console.print(*(table.rich() for table in tables), f"report: {report}")
    _finish(folder, figures(results), as_json)


@app.command()
def recovery(
    folder: Path = typer.Option(
        Path("runs/recovery"), "--dir", help="Folder of the results; finished cells are not run again."
    ),
    steps: int = typer.Option(300, min=20, help="Training steps of each whole model; half as many of each adapter."),
    seeds: str = typer.Option("0,1,2", help="Seeds, with commas."),
    workers: int = _WORKERS,
    report_only: bool = typer.Option(False, "--report", help="Compute nothing, report the cells that are there."),
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """A model in six stages that loses some of them: ways of rebuilding, on one trace of failures."""
    from swarm.experiments.recovery.figures import Runs, figures
    from swarm.experiments.recovery.plan import ADAPTER_RATE, CHECKFREE_PLUS, NONE, OWN_COPY, RecoveryPlan
    from swarm.experiments.recovery.recovery_report import write_all

    base = str((folder / "base").resolve())
    plan = RecoveryPlan(base, tuple(seed_list(seeds)), num_steps=steps, adapter_steps=steps // 2)
    if quick:
        plan = RecoveryPlan(
            base, (0,), (ADAPTER_RATE,), (NONE, CHECKFREE_PLUS), (NONE, OWN_COPY), num_steps=50, adapter_steps=50
        )  # fmt: skip
    with contextlib.nullcontext(_console()) if report_only else _experiment(folder) as console:
        store = CellStore(folder / "cells")
        if not report_only:
            if plan.adapter_arms:
                compute([plan.base_cell()], store, 1, console.print)
            compute(plan.cells(), store, workers, console.print)
        results = store.read_all(plan.cells())
        if not results:
            raise SwarmError(f"a report needs finished cells, got none in {folder}; leave --report out")
        runs = Runs.of_cells(results)
        report, tables = write_all(folder, runs)
        console.print(*(table.rich() for table in tables), f"report: {report}")
    _finish(folder, figures(runs), as_json)


@app.command()
def attacks(
    folder: Path = typer.Option(
        Path("runs/attacks"), "--dir", help="Folder of the results; finished cells are not run again."
    ),
    rounds: int = typer.Option(24, min=1, help="Rounds of each cell."),
    seeds: str = typer.Option("0,1", help="Seeds, with commas; each attack alone has the first one only."),
    alone: str = typer.Option(None, "--attacks", help="Attacks to run alone, with commas.", show_default="all"),
    hostile: str = typer.Option("1,2,4", help="Hostile nodes of eight, with commas, where all attacks come in turn."),
    workers: int = _WORKERS,
    report_only: bool = typer.Option(False, "--report", help="Compute nothing, report the cells that are there."),
    quick: bool = _QUICK,
    as_json: bool = _JSON,
) -> None:
    """Hostile nodes among eight, attack by attack: what they cost honest ones, and those that defend nothing."""
    from swarm.experiments.attacks.attacks_report import figures, write_all
    from swarm.experiments.attacks.plan import ATTACKS, AttackPlan, chosen_attacks

    chosen = chosen_attacks(alone or ",".join(ATTACKS))
    plan = AttackPlan(tuple(seed_list(seeds)), tuple(seed_list(hostile)), chosen, num_rounds=rounds)
    if quick:
        plan = AttackPlan(
            (0,), (1,), ("wrong rewards",), num_nodes=3, num_rounds=2, groups_per_round=2, group_size=4,
            hostile_groups=2, num_sybils=5, held_out_tasks=1,
        )  # fmt: skip
    with contextlib.nullcontext(_console()) if report_only else _experiment(folder) as console:
        store = CellStore(folder / "cells")
        if not report_only:
            compute(plan.cells(), store, workers, console.print)
        results = store.read_all(plan.cells())
        if not results:
            raise SwarmError(f"a report needs finished cells, got none in {folder}; leave --report out")
        report, tables = write_all(folder, results)
        console.print(*(table.rich() for table in tables), f"report: {report}")
    _finish(folder, figures(results), as_json)


@contextlib.contextmanager
def _experiment(folder: Path) -> "Iterator[Console]":
    """One run per folder; says how to go on when it is interrupted."""
    from swarm.testbed.testbed import exclusive

    console = _console()
    with exclusive(folder):
        try:
            yield console
        except KeyboardInterrupt:
            console.print(f"stopped; the same command goes on in {folder}")
            raise


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def _finish(folder: Path, figures: Mapping[str, Any], as_json: bool) -> None:
    (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(figures))
