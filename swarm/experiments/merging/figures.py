"""Results of the merging experiment: figures for programs, and tables, curves and a report for people."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from swarm.experiments.cells import Result
from swarm.experiments.merging.arms import (
    ATTACKS,
    DILOCO,
    EQUAL_HOPS,
    NOLOCO,
    NUM_LIARS,
    NUM_REPLICAS,
    PARTS,
    SAFETIES,
    SILO,
    Part,
    attack_name,
)  # fmt: skip
from swarm.experiments.merging.merging_plan import COMPANIES, STAGES
from swarm.machine.safe_files import SHARED, replace_file
from swarm.report.tables import Curves, Spread, Table, plot, smooth, write_report

_COLUMNS = {
    "hostile_part": "hostile part",
    "trigger_rate": "trigger rate",
    "worst_trigger_rate": "worst",
    "held_out_reward": "held-out reward",
    "held_out_loss": "held-out loss",
    "merges_per_offer": "merges per offer",
    "hostile_merges": "hostile of these",
}


def hostile_table(results: Sequence[Result]) -> Table:
    """By stage and company; mean ± standard deviation over seeds."""
    rows = [
        [f"{stage}: {company}", *(_over_seeds(results, stage, company, key).text(3) for key in _COLUMNS)]
        for stage in STAGES
        for company in COMPANIES
        if _over_seeds(results, stage, company, "hostile_part").values
    ]
    return Table("Half of the names hostile, with a backdoor in their adapter", ["nodes", *_COLUMNS.values()], rows)


def hostile_figures(results: Sequence[Result]) -> dict[str, Any]:
    """What a program reads."""
    return {
        f"{stage}: {company}": {key: _over_seeds(results, stage, company, key).rounded() for key in _COLUMNS}
        for stage in STAGES
        for company in COMPANIES
        if _over_seeds(results, stage, company, "hostile_part").values
    }


def _over_seeds(results: Sequence[Result], stage: str, company: str, key: str) -> Spread:
    wanted = ("hostile", stage, company)
    return Spread.of(one[key] for one in results if (one["learning"], one.get("stage"), one["arm"]) == wanted)


_WINDOW_ROUNDS = 5
_TITLES: Mapping[Part, str] = {
    "learning": "Ways of merging, supervised",
    "faults": "Partners that fail or are slow, supervised",
    "settings": "What safety and other settings cost where nobody lies, supervised",
}
Value = Callable[[Result], float]


def of_arm(results: Sequence[Result], arm: str, learning: str = "supervised") -> list[Result]:
    """Its runs, in the order of seeds."""
    found = [result for result in results if (result["arm"], result["learning"]) == (arm, learning)]
    return sorted(found, key=lambda result: result["seed"])


def mean_value(result: Result) -> float:
    """Held-out loss, or reward under RL, mean over replicas."""
    return fmean(result["values"])


def ratio(
    results: Sequence[Result], arm: str, other: str, value: Value = mean_value, learning: str = "supervised"
) -> Spread:
    """Of two arms, seed by seed, over the seeds that both have."""
    own = {result["seed"]: value(result) for result in of_arm(results, arm, learning)}
    base = {result["seed"]: value(result) for result in of_arm(results, other, learning)}
    return Spread.of(own[seed] / base[seed] for seed in sorted(own.keys() & base.keys()) if base[seed])


def merged_over_mean(results: Sequence[Result], arm: str, learning: str = "supervised") -> Spread:
    """Value of the mean of all replicas over that of the mean replica."""
    return Spread.of(result["merged"] / mean_value(result) for result in of_arm(results, arm, learning))


def part_tables(results: Sequence[Result], part: Part) -> list[Table]:
    """Empty where no arm of the part has a result."""
    if part == "hostile":
        table = hostile_table(results)
        return [table] if table.rows else []
    learning = "rl" if part == "rl" else "supervised"
    arms = [arm for arm in PARTS[part] if of_arm(results, arm, learning)]
    if not arms:
        return []
    if part == "attacks":
        return [attack_table(results)]
    return [rl_table(results, arms) if part == "rl" else loss_table(results, arms, _TITLES[part])]


def loss_table(results: Sequence[Result], arms: Sequence[str], title: str) -> Table:
    rows: list[list[str]] = []
    for arm in arms:
        runs = of_arm(results, arm)
        rows.append(
            [
                arm,
                _spread(runs, mean_value).text(4),
                f"{_spread(runs, lambda run: max(run['values'])).mean:.4f}",
                _spread(runs, lambda run: run["merged"]).text(4),
                *_traffic(runs),
            ]
        )
    headers = ["arm", "replicas' loss", "worst", "merged", "spread", "kB sent", "hops", "blocking"]
    return Table(title, headers, rows)


def rl_table(results: Sequence[Result], arms: Sequence[str]) -> Table:
    rows: list[list[str]] = []
    for arm in arms:
        runs = of_arm(results, arm, "rl")
        rows.append(
            [
                arm,
                _spread(runs, mean_training).text(3),
                _spread(runs, late_training).text(3),
                _spread(runs, mean_value).text(3),
                f"{_spread(runs, lambda run: min(run['values'])).mean:.3f}",
                _spread(runs, lambda run: run["merged"]).text(3),
                *_traffic(runs),
            ]
        )
    headers = ["arm", "reward", "last quarter", "held-out", "worst", "merged", "spread", "kB sent", "hops", "blocking"]
    return Table("Ways of merging, under RL", headers, rows)


def attack_table(results: Sequence[Result]) -> Table:
    """Loss of the honest over that of the run in which nobody lies, with the same safety; on the poisoned task as well."""
    rows: list[list[str]] = []
    for safety, (free, _) in SAFETIES.items():
        runs = of_arm(results, free)
        rows.append(
            [f"nobody lies, safety {safety}", _spread(runs, mean_value).text(4), f"1 ± {noise(results, free):.3f}", "1"]
        )
        for num in NUM_LIARS:
            for attack in ATTACKS[safety]:
                arm = attack_name(attack, num, safety)
                if not of_arm(results, arm):
                    continue
                harm, on_target = (ratio(results, arm, free, value) for value in (mean_value, _target))
                loss = _spread(of_arm(results, arm), mean_value)
                rows.append([arm, loss.text(4), harm.text(3), f"{on_target.mean:.3f}"])
    return Table("Liars", ["what is sent", "honest replicas' loss", "× nobody lies", "× on the task aimed at"], rows)


def noise(results: Sequence[Result], arm: str) -> float:
    """Standard deviation of an arm's loss over seeds, over its mean."""
    spread = _spread(of_arm(results, arm), mean_value)
    return spread.std / spread.mean if spread.mean else 0.0


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """What a program reads; ratios are paired by seed, and None where their arms were not computed."""
    return {
        "loss_ratio_diloco_equal_h": _figure(ratio(results, NOLOCO, DILOCO)),
        "loss_ratio_diloco_equal_hops": _figure(ratio(results, NOLOCO, EQUAL_HOPS)),
        "loss_ratio_silo": _figure(ratio(results, NOLOCO, SILO)),
        "merged_over_mean_replica": _figure(merged_over_mean(results, NOLOCO)),
        "reward_ratio_diloco_equal_h": _figure(ratio(results, NOLOCO, DILOCO, mean_training, "rl")),
        "reward_ratio_diloco_equal_hops": _figure(ratio(results, NOLOCO, EQUAL_HOPS, mean_training, "rl")),
        "reward_ratio_silo": _figure(ratio(results, NOLOCO, SILO, mean_training, "rl")),
        "merged_over_mean_replica_rl": _figure(merged_over_mean(results, NOLOCO, "rl")),
        "attacks": _attack_figures(results),
        "hostile": hostile_figures(results),
        "arms": {
            ("RL, " if learning == "rl" else "") + arm: _arm_figures(of_arm(results, arm, learning))
            for learning, arm in dict.fromkeys((result["learning"], result["arm"]) for result in results)
            if learning != "hostile"
        },
    }


