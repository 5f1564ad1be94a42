"""`Config` holds all sections and checks the rules between them."""

import hashlib
from collections.abc import Mapping
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from swarm.config.integrations import IntegrationsSection
from swarm.config.merging import MergingSection
from swarm.config.network import NetworkSection
from swarm.config.node import CheckpointSection, EvaluationSection, NodeSection, ObservabilitySection, SwarmSection
from swarm.config.policy import BUNDLED, BUNDLED_BASES, BUNDLED_REASONING, PolicySection
from swarm.config.rollouts import RolloutsSection
from swarm.config.section import Section
from swarm.config.sharing import SharingSection
from swarm.config.tasks import REASONING_TASKS, TasksSection, WarmStartSection
from swarm.config.training import TrainingSection
from swarm.extensions.points import ADVANTAGES, ODD_GROUPS
from swarm.types import USUAL_ANSWER_TOKENS, is_mapping, is_sequence

_DEFAULTS_OF_LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "policy": {"max_prompt_tokens": 1024},
    "rollouts": {"max_new_tokens": 1024},
    "training": {"lr": 2e-5, "warmup_steps": 10},
}
"""Where policy.base is not a bundled policy; those learn at much higher rates."""
_DEFAULTS_OF_REASONING: dict[str, dict[str, Any]] = {
    "tasks": {"sources": REASONING_TASKS},
    "rollouts": {"max_new_tokens": 256},
}
_DEFAULTS_AFTER_WARM_START: dict[str, dict[str, Any]] = {"training": {"lr": 3e-4}}
"""Of a bundled policy that examples have made sure of itself: its usual rate takes that away again."""
_HELD_OUT_TASKS = 64
"""About as many answers as a round samples with the defaults."""


def _defaults_of_base(data: Mapping[str, Any], base: str) -> Mapping[str, Mapping[str, Any]]:
    """Defaults by section that differ from the plain ones. Those fit the tiny policy, whose answers have four characters."""
    if base in BUNDLED_BASES:
        start = data.get("warm_start")
        is_sure = is_mapping(start) and start.get("steps")
        return {
            **(_DEFAULTS_OF_REASONING if base == BUNDLED_REASONING else {}),
            **(_DEFAULTS_AFTER_WARM_START if is_sure else {}),
        }
    return {**_DEFAULTS_OF_LANGUAGE_MODELS, "evaluation": {"tasks_per_source": _held_out_tasks(data)}}


def _held_out_tasks(data: Mapping[str, Any]) -> int:
    """Return the held-out tasks per source of an evaluation that takes no longer than a round, between 4 and 32."""
    tasks = data.get("tasks")
    sources: object = tasks.get("sources") if is_mapping(tasks) else None
    num_sources = len(sources if is_sequence(sources) else TasksSection().sources)
    return max(4, min(32, _HELD_OUT_TASKS // max(1, num_sources)))


class Config(Section):
    """All settings of one node."""

    node: NodeSection = NodeSection()
    swarm: SwarmSection = SwarmSection()
    network: NetworkSection = NetworkSection()
    tasks: TasksSection = TasksSection()
    policy: PolicySection = PolicySection()
    warm_start: WarmStartSection = WarmStartSection()
    rollouts: RolloutsSection = RolloutsSection()
    sharing: SharingSection = SharingSection()
    training: TrainingSection = TrainingSection()
    merging: MergingSection = MergingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    observability: ObservabilitySection = ObservabilitySection()
    integrations: IntegrationsSection = IntegrationsSection()

    @model_validator(mode="wrap")
    @classmethod
    def _each_kind_of_base_has_defaults_of_its_own(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """They do not count as set by the user: `model_fields_set` of their sections leaves them out."""
        policy = data.get("policy", {}) if is_mapping(data) else None
        if not is_mapping(policy):
            return validate(data)
        defaults = _defaults_of_base(data, str(policy.get("base", BUNDLED)))
        given = {section: data.get(section, {}) for section in defaults}
        filled = {section: {**defaults[section], **own} for section, own in given.items() if is_mapping(own)}
        config = validate({**data, **filled})
        for section in filled:
            getattr(config, section).model_fields_set.difference_update(
                defaults[section].keys() - given[section].keys()
            )
        return config

    @model_validator(mode="before")
    @classmethod
    def _peers_may_answer_as_long_as_this_node(cls, data: Any) -> Any:
        rollouts, sharing = (
            (data.get(name, {}) for name in ("rollouts", "sharing")) if is_mapping(data) else (None, None)
        )
        longest = rollouts.get("max_new_tokens") if is_mapping(rollouts) else None
        if not isinstance(longest, int) or longest <= USUAL_ANSWER_TOKENS or not is_mapping(sharing):
            return data
        return {**data, "sharing": {"max_answer_tokens": longest, **sharing}}

    @model_validator(mode="before")
    @classmethod
    def _without_a_network_nothing_is_shared(cls, data: Any) -> Any:
        network, sharing = (data.get(name, {}) for name in ("network", "sharing")) if is_mapping(data) else (None, None)
        if is_mapping(network) and network.get("backend") == "off" and is_mapping(sharing):
            return {**data, "sharing": {"swarm_groups": 0, "publish": False, **sharing}}
        return data

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
    def _hints_come_from_somewhere(self) -> "Config":
        if self.rollouts.hints and not self.sharing.swarm_groups:
            raise ValueError(
                f"rollouts.hints must be 0 with sharing.swarm_groups = 0, got {self.rollouts.hints}: a node that reads no groups "
                "of others has no hints; set rollouts.hints = 0, or sharing.swarm_groups above 0"
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
        is_plain = (
            not rollouts.prune
            and rollouts.over_provision == 1
            and not rollouts.hints
            and not rollouts.overlap
            and rollouts.engine == "auto"
        )
        if self.policy.pipeline.is_on and not is_plain:
            raise ValueError(
                "a pipelined policy goes without rollouts.prune, rollouts.over_provision, rollouts.hints, rollouts.overlap and "
                "another rollouts.engine; set them to false, 1, 0, false and auto"
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

    @model_validator(mode="after")
    def _judged_groups_stay_private(self) -> "Config":
        """Readers cannot compute the reward of a language model again: only members of a silo believe each other."""
        if not self.tasks.has_judge or self.network.backend == "off":
            return self
        if not self.swarm.silo_owner and (self.sharing.publish or self.sharing.swarm_groups):
            raise ValueError(
                f"signal judge must be for own groups or a silo, as strangers cannot compute its reward again, got "
                f"sharing.publish = {str(self.sharing.publish).lower()} and sharing.swarm_groups = {self.sharing.swarm_groups}; "
                'set them to false and 0, or network.backend = "off", or remove the signal'
            )
        if self.swarm.silo_owner and not self.tasks.judge.is_near:
            raise ValueError(
                "a silo's texts must not leave it, so tasks.judge.base_url must be localhost or the number of a private "
                f"address, got {self.tasks.judge.base_url or 'none'}; run the judge there"
            )
        return self

    @property
    def max_shared_groups(self) -> int:
        """Groups in a training batch that were sampled this round without a hint, or by others, at most."""
        return min(self.sharing.own_groups, self.rollouts.groups_per_round) + self.sharing.swarm_groups

    @property
    def swarm_id(self) -> str:
        """32 hex digits, over the swarm's name unless `swarm.id` says them; part of every signature and index key."""
        return self.swarm.id or hashlib.sha256(b"swarm-id:" + self.swarm.name.encode()).hexdigest()[:32]
