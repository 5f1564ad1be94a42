"""`Config` holds all sections and checks the rules between them."""

import hashlib
from typing import Any

from pydantic import model_validator

from swarm.config.integrations import IntegrationsSection
from swarm.config.merging import MergingSection
from swarm.config.network import NetworkSection
from swarm.config.node import CheckpointSection, EvaluationSection, NodeSection, ObservabilitySection, SwarmSection
from swarm.config.policy import BUNDLED, BUNDLED_REASONING, PolicySection
from swarm.config.rollouts import RolloutsSection
from swarm.config.section import Section
from swarm.config.sharing import SharingSection
from swarm.config.tasks import REASONING_TASKS, TasksSection
from swarm.config.training import TrainingSection
from swarm.extensions.points import ADVANTAGES, ODD_GROUPS
from swarm.types import is_mapping

_DEFAULTS_OF_LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "policy": {"max_prompt_tokens": 1024},
    "rollouts": {"max_new_tokens": 1024},
    "training": {"lr": 2e-5, "warmup_steps": 10},
}
"""Where policy.base is not a bundled policy; those learn at much higher rates."""
_DEFAULTS_OF_BUNDLED: dict[str, dict[str, dict[str, Any]]] = {
    BUNDLED: {},
    BUNDLED_REASONING: {"tasks": {"sources": REASONING_TASKS}, "rollouts": {"max_new_tokens": 256}},
}
"""The plain defaults are those of the tiny policy, whose answers have four characters."""


class Config(Section):
    """All settings of one node."""

    node: NodeSection = NodeSection()
    swarm: SwarmSection = SwarmSection()
    network: NetworkSection = NetworkSection()
    tasks: TasksSection = TasksSection()
    policy: PolicySection = PolicySection()
    rollouts: RolloutsSection = RolloutsSection()
    sharing: SharingSection = SharingSection()
    training: TrainingSection = TrainingSection()
    merging: MergingSection = MergingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    observability: ObservabilitySection = ObservabilitySection()
    integrations: IntegrationsSection = IntegrationsSection()

    @model_validator(mode="before")
    @classmethod
    def _each_kind_of_base_has_defaults_of_its_own(cls, data: Any) -> Any:
        policy = data.get("policy") if is_mapping(data) else None
        if not is_mapping(policy):
            return data
        filled = dict(data)
        defaults_of_base = _DEFAULTS_OF_BUNDLED.get(str(policy.get("base", BUNDLED)), _DEFAULTS_OF_LANGUAGE_MODELS)
        for section, defaults in defaults_of_base.items():
            given = data.get(section, {})
            if is_mapping(given):
                filled[section] = {**defaults, **given}
        return filled

    @model_validator(mode="before")
    @classmethod
    def _tasks_of_a_manifest_are_sandboxed(cls, data: Any) -> Any:
        """This holds for a configuration that was written when there was no sandbox yet, too."""
        swarm, tasks = (data.get(name) for name in ("swarm", "tasks")) if is_mapping(data) else (None, None)
        if is_mapping(swarm) and swarm.get("id") and (tasks is None or is_mapping(tasks)):
            return {**data, "tasks": {"sandboxed": True, **(tasks or {})}}
        return data

    @model_validator(mode="after")
    def _no_manifest_reads_files(self) -> "Config":
        if self.swarm.id and not self.tasks.sandboxed:
            raise ValueError(
                "tasks.sandboxed must be true in a swarm with a manifest (swarm.id), got false: its founder chose the tasks; "
                "remove your setting"
            )
        return self

    @model_validator(mode="after")
    def _batch_comes_from_somewhere(self) -> "Config":
        if self.network.backend == "off" and self.sharing.swarm_groups > 0:
            raise ValueError(
                f"sharing.swarm_groups must be 0 with network.backend off, got {self.sharing.swarm_groups}; "
                'set sharing.swarm_groups = 0 or network.backend = "hivemind"'
            )
        return self

    @model_validator(mode="after")
    def _groups_are_taken_by_others(self) -> "Config":
        largest, limit = self.rollouts.largest_group, self.sharing.max_group_size
        if self.rollouts.sizes_differ and self.sharing.publish and largest > limit:
            raise ValueError(
                f"rollouts.largest_group must be at most sharing.max_group_size, got {largest} > {limit}: "
                "others would refuse such groups; lower it"
            )
        return self

    @model_validator(mode="after")
    def _median_is_a_rollout(self) -> "Config":
        size = self.rollouts.group_size
        needs_odd_groups = ADVANTAGES.has_trait(self.training.advantage, ODD_GROUPS)
        if needs_odd_groups and size % 2 == 0:
            raise ValueError(
                f"rollouts.group_size must be odd with training.advantage {self.training.advantage}, got {size}: one rollout is "
                f"left out; set rollouts.group_size = {size + 1}"
            )
        if needs_odd_groups and self.rollouts.prune:
            raise ValueError(
                f"training.advantage {self.training.advantage} needs groups of an odd size, got rollouts.prune = true: what is "
                "left of them has any size; set one of the two otherwise"
            )
        return self

    @model_validator(mode="after")
    def _crew_samples_plainly(self) -> "Config":
        rollouts = self.rollouts
        if self.policy.pipeline.is_on and (rollouts.prune or rollouts.over_provision > 1 or rollouts.engine != "auto"):
            raise ValueError(
                "a pipelined policy goes without rollouts.prune, rollouts.over_provision and another rollouts.engine; set "
                "them to false, 1 and auto"
            )
        if self.policy.pipeline.is_on and self.merging.final_export:
            raise ValueError(
                "a pipelined policy goes without merging.final_export: no machine holds all of it; set it to false, and use "
                "`swarm export` where the base fits"
            )
        return self

    @model_validator(mode="after")
    def _silo_tells_nobody(self) -> "Config":
        if self.swarm.silo_owner and self.integrations.outside:
            raise ValueError(
                f"a silo's node tells nobody outside, got {self.integrations.outside}; leave it off, or use "
                'integrations.tensorboard, integrations.wandb = "offline" or an otel_endpoint on loopback'
            )
        return self

    @property
    def max_batch_groups(self) -> int:
        """Groups in a training batch, at most."""
        fresh = min(self.sharing.own_groups, self.rollouts.groups_per_round) + self.sharing.swarm_groups
        return fresh + self.training.replay_groups

    @property
    def swarm_id(self) -> str:
        """32 hex digits, over the swarm's name unless `swarm.id` says them; part of every signature and index key."""
        return self.swarm.id or hashlib.sha256(b"swarm-id:" + self.swarm.name.encode()).hexdigest()[:32]
