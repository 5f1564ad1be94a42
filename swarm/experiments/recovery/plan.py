"""Which cells the recovery experiment has: ways of rebuilding a lost stage, failure rates, seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swarm.experiments.cells import Cell

NUM_STAGES = 6
STEP_S = 90.0
"""What one step of the toy stands for; a rate per machine and hour becomes one per step by it."""
RATES = (0.05, 0.10, 0.16)
"""Share of machines that are lost per hour."""
ADAPTER_RATE = 0.16

NONE, COPY, CHECKFREE, CHECKFREE_PLUS = "no failure", "copy of the stage before", "CheckFree", "CheckFree+"
SWAPPED, OWN_COPY = "no failure, swapped order", "neighbour's copy, 10 steps old at most"
TUNED, POOR, REDUNDANT = "checkpoints, Young-Daly", "checkpoints every 100 steps", "redundant computation"
AVERAGE, BASE = "CheckFree", "base alone"

Training = Literal["full", "adapter"]
Strategy = Literal["none", "copy", "average", "plus", "own_copy", "base"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of training and of rebuilding what is lost."""

    strategy: Strategy
    swaps: bool = False
    """Every other micro-batch with the edge stages in swapped order."""

    @property
    def fails(self) -> bool:
        return self.strategy != "none"


FULL: Mapping[str, Arm] = {
    NONE: Arm("none"),
    SWAPPED: Arm("none", swaps=True),
    COPY: Arm("copy"),
    CHECKFREE: Arm("average"),
    CHECKFREE_PLUS: Arm("plus", swaps=True),
    OWN_COPY: Arm("own_copy"),
}
ADAPTER: Mapping[str, Arm] = {
    NONE: Arm("none"),
    OWN_COPY: Arm("own_copy"),
    AVERAGE: Arm("average"),
    BASE: Arm("base"),
}
DERIVED = (TUNED, POOR, REDUNDANT)
"""They lose time and no learning, so their curve is that of no failure on another clock; nothing is trained for them."""


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What to run."""

    base_folder: str
    """Where the toy that adapters are trained on is written."""
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = RATES
    full_arms: tuple[str, ...] = tuple(FULL)
    adapter_arms: tuple[str, ...] = tuple(ADAPTER)
    num_steps: int = 300
    adapter_steps: int = 150
    check_interval: int = 10
    """Steps between two measurements of the held-out loss."""

    def base_cell(self) -> Cell:
        """The base of all adapter cells; to be computed before them."""
        settings = {"arm": NONE, "rates": [0.0], "seed": 1000, "training": "full", "write_to": self.base_folder}
        return Cell("recovery", "base for adapters", {**settings, **self._lengths(self.num_steps)})

    def cells(self) -> list[Cell]:
        """Seed after seed, so that an experiment cut short has whole seeds."""
        found = list[Cell]()
        for seed in self.seeds:
            for name in self.full_arms:
                found.append(self._cell("full", name, self.rates if FULL[name].fails else (0.0,), seed))
            for name in self.adapter_arms:
                found.append(self._cell("adapter", name, (ADAPTER_RATE,) if ADAPTER[name].fails else (0.0,), seed))
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