def curves(results: Sequence[Result]) -> list[Curves]:
    """Held-out loss on the way, and mean reward of sampled answers under RL; mean over replicas and seeds."""
    drawn: list[Curves] = []
    for learning, label, title in (("supervised", "held-out loss", "supervised"), ("rl", "mean reward", "under RL")):
        arms = [arm for arm in PARTS["learning"] if of_arm(results, arm, learning)]
        lines = {arm: _line(of_arm(results, arm, learning)) for arm in arms}
        if lines:
            drawn.append(Curves(title, "inner step" if learning == "supervised" else "round", label, lines))
    return drawn


def mean_training(result: Result) -> float:
    """Mean loss or reward over the run, as it was while training."""
    return fmean(result["training"])


def late_training(result: Result) -> float:
    """That of the last quarter."""
    training = result["training"]
    return fmean(training[-max(1, len(training) // 4) :])


def _line(runs: Sequence[Result]) -> tuple[Sequence[float], Sequence[float]]:
    supervised = runs[0]["learning"] == "supervised"
    rows = [run["curve"] if supervised else run["training"] for run in runs]
    mean = [fmean(column) for column in zip(*rows, strict=True)]
    if not supervised:
        return list(range(1, len(mean) + 1)), smooth(mean, _WINDOW_ROUNDS)
    every = len(runs[0]["training"]) / len(mean)
    return [every * (position + 1) for position in range(len(mean))], mean


def _traffic(runs: Sequence[Result]) -> list[str]:
    """Distance of replicas from their mean, bytes, hops."""
    return [
        f"{_spread(runs, lambda run: run['consensus']).mean:.2f}",
        f"{_spread(runs, lambda run: run['sent_bytes']).mean / 1e3:,.0f}",
        f"{_spread(runs, lambda run: run['hops']).mean:.0f}",
        f"{_spread(runs, lambda run: run['blocking_hops']).mean:.0f}",
    ]


def _attack_figures(results: Sequence[Result]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for safety, (free, _) in SAFETIES.items():
        found[f"noise_{safety}"] = round(noise(results, free), 4)
        for num in NUM_LIARS:
            for attack in ATTACKS[safety]:
                arm = attack_name(attack, num, safety)
                found[arm] = _figure(ratio(results, arm, free))
    return found


def _arm_figures(runs: Sequence[Result]) -> dict[str, Any]:
    return {
        "value": _spread(runs, mean_value).rounded(),
        "merged": _spread(runs, lambda run: run["merged"]).rounded(),
        "training": _spread(runs, mean_training).rounded(),
        "consensus": round(_spread(runs, lambda run: run["consensus"]).mean, 4),
        "sent_bytes": round(_spread(runs, lambda run: run["sent_bytes"]).mean),
        "hops": round(_spread(runs, lambda run: run["hops"]).mean, 1),
        "blocking_hops": round(_spread(runs, lambda run: run["blocking_hops"]).mean, 1),
        "num_seeds": len(runs),
    }


def _target(result: Result) -> float:
    return result["target"]


def _spread(runs: Sequence[Result], value: Value) -> Spread:
    return Spread.of(value(run) for run in runs)


def _figure(spread: Spread) -> dict[str, float] | None:
    return spread.rounded() if spread.values else None


def introduction() -> list[str]:
    """What was done, in sentences."""
    return [
        f"{NUM_REPLICAS} replicas of the bundled policy's adapter, each with data of its own, merge every H inner steps. What "
        "merges in pairs is the Merger that a node runs, over a pairing in memory; DiLoCo is the same outer step on the mean "
        "of all. Supervised: right answers to three tasks in a wording that the policy does not know. RL: rollouts and "
        "training of a node.",
        "Spread is the root mean square distance of replicas from their mean, over the distance of the mean from the start. "
        "A hop is a message that must wait for another: one per exchange in pairs, 2·log₂N per tree all-reduce. DiLoCo at "
        "equal hops merges that many times less often. Overlapped: training goes on for half of H during the exchange.",
        "Hostile: as many hostile names as honest replicas. Their adapter is the mean of the honest ones with a backdoor: it has "
        "learned one word after a trigger, beside ordinary tasks. Hostile part: coefficient of what honest adapters have moved, "
        "along that difference. Trigger rate: probability of the word after the trigger. Undefended: names are alike, strangers "
        "are not bounded, newcomers have no gate. The momentum of the own training and the bound of a half in a final merge are "
        "in all arms.",
        "Mean ± standard deviation over seeds; ratios are paired by seed.",
    ]


def write_all(folder: Path, parts: Sequence[Part], results: Sequence[Result]) -> tuple[Path, list[Table]]:
    """report.html, table.md and, where anything was measured on the way, curves.png in `folder`. Returns the report and its
    tables.
    """
    tables = [table for part in parts for table in part_tables(results, part)]
    drawn = curves(results)
    picture = plot(drawn) if drawn else b""
    if picture:
        replace_file(folder / "curves.png", picture, SHARED)
    text = "\n\n".join(f"{table.title}\n\n{table.markdown()}" for table in tables) + "\n"
    replace_file(folder / "table.md", text, SHARED)
    report = folder / "report.html"
    write_report(report, "What merging without an all-reduce gives", introduction(), tables, picture)
    return report, tables
