"""The arms of the sharing experiment: what a member has in its batches, and what it is compared with.

silo …     own groups alone; the control gets the same filter, its own learning rate, and replays or more steps
I/J        I own groups a round, and J of the other members on top
merging    every second round each member also merges its adapter with one other, so that they divide the training
oracle     one trainer that samples the groups of all members from its one policy each round, as a data centre would
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.experiments.cells import chosen_names
from swarm.experiments.merging.arms import PUBLISHED_BETA

Settings = Mapping[str, Mapping[str, Any]]
"""{section: {setting: value}}"""

SILO, ORACLE = "silo", "oracle"
ALL = "all"
"""As `swarm_groups`: all that the others sample in a round."""


@dataclass(frozen=True, slots=True)
class MemberKind:
    """Members that are alike, in an arm whose members are not."""

    name: str
    number: int
    first_round: int = 1
    """The round in which they join."""
    interval_rounds: int = 1
    """They take part in every n-th round."""
    sources: tuple[int, ...] = ()
    """Places of the task sources that they draw from; empty for all. All of them check and are evaluated on all sources."""

    def rests(self, round_number: int) -> bool:
        since = round_number - self.first_round
        return since < 0 or since % self.interval_rounds != 0


@dataclass(frozen=True, slots=True)
class SharingArm:
    """Every member samples the same number of groups in its rounds, whatever the arm."""

    name: str
    swarm_groups: int | str = 0
    """Groups of others in a batch, or `ALL`."""
    num_members: int | None = None
    """None: as the experiment has."""
    is_oracle: bool = False
    hinted_share: float = 0.0
    """Share of the groups that a member samples which begin with hints, in place of ordinary ones."""
    settings: Settings = field(default_factory=dict[str, Mapping[str, Any]])
    """Over those of a node as it comes."""
    kinds: tuple[MemberKind, ...] = ()
    """Empty where all members are alike."""
    merge_interval_rounds: int = 0
    """How often members merge their adapters with one partner each; 0: never. They do so without the gate, whose answers would
    have to be counted: partners are honest here."""
    tuned_as: str = ""
    """The arm whose learning rate it takes, as it differs from that one in a single setting or in its members; empty for one of
    its own."""
    part_of_rounds: float = 0.6
    """Of the rounds of silos: what learns faster needs fewer to the target. An arm that does not reach it is said not to."""

    @property
    def is_silo(self) -> bool:
        """Whether its members are alike and learn alone: the best of these sets the target."""
        return not (self.swarm_groups or self.is_oracle or self.kinds or self.merge_interval_rounds)

    def members(self, usual: int) -> int:
        return sum(kind.number for kind in self.kinds) or self.num_members or usual

    def kinds_of_members(self, usual: int) -> list[MemberKind]:
        """One for each member; the oracle counts as one."""
        kinds = self.kinds or (MemberKind("", 1 if self.is_oracle else self.members(usual)),)
        return [kind for kind in kinds for _ in range(kind.number)]

    def node_settings(self, usual_members: int, own_groups: int) -> Settings:
        """Of each of its nodes; the oracle is one node."""
        members = self.members(usual_members)
        hints = int(self.hinted_share * own_groups)
        own = own_groups * members if self.is_oracle else own_groups - hints
        others = (own_groups - hints) * (members - 1) if self.swarm_groups == ALL else int(self.swarm_groups)
        chosen = {
            "rollouts": {"groups_per_round": own},
            "sharing": {"own_groups": own, "swarm_groups": others, "publish": others > 0},
        }
        # hints need verifiers in processes
        hinted: Settings = {"rollouts": {"hints": hints}, "tasks": {"sandboxed": True}} if hints else {}
        interval_s = float(self.merge_interval_rounds * members)  # each turn of a `LearnerSwarm` takes a second
        merging: Settings = {
            "merging": {"enabled": True, "interval_s": interval_s, "gate_tasks": 0, "beta": PUBLISHED_BETA}
        }
        return overlaid(TRUNCATED, chosen, hinted, merging if interval_s else {}, self.settings)


def overlaid(*layers: Settings) -> dict[str, dict[str, Any]]:
    """Settings of which later ones win."""
    found: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, settings in layer.items():
            found[section] = {**found.get(section, {}), **settings}
    return found


def _training(**settings: Any) -> Settings:
    return {"training": settings}


PUBLISHED: Settings = {
    "training": {"correction": "none", "lr_by_ess": False, "groups_per_step": 0},
    "sharing": {"likelihood_floor_quantile": 0.0, "success_quantile": 0.0},
}
"""Groups of others count as own ones do, and a round is one step (SAPO, 2509.08721)."""
PUBLISHED_IN_PLACE = overlaid(PUBLISHED, {"sharing": {"own_groups": 4}})
"""As its 4/4: they take the place of own ones."""

_SPECIALISTS = (
    MemberKind("sums", 3, sources=(0, 1)),
    MemberKind("spelling", 3, sources=(2, 3)),
    MemberKind("products", 2, sources=(4, 5)),
)
"""Each knows a third of the short tasks."""
_LATE = (MemberKind("first", 7), MemberKind("late", 1, first_round=13))
_AHEAD = (MemberKind("strong", 2), MemberKind("weak", 6, first_round=13))
_SLOW = (MemberKind("usual", 4), MemberKind("slow", 4, interval_rounds=4))

TRUNCATED = _training(correction="tis+opsm")
"""Of every arm that names no other correction: most cells are from when it was the default of nodes."""
SHAPED = _training(correction="shaped+opsm")
"""The default of nodes."""
READERS_BASELINE: Settings = {"sharing": {"baseline": "reader"}}
SOLVED_GROUPS: Settings = {"sharing": {"baseline": "reader", "solved_groups": True}}
INFORMATIVE: Settings = {"sharing": {"choice": "informative"}}
COMMON_TASKS: Settings = {"sharing": {"common_tasks": 0.25}}

_MERGING_EVERY = tuple(
    SharingArm(name, merge_interval_rounds=rounds, tuned_as="merging", part_of_rounds=1.0)
    for name, rounds in (
        ("merging, every round", 1),
        ("merging, every 4 rounds", 4),
        ("merging, every 8 rounds", 8),
        ("merging, every 16 rounds", 16),
    )
)
"""The arm of merging itself does so every second round."""

_SHORT = 0.4
"""Rounds of arms that train on at least three times as many groups of others as own ones."""

ARMS = {
    arm.name: arm
    for arm in (
        SharingArm(SILO, part_of_rounds=1.0),
        SharingArm("silo, 2 groups a step", settings=_training(groups_per_step=2), part_of_rounds=1.0),
        SharingArm("silo, 1 group a step", settings=_training(groups_per_step=1), part_of_rounds=1.0),
        SharingArm("silo, replay 8", settings=_training(replay_groups=8), part_of_rounds=1.0),
        SharingArm("silo, replay 24", settings=_training(replay_groups=24), part_of_rounds=1.0),
        SharingArm("silo, 2 epochs", settings=_training(inner_epochs=2), part_of_rounds=1.0),
        SharingArm("silo, 4 epochs", settings=_training(inner_epochs=4), part_of_rounds=1.0),
        SharingArm("silo, informative tasks", settings={"rollouts": {"task_choice": "thompson"}}, part_of_rounds=1.0),
        SharingArm("4/4 as published", 4, settings=PUBLISHED_IN_PLACE),
        SharingArm("8/8", 8),
        SharingArm("8/16, informative", 16, settings=INFORMATIVE),
        SharingArm("8/24, replay 8", 24, settings=_training(replay_groups=8), part_of_rounds=_SHORT),
        SharingArm("8/24", 24, part_of_rounds=_SHORT),
        SharingArm("8/24, shaped", 24, settings=SHAPED, tuned_as="8/all, shaped", part_of_rounds=1.0),
        SharingArm("8/all", ALL, part_of_rounds=_SHORT),
        SharingArm(
            "8/all, no correction", ALL, settings=_training(correction="none"), tuned_as="8/all", part_of_rounds=_SHORT
        ),
        SharingArm("8/all, shaped", ALL, settings=SHAPED, part_of_rounds=_SHORT),
        SharingArm("8/all, reader's baseline", ALL, settings=READERS_BASELINE, tuned_as="8/all", part_of_rounds=_SHORT),
        SharingArm(
            "8/all, both", ALL, settings=overlaid(SHAPED, READERS_BASELINE), tuned_as="8/all", part_of_rounds=_SHORT
        ),
        SharingArm("8/all, solved groups", ALL, settings=SOLVED_GROUPS, tuned_as="8/all", part_of_rounds=_SHORT),
        SharingArm("8/all, common tasks", ALL, settings=COMMON_TASKS, tuned_as="8/all", part_of_rounds=_SHORT),
        SharingArm("8/all, hints", ALL, hinted_share=1 / 4, tuned_as="8/all", part_of_rounds=_SHORT),
        SharingArm("merging", merge_interval_rounds=2, part_of_rounds=1.0),
        *_MERGING_EVERY,
        SharingArm("merging, more momentum", merge_interval_rounds=2, settings={"merging": {"alpha": 0.8}}),
        SharingArm(
            "merging, no momentum",
            merge_interval_rounds=1,
            settings={"merging": {"alpha": 0.0, "beta": 1.0}},
            tuned_as="merging",
            part_of_rounds=1.0,
        ),
        SharingArm("8/8, merging", 8, merge_interval_rounds=2, part_of_rounds=1.0),
        SharingArm("8/24, merging", 24, merge_interval_rounds=2, part_of_rounds=1.0),
        SharingArm("8/24, merging every round", 24, merge_interval_rounds=1, part_of_rounds=1.0),
        SharingArm("8/all, merging", ALL, merge_interval_rounds=2, part_of_rounds=_SHORT),
        SharingArm("8/all of 2", ALL, num_members=2, tuned_as="8/all"),
        SharingArm("8/all of 4", ALL, num_members=4, tuned_as="8/all"),
        SharingArm("8/all of 16", ALL, num_members=16, tuned_as="8/all", part_of_rounds=0.3),
        SharingArm("specialists alone", kinds=_SPECIALISTS, tuned_as=SILO, part_of_rounds=1.0),
        SharingArm("specialists, 8/all", ALL, kinds=_SPECIALISTS, tuned_as="8/all"),
        SharingArm(
            "specialists, solved groups",
            ALL,
            kinds=_SPECIALISTS,
            settings=SOLVED_GROUPS,
            tuned_as="8/all",
        ),
        SharingArm("one late, 8/all", ALL, kinds=_LATE, tuned_as="8/all", part_of_rounds=0.8),
        SharingArm("six weak, 8/all", ALL, kinds=_AHEAD, tuned_as="8/all", part_of_rounds=0.8),
        SharingArm("four slow, 8/all", ALL, kinds=_SLOW, tuned_as="8/all", part_of_rounds=0.8),
        SharingArm(ORACLE, is_oracle=True),
    )
}
DEFAULT_ARMS = tuple(ARMS)


def chosen_arms(text: str) -> tuple[SharingArm, ...]:
    """Arms by names with semicolons between them. Raises ConfigError for another name."""
    return tuple(ARMS[name] for name in chosen_names(text, ARMS, "arms", ";"))
