"""The base class of all sections, common types of values, and the old names of renamed settings."""

import functools
import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from swarm.errors import ConfigError
from swarm.types import is_mapping

logger = logging.getLogger(__name__)

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
SwarmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

RENAMED = {
    "merging.search_s": "merging.search_timeout_s",
    "network.max_connections_inbound": "network.max_concurrent_requests",
    "policy.pipeline.by_hand": "policy.pipeline.self_assigned",
    "policy.pipeline.crew": "policy.pipeline.machines",
    "rollouts.prune_after": "rollouts.prune_interval_tokens",
    "rollouts.second_round": "rollouts.extra_rollouts",
    "tasks.fenced": "tasks.sandboxed",
    "tasks.run_code_unfenced": "tasks.run_code_unsandboxed",
    "tasks.unfenced_rewards": "tasks.unsandboxed_rewards",
}
"""{old name: present name} of settings. Both are in the same section, and both are accepted wherever settings are read.

None of them is part of a signed or hashed form (manifest, lineage, swarm id)."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def with_present_names(settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """`settings`, nested as in a file, with every renamed setting under its present name.

    `where` says in which file or place the settings are. If it is given, each old name is reported once per process.
    Raises ConfigError for a setting that is given under both names.
    """
    found = dict(settings)
    for old, new in RENAMED.items():
        *sections, old_name = old.split(".")
        found = _rename(found, sections, old_name, new, where)
    return found


def _rename(settings: dict[str, Any], sections: list[str], old_name: str, new: str, where: str) -> dict[str, Any]:
    if sections:
        inner = settings.get(sections[0])
        if not is_mapping(inner):
            return settings
        return {**settings, sections[0]: _rename(dict(inner), sections[1:], old_name, new, where)}
    if old_name not in settings:
        return settings
    section, _, name = new.rpartition(".")
    old = f"{section}.{old_name}"
    if name in settings:
        place = f" in {where}" if where else ""
        raise ConfigError(f"a setting must be given once, got {old}{place} beside its present name {new}; remove {old}")
    if where:
        _report_old_name(old, new, where)
    return {name if key == old_name else key: value for key, value in settings.items()}


@functools.cache
def _report_old_name(old: str, new: str, where: str) -> None:
    logger.warning("%s in %s is the old name of %s, and still works; please use the new name", old, where, new)
