"""Which cells the sharing experiment computes.

    arms × learning rates × tuning seeds ─▶ the best rate of each arm ─▶ arms × reported seeds ─▶ figures

The learning rate of every arm, silos included, is chosen on seeds that are not reported. Where the best rate of an arm is the
first or the last of the grid, rates beyond it are tried, too. Arms that differ from another one in their members alone take the
rate of that one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Literal

from swarm.experiments.cells import Cell, Result
from swarm.experiments.sharing.arms import ARMS, SharingArm

Regime = Literal["short", "reasoning"]
LR_FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
"""What is tried beyond a grid."""
FINAL_EVALUATIONS = 3
"""At the end of a run; as many make a point of a curve."""


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """What to run."""

    arms: tuple[SharingArm, ...]
    seeds: tuple[int, ...]
    regime: Regime = "short"
    lr_factors: tuple[float, ...] = (1.0, 1.4, 2.0)
    """Learning rates that are tried, as multiples of the default. With one nothing is tuned."""
    tuning_seeds: tuple[int, ...] = (1000,)
    """Seeds on which rates are tried; a rate counts by its mean over them."""
    num_members: int = 8
    num_rounds: int = 40
    """Of silos; see `rounds_of`."""
    groups_per_round: int = 8
    group_size: int = 8
    held_out_tasks: int = 8
    """Per source and member, at every evaluation."""
    evaluation_interval_rounds: int = 2

    def tuning_cells(self) -> list[Cell]:
        """Empty where there is only one learning rate."""
        factors = self.lr_factors if len(self.lr_factors) > 1 else ()
        named = dict.fromkeys(arm.tuned_as or arm.name for arm in self.arms)
        return [cell for name in named for factor in factors for cell in self._tuning(name, factor)]

    def cells_beyond(self, results: Sequence[Result]) -> list[Cell]:
        """For each arm whose best learning rate of `results` is the lowest or the highest one, the cell of the next rate."""
        found: list[Cell] = []
        for name in dict.fromkeys(arm.tuned_as or arm.name for arm in self.arms):
            tried = [result["lr_factor"] for result in results if result["arm"] == name]
            best = _best_factor(name, results)
            lower, higher = ([one for one in LR_FACTORS if one < best], [one for one in LR_FACTORS if one > best])
            next_ones = (
                lower[-1:] if best == min(tried, default=0) else higher[:1] if best == max(tried, default=0) else []
            )
            found += [cell for factor in next_ones for cell in self._tuning(name, factor)]
        return found

    def reported_cells(self, tuned: Mapping[str, float]) -> list[Cell]:
        """Seed after seed, so that an experiment cut short has whole seeds. `tuned`: {arm: factor}."""
        return [self.cell(arm, seed, tuned[arm.name]) for seed in self.seeds for arm in self.arms]

    def _tuning(self, arm: str, factor: float) -> list[Cell]:
        return [self.cell(ARMS[arm], seed, factor) for seed in self.tuning_seeds]

    def rounds_of(self, arm: SharingArm) -> int:
        return max(2, round(self.num_rounds * arm.part_of_rounds))

    def cell(self, arm: SharingArm, seed: int, lr_factor: float) -> Cell:
        settings = {
            "arm": arm.name,
            "seed": seed,
            "lr_factor": lr_factor,
            "regime": self.regime,
            "num_members": self.num_members,
            "num_rounds": self.rounds_of(arm),
            "groups_per_round": self.groups_per_round,
            "group_size": self.group_size,
            "held_out_tasks": self.held_out_tasks,
            "evaluation_interval_rounds": self.evaluation_interval_rounds,
            # only for the digest: with other settings it is another cell
            "of_nodes": arm.node_settings(self.num_members, self.groups_per_round),
            "kinds": [asdict(kind) for kind in arm.kinds],
        }
        return Cell("sharing", f"{arm.name}, {self.regime}, lr {lr_factor:g}, seed {seed}", settings)


def tuned_factors(plan: SharingPlan, results_of: Callable[[Sequence[Cell]], Sequence[Result]]) -> dict[str, float]:
    """{arm: the best factor of its learning rate}

    `results_of` computes the cells that are needed, or gives those that are there.
    """
    if len(plan.lr_factors) == 1:
        return {arm.name: plan.lr_factors[0] for arm in plan.arms}
    cells = plan.tuning_cells()
    while True:
        results = results_of(cells)
        known = {cell.digest for cell in cells}
        beyond = [cell for cell in plan.cells_beyond(results) if cell.digest not in known]
        if not beyond:
            return {arm.name: _best_factor(arm.tuned_as or arm.name, results) for arm in plan.arms}
        cells += beyond


def _best_factor(arm: str, results: Sequence[Result]) -> float:
    """Of silos the one with the highest reward at the end, which is the target; of other arms that with the highest mean."""
    measure = final_held_out if ARMS[arm].is_silo else mean_held_out
    by_factor: dict[float, list[float]] = {}
    for result in (result for result in results if result["arm"] == arm):
        by_factor.setdefault(result["lr_factor"], []).append(measure(result))
    return max(by_factor, key=lambda factor: fmean(by_factor[factor])) if by_factor else 1.0


def final_held_out(result: Result) -> float:
    """Mean of the last evaluations of all members."""
    return fmean(fmean(one["held_out"][-FINAL_EVALUATIONS:]) for one in result["members"])


def mean_held_out(result: Result) -> float:
    """Mean over the run: what is learned early counts more often."""
    return fmean(fmean(one["held_out"]) for one in result["members"])
