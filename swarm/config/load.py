"""Reads TOML files and overrides into one validated `Config`, and writes it back. Errors name rule, value and fix."""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from swarm.config.config import Config
from swarm.config.section import RENAMED, with_present_names
from swarm.config.tasks import LOCAL_SETTINGS
from swarm.errors import ConfigError
from swarm.types import is_list, is_table

_MAX_FILE_BYTES = 1 << 20
READY = "node_configs"
Origin = Callable[[Sequence[str | int]], Path | None]
"""Finds the file that sets a location, for error messages."""
_BOUNDS = {"gt": "more than {}", "ge": "at least {}", "lt": "less than {}", "le": "at most {}"}
_KINDS = {"int": " to a whole number", "float": " to a number", "bool": " to true or false", "string": " to text"}
"""By the first word of an error's type, such as int_parsing."""
_ALIASES = {
    "learning_rate": "training.lr",
    "lr": "training.lr",
    "batch_size": "training.micro_batch_sequences",
    "micro_batch_size": "training.micro_batch_sequences",
    "gradient_clip": "training.max_grad_norm",
    "max_tokens": "rollouts.max_new_tokens",
    "max_length": "rollouts.max_new_tokens",
    "num_generations": "rollouts.group_size",
    "model": "policy.base",
    "model_name": "policy.base",
    "lora_rank": "policy.lora.rank",
    "bootstrap": "network.initial_peers",
    "bootstrap_peers": "network.initial_peers",
    "max_steps": "node.max_rounds",
    "num_rounds": "node.max_rounds",
}
"""{name in other trainers: setting here}, for names that do not resemble each other."""


def load(paths: Iterable[Path | str] = (), overrides: Mapping[str, str] | None = None) -> Config:
    """Merge TOML files left to right (tables merge, other values replace), apply overrides, validate.

    `overrides` maps dotted keys to TOML literals; text that is not a TOML literal is a string.
    Relative paths of tasks and of reward functions are resolved against the file that names them.
    Raises ConfigError, one line per mistake, each with rule, value, the file that has it, and fix.
    """
    paths = list(paths)
    return parse(read(paths, overrides), origin_in(paths, overrides))


