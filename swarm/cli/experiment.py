"""`swarm experiment`: controlled experiments on sharing, merging, old data, unlike models, hostile peers and lost stages.

Every experiment computes its missing cells in one folder, which one process uses at a time, and writes a report of the
finished ones. The options that experiments share are declared once; a command adds its own.
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from swarm.cli.arguments import number_list, seed_list
from swarm.errors import ConfigError, SwarmError
from swarm.experiments.cells import Cell, CellStore, Result, chosen_names, compute
from swarm.machine.safe_files import SHARED, replace_file

if TYPE_CHECKING:
    from rich.console import Console

    from swarm.experiments.sharing.plan import Regime
    from swarm.report.tables import Curves, Table


@dataclass(frozen=True, slots=True)
class Run:
    """How the cells of an experiment are computed and reported, whatever the experiment."""

    folder: Path
    workers: int
    as_json: bool
    report_only: bool = False


def run_cells(
    run: Run,
    cells: Sequence[Cell],
    write: Callable[[Sequence[Result]], "tuple[Path, list[Table]]"],
    figures: Callable[[Sequence[Result]], Mapping[str, Any]],
    *,
    first: Sequence[Cell] = (),
) -> None:
    """Computes the missing cells and reports all finished ones.

    `write` writes the report. `first` are cells that the others need; they are computed one at a time.
    Raises SwarmError if there is no finished cell to report.
    """
    with contextlib.nullcontext(console()) if run.report_only else one_run(run.folder) as screen:
        store = CellStore(run.folder / "cells")
        if not run.report_only:
            compute(first, store, 1, screen.print)
            compute(cells, store, run.workers, screen.print)
        results = store.read_all(cells)
        if not results:
            raise SwarmError(f"a report needs finished cells, got none in {run.folder}; leave --report out")
        report, tables = write(results)
        screen.print(*(table.rich() for table in tables), f"report: {report}")
    finish(run.folder, figures(results), as_json=run.as_json)


def write_one(
    folder: Path, title: str, introduction: str, table: "Table", lines: "Sequence[Curves]"
) -> "tuple[Path, list[Table]]":
    """report.html and table.md of an experiment with one table."""
    from swarm.report.tables import plot, write_report

    report = folder / "report.html"
    write_report(report, title, [introduction], [table], plot(lines))
    replace_file(folder / "table.md", table.markdown() + "\n", SHARED)
    return report, [table]


@contextlib.contextmanager
def one_run(folder: Path) -> "Iterator[Console]":
    """One run per folder; says how to go on when it is interrupted."""
    from swarm.testbeds.testbed import exclusive

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


def finish(folder: Path, figures: Mapping[str, Any], *, as_json: bool) -> None:
    replace_file(folder / "figures.json", json.dumps(figures, indent=1) + "\n", SHARED)
    if as_json:
        print(json.dumps(figures))


app = typer.Typer(
    help="Controlled experiments on this machine: sharing, merging, old data, unlike models, attacks, lost stages; resumable.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="Folder of the results; finished cells are not run again.")
]
Seeds = Annotated[str, typer.Option(help="Seeds, with commas.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes at a time, one thread each.")]
ReportOnly = Annotated[bool, typer.Option("--report", help="Compute nothing, report the cells that are there.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Runs in under a minute and shows only that the experiment works.")
]
Json = Annotated[bool, typer.Option("--json", help="End with one line that holds all figures as a JSON object.")]
Command = TypeVar("Command", bound=Callable[..., None])
_HELP = """{summary}

Reads: cells that are in --dir already.
Writes: cells and report.html, with its curves, in --dir.

Examples:
{examples}

