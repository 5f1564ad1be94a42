"""Arguments that many commands share: configuration files, `--section.key value` overrides and lists of seeds.

Settings also come from variables of the environment, which commands alone read.

An error about a setting that was given with a flag names that flag. `prepare_imports` runs before anything imports torch.
"""

import difflib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import ConfigError, ManifestError, NetworkError

if TYPE_CHECKING:
    from swarm.config import Config, Layer


@contextmanager
def told_by_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Errors of the block name `flags`, {setting: flag}: `set observability.http_port = 0` becomes `set --port 0`."""
    try:
        yield
    except (ConfigError, ManifestError, NetworkError) as error:
        text = str(error)
        for setting, flag in flags.items():
            name = rf"(?<![\w.]){re.escape(setting)}(?:\.\d+)?(?![\w.]*\w)"  # with the place in a list, never a longer name
            text = re.sub(name, flag, re.sub(rf"{name} = ", f"{flag} ", text))
        error.args = (text,)
        raise


def prepare_imports(config: "Config") -> None:
    """For a process that loads the policy of `config` and no other.

    peft imports bitsandbytes wherever it is installed, and that the whole compiler of torch: a third of the time until a
    policy is there, and 45 MiB. A base that is not quantised has no use for either.
    """
    stay_off_hubs(config)
    if config.policy.quantization == "none":
        sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type] - the documented way to make an import fail


def stay_off_hubs(config: "Config") -> None:
    """A silo's node contacts nobody but its peers. This sets the hub libraries to offline mode before anything imports them."""
    if config.swarm.silo_owner:
        os.environ["HF_HUB_OFFLINE"] = "1"


CONFIG_METAVAR = "CONFIG|--section.key VALUE"
CONFIG_HELP = "TOML files, later ones win, and overrides such as --training.lr 1e-5."


def load_config(arguments: Iterable[str], known_options: Sequence[str] = ()) -> "Config":
    """The Config of files, environment and overrides. `known_options` are the command's own, for the hint at a misspelt one.

    Raises ConfigError.
    """
    from swarm.config import resolve

    return resolve(given_layers(arguments, known_options))


def given_layers(arguments: Iterable[str], known_options: Sequence[str] = ()) -> list["Layer"]:
    """What the user has set: files, then variables of the environment, then overrides. Raises ConfigError."""
    from swarm.config import read_layers, setting_variables

    paths, overrides = split_arguments(list(arguments), known_options)
    return read_layers(paths, overrides, setting_variables(os.environ))


def split_arguments(arguments: list[str], known_options: Sequence[str] = ()) -> tuple[list[Path], dict[str, str]]:
    """Files and {dotted key: text}, in any order; `--key=value` and `--key value` are the same."""
    paths: list[Path] = []
    overrides: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            paths.append(Path(argument))
            continue
        key, has_value, value = argument.removeprefix("--").partition("=")
        if "." not in key or argument[:2] != "--":
            raise ConfigError(_unknown_option(argument, known_options))
        if not has_value:
            value = next(rest, "")
            if not value:
                raise ConfigError(f"an override needs a value, got {argument} alone; write {argument} VALUE")
        overrides[key] = value
    return paths, overrides


def take_first(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The first argument that is neither an override nor its value, or None, and the others."""
    is_value = False
    for position, argument in enumerate(arguments):
        if not argument.startswith("-") and not is_value:
            return argument, [*arguments[:position], *arguments[position + 1 :]]
        is_value = argument.startswith("--") and "=" not in argument
    return None, arguments


_MAX_HINTS = 4


def _unknown_option(argument: str, known_options: Sequence[str]) -> str:
    """For a person, with the option or the setting that the name comes next to."""
    from swarm.config import Config

    settings = {
        f"--{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {})
    }
    name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
    close = difflib.get_close_matches(argument, [*known_options, "--help"], n=1)
    close = close or sorted(setting for setting in settings if setting.endswith(f".{name}"))
    close = close or sorted(setting for setting in settings if name and setting.endswith(f"_{name}"))
    named = " or ".join(close[:_MAX_HINTS])
    hint = f"did you mean {named}?" if close else "see --help; settings are written --section.key VALUE"
    return f"unknown option {argument}; {hint}"


def seed_list(text: str) -> list[int]:
    """Seeds with commas between them, in order, each once. Raises ConfigError."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(
            f"seeds must be numbers with commas between them, got {text!r}; write --seeds 0,1,2"
        ) from None


def number_list(text: str, option: str) -> tuple[float, ...]:
    """Positive numbers with commas between them, each once. Raises ConfigError."""
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < one < math.inf for one in found):
        raise ConfigError(
            f"{option} must be positive numbers with commas between them, got {text!r}; write {option} 0.7,1,1.4"
        )
    return found
