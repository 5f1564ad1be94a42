"""Which cells the sharing experiment computes.

    arms × learning rates × one seed ─▶ the best rate of each arm ─▶ arms × reported seeds ─▶ figures

The learning rate of every arm, silos included, is chosen on a seed that is not reported. Arms that differ from another one in
their members alone take the rate of that one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Literal

from swarm.experiments.cells import Cell, Result
from swarm.experiments.sharing.arms import ARMS, SharingArm

Regime = Literal["short", "reasoning"]
TUNING_SEED = 1000
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
        return [self.cell(ARMS[name], TUNING_SEED, factor) for name in named for factor in factors]

    def reported_cells(self, tuned: Mapping[str, float]) -> list[Cell]:
        """Seed after seed, so that an experiment cut short has whole seeds. `tuned`: {arm: factor}."""
        return [self.cell(arm, seed, tuned[arm.name]) for seed in self.seeds for arm in self.arms]

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


def tuned_factors(plan: SharingPlan, results: Sequence[Result]) -> dict[str, float]:
    """{arm: the best factor of its learning rate}

    Of silos it is the one with the highest reward at the end, which is the target; of others that with the highest mean.
    """
    if len(plan.lr_factors) == 1:
        return {arm.name: plan.lr_factors[0] for arm in plan.arms}
    found: dict[str, float] = {}
    for arm in plan.arms:
        runs = [result for result in results if result["arm"] == (arm.tuned_as or arm.name)]
        measure = final_held_out if ARMS[arm.tuned_as or arm.name].is_silo else mean_held_out
        found[arm.name] = max(runs, key=measure)["lr_factor"] if runs else 1.0
    return found


def final_held_out(result: Result) -> float:
    """Mean of the last evaluations of all members."""
    return fmean(fmean(one["held_out"][-FINAL_EVALUATIONS:]) for one in result["members"])


def mean_held_out(result: Result) -> float:
    """Mean over the run: what is learned early counts more often."""
    return fmean(fmean(one["held_out"]) for one in result["members"])
