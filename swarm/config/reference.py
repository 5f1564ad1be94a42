"""Lists every setting as rows and as a page, generated from the pydantic sections."""

import json
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from swarm.config import Config, LanguageSection, RewardSignalSection, TaskSourceSection
from swarm.config.section import RENAMED
from swarm.extensions.points import REWARDS
from swarm.extensions.registry import Registry
from swarm.types import is_sequence

_INTRODUCTION = """# Configuration

Settings live in TOML files, one table per section. Files are merged left to right; then variables
of the environment apply, and options of the command line win over both:

    swarm run base.toml gpu-8gb.toml --training.lr 1e-5
    SWARM_TRAINING__LR=1e-5 swarm run base.toml
    swarm config show base.toml        # what results, and where each value comes from
    swarm run base.toml --dry-run      # the same, with lengths that fit the base

`--dry-run` of `swarm run` and `swarm join` names the origin of each value in a comment, and stays
TOML that can be used as a file:

    [node]
    dir = "runs/friends"                          # hardware
    seed = 4                                      # SWARM_NODE__SEED
    duty_cycle = 1.0                              # default
    [policy]
    base = "Qwen/Qwen2.5-1.5B-Instruct"           # base.toml
    revision = "989aa7980e4cf806f80c7fef2b1adb7bc71aa306"  # manifest
    [training]
    lr = 1e-05                                    # --training.lr

| origin | the value comes from |
|---|---|
| `default` | this page, or the kind of base |
| `hardware` | `swarm join`, which chooses for this machine |
| a path | that file; the last one that sets it |
| `SWARM_…` | that variable |
| `--…` | that option; `--gpus` is what a node on one of several GPUs has for itself |
| `manifest` | the swarm's manifest |
| `policy.base` | the base, to whose positions lengths that are not set are fitted |

An unknown setting is an error that names the nearest known one. This page is generated: `swarm
config schema --markdown`.

## Variables of the environment

`SWARM_SECTION__KEY` sets `section.key`, with two underscores for each dot:
`SWARM_POLICY__LORA__RANK=8` is `policy.lora.rank = 8`. Every setting of this page has one, and each
command that takes settings reads them.

- Numbers, `true` and `false` are written as in a file, text without quotes. Lists and tables are
  TOML or JSON: `SWARM_NETWORK__LISTEN='["/ip4/0.0.0.0/tcp/28000"]'`,
  `SWARM_TASKS__SOURCES='[{"name": "lcm"}]'`, `SWARM_POLICY__LORA='{rank = 8}'`. Text that would be
  read as something else needs quotes of its own: `SWARM_POLICY__REVISION='"1234"'`.
- An empty variable is an unset one.
- A variable with two underscores that is no setting is an error with the nearest name, and so is a
  setting with single underscores, such as `SWARM_TRAINING_LR`.
- What the manifest of a swarm decides cannot be set otherwise by a variable, as by a file or an
  option: `swarm join` names the contradiction and ends.
- Only your shell, your service manager or your container sets variables. No file or manifest does,
  a `.env` in the current folder is not read, and `$NAME` in a value is not replaced.
- `swarm testbed` and `--gpus` apply them to all nodes. `swarm.Node` in Python ignores them: its
  program says the settings.

Variables of other purposes, which are no settings:

| variable | read by | meaning |
|---|---|---|
| `SWARM_PASSPHRASE_FILE` | every command that reads an identity | file with the passphrase in its first line |
| `SWARM_PASSPHRASE` | the same | the passphrase; removed from the environment once read |
| `SWARM_MANIFEST` | the containers | manifest of the swarm to join, a file or an address |
| `SWARM_FOUNDER` | the containers | accept only a manifest of this founder |
| `SWARM_ARGUMENTS` | the containers | further arguments of `swarm join` |

`docker-compose.yml` itself reads some more, which [Containers](operations/containers.md) lists.
"""


def settings() -> list[tuple[str, str, str, str]]:
    """(dotted key, type, default, meaning) of every setting."""
    rows = _rows(Config, "")
    rows += _rows(TaskSourceSection, "tasks.sources[].")
    rows += _rows(RewardSignalSection, "tasks.sources[].signals[].")
    return rows + _rows(LanguageSection, "tasks.languages[].")


def reference_markdown() -> str:
    """The page docs/configuration.md. It imports every built-in implementation, for its parameters."""
    parts = [_INTRODUCTION]
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        parts.append(f"\n## {name}\n\n{(section.__doc__ or '').strip()}\n")
        parts.append(_markdown_table(_rows(section, f"{name}.")))
        parts += _parameter_tables(section)
        if name == "tasks":
            parts.append("\nEach entry of `tasks.sources`:\n")
            parts.append(_markdown_table(_rows(TaskSourceSection, "")))
            parts += _parameter_tables(TaskSourceSection)
            parts.append("\nEach entry of `signals` of a source:\n")
            parts.append(_markdown_table(_rows(RewardSignalSection, "")))
            parts += _parameter_tables_of("signal", REWARDS)
            parts.append("\nEach entry of `tasks.languages`, by the name of the language:\n")
            parts.append(_markdown_table(_rows(LanguageSection, "")))
    parts.append("\n## Renamed settings\n\nThe old names are still read, with a notice. Please use the present ones.\n")
    parts += ["| old name | present name |", "|---|---|", *(f"| `{old}` | `{new}` |" for old, new in RENAMED.items())]
    return "\n".join(parts) + "\n"


def _parameter_tables(section: type[BaseModel]) -> list[str]:
    """What stands beside the implementations that the settings of a section choose."""
    chosen = [(name, registry) for name, field in section.model_fields.items() if (registry := _registry(field))]
    return [text for name, registry in chosen for text in _parameter_tables_of(name, registry)]


def _parameter_tables_of(setting: str, registry: Registry) -> list[str]:
    parts: list[str] = []
    for name in registry.names:
        section = getattr(registry.load(name), "Parameters", None)
        if section is not None:
            parts += [f"\nParameters of {setting} `{name}`:\n", _markdown_table(_rows(section, ""))]
    return parts


def _registry(field: FieldInfo) -> Registry | None:
    return next((one for one in field.metadata if isinstance(one, Registry)), None)


def _markdown_table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{r[0]}`", *r[1:])) + " |" for r in rows]
    return "\n".join(lines)


def _rows(section: type[BaseModel], prefix: str) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += _rows(annotation, f"{prefix}{name}.")
        else:
            registry = _registry(field)
            meaning = " ".join(f"{field.description or ''} {registry.summary if registry else ''}".split())
            kind = _names(registry) if registry else _type_name(annotation) + _bounds(field)
            rows.append((f"{prefix}{name}", kind, _default(field), meaning))
    return rows


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " or ".join(json.dumps(value) for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part) for part in arguments if part is not type(None))
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "table"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Path": "path"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, "table" if name.endswith("Section") else name)


def _names(registry: Registry) -> str:
    """The built-in names; which packages are installed is a matter of each machine."""
    package = f" or one of a package ({registry.group})" if registry.group else ""
    return " or ".join(map(json.dumps, registry.names)) + package


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{signs[key]} {getattr(item, key)}" for item in field.metadata for key in signs if hasattr(item, key)]
    return f" {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if is_sequence(value) and value and isinstance(value[0], BaseModel):
        return f"{len(value)} sources of the bundled policy"
    return "unset" if value is None else json.dumps(value, default=str)
