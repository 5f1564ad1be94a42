"""Selects what others may see of a configuration, for reports, crash reports, model cards and external tools."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from swarm.config.config import Config
from swarm.config.load import Origin
from swarm.config.section import with_present_names
from swarm.errors import ConfigError
from swarm.extensions.registry import Registry
from swarm.types import is_mapping, is_sequence

HIDDEN = "…"
_TEXTS = frozenset(
    {
        "swarm.name", "swarm.id", "policy.revision", "policy.lora.targets", "tasks.sources.name", "tasks.sources.label",
        "tasks.sources.signals.name", "tasks.signals.name",
    }
)  # fmt: skip
"""Settings whose text may be seen. Any other text may be a folder, an address or a password."""
_BASE = "policy.base"
_MAX_KEY_CHARACTERS = 64


def shareable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` of a configuration, as of TOML, with what is known to be harmless: numbers, switches, choices from a list, and
    the texts named above. Another text is hidden, and what is no setting is left out. None is left out, too.

    A list of what is allowed, as a list of what is secret would miss the next setting.
    """
    with contextlib.suppress(ConfigError):  # one under both names: its present name alone is a setting below
        settings = with_present_names(settings)
    return _section(settings, Config, "")


def told_settings(config: Config, origin: Origin | None = None) -> list[dict[str, Any]]:
    """Every setting: {key, value, default, origin}, values as text and as `shareable` lets others see them.

    Of the file that sets one its name is told, not its folder; "" where nobody sets it, or where it is not known.
    """
    given, usual = config.model_dump(mode="json"), Config().model_dump(mode="json")
    values, defaults = dict(_leaves(given)), dict(_leaves(usual))
    seen, usually_seen = dict(_leaves(shareable(given))), dict(_leaves(shareable(usual)))
    told: list[dict[str, Any]] = []
    for key, value in values.items():
        source = (origin(key.partition("[")[0].split(".")) if origin else None) or ""
        is_named = source.startswith(("--", "SWARM_"))
        told.append(
            {
                "key": key,
                "value": _as_text(value and seen.get(key, HIDDEN)),
                "default": _as_text(defaults.get(key) and usually_seen.get(key, HIDDEN)),
                "is_default": value == defaults.get(key),
                "origin": source if is_named else PurePath(source).name,
            }
        )
    return told


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); each section of a list is a value, and any other list is one."""
    for name, value in settings.items():
        if is_mapping(value) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif is_sequence(value) and value and all(map(is_mapping, value)):
            yield from ((f"{prefix}{name}[{number}]", part) for number, part in enumerate(value))
        else:
            yield prefix + name, value


def _as_text(value: Any) -> str:
    if is_mapping(value):  # a section of a list, without what is not worth telling
        told = {name: part for name, part in value.items() if part not in (HIDDEN, "", None, {}, [])}
        return ", ".join(
            f"{name} {part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)}"
            for name, part in told.items()
        )
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def base_name(base: str) -> str:
    """What to call a base to others: one of the hub by its name there, a folder by its last part alone."""
    is_path = base.startswith((".", "/", "~")) or base.count("/") > 1 or "\\" in base or "@" in base
    return PurePath(base.replace("\\", "/")).name if is_path else base


def _section(settings: Mapping[str, Any], section: type[BaseModel], prefix: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        value = settings.get(name)
        if value is None:
            continue
        key, inner = f"{prefix}{name}", _inner_section(field.annotation)
        if inner is None:
            known = {one for item in field.metadata if isinstance(item, Registry) for one in item.names}
            may_be_seen = isinstance(value, str) and value in known  # a package's name says more of its user
            kept[name] = (
                base_name(value) if key == _BASE and isinstance(value, str)
                else value if may_be_seen else _value(value, key, field.annotation)
            )  # fmt: skip
        elif is_mapping(value):
            kept[name] = _section(value, inner, f"{key}.")
        elif is_sequence(value):
            kept[name] = [_section(part, inner, f"{key}.") for part in value if is_mapping(part)]
    return kept


def _value(value: Any, key: str, annotation: Any) -> Any:
    if isinstance(value, str):
        return value if key in _TEXTS or value in _choices(annotation) else HIDDEN
    if isinstance(value, int | float):  # switches, too
        return value
    if is_sequence(value):
        return [_value(part, key, annotation) for part in value]
    if is_mapping(value):
        return {str(name)[:_MAX_KEY_CHARACTERS]: _value(part, key, annotation) for name, part in value.items()}
    return HIDDEN


def _choices(annotation: Any) -> tuple[Any, ...]:
    """All values of the choices that an annotation names."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))


def _inner_section(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation is, or is a list of."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((inner for part in get_args(annotation) if (inner := _inner_section(part))), None)