Exit codes: 0 done, 1 a cell failed, 3 wrong choice, 130 interrupted."""


def _experiment(*examples: str) -> Callable[[Command], Command]:
    """Registers a command. Its help is its docstring, `examples` of its options, and what holds for all experiments."""

    def register(command: Command) -> Command:
        lines = "\n".join(f"  swarm experiment {command.__name__} {one}".rstrip() for one in examples)
        command.__doc__ = _HELP.format(summary=inspect.getdoc(command), examples=lines)
        return app.command()(command)

    return register


@_experiment("", '--arms "silo; 8/24; oracle" --seeds 0,1', "--quick")
def sharing(
    folder: Folder = Path("runs/sharing"),
    regime: str = typer.Option("short", help="short: answers of four tokens. reasoning: of two hundred."),
    rounds: int = typer.Option(40, min=6, help="Rounds of silos; other arms have fewer."),
    seeds: Seeds = "0,1,2,3,4",
    arms: str = typer.Option(None, help="Arms, with semicolons.", show_default="all"),
    lrs: str = typer.Option("1,1.4,2", help="Multiples of the learning rate of which each arm gets its best."),
    tuning_seeds: str = typer.Option("1000", help="Seeds of that choice, with commas; none of --seeds."),
    nodes: int = typer.Option(8, min=2, help="Members of each swarm."),
    workers: Workers = 2,
    report_only: ReportOnly = False,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """What joining is worth to a member, beside tuned silos.

    Own samples and processor time to what the best silo reaches, and the same for one trainer that samples for all.
    """
    from swarm.experiments.sharing.arms import DEFAULT_ARMS, chosen_arms
    from swarm.experiments.sharing.figures import figures, write_all
    from swarm.experiments.sharing.plan import SharingPlan, tuned_factors

    if regime not in ("short", "reasoning"):
        raise ConfigError(f"regime must be short or reasoning, got {regime}; set --regime")
    plan = SharingPlan(
        chosen_arms(arms or ";".join(DEFAULT_ARMS)),
        tuple(seed_list(seeds)),
        cast("Regime", regime),
        number_list(lrs, "--lrs"),
        tuple(seed_list(tuning_seeds)),
        num_members=nodes,
        num_rounds=rounds,
    )
    if quick:
        plan = SharingPlan(
            chosen_arms("silo; 8/8; oracle"), (0,), lr_factors=(1.0,), num_members=2, num_rounds=6, held_out_tasks=2
        )
    if both := sorted({*plan.seeds} & {cell.settings["seed"] for cell in plan.tuning_cells()}):
        raise ConfigError(
            f"a seed on which learning rates are chosen must not be reported, got {both} in both; change --tuning-seeds"
        )
    if not any(arm.is_silo for arm in plan.arms):
        raise ConfigError("arms must have a silo, which sets the target, got none; add silo to --arms")
    run, store = Run(folder, workers, as_json, report_only), CellStore(folder / "cells")
    if report_only:
        factors = tuned_factors(plan, store.read_all)
    else:
        with one_run(folder) as screen:
            factors = tuned_factors(plan, lambda cells: compute(cells, store, workers, screen.print))
    introduction = [
        f"{plan.num_members} members sample {plan.groups_per_round} groups of {plan.group_size} answers a round in every arm; "
        f"the oracle's one policy samples for all of them. Regime: {regime}. Learning rate of every arm by a grid on seeds "
        "that are not reported. What is held out is an eighth of all prompts, which no arm trains on. "
        "Correction: tis+opsm; in arms that are named shaped it is the default of nodes, shaped+opsm.",
    ]
    run_cells(run, plan.reported_cells(factors), lambda results: write_all(folder, introduction, results), figures)


@_experiment("", "--quick")
def offpolicy(
    folder: Folder = Path("runs/offpolicy"),
    steps: int = typer.Option(192, min=1, help="Training steps of each cell."),
    corrections: str = typer.Option(None, help="Corrections, with commas.", show_default="all"),
    seeds: Seeds = "0,1,2",
    workers: Workers = 2,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Old data and data of another lineage, with each correction.

    Reward and collapse with data that is 0 to 128 policy versions old.
    """
    from swarm.experiments.offpolicy import CORRECTIONS, OffPolicyPlan, curves, figures, reward_table

    chosen = chosen_names(corrections or ",".join(CORRECTIONS), CORRECTIONS, "corrections")
    plan = OffPolicyPlan(tuple(seed_list(seeds)), steps, tuple(chosen))
    if quick:
        plan = OffPolicyPlan((0,), 3, ("none", "tis"), ("8",), held_out_tasks=2)
    introduction = (
        f"The policy trains on {plan.groups_per_round} groups of {plan.group_size} answers a step and on nothing else. "
        "Collapsed: ended below its start or below half of its best."
    )

    def write(results: "Sequence[Result]") -> "tuple[Path, list[Table]]":
        return write_one(folder, "How far data may be off-policy", introduction, reward_table(results), curves(results))

    run_cells(Run(folder, workers, as_json), plan.cells(), write, figures)