def read(paths: Iterable[Path | str] = (), overrides: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What files and overrides say, merged as `load` does, before defaults and validation. Raises ConfigError."""
    merged: dict[str, Any] = {}
    for path in paths:
        merged = merge(merged, _read_toml(Path(path)))
    return merge(merged, _nested(overrides or {}))


def parse(data: Mapping[str, Any], origin: Origin = lambda location: None) -> Config:
    """Validate plain data. Raises ConfigError."""
    try:
        return Config.model_validate(with_present_names(data))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item, origin) for item in _causes(error.errors()))) from None


def _causes(errors: Sequence[Any]) -> list[Any]:
    """The mistakes without those lists that are only too short because an item of theirs is wrong."""
    places = [item["loc"] for item in errors]
    return [
        item
        for item in errors
        if item["type"] != "too_short"
        or not any(len(place) > len(item["loc"]) and place[: len(item["loc"])] == item["loc"] for place in places)
    ]


def origin_in(paths: Iterable[Path | str], overrides: Mapping[str, str] | None = None) -> Origin:
    """The last file that says something at a location; None where an override does, which stands on the command line."""
    last_first = [Path(path) for path in paths][::-1]
    on_command_line = [RENAMED.get(key, key) for key in overrides or {}]

    def find(location: Sequence[str | int]) -> Path | None:
        key = ".".join(str(part) for part in location)
        if any(f"{key}.".startswith(f"{override}.") for override in on_command_line):
            return None
        return next((path for path in last_first if _says(_read_toml(path), location)), None)

    return find


def _says(data: Any, location: Sequence[str | int]) -> bool:
    """Whether `data` goes as deep as `location`, or ends on the way there in a list or value of its own."""
    for part in location:
        if not is_table(data):
            return True
        if part not in data:
            return False
        data = data[part]
    return True


def dump_toml(config: Config) -> str:
    """The resolved configuration as TOML that `load` reads back to an equal Config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def ready_configs() -> Path:
    """The folder of ready configurations: inside the installed package, or beside it in a clone."""
    package = Path(__file__).parents[1]
    return package / READY if (package / READY).is_dir() else package.parent / READY


def _read_toml(path: Path) -> dict[str, Any]:
    if path.parent == Path(READY) and not path.exists():  # from an installed package, in whatever folder the user is
        path = ready_configs() / path.name
    try:
        with path.open("rb") as file:  # may be a link or a pipe: whoever names it knows it
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"a config must have <= {_MAX_FILE_BYTES} bytes, got more in {path}; name another file")
        data = tomllib.loads(content.decode())
    except FileNotFoundError:
        raise ConfigError(
            f"a config must be an existing TOML file, got {path}; see node_configs/ for ready ones"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a config must be readable UTF-8 text, got {path}: {error}; check the file") from None
    except RecursionError:
        raise ConfigError(f"a config must be nested less deep, got {path}; name another file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"a config must be valid TOML, got {path}: {error}; correct that line") from None
    resolve_paths(data, path.parent)
    return with_present_names(data, str(path))


def resolve_paths(data: dict[str, Any], folder: Path) -> None:
    """Make the paths of task sources and of reward functions absolute, in place: they are relative to `folder`."""
    tasks = data.get("tasks")
    sources = tasks.get("sources") if is_table(tasks) else None
    for source in sources if is_list(sources) else ():
        if not is_table(source):
            continue
        for name in LOCAL_SETTINGS:
            if isinstance(source.get(name), str | Path):
                source[name] = str((folder / source[name]).resolve())
        signals = source.get("signals")
        for signal in signals if is_list(signals) else ():
            if is_table(signal) and isinstance(signal.get("function"), str):
                signal["function"] = _in_folder(signal["function"], folder)


def _in_folder(function: str, folder: Path) -> str:
    """FILE.py:NAME with the whole path of its file, and anything else as it is."""
    path, colon, name = function.rpartition(":")
    return f"{(folder / path).resolve()}{colon}{name}" if path.endswith(".py") else function


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` over `base`: tables merge, other values replace."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if is_table(old) and is_table(value) else value
    return merged


def _nested(overrides: Mapping[str, str]) -> dict[str, Any]:
    """What the command line says, in the shape of a file."""
    nested: dict[str, Any] = {}
    for key, text in overrides.items():
        nested = merge(nested, _nest(key, _literal(text)))
    return with_present_names(nested, "the command line")


def _nest(dotted: str, value: Any) -> dict[str, Any]:
    head, _, rest = dotted.partition(".")
    return {head: _nest(rest, value) if rest else value}


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _explain(item: Any, origin: Origin) -> str:
    location = [part for part in item["loc"] if isinstance(part, str | int)]
    key = ".".join(str(part) for part in location)
    path = origin(location)
    where = f" in {path}" if path else ""
    if item["type"] == "extra_forbidden":
        nearest = _nearest_key(location)
        fix = f"did you mean {nearest}?" if nearest else "see `swarm config schema`"
        return f"unknown setting {key}{where}; {fix}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    rule = item["msg"][0].lower() + item["msg"][1:]
    return f"{key}: {rule}, got {item['input']!r}{where}; set {key}{_wanted(item)}"


def _wanted(item: Any) -> str:
    """What to set it to, as far as the rule says."""
    context = item.get("ctx", {})
    for bound, words in _BOUNDS.items():
        if bound in context:
            return " to " + words.format(context[bound])
    if item["type"] in ("literal_error", "unknown_name"):
        return f" to {context['expected']}"
    return _KINDS.get(item["type"].partition("_")[0], "")


def _nearest_key(location: list[Any]) -> str | None:
    known = _known_keys(Config)
    wanted = ".".join(str(part) for part in location)
    if alias := _ALIASES.get(str(location[-1])):
        return alias
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    if not close:  # right name, wrong section
        close = [key for key in known if key.rsplit(".", 1)[-1] == str(location[-1])][:1]
    return close[0] if close else None


def _known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                keys += _known_keys(inner, f"{prefix}{name}.")
    return keys
