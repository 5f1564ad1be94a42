"""A registry maps the names that a setting may have to implementations, and imports an implementation when it is needed.

    built in   one line in `points.py`: name, "module:attribute", one phrase for the documentation
    package    an entry point of the registry's group in an installed package

Reading a configuration imports no implementation: built-in names are in the list, and names of packages are in their metadata.
Only `load` imports. Whoever calls it must have the name from the operator's settings, never from a record of a peer.
"""

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from swarm.errors import ConfigError, SwarmError

S = TypeVar("S", bound=BaseModel)

_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,64}")


class Isolation(Enum):
    """What keeps an implementation that reads texts of strangers from harming the node. There is no default."""

    NONE_NEEDED = "none needed"
    """It runs in the node: its own code takes time and memory in proportion to a bounded text and evaluates nothing."""
    OWN_SANDBOX = "own sandbox"
    """It runs in the node and hands what strangers wrote to a sandbox itself, within bounds of time and memory."""
    PROCESS = "process"
    """Texts of strangers reach it in a sandboxed process only."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """An implementation of this project."""

    name: str
    target: str
    """`module:attribute`, imported when the implementation is loaded."""
    summary: str
    """What it does, in one phrase, for the page of all settings."""
    traits: frozenset[str] = frozenset()
    """Facts that the validation of a configuration needs before anything is imported."""


class Registry:
    """The implementations of one extension point.

    As metadata of a text field, `Annotated[str, REGISTRY]`, it makes the field accept the registry's names only. It is
    immutable but for a cache of loaded implementations, and safe from any thread.
    """

    def __init__(
        self,
        what: str,
        built_in: Sequence[BuiltIn],
        *,
        group: str = "",
        error: type[SwarmError] = ConfigError,
        needs_isolation: bool = False,
    ) -> None:
        """`what` names one implementation in errors, such as "a task source". `group`: the entry points of packages; without
        one only built-in implementations are known. `needs_isolation`: an implementation must declare its `isolation`.

        Raises ValueError where two built-in implementations have one name.
        """
        self.what = what
        self.group = group
        self._error = error
        self._needs_isolation = needs_isolation
        self._built_in = {one.name: one for one in built_in}
        self._loaded: dict[str, Any] = {}
        if len(self._built_in) < len(built_in):
            raise ValueError(f"{what} must have a name of its own, got {[one.name for one in built_in]}; rename one")

    @property
    def names(self) -> tuple[str, ...]:
        """The built-in names, in the order of the list."""
        return tuple(self._built_in)

    @property
    def summary(self) -> str:
        """One phrase per built-in implementation."""
        return " ".join(f"{one.name}: {one.summary}." for one in self._built_in.values())

    def is_built_in(self, name: str) -> bool:
        return name in self._built_in

    def has_trait(self, name: str, trait: str) -> bool:
        """Whether a built-in implementation has a trait. Implementations of packages have none."""
        return name in self._built_in and trait in self._built_in[name].traits

    def installed(self) -> dict[str, EntryPoint]:
        """What installed packages offer, by name; nothing is imported. Raises the registry's error for a doubled name."""
        found: dict[str, EntryPoint] = {}
        for entry in self._entries():
            other = found.setdefault(entry.name, entry)
            if self._origin(other) != self._origin(entry):
                raise self._error(
                    f"{self.what} must come from one package, got {entry.name!r} of {self._origin(other)} and "
                    f"{self._origin(entry)}; remove one"
                )
        return found

    def origin(self, name: str) -> str:
        """NAME==VERSION of the package that offers it; empty for a built-in one. Raises the registry's error."""
        return "" if self.is_built_in(name) else self._origin(self._entry(name))

    def load(self, name: str) -> Any:
        """Import an implementation. Raises the registry's error where it is unknown, fails to import or lacks `isolation`."""
        if name not in self._loaded:
            self._loaded[name] = self._imported(name)
        return self._loaded[name]

    def make(self, name: str, parameters: Mapping[str, Any], setting: str) -> Any:
        """An instance of the class `name`, which validates its parameters with its own `Parameters` where it has them.

        `setting` names in errors where the parameters come from. Raises the registry's error.
        """
        implementation = self.load(name)
        section = getattr(implementation, "Parameters", None)
        if section is not None:
            return implementation(valid_parameters(section, parameters, name, setting, self._error))
        if parameters:
            raise self._error(f"{self.what} {name} takes no parameters, got {dict(parameters)}; remove {setting}")
        return implementation()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def _known(self, name: str) -> str:
        """The same name. Raises a mistake that `swarm.config.load` explains with the setting, the value and its file."""
        if self.is_built_in(name) or (_NAME.fullmatch(name) and name in {entry.name for entry in self._entries()}):
            return name
        raise PydanticCustomError("unknown_name", "{rule}", {"rule": self._rule(), "expected": self._nearest(name)})

    def _rule(self) -> str:
        packages = f" or one that an installed package offers as {self.group}" if self.group else ""
        return f"must be one of {', '.join(self._all_names())}{packages}"

    def _all_names(self) -> list[str]:
        return [*self.names, *sorted({entry.name for entry in self._entries()} - set(self.names))]

    def _nearest(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._all_names(), n=1)
        return repr(close[0]) if close else "one of them"

    def _entries(self) -> Sequence[EntryPoint]:
        return tuple(entry_points(group=self.group)) if self.group else ()

    def _entry(self, name: str) -> EntryPoint:
        found = self.installed()
        if name not in found:
            raise self._error(f"{self.what} {self._rule()}, got {name[:64]!r}; set {self._nearest(name[:64])}")
        return found[name]

    def _imported(self, name: str) -> Any:
        if self.is_built_in(name):
            implementation = EntryPoint(name, self._built_in[name].target, "swarm").load()
        else:
            entry = self._entry(name)
            try:
                implementation = entry.load()
            except Exception as error:  # packages fail to import in any way they like
                raise self._error(
                    f"{self.what} {name} of {self._origin(entry)} must be loadable, got {type(error).__name__}: {error}; "
                    "fix or remove the package"
                ) from None
        if self._needs_isolation and not isinstance(_declared_isolation(implementation), Isolation):
            choices = ", ".join(f"Isolation.{one.name}" for one in Isolation)
            raise self._error(
                f"{self.what} must declare what isolation it needs, got no attribute `isolation` of {name}; set it to one of "
                f"{choices}"
            )
        return implementation

    def _origin(self, entry: EntryPoint) -> str:
        name = entry.dist.name if entry.dist is not None else None
        version = entry.dist.version if entry.dist is not None else None
        if not name or not version:
            raise self._error(f"{self.what} must come from a package with a version, got {entry}; fix its metadata")
        return f"{name}=={version}"


def versions_of(*packages: str) -> str:
    """NAME==VERSION of installed packages, and of Python, since messages of both differ. Raises PackageNotFoundError."""
    python = f"python=={sys.version_info.major}.{sys.version_info.minor}"
    return " ".join([*(f"{name}=={version(name)}" for name in packages), python])


def valid_parameters(
    section: type[S], parameters: Mapping[str, Any], name: str, setting: str, error: type[SwarmError]
) -> S:
    """`parameters` as a `section`. Raises `error`, with the first mistake and where to fix it."""
    try:
        return section.model_validate(dict(parameters))
    except ValidationError as mistake:
        raise error(
            f"parameters of {name} must be valid, got {dict(parameters)}: {first_mistake(mistake)}; set {setting}"
        ) from None


def first_mistake(error: Exception) -> str:
    """The first mistake of a failed validation, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    rule = first["msg"].removeprefix("Value error, ")
    return f"{key}: {rule}" if key else rule


def _declared_isolation(implementation: Any) -> Any:
    """What it declares itself: a class does not inherit that its parent needs no isolation."""
    if isinstance(implementation, type):
        return vars(implementation).get("isolation")
    return getattr(implementation, "isolation", None)
