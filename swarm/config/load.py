"""Reads settings from files, environment and command line into one validated `Config`, and writes it back.

    TOML files, left to right ─▶ variables SWARM_SECTION__KEY ─▶ options --section.key ─ later wins ─▶ Config

Each source is a `Layer`, so that an error and `--dry-run` can say where a value comes from. Errors name rule, value and fix.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from swarm.config.config import Config
from swarm.config.policy import BUNDLED_BASES
from swarm.config.section import RENAMED, with_present_names
from swarm.config.tasks import LOCAL_SETTINGS
from swarm.errors import ConfigError
from swarm.types import is_list, is_table

_MAX_FILE_BYTES = 1 << 20
READY = "node_configs"
VARIABLE_PREFIX = "SWARM_"
Origin = Callable[[Sequence[str | int]], str | None]
"""Finds the source that sets a location: a file, a variable or an option. None: nobody does."""
_COMMENT_COLUMN = 44
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


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of one source."""

    source: str
    """As a person names it: a path, SWARM_TRAINING__LR, --training.lr."""
    settings: Mapping[str, Any]
    """Nested as in a file."""


def load(paths: Iterable[Path | str] = (), overrides: Mapping[str, str] | None = None) -> Config:
    """Merge TOML files left to right (tables merge, other values replace), apply overrides, validate.

    `overrides` maps dotted keys to TOML or JSON literals; text that is neither is a string.
    Relative paths of tasks and of reward functions are resolved against the file that names them.
    Raises ConfigError, one line per mistake, each with rule, value, the source that has it, and fix.
    """
    return resolve(read_layers(paths, overrides))


