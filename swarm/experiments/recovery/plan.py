"""The cells of the recovery experiment: ways of rebuilding a lost stage, failure rates, seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swarm.experiments.cells import Cell

NUM_STAGES = 6
STEP_S = 90.0
"""Time that one step of the toy stands for; it converts a rate per machine and hour into one per step."""
RATES = (0.05, 0.10, 0.16)
"""Fractions of machines that are lost per hour."""
ADAPTER_RATE = 0.16

NONE, COPY, CHECKFREE, CHECKFREE_PLUS = "no failure", "copy of the stage before", "CheckFree", "CheckFree+"
SWAPPED, OWN_COPY = "no failure, swapped order", "neighbour's copy, 10 steps old at most"
TUNED, POOR, REDUNDANT = "checkpoints, Young-Daly", "checkpoints every 100 steps", "redundant computation"
AVERAGE, BASE = "CheckFree", "base alone"

Training = Literal["full", "adapter"]
Strategy = Literal["none", "copy", "average", "plus", "own_copy", "base"]


@dataclass(frozen=True, slots=True)
class RecoveryArm:
    """One way of training and of rebuilding lost stages."""

    strategy: Strategy
    swaps: bool = False
    """Whether every other micro-batch takes the edge stages in swapped order."""

    @property
    def fails(self) -> bool:
        return self.strategy != "none"


FULL: Mapping[str, RecoveryArm] = {
    NONE: RecoveryArm("none"),
    SWAPPED: RecoveryArm("none", swaps=True),
    COPY: RecoveryArm("copy"),
    CHECKFREE: RecoveryArm("average"),
    CHECKFREE_PLUS: RecoveryArm("plus", swaps=True),
    OWN_COPY: RecoveryArm("own_copy"),
}
ADAPTER: Mapping[str, RecoveryArm] = {
    NONE: RecoveryArm("none"),
    OWN_COPY: RecoveryArm("own_copy"),
    AVERAGE: RecoveryArm("average"),
    BASE: RecoveryArm("base"),
}
DERIVED = (TUNED, POOR, REDUNDANT)
"""These lose time but no learning. Their curve is that of the run without failure on another clock; none is trained."""


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What to run."""

    base_folder: str
    """Folder for the toy on which adapters are trained."""
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = RATES
    full_arms: tuple[str, ...] = tuple(FULL)
    adapter_arms: tuple[str, ...] = tuple(ADAPTER)
    num_steps: int = 300
    adapter_steps: int = 150
    check_interval: int = 10
    """Steps between two measurements of the held-out loss."""

    def base_cell(self) -> Cell:
        """The base of all adapter cells, which must be computed first."""
        settings = {"arm": NONE, "rates": [0.0], "seed": 1000, "training": "full", "write_to": self.base_folder}
        return Cell("recovery", "base for adapters", {**settings, **self._lengths(self.num_steps)})

    def cells(self) -> list[Cell]:
        """Return the cells seed by seed, so that an interrupted experiment has complete seeds."""
        found = list[Cell]()
        for seed in self.seeds:
            for name in self.full_arms:
                found.append(self._cell("full", name, self.rates if FULL[name].fails else (0.0,), seed=seed))
            for name in self.adapter_arms:
                found.append(self._cell("adapter", name, (ADAPTER_RATE,) if ADAPTER[name].fails else (0.0,), seed=seed))
        return found

    def _cell(self, training: Training, arm: str, rates: Sequence[float], seed: int) -> Cell:
        settings: dict[str, Any] = {"arm": arm, "rates": list(rates), "seed": seed, "training": training}
        steps = self.num_steps
        if training == "adapter":
            settings, steps = (
                {**settings, "base": self.base_cell().digest, "folder": self.base_folder},
                self.adapter_steps,
            )
        return Cell("recovery", f"{training}, {arm}, seed {seed}", {**settings, **self._lengths(steps)})

    def _lengths(self, num_steps: int) -> dict[str, int]:
        return {"num_steps": num_steps, "check_interval": self.check_interval}
