"""Every setting of a node: one frozen pydantic section per package, each knob documented beneath it.

`load(paths, overrides)` merges TOML files left to right, then `section.key=value` overrides, and validates once. Commands put
the variables of the environment between the two (`read_layers`).
An unknown key is an error that names the nearest known one. Nothing here imports torch.
"""

from swarm.config.config import Config
from swarm.config.integrations import IntegrationsSection
from swarm.config.load import (
    Layer,
    Origin,
    adjusted,
    dump_toml,
    kept_origin,
    kept_toml,
    load,
    merge,
    merged,
    origin_in,
    parse,
    read,
    read_layers,
    ready_configs,
    resolve,
    resolve_paths,
    setting_variables,
    told_place,
    variable_of,
    without_settings,
)
from swarm.config.merging import MergingSection, largest_stable_beta
from swarm.config.network import NetworkSection
from swarm.config.node import CheckpointSection, EvaluationSection, NodeSection, ObservabilitySection, SwarmSection
from swarm.config.policy import BUNDLED_BASES, LoraSection, PipelineSection, PolicySection
from swarm.config.rewards import LANGUAGE, JudgeSection, LanguageSection, RewardSignalSection
from swarm.config.rollouts import RolloutsSection
from swarm.config.section import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section, SwarmName
from swarm.config.sharing import SharingSection
from swarm.config.tasks import (
    DEMO_TASKS,
    LOCAL_SETTINGS,
    REASONING_TASKS,
    ExampleSection,
    TaskSourceFacts,
    TaskSourceSection,
    TasksSection,
    ToolSection,
    WarmStartSection,
)
from swarm.config.training import TrainingSection

__all__ = [
    "BUNDLED_BASES",
    "DEMO_TASKS",
    "LANGUAGE",
    "LOCAL_SETTINGS",
    "REASONING_TASKS",
    "CheckpointSection",
    "Config",
    "EvaluationSection",
    "ExampleSection",
    "Fraction",
    "IntegrationsSection",
    "JudgeSection",
    "LanguageSection",
    "Layer",
    "LoraSection",
    "MergingSection",
    "NetworkSection",
    "NodeSection",
    "NonNegativeInt",
    "ObservabilitySection",
    "Origin",
    "PipelineSection",
    "PolicySection",
    "PositiveFloat",
    "PositiveInt",
    "RewardSignalSection",
    "RolloutsSection",
    "Section",
    "SharingSection",
    "SwarmName",
    "SwarmSection",
    "TaskSourceFacts",
    "TaskSourceSection",
    "TasksSection",
    "ToolSection",
    "TrainingSection",
    "WarmStartSection",
    "adjusted",
    "dump_toml",
    "kept_origin",
    "kept_toml",
    "largest_stable_beta",
    "load",
    "merge",
    "merged",
    "origin_in",
    "parse",
    "read",
    "read_layers",
    "ready_configs",
    "resolve",
    "resolve_paths",
    "setting_variables",
    "told_place",
    "variable_of",
    "without_settings",
]
