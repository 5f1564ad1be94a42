"""The configurations of the nodes of a testbed, which differ as nodes of a real swarm do."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.config import Config, dump_toml, merge, merged, origin_in, parse, read_layers
from swarm.errors import ConfigError
from swarm.machine.safe_files import replace_file

_COMMON: Mapping[str, Any] = {
    "node": {"threads": 1},  # the nodes share the cores
    "swarm": {"name": "testbed"},
    "network": {"poll_interval_s": 0.5},  # rounds take about a second
    "evaluation": {"tasks_per_source": 48, "interval_rounds": 50},
}
"""What all nodes of a testbed share."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How a node differs from the default."""

    label: str
    """For tables and plots."""
    overrides: Mapping[str, str]
    """{dotted key: TOML literal}"""
    rounds_share: float = 1.0
    """A slower node does fewer rounds, so that all end at about the same time."""


PROFILES = (
    Profile("plain", {}),
    Profile(
        "large batch",
        {"rollouts.groups_per_round": "12", "sharing.own_groups": "12", "sharing.swarm_groups": "12"},
    ),
    Profile("slow", {"node.duty_cycle": "0.5", "rollouts.group_size": "6"}, rounds_share=0.5),
    Profile("LoRA rank 8", {"policy.lora.rank": "8", "policy.lora.alpha": "16.0"}),
)
"""Taken in turn when there are more nodes."""

MERGING: Mapping[str, str] = {
    "merging.enabled": "true",
    "merging.final": "true",
    "merging.final_interval_s": "30.0",
    "merging.final_tries": "3",
    "merging.final_window_s": "30.0",
}
"""Over the defaults where the nodes of a testbed merge. Nodes of the profile with another adapter shape are of another lineage
and find no partner in less than eight nodes."""


def final_merge_time(minutes: float, now: float) -> tuple[dict[str, str], float]:
    """Settings that end training after `minutes` for a final merge, and the minutes until that is surely over.

    `now`: seconds since 1970.
    """
    interval_s, window_s, tries = (
        float(MERGING[f"merging.final_{part}"]) for part in ("interval_s", "window_s", "tries")
    )
    final_at = math.ceil((now + 60 * minutes) / interval_s) * interval_s
    most_exchanges = 8  # of 64 nodes
    return {"merging.final_at": str(final_at)}, (final_at - now + interval_s * tries + window_s * most_exchanges) / 60


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node of a testbed before it starts."""

    name: str
    label: str
    config: Config
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables for its process, over those of this one."""

    @property
    def folder(self) -> Path:
        return self.config.node.dir

    @property
    def config_path(self) -> Path:
        return self.folder.with_suffix(".toml")

    def write(self) -> None:
        self.config_path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.config_path, dump_toml(self.config))


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user asked for, over the profiles."""

    num_nodes: int = 4
    num_rounds: int = 150
    seed: int = 0
    configs: Sequence[Path] = ()
    """TOML files for all nodes; a node's profile wins over them."""
    overrides: Mapping[str, str] | None = None
    """{dotted key: text} for all nodes; wins over files and profiles."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Plain data in the shape of a file, for all nodes; wins over everything."""


def plan_nodes(folder: Path, request: PlanRequest, arm: Mapping[str, str] | None = None) -> list[NodePlan]:
    """Resolve a configuration per node; `arm` wins over profiles. Writes nothing. Raises ConfigError."""
    for name, value in (("nodes", request.num_nodes), ("rounds", request.num_rounds)):
        if value < 1:
            raise ConfigError(f"{name} of a testbed must be at least 1, got {value}; set {name}")
    plans = []
    for number in range(request.num_nodes):
        profile = PROFILES[number % len(PROFILES)]
        name = f"node-{number + 1}"
        own = {
            "node.dir": json.dumps(str(folder / name)),
            "node.seed": str(1000 * request.seed + number),
            "node.max_rounds": str(max(1, round(request.num_rounds * profile.rounds_share))),
        }
        overrides = {**profile.overrides, **own, **(arm or {}), **(request.overrides or {})}
        layers = read_layers(request.configs, overrides)
        config = parse(merge(merge(_COMMON, merged(layers)), request.settings), origin_in(layers))
        if config.node.dir != folder / name:
            raise ConfigError(f"node.dir is chosen per node here, got {config.node.dir}; set --dir in its place")
        plans.append(NodePlan(name, profile.label, config))
    return plans
