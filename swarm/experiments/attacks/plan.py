"""Plans the experiment: which attacks, by how many nodes, with which defence."""

from dataclasses import dataclass, field
from typing import Any

from swarm.experiments.cells import Cell, chosen_names
from swarm.extensions import points

ATTACKS: tuple[str, ...] = points.ATTACKS.names
ALL = "all in turn"
"""Every hostile node goes from one attack to the next, round by round."""
ABSENT = "absent"
"""Hostile nodes send nothing. This shows what their absence costs, since honest nodes have fewer to learn from."""
EPISODES = "forged episodes"
"""Its runs play a game in place of the other tasks, so they are compared with a game without an attack."""
DEFENDED, OPEN = "defended", "undefended"
DEFENCES = (DEFENDED, OPEN)


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1)
    numbers: tuple[int, ...] = (1, 2, 4)
    """Numbers of hostile nodes, of `num_nodes` in all, where they attack in every way in turn."""
    attacks: tuple[str, ...] = ATTACKS
    """Attacks that are run alone, by `max(numbers)` hostile nodes."""
    num_nodes: int = 8
    num_rounds: int = 24
    groups_per_round: int = 4
    """Own groups of a round: half of a node's default, for time."""
    swarm_groups: int = 12
    """Most groups of others in a batch: half of a node's default."""
    group_size: int = 8
    hostile_groups: int = 4
    """Groups of a hostile node in a round."""
    num_sybils: int = 50
    """Names that one hostile node takes in a round of the attack `sybils`."""
    held_out_tasks: int = 16
    """Held-out tasks per source and node."""
    correction: str | None = None
    """`training.correction` of honest nodes; None: as it comes."""
    baseline: str | None = None
    """`sharing.baseline` of honest nodes; None: as it comes."""
    defences: tuple[str, ...] = field(default=DEFENCES)
    """A run without a defence only shows what there is to lose, so it is computed with the first seed alone."""

    @property
    def most(self) -> int:
        return max(self.numbers)

    def cells(self) -> list[Cell]:
        """The runs without an attack first, then all attacks in turn from the most hostile nodes down, then each attack alone."""
        runs = [(seed, DEFENDED) for seed in self.seeds if DEFENDED in self.defences]
        runs += [(seed, OPEN) for seed in self.seeds[:1] if OPEN in self.defences]
        numbers = sorted(self.numbers, reverse=True)
        quiet = [self._cell("none", 0, defence, seed) for seed, defence in runs]
        in_turn = [self._cell(ALL, number, defence, seed) for number in numbers for seed, defence in runs]
        alone = [self._cell(attack, self.most, defence, seed) for seed, defence in runs for attack in self.attacks]
        quiet += [self._cell(EPISODES, 0, DEFENDED, seed) for seed in self.seeds if EPISODES in self.attacks]
        absent = [self._cell(ABSENT, self.most, DEFENDED, seed) for seed in self.seeds]
        return quiet + absent + in_turn + alone

    def _cell(self, attack: str, num_hostile: int, defence: str, seed: int) -> Cell:
        settings: dict[str, Any] = {
            "attack": attack,
            "num_hostile": num_hostile,
            "defence": defence,
            "seed": seed,
            "num_nodes": self.num_nodes,
            "num_rounds": self.num_rounds,
            "groups_per_round": self.groups_per_round,
            "swarm_groups": self.swarm_groups,
            "group_size": self.group_size,
            "hostile_groups": self.hostile_groups,
            "num_sybils": self.num_sybils,
            "held_out_tasks": self.held_out_tasks,
        }
        named = {"correction": self.correction, "baseline": self.baseline}
        settings |= {name: value for name, value in named.items() if value is not None}
        if attack == ALL:
            settings["turns"] = list(ATTACKS)  # only for the digest: with other attacks it is another cell
        return Cell("attacks", f"{attack}, {num_hostile} hostile, {defence}, seed {seed}", settings)


def chosen_attacks(text: str) -> tuple[str, ...]:
    """The attacks of a text with names between commas. Raises ConfigError for an unknown name."""
    return tuple(chosen_names(text, ATTACKS, "attacks"))