def read(paths: Iterable[Path | str] = (), overrides: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What files and overrides say, merged as `load` does, before defaults and validation. Raises ConfigError."""
    return merged(read_layers(paths, overrides))


def read_layers(
    paths: Iterable[Path | str] = (),
    overrides: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[Layer]:
    """Read all sources, the ones that win last. `variables`: {dotted key: text} of `setting_variables`.

    Raises ConfigError.
    """
    layers = [Layer(str(path), _read_toml(Path(path))) for path in paths]
    layers += _literal_layers(variables or {}, variable_of, "the environment")
    return layers + _literal_layers(overrides or {}, lambda key: f"--{key}", "the command line")


def merged(layers: Iterable[Layer]) -> dict[str, Any]:
    """All settings of `layers` in one table; later layers win."""
    settings: dict[str, Any] = {}
    for layer in layers:
        settings = merge(settings, layer.settings)
    return settings


def resolve(layers: Sequence[Layer]) -> Config:
    """Merge and validate. Raises ConfigError."""
    return parse(merged(layers), origin_in(layers))


def variable_of(key: str) -> str:
    """The variable of the environment that sets `key`: SWARM_TRAINING__LR for training.lr."""
    return VARIABLE_PREFIX + key.upper().replace(".", "__")


def setting_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """{dotted key: text} of the variables that are settings. An empty one counts as unset.

    Variables of other purposes begin with the prefix, too, and pass. Raises ConfigError for one that looks like a setting,
    by a double underscore or by the name of one with single underscores, and is none.
    """
    keys = {variable_of(key): key for key in (*_keys(Config), *RENAMED) if "." in key}
    flat = {name.replace("__", "_"): name for name in keys}
    found: dict[str, str] = {}
    for name in sorted(name for name in environment if name.startswith(VARIABLE_PREFIX)):
        if name not in keys and ("__" in name or name in flat):
            close = [flat[name]] if name in flat else difflib.get_close_matches(name.upper(), keys, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else "see `swarm config schema`"
            raise ConfigError(f"a variable {VARIABLE_PREFIX}SECTION__KEY must be a setting, got {name}; {hint}")
        if name in keys and environment[name].strip():
            found[keys[name]] = environment[name]
    return found


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process whose settings are complete without it: no variable overrides them there."""
    return {name: text for name, text in environment.items() if not (name.startswith(VARIABLE_PREFIX) and "__" in name)}


def _keys(section: type[BaseModel], prefix: str = "", *, inside_lists: bool = False) -> Iterator[str]:
    """Dotted keys that can be set by themselves, subsections included; with `inside_lists` also those of items of lists."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in (field.annotation, *(get_args(field.annotation) if inside_lists else ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _keys(inner, f"{prefix}{name}.", inside_lists=inside_lists)


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


def origin_in(layers: Sequence[Layer]) -> Origin:
    """The last layer that says something at a location."""

    def find(location: Sequence[str | int]) -> str | None:
        return next((layer.source for layer in reversed(layers) if _says(layer.settings, location)), None)

    return find


def adjusted(origin: Origin, before: Config, after: Config, by: str) -> Origin:
    """The origin of each setting of `after`, which `by` made of `before`, whose settings have `origin`."""
    old, new = before.model_dump(), after.model_dump()
    return lambda location: origin(location) if _at(old, location) == _at(new, location) else by


def _at(data: Any, location: Sequence[str | int]) -> Any:
    for part in location:
        data = data.get(str(part)) if is_table(data) else None
    return data


def _says(data: Any, location: Sequence[str | int]) -> bool:
    """Whether `data` goes as deep as `location`, or ends on the way there in a list or value of its own."""
    for part in location:
        if not is_table(data):
            return True
        if part not in data:
            return False
        data = data[part]
    return True


def dump_toml(config: Config, origin: Origin | None = None) -> str:
    """The resolved configuration as TOML that `load` reads back to an equal Config.

    With `origin`, a comment beside each setting says where its value comes from.
    """
    text = tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
    return text if origin is None else "".join(f"{line}\n" for line in _with_origins(text.splitlines(), origin))


def kept_toml(config: Config, origin: Origin | None = None) -> str:
    """As `dump_toml`, for a file that is read again from any current folder: with whole paths."""
    changes: dict[str, dict[str, Any]] = {
        "node": {name: path.absolute() for name in ("dir", "identity") if (path := getattr(config.node, name))},
    }
    if config.warm_start.adapter is not None:
        changes["warm_start"] = {"adapter": config.warm_start.adapter.absolute()}
    base = Path(config.policy.base).expanduser()
    if config.policy.base not in BUNDLED_BASES and config.policy.revision is None and base.is_dir():
        changes["policy"] = {"base": str(base.absolute())}
    sections = {name: getattr(config, name).model_copy(update=change) for name, change in changes.items()}
    return dump_toml(config.model_copy(update=sections), origin)


def _with_origins(lines: Iterable[str], origin: Origin) -> Iterator[str]:
    """What is in a list of tables has the origin of the list."""
    table: list[str] = []
    in_list = False
    for line in lines:
        if header := re.fullmatch(r"(\[\[?)([^\[\]]+)\]\]?", line):
            inside = in_list and header[2].split(".")[: len(table)] == table
            is_item = header[1] == "[[" and not inside
            table, in_list = (table, True) if inside else (header[2].split("."), is_item)
            location = table if is_item else None
        else:
            key = None if in_list else re.match(r"([A-Za-z0-9_-]+) = ", line)
            location = [*table, key[1]] if key else None
        yield line if location is None else f"{line:<{_COMMENT_COLUMN}}  # {_one_line(origin(location) or 'default')}"


def kept_origin(origin: Origin, path: Path) -> Origin:
    """As `origin`, for a node that is started again from its own file at `path`: what the comments of that file say.

    Nothing but what people are shown may follow from it: whoever edits the file leaves the comments as they are.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return origin
    told: dict[tuple[str, ...], str] = {}
    table: tuple[str, ...] = ()
    for line in lines:
        setting, mark, source = line.rpartition("  # ")
        if header := re.match(r"\[\[?([^\[\]]+)\]", line):
            table = tuple(header[1].split("."))
        key = re.match(r"([A-Za-z0-9_-]+) = ", setting)
        if mark and (header or key):
            location = (*table, key[1]) if key else table
            told[location] = "" if source == "default" else source

    def find(location: Sequence[str | int]) -> str | None:
        source = origin(location)
        is_own = source is not None and Path(source).name == path.name and Path(source).resolve() == path.resolve()
        return told.get(tuple(map(str, location)), source) if is_own else source

    return find


def _one_line(source: str) -> str:
    """A path may hold any character, and a comment ends with its line."""
    return "".join(character if character.isprintable() else "?" for character in source)


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


def _literal_layers(texts: Mapping[str, str], name_of: Callable[[str], str], where: str) -> list[Layer]:
    """One layer per setting that was given as text. `where` is told of a setting with an old name, or with both."""
    nested: dict[str, Any] = {}
    for key, text in texts.items():
        nested = merge(nested, _nest(key, _literal(text)))
    with_present_names(nested, where)
    return [Layer(name_of(key), with_present_names(_nest(key, _literal(text)))) for key, text in texts.items()]


def _nest(dotted: str, value: Any) -> dict[str, Any]:
    head, _, rest = dotted.partition(".")
    return {head: _nest(rest, value) if rest else value}


def _literal(text: str) -> Any:
    """What `text` is as TOML, or a table or list as JSON, or else itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError, RecursionError):
        pass
    try:
        return json.loads(text) if text.lstrip()[:1] in ("{", "[") else text
    except (ValueError, RecursionError):
        return text


def _explain(item: Any, origin: Origin) -> str:
    location = [part for part in item["loc"] if isinstance(part, str | int)]
    key = ".".join(str(part) for part in location)
    where = told_place(origin(location))
    if item["type"] == "extra_forbidden":
        nearest = _nearest_key(location)
        fix = f"did you mean {nearest}?" if nearest else "see `swarm config schema`"
        return f"unknown setting {key}{where}; {fix}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    rule = item["msg"][0].lower() + item["msg"][1:]
    return f"{key}: {rule}, got {item['input']!r}{where}; set {key}{_wanted(item)}"


def told_place(source: str | None) -> str:
    """Where a mistake is, to follow the value in an error: nothing for an option, which the person has just typed."""
    return f" in {source}" if source and not source.startswith("--") else ""


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
    known = list(_keys(Config, inside_lists=True))
    wanted = ".".join(str(part) for part in location)
    if alias := _ALIASES.get(str(location[-1])):
        return alias
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    if not close:  # right name, wrong section
        close = [key for key in known if key.rsplit(".", 1)[-1] == str(location[-1])][:1]
    return close[0] if close else None
