"""The report of the sharing experiment: tables, curves and sentences."""

from collections.abc import Sequence
from pathlib import Path

from swarm.experiments.cells import Result
from swarm.experiments.sapo.sapo import CONTROL, ArmSummary, SapoPlan, in_order, mean_rewards
from swarm.machine.safe_files import SHARED, replace_file
from swarm.report.tables import Curves, Spread, Table, plot, smooth, write_report

_WINDOW_ROUNDS = 5
_ARM = "own/others'"


def sampling_table(summaries: Sequence[ArmSummary]) -> Table:
    """At equal sampling: every arm as mean ± standard deviation over seeds; ratios to the control are paired by seed."""
    control = next((summary.cumulative for summary in summaries if summary.arm == CONTROL), None)
    rows = [
        [
            summary.arm, summary.cumulative.text(1), _ratio(summary.cumulative, control), summary.late.text(3),
            summary.held_out_end.text(3),
        ]
        for summary in summaries
    ]  # fmt: skip
    headers = [_ARM, "cumulative reward", "× control", "last quarter", "held-out end"]
    return Table(f"At equal sampling, {_num_seeds(summaries)} seeds", headers, rows)


def training_table(summaries: Sequence[ArmSummary]) -> Table:
    """At equal training: mean reward until as many answers were trained on as the arm with the fewest has."""
    control = next((summary.at_equal_training for summary in summaries if summary.arm == CONTROL), None)
    rows = [
        [
            summary.arm, summary.at_equal_training.text(3), _ratio(summary.at_equal_training, control),
            f"{summary.answers_trained_on.mean:,.0f}", f"{summary.swarm_share.mean:.0%}",
        ]
        for summary in summaries
    ]  # fmt: skip
    headers = [_ARM, "mean reward", "× control", "answers trained on", "of others"]
    return Table("At equal training", headers, rows)


def task_table(results: Sequence[Result]) -> Table:
    """Held-out reward by task: at the start, and at the end of each arm; mean over nodes and seeds."""
    arms = in_order(results)
    rows = []
    for name in sorted({source for result in results for source in result["held_out_end"]}):
        start = Spread.of(result["held_out_start"][name] for result in results).mean
        ends = [Spread.of(r["held_out_end"][name] for r in results if r["arm"] == arm).mean for arm in arms]
        rows.append([name, f"{start:.3f}", *(f"{end:.3f}" for end in ends)])
    return Table("Held-out reward by task", ["task", "start", *arms], rows)


def tables_of(results: Sequence[Result], summaries: Sequence[ArmSummary]) -> list[Table]:
    return [sampling_table(summaries), training_table(summaries), task_table(results)]


def curves(results: Sequence[Result]) -> list[Curves]:
    """Mean reward over rounds, which are answers sampled, and over answers trained on."""
    by_round: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    by_training: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for arm in in_order(results):
        rows = [result for result in results if result["arm"] == arm]
        mean = [sum(column) / len(column) for column in zip(*map(mean_rewards, rows), strict=True)]
        counts = [sum(column) / len(column) for column in zip(*(r["answers_trained_on"] for r in rows), strict=True)]
        trained = [sum(counts[:number]) for number in range(len(counts))]
        by_round[arm] = (list(range(1, len(mean) + 1)), smooth(mean, _WINDOW_ROUNDS))
        by_training[arm] = (trained, smooth(mean, _WINDOW_ROUNDS))
    label = f"mean reward, {_WINDOW_ROUNDS} rounds"
    return [
        Curves("at equal sampling", "round", label, by_round),
        Curves("at equal training", "answers trained on, all nodes", label, by_training),
    ]


def write_all(folder: Path, plan: SapoPlan, results: Sequence[Result], summaries: Sequence[ArmSummary]) -> Path:
    """report.html, curves.png and table.md in `folder`. Returns the report."""
    picture = plot(curves(results))
    replace_file(folder / "curves.png", picture, SHARED)
    tables = tables_of(results, summaries)
    replace_file(folder / "table.md", "\n\n".join(table.markdown() for table in tables) + "\n", SHARED)
    report = folder / "report.html"
    write_report(report, "What sharing is worth", introduction(plan, results), tables, picture)
    return report


def introduction(plan: SapoPlan, results: Sequence[Result]) -> list[str]:
    """What was done, in sentences."""
    num_rounds = len(results[0]["rewards"]) if results else 0
    tasks = "all nine tasks alike" if plan.mix == "shared" else "mostly three of the nine tasks"
    return [
        f"{plan.num_nodes} nodes, {num_rounds} rounds, {plan.groups_per_round} groups of {plan.group_size} answers per "
        f"node and round in every arm; each node draws {tasks}. Arms differ in where the groups of a batch come from: "
        "own / others'. 8/0 is the published baseline, which trains on groups without reward differences too; all other "
        "arms leave them out, and 8/0 + filter is the control.",
        "Cumulative reward is the sum over rounds and nodes of the mean reward of sampled answers: at equal sampling. "
        "At equal training, an arm's mean reward counts until it has trained on as many answers as the arm with the "
        "fewest. Mean ± standard deviation over seeds; ratios are paired by seed.",
        "Where an arm has fewer own groups with signal than I, groups of others fill its batch, and the other way round.",
    ]


def _ratio(value: Spread, control: Spread | None) -> str:
    return "" if control is None else value.over(control).text(2)


def _num_seeds(summaries: Sequence[ArmSummary]) -> int:
    return len(summaries[0].cumulative.values) if summaries else 0
