"""Rules for the parameters that the founder of a swarm may set: numbers, booleans, and words of closed sets.

    manifest ─▶ check_shape (no library needed) ─▶ Manifest ─▶ … ─▶ check_declared ─▶ the data set is built

A manifest comes from a stranger, and a data set may do anything with its parameters: `spell_backward` reads the file that
`data_file` names. So these rules list what is allowed. `check_shape` runs when a manifest is parsed. `check_declared` runs
when a source or a signal is built, and compares each parameter with what the data set's configuration class, or the reward
function, declares: it must be declared there, it takes numbers only where that does, and a word must be one that the
declaration itself names (in a Literal, or in the default of that very parameter). A parameter that a new release adds is
therefore allowed as far as it is a number.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

MAX_NUMBER = 10**12
"""Largest absolute value of a number."""
MAX_ITEMS = 64
"""Parameters of one source, and values in one list."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_WORD = re.compile(r"[A-Za-z0-9_-]{1,32}|[-+*/.]")
"""A name or a single operator: no path of more than one part can be written with it, and no name of a file with a suffix."""
_MAX_DEPTH = 2
Declared = Mapping[str, tuple[Any, Any]]
"""{name: (type, default)}"""
_OF_THE_NODE = frozenset({"seed", "size"})
"""Set for each task by the node."""


def check_shape(parameters: Mapping[str, Any], *, with_words: bool = True) -> None:
    """Raises ValueError for parameters that no founder may set. Without `with_words` no text is allowed at all."""
    if len(parameters) > MAX_ITEMS:
        raise ValueError(f"a source must have at most {MAX_ITEMS} parameters, got {len(parameters)}; remove some")
    for name, value in parameters.items():
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"the name of a parameter must be letters, digits and _, got {_shown(name)}; rename it")
        for leaf in _leaves(name, value):
            _check_leaf(name, leaf, with_words=with_words)


def declared_by_class(config_class: type) -> Declared:
    """What a data set's configuration class, a dataclass, declares."""
    hints, standard = get_type_hints(config_class), config_class()
    return {
        field.name: (hints[field.name], getattr(standard, field.name))
        for field in fields(config_class)
        if field.name not in _OF_THE_NODE
    }


def declared_by_function(function: Callable[..., Any], num_given: int = 3) -> Declared:
    """What a reward function declares after the `num_given` arguments that the node gives it."""
    hints = get_type_hints(function)
    named = list(inspect.signature(function).parameters.values())[num_given:]
    return {
        one.name: (hints.get(one.name), one.default)
        for one in named
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }


def check_declared(declared: Declared, parameters: Mapping[str, Any]) -> None:
    """Raises ValueError for a parameter that is not declared, or not with such values."""
    check_shape(parameters)
    for name, value in parameters.items():
        if name not in declared:
            known = ", ".join(sorted(declared)) or "none: there are no parameters"
            raise ValueError(f"a parameter must be one of {known}, got {name}; remove it")
        hint, default = declared[name]
        words = frozenset(_words(hint, default))
        takes_numbers = bool({int, float, bool} & set(_types(hint))) or _has_numbers(default)
        for leaf in _leaves(name, value):
            if isinstance(leaf, str) and leaf not in words:
                allowed = f"one of {', '.join(sorted(words))}" if words else "no text"
                raise ValueError(f"parameter {name} must be {allowed}, got {_shown(leaf)}; a manifest sets no other")
            if not isinstance(leaf, str) and not takes_numbers:
                raise ValueError(f"parameter {name} must not be a number, got {leaf}; remove it")


def _check_leaf(name: str, leaf: Any, *, with_words: bool) -> None:
    if isinstance(leaf, str):
        if not with_words or _WORD.fullmatch(leaf) is None:
            rule = "a name of <= 32 letters, digits, - and _, or an operator" if with_words else "a number or boolean"
            raise ValueError(f"parameter {name} must be {rule}, got {_shown(leaf)}; a manifest names no file")
    elif not isinstance(leaf, int | float):
        raise ValueError(f"parameter {name} must hold numbers, booleans and words, got {_shown(leaf)}; remove it")
    elif not (math.isfinite(leaf) and abs(leaf) <= MAX_NUMBER):
        raise ValueError(f"parameter {name} must be within ±{MAX_NUMBER:.0e}, got {_shown(leaf)}; choose a smaller one")


def _leaves(name: str, value: Any, depth: int = 0) -> Iterator[Any]:
    """The single values in a value, which may be a list of lists."""
    if not isinstance(value, list | tuple):
        yield value
        return
    if depth == _MAX_DEPTH or len(value) > MAX_ITEMS:
        raise ValueError(f"parameter {name} must be lists of <= {MAX_ITEMS} values, {_MAX_DEPTH} levels; shorten it")
    for item in value:
        yield from _leaves(name, item, depth + 1)


def _words(hint: Any, default: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from (choice for choice in get_args(hint) if isinstance(choice, str))
    for item in default if isinstance(default, list | tuple) else (default,):
        if type(item) is str:
            yield item


def _types(hint: Any) -> Iterator[Any]:
    """A type and all types within it, such as int and None of `int | None`."""
    yield hint
    for part in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from _types(part)


def _has_numbers(default: Any) -> bool:
    return any(isinstance(item, int | float) for item in (default if isinstance(default, list | tuple) else (default,)))


def _shown(value: object) -> str:
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**40 else "a giant number"
    return text if len(text) <= 80 else f"{text[:79]}…"
