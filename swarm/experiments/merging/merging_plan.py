"""The cells of the merging experiment, with the companies and stages of its part `hostile`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from swarm.experiments.cells import Cell, chosen_names
from swarm.experiments.merging.arms import PARTS, MergingArm, Part

Stage = Literal["live", "final", "newcomers"]
"""Merging while nodes train, the final merge, and nodes that join."""
STAGES: Sequence[Stage] = get_args(Stage)


@dataclass(frozen=True, slots=True)
class Company:
    """Who the others of a node are, and what the node makes of it."""

    is_hostile: bool = True
    """Half of the names."""
    is_defended: bool = True
    """Strangers, address groups and what strangers may move are bounded, and newcomers have a gate."""
    is_known: bool = False
    """Honest nodes know each other by experience that they admitted."""
    is_one_network: bool = False
    """Hostile names share an address group, and honest nodes have one each; else no address is known."""


QUIET, OPEN, KNOWN = "nobody hostile", "undefended", "as shipped, honest ones known"
COMPANIES: Mapping[str, Company] = {
    QUIET: Company(is_hostile=False, is_known=True, is_one_network=True),
    OPEN: Company(is_defended=False),
    KNOWN: Company(is_known=True),
    "as shipped, nobody known, one hostile network": Company(is_one_network=True),
    "as shipped, nobody known, no addresses": Company(),
}


@dataclass(frozen=True, slots=True)
class MergingPlan:
    """What to run."""

    parts: tuple[Part, ...] = get_args(Part)
    seeds: tuple[int, ...] = (0, 1, 2)
    arms: tuple[str, ...] = ()
    """Those alone, of all parts; all if empty."""
    num_steps: int = 120
    """Inner steps in supervised training."""
    inner_steps: int = 10
    """H there."""
    batch: int = 2
    num_examples: int = 128
    """Per replica and task."""
    held_out_examples: int = 24
    """Per task."""
    num_rounds: int = 72
    """Inner steps under RL."""
    inner_rounds: int = 6
    """H there."""
    groups_per_round: int = 4
    group_size: int = 8
    held_out_tasks: int = 16
    """Per source, under RL."""

    warm_steps: int = 30
    """Inner steps before hostile names come, in the part `hostile`."""
    hostile_steps: int = 80
    """Inner steps among them."""
    backdoor_steps: int = 60
    """Steps that the attacker trains its backdoor for."""

    def cells(self, part: Part) -> list[Cell]:
        """Seed after seed, so that an experiment cut short has whole seeds."""
        if part == "hostile":
            return self._hostile()
        arms = {name: arm for name, arm in PARTS[part].items() if not self.arms or name in self.arms}
        make = self._rl if part == "rl" else self._supervised
        return [make(name, arm, seed) for seed in self.seeds for name, arm in arms.items()]

    def all_cells(self) -> list[Cell]:
        """Of all parts; a cell that several parts have is there once."""
        cells = [cell for part in self.parts for cell in self.cells(part)]
        return list({cell.digest: cell for cell in cells}.values())

    def _hostile(self) -> list[Cell]:
        scale = {
            "warm_steps": self.warm_steps,
            "num_steps": self.hostile_steps,
            "inner_steps": self.inner_steps,
            "backdoor_steps": self.backdoor_steps,
            "num_examples": self.num_examples,
            "held_out_tasks": self.held_out_examples,
        }
        return [
            Cell(
                "hostile_merging",
                f"{stage}, {company}, seed {seed}",
                {"arm": company, "stage": stage, "seed": seed, "scale": scale},
            )
            for seed in self.seeds
            for stage in STAGES
            for company in COMPANIES
            if not self.arms or company in self.arms
        ]

    def _supervised(self, name: str, arm: MergingArm, seed: int) -> Cell:
        return _cell(
            name,
            arm,
            seed,
            {
                "learning": "supervised",
                "num_steps": self.num_steps,
                "inner_steps": self.inner_steps,
                "num_checks": 4,
                "batch": self.batch,
                "num_examples": self.num_examples,
                "held_out_tasks": self.held_out_examples,
            },
        )

    def _rl(self, name: str, arm: MergingArm, seed: int) -> Cell:
        return _cell(
            name,
            arm,
            seed,
            {
                "learning": "rl",
                "num_steps": self.num_rounds,
                "inner_steps": self.inner_rounds,
                "num_checks": 0,
                "groups_per_round": self.groups_per_round,
                "group_size": self.group_size,
                "held_out_tasks": self.held_out_tasks,
            },
        )


def _cell(name: str, arm: MergingArm, seed: int, rest: Mapping[str, Any]) -> Cell:
    how = {**asdict(arm), "speeds": list(arm.speeds)}
    prefix = "RL, " if rest["learning"] == "rl" else ""
    return Cell("merging", f"{prefix}{name}, seed {seed}", {"arm": name, "seed": seed, "how": how, **rest})


def chosen_parts(text: str) -> tuple[Part, ...]:
    """Parts by names with commas between them. Raises ConfigError for another name."""
    return tuple(cast(Part, name) for name in chosen_names(text, PARTS, "parts"))
