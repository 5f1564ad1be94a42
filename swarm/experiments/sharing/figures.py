"""How many own samples, and how much processor time, a member needs to what the best silo reaches in the end.

    held-out curve ─ mean of 3 evaluations ─▶ first crossing of the target ─▶ own tokens, seconds ─▶ speed-up over the silo

The target of a seed is the mean of the last three evaluations of the silo arm with the highest one. What the silo needed is
where it first reached that: a silo that learns no more does not make others look faster by going on.

Where the curve of one seed is noisier than what it gains, its crossing says little. So a second table has the crossings of the
mean curves over the seeds: of half, three quarters and all of what the best silo gains.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from swarm.experiments.cells import Result
from swarm.experiments.sharing.arms import ARMS, ORACLE
from swarm.experiments.sharing.plan import FINAL_EVALUATIONS
from swarm.machine.safe_files import SHARED, replace_file
from swarm.report.tables import Curves, Spread, Table, plot, write_report

SAMPLING_OVER_TRAINING = 4.0
"""What a token costs to sample over what it costs to train on, for `Curve.clock`: with large models 80 % of the time of RLHF goes
into sampling (OpenRLHF, 2405.11143). It is taken from there, not measured here."""
PARTS_OF_GAIN = (0.5, 0.75, 1.0)
"""Of what the best silo gains from its start to its end, by the mean curves."""
SPENT = ("tokens", "seconds", "clock")
"""What a `Curve` counts beside the reward."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out reward of one run by what a member had spent."""

    rewards: tuple[float, ...]
    tokens: tuple[float, ...]
    """Own sampled tokens until then."""
    seconds: tuple[float, ...]
    """Own processor time until then."""
    clock: tuple[float, ...]
    """Time until then, in sampled tokens, where sampling costs `SAMPLING_OVER_TRAINING` times as much as training."""

    @classmethod
    def of(cls, result: Result, kind: str | None = None) -> "Curve":
        """Mean over the members of a kind, or over all."""
        members = [one for one in result["members"] if kind in (None, one["kind"])]
        rewards = _mean_column(one["held_out"] for one in members)
        tokens, seconds, trained = (
            [0.0, *itertools.accumulate(_mean_column(one[name] for one in members))]
            for name in ("tokens", "processor_s", "tokens_trained")
        )
        clock = [sampled + learned / SAMPLING_OVER_TRAINING for sampled, learned in zip(tokens, trained, strict=True)]
        rounds = result["evaluated"]
        points = range(len(rounds))
        windows = [points[end - FINAL_EVALUATIONS : end] for end in range(FINAL_EVALUATIONS, len(rounds) + 1)] or [
            points
        ]
        return cls(
            tuple(fmean(rewards[place] for place in window) for window in windows),
            tuple(fmean(tokens[rounds[place]] for place in window) for window in windows),
            tuple(fmean(seconds[rounds[place]] for place in window) for window in windows),
            tuple(fmean(clock[rounds[place]] for place in window) for window in windows),
        )

    @classmethod
    def mean(cls, curves: Sequence["Curve"]) -> "Curve":
        """Point by point, of curves of equal length."""
        return cls(
            *(
                tuple(fmean(column) for column in zip(*(getattr(curve, one.name) for curve in curves), strict=True))
                for one in fields(cls)
            )
        )

    def first(self, target: float, by: str) -> float | None:
        """What was spent, of `SPENT`, where the curve first reaches the target, between two points in proportion; else None."""
        spent = getattr(self, by)
        for place, reward in enumerate(self.rewards):
            if reward >= target:
                if not place:
                    return spent[0]
                before = self.rewards[place - 1]
                part = (target - before) / (reward - before)
                return spent[place - 1] + part * (spent[place] - spent[place - 1])
        return None


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm, or one kind of its members, over the seeds that it and all silos have."""

    arm: str
    lr_factor: float
    final: Spread
    """Held-out reward at the end."""
    speedups: Mapping[str, Spread]
    """By each of `SPENT`: of the best silo to its target, over that of a member of this arm."""
    num_seeds: int
    num_missed: int
    """Seeds in which it never reached the target."""
    share_of_oracle: Spread


def summarize(results: Sequence[Result]) -> list[ArmSummary]:
    """Arms in the order of `ARMS`, of unlike members one for each kind; seeds that some silo lacks are left out."""
    curves, factors = _curves(results), dict[str, float]()
    for result in results:
        factors.update((row, result["lr_factor"]) for row in _rows_of(result["arm"]))
    arms = list(dict.fromkeys(arm for arm, _ in curves))
    silos = _silos(arms)
    known = sorted({seed for _, seed in curves})
    best = {
        seed: max((curves[silo, seed] for silo in silos), key=lambda curve: curve.rewards[-1])
        for seed in known
        if silos and all((silo, seed) in curves for silo in silos)
    }
    by_tokens = {
        (arm, seed): _speedup(curve, best[seed], "tokens") for (arm, seed), curve in curves.items() if seed in best
    }
    found: list[ArmSummary] = []
    for arm in arms:
        seeds = [seed for seed in best if (arm, seed) in curves]
        reached = [seed for seed in seeds if by_tokens[arm, seed] is not None]
        speedups = {by: [_speedup(curves[arm, seed], best[seed], by) for seed in reached] for by in SPENT}
        of_oracle = [
            (mine, theirs)
            for seed in reached
            if (mine := by_tokens[arm, seed]) and (theirs := by_tokens.get((ORACLE, seed)))
        ]
        found.append(
            ArmSummary(
                arm=arm,
                lr_factor=factors[arm],
                final=Spread.of(curves[arm, seed].rewards[-1] for seed in seeds),
                speedups={by: Spread.of(one for one in each if one is not None) for by, each in speedups.items()},
                num_seeds=len(seeds),
                num_missed=len(seeds) - len(reached),
                share_of_oracle=Spread.of(mine / theirs for mine, theirs in of_oracle),
            )
        )
    return found


def table(summaries: Sequence[ArmSummary]) -> Table:
    """Every arm as mean ± standard deviation over seeds."""
    rows = [
        [
            one.arm, f"{one.lr_factor:g}", one.final.text(3), _text(one.speedups["tokens"], one.num_missed),
            _text(one.share_of_oracle), _text(one.speedups["seconds"]), _text(one.speedups["clock"]), str(one.num_seeds),
        ]
        for one in summaries
    ]  # fmt: skip
    headers = [
        "arm", "lr ×", "held-out at its end", "× by own tokens", "of the oracle", "× by processor time", "× by the clock",
        "seeds",
    ]  # fmt: skip
    return Table("To what the best silo reaches", headers, rows)


def table_of_means(results: Sequence[Result]) -> Table:
    """What the best silo needed over what an arm needed, to parts of what that silo gains; a dash where the arm never gets there.

    By the mean curves over the seeds that all arms have; without such seeds there is no row. From three seeds on, each
    factor is followed by the least and the most of it if one of the seeds is left out: how much hangs on a single one.
    """
    by_seed = _curves(results)
    arms = list(dict.fromkeys(arm for arm, _ in by_seed))
    seeds = [seed for seed in dict.fromkeys(seed for _, seed in by_seed) if all((arm, seed) in by_seed for arm in arms)]
    final = {arm: Spread.of(by_seed[arm, seed].rewards[-1] for seed in seeds) for arm in arms}
    silo = max(_silos(arms) if seeds else [], key=lambda arm: final[arm].mean, default=None)
    rows: list[list[str]] = []
    if silo is not None:
        starts = {  # the silo's own, so that no row depends on which others there are
            result["seed"]: fmean(one["held_out"][0] for one in result["members"])
            for result in results
            if result["arm"] == silo
        }
        of_all = _mean_factors(by_seed, starts, arms, silo, seeds)
        left_out = [[seed for seed in seeds if seed != left] for left in seeds] if len(seeds) > 2 else []
        of_parts = [_mean_factors(by_seed, starts, arms, silo, part) for part in left_out]
        for arm in arms:
            cells = [
                ", ".join(
                    _factor(factor) + _range([] if arm == silo else [part[arm, by][place] for part in of_parts])
                    for place, factor in enumerate(of_all[arm, by])
                )
                for by in SPENT
            ]
            needed_s = fmean(by_seed[arm, seed].seconds[-1] for seed in seeds)
            rows.append([arm, final[arm].text(3), *cells, f"{needed_s:.0f} s"])
    headers = [
        "arm", "held-out at its end", "× by own tokens", "× by processor time", "× by the clock", "processor time at its end",
    ]  # fmt: skip
    return Table("To half, three quarters and all of what the best silo gains, by the mean curves", headers, rows)


def _mean_factors(
    by_seed: Mapping[tuple[str, int], Curve],
    starts: Mapping[int, float],
    arms: Sequence[str],
    silo: str,
    seeds: Sequence[int],
) -> dict[tuple[str, str], list[float | None]]:
    """{(arm, what is spent): factor to each of `PARTS_OF_GAIN`}, by the mean curves over `seeds`; None: it never gets there.

    `starts`: {seed: held-out reward of the silo before training}.
    """
    curves = {arm: Curve.mean([by_seed[arm, seed] for seed in seeds]) for arm in arms}
    best, start = curves[silo], fmean(starts[seed] for seed in seeds)
    targets = [start + part * (best.rewards[-1] - start) for part in PARTS_OF_GAIN]
    return {
        (arm, by): [_speedup(curve, best, by, target) for target in targets]
        for arm, curve in curves.items()
        for by in SPENT
    }


def _factor(factor: float | None) -> str:
    return "–" if factor is None else f"{factor:.1f}"


def _range(factors: Sequence[float | None]) -> str:
    """From the least, which is never to get there, to the most."""
    if not factors:
        return ""
    ordered = sorted(factors, key=lambda factor: factor or 0.0)
    return f" ({_factor(ordered[0])} to {_factor(ordered[-1])})"


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """What a program reads."""
    return {
        one.arm: {
            "lr_factor": one.lr_factor,
            "held_out": one.final.rounded(),
            **{f"speedup_{by}": speedup.rounded() for by, speedup in one.speedups.items()},
            "share_of_oracle": one.share_of_oracle.rounded(),
            "seeds_missed": one.num_missed,
        }
        for one in summarize(results)
    }


def curves_of(results: Sequence[Result]) -> list[Curves]:
    """Held-out reward by own tokens and by processor time, mean over seeds."""
    means = {
        arm: Curve.mean([Curve.of(result) for result in results if result["arm"] == arm])
        for arm in ARMS
        if any(result["arm"] == arm for result in results)
    }
    return [
        Curves(title, label, "held-out reward", {arm: (getattr(mean, by), mean.rewards) for arm, mean in means.items()})
        for by, title, label in (
            ("tokens", "by what a member samples", "own tokens"),
            ("seconds", "by what a member computes", "processor seconds"),
        )
    ]


def write_all(folder: Path, introduction: Sequence[str], results: Sequence[Result]) -> tuple[Path, list[Table]]:
    """report.html, curves.png and table.md in `folder`. Returns the report and its tables."""
    tables = [table(summarize(results)), table_of_means(results)]
    picture = plot(curves_of(results))
    replace_file(folder / "curves.png", picture, SHARED)
    replace_file(folder / "table.md", "\n\n".join(one.markdown() for one in tables) + "\n", SHARED)
    report = folder / "report.html"
    write_report(report, "What joining is worth", introduction, tables, picture)
    return report, tables


def _mean_column(rows: Iterable[Sequence[float]]) -> list[float]:
    return [fmean(column) for column in zip(*rows, strict=True)]


def _curves(results: Sequence[Result]) -> dict[tuple[str, int], Curve]:
    """{(row of a table, seed): its curve}, in the order of `ARMS`."""
    return {
        (row, result["seed"]): Curve.of(result, kind)
        for name in ARMS
        for row, kind in _rows_of(name).items()
        for result in results
        if result["arm"] == name
    }


def _rows_of(arm: str) -> dict[str, str | None]:
    """{row: kind of members}; of unlike members one for each kind."""
    return {f"{arm}: {kind.name}": kind.name for kind in ARMS[arm].kinds} or {arm: None}


def _silos(rows: Iterable[str]) -> list[str]:
    return [row for row in rows if row in ARMS and ARMS[row].is_silo]


def _speedup(own: Curve, silo: Curve, by: str, target: float | None = None) -> float | None:
    """To what the silo has at its end, or to `target`; None where one of them never gets there."""
    target = silo.rewards[-1] if target is None else target
    needed, by_silo = own.first(target, by), silo.first(target, by)
    return None if needed is None or by_silo is None else by_silo / max(needed, 1e-9)


def _text(spread: Spread, num_missed: int = 0) -> str:
    missed = f" ({num_missed} missed)" if num_missed else ""
    return (spread.text(2) if spread.values else "") + missed