@_experiment("", "--quick")
def heterogeneous(
    folder: Folder = Path("runs/heterogeneous"),
    rounds: int = typer.Option(60, min=1, help="Rounds of each cell."),
    learn_steps: int = typer.Option(600, min=1, help="Supervised steps of the second policy, once."),
    seeds: Seeds = "0,1,2",
    workers: Workers = 2,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Two architectures in one swarm, each against its silo.

    Each has a tokenizer of its own.
    """
    from swarm.experiments.heterogeneous import heterogeneous as experiment

    base = (folder / "second_policy").resolve()
    plan = experiment.HeterogeneousPlan(base, tuple(seed_list(seeds)), rounds)
    if quick:
        learn_steps = 3
        plan = experiment.HeterogeneousPlan(base, (0,), 2, groups_per_round=4, held_out_tasks=2)
    introduction = (
        "One node of each model. In the mixed swarm every group of others comes from the other model, as text."
    )

    def write(results: "Sequence[Result]") -> "tuple[Path, list[Table]]":
        table, lines = experiment.model_table(results), experiment.curves(results)
        return write_one(folder, "Unlike models in one swarm", introduction, table, lines)

    first = [experiment.second_policy_cell(base, learn_steps)]
    run_cells(Run(folder, workers, as_json), plan.cells(), write, experiment.figures, first=first)


@_experiment("", "--quick", "--parts hostile --workers 2")
def merging(
    folder: Folder = Path("runs/merging"),
    parts: str = typer.Option("learning,faults,rl", help="Which tables, with commas: also attacks, settings, hostile."),
    attacks: bool = typer.Option(False, "--attacks", help="The table of liars as well."),
    steps: int = typer.Option(120, min=1, help="Inner steps of each replica, supervised."),
    rounds: int = typer.Option(72, min=1, help="Rounds of each replica, under RL."),
    seeds: Seeds = "0,1,2",
    workers: Workers = 2,
    report_only: ReportOnly = False,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Eight replicas that merge in pairs, all at once or never.

    And partners that fail, are slow, or lie.
    """
    from swarm.experiments.merging.arms import DILOCO, NOLOCO
    from swarm.experiments.merging.figures import figures, write_all
    from swarm.experiments.merging.merging_plan import KNOWN, MergingPlan, chosen_parts

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
        Run(folder, workers, as_json, report_only), plan.all_cells(),
        lambda results: write_all(folder, plan.parts, results), figures,
    )  # fmt: skip


@_experiment("", "--quick")
def recovery(
    folder: Folder = Path("runs/recovery"),
    steps: int = typer.Option(300, min=20, help="Training steps of each whole model; half as many of each adapter."),
    seeds: Seeds = "0,1,2",
    workers: Workers = 2,
    report_only: ReportOnly = False,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """A model in six stages that loses some: ways of rebuilding.

    All of them on one trace of failures.
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
        Run(folder, workers, as_json, report_only), plan.cells(), lambda results: write_all(folder, Runs.of_cells(results)),
        lambda results: figures(Runs.of_cells(results)), first=first,
    )  # fmt: skip


@_experiment("", "--quick")
def attacks(
    folder: Folder = Path("runs/attacks"),
    rounds: int = typer.Option(24, min=1, help="Rounds of each cell."),
    seeds: str = typer.Option("0,1", help="Seeds, with commas; without a defence the first one only."),
    alone: str = typer.Option(None, "--attacks", help="Attacks to run alone, with commas.", show_default="all"),
    hostile: str = typer.Option("1,2,4", help="Hostile nodes of eight, with commas, where all attacks come in turn."),
    correction: str = typer.Option(None, help="training.correction of honest nodes.", show_default="as it comes"),
    baseline: str = typer.Option(None, help="sharing.baseline of honest nodes.", show_default="as it comes"),
    workers: Workers = 2,
    report_only: ReportOnly = False,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Hostile nodes among eight, attack by attack.

    What they cost honest ones, and those that defend nothing.
    """
    from swarm.experiments.attacks.attacks_report import figures, write_all
    from swarm.experiments.attacks.plan import ATTACKS, AttackPlan, chosen_attacks

    chosen = chosen_attacks(alone or ",".join(ATTACKS))
    plan = AttackPlan(
        tuple(seed_list(seeds)), tuple(seed_list(hostile)), chosen,
        num_rounds=rounds, correction=correction, baseline=baseline,
    )  # fmt: skip
    if quick:
        plan = AttackPlan(
            (0,), (1,), ("wrong rewards",), num_nodes=3, num_rounds=2, groups_per_round=2, group_size=4,
            hostile_groups=2, num_sybils=5, held_out_tasks=1,
        )  # fmt: skip
    run_cells(
        Run(folder, workers, as_json, report_only), plan.cells(), lambda results: write_all(folder, results), figures,
    )  # fmt: skip
