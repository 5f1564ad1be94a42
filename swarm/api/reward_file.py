"""Writes a Python function into a file that stands alone, so that nodes can run it in processes of their own.

    function ─ source ─┬▶ names that it reads ─ imports, constants, further functions ─┬▶ text ─ run and compared ─▶ file
                       └──────────────────── bytecode of the original ────────────────┘

A reward decides what is learned, so nothing is guessed. The text is executed here, and its functions must have the bytecode and
the defaults of the originals. Whatever cannot be written down with certainty is refused, with the advice to use a file.
"""

import __future__

import ast
import builtins
import dis
import functools
import inspect
import linecache
import math
import operator
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from swarm.errors import TaskError
from swarm.sandbox.inside.file_guard import readable_folders
from swarm.tasks.rewards.reward_plugin import MAX_CODE_BYTES

_FUTURE = "from __future__ import annotations"
_CONSTANTS = (bool, int, float, str, bytes, type(None))
_STORES = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_KINDS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_FEATURES = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
_SAME = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")


def reward_file(function: Any) -> str:
    """The text of a file with `function` and all that it needs. Raises TaskError where that is not certain."""
    writer = _Writer(function)
    text = writer.text()
    if (num_bytes := len(text.encode())) > MAX_CODE_BYTES:
        raise writer.refusal(f"it has {num_bytes} bytes with its constants, more than {MAX_CODE_BYTES}")
    _check_same(writer, text)
    return text


class _Writer:
    """Collects what one function needs. Each name has one meaning in the file."""

    def __init__(self, function: Any) -> None:
        _check_kind(function)
        self.function: FunctionType = function
        self.functions: dict[str, FunctionType] = {}
        self._meanings: dict[str, Any] = {}
        self._lines: dict[str, str] = {}
        self._imports: set[str] = set()
        self._add_function(function.__name__, function)

    def text(self) -> str:
        sources = [_source_of(one).strip("\n") for one in self.functions.values()]
        parts = ["\n".join(sorted(self._imports)), "\n".join(self._lines.values()), *reversed(sources)]
        return f"{_FUTURE}\n\n" + "\n\n\n".join(part for part in parts if part) + "\n"

    def refusal(self, reason: str) -> TaskError:
        return refusal(self.function.__name__, reason)

    def _add_function(self, name: str, function: FunctionType) -> None:
        if name != function.__name__:
            raise self.refusal(f"it calls {function.__name__} by the other name {name}")
        if function.__closure__:
            names = ", ".join(function.__code__.co_freevars)
            raise self.refusal(f"{name} reads {names} of the function around it")
        self._meanings[name] = self.functions[name] = function
        node = _definition(function)
        if node.decorator_list:
            raise self.refusal(f"{name} has a decorator")
        codes = [function.__code__, *_default_codes(node)]
        for one in (inner for code in codes for inner in _all_codes(code)):
            for read in _names_read(self, one):
                self._add_name(read, function)

    def _add_name(self, chain: tuple[str, ...], function: FunctionType) -> None:
        name = chain[0]
        if name in function.__globals__:
            value = function.__globals__[name]
        elif hasattr(builtins, name):
            return
        else:
            raise self.refusal(f"it uses {name}, which is not defined")
        if name in self._meanings:
            if self._meanings[name] is not value:
                raise self.refusal(f"{name} means two different things in its functions")
        elif isinstance(value, FunctionType) and not _is_installed(value.__module__):
            self._add_function(name, value)
        else:
            self._meanings[name] = value
            self._add_value(name, value)
        if isinstance(value, ModuleType):
            self._imports |= {f"import {one}" for one in _submodules(value, chain[1:])}

    def _add_value(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType):
            if not _is_installed(value.__name__) or sys.modules.get(value.__name__) is not value:
                raise self.refusal(f"it needs the module {value.__name__}, which is not an installed package")
            has_own_name = name == value.__name__
            self._imports.add(f"import {name}" if has_own_name else f"import {value.__name__} as {name}")
        elif isinstance(value, re.Pattern):
            self._imports.add("import re")
            if self._meanings.setdefault("re", re) is not re:
                raise self.refusal("re means something else than the module re")
            self._lines[name] = f"{name} = re.compile({value.pattern!r}, {int(value.flags)})"
        elif origin := _importable(value):
            module, attribute = origin
            alias = "" if attribute == name else f" as {name}"
            self._imports.add(f"from {module} import {attribute}{alias}")
        elif _is_constant(value):
            self._lines[name] = f"{name} = {value!r}"
        else:
            raise self.refusal(f"it uses {name}, a {type(value).__name__} that cannot be written into a file")


def refusal(name: str, reason: str) -> TaskError:
    """The error for a function that cannot be written into a file."""
    return TaskError(
        f"a reward function must stand alone, so that nodes can run it in processes of their own, got {name}: {reason}; "
        f'put it into a file with all that it needs, and give reward="FILE.py:NAME"'
    )


def _check_kind(function: Any) -> None:
    shown = getattr(function, "__name__", None) or type(function).__name__
    if not isinstance(function, FunctionType):
        kind = (
            "is a method" if inspect.ismethod(function) else f"is a {type(function).__name__}, not a function of Python"
        )
        raise refusal(shown, f"it {kind}")
    if not function.__name__.isidentifier():  # <lambda>
        raise refusal("a lambda", "it has no name that others could know it by; write `def`")
    if function.__code__.co_flags & _KINDS:
        raise refusal(shown, "it is asynchronous or a generator")
    if hasattr(function, "__wrapped__"):
        raise refusal(shown, "it has a decorator")


def _source_of(function: FunctionType) -> str:
    linecache.checkcache(function.__code__.co_filename)
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, IndentationError, SyntaxError):
        raise refusal(function.__name__, "its source is not known here, as of what is typed into a prompt") from None


def _definition(function: FunctionType) -> ast.FunctionDef:
    try:
        (node,) = ast.parse(_source_of(function)).body
    except (SyntaxError, ValueError):
        node = None
    if not isinstance(node, ast.FunctionDef) or node.name != function.__name__:
        raise refusal(function.__name__, "its source is not a definition by `def`")
    return node


def _default_codes(node: ast.FunctionDef) -> list[CodeType]:
    """What is evaluated when the function is defined, beside hints of types, which nobody reads."""
    given = [one for one in [*node.args.defaults, *node.args.kw_defaults] if one is not None]
    return [compile(ast.Expression(one), "default", "eval") for one in given]


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_codes(constant)


def _names_read(writer: _Writer, code: CodeType) -> Iterator[tuple[str, ...]]:
    """Each global name, with the attributes that are read from it: ("scipy", "optimize", "linprog")."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _STORES:
            raise writer.refusal(
                f"it changes the global name {instruction.argval}, and may remember nothing between answers"
            )
        if chain and instruction.opname in _ATTRIBUTES:
            chain.append(instruction.argval)
            continue
        if chain:
            yield tuple(chain)
        chain = [instruction.argval] if instruction.opname in _LOADS else []
    if chain:
        yield tuple(chain)


def _submodules(module: ModuleType, attributes: tuple[str, ...]) -> Iterator[str]:
    """Submodules among the attributes, which `import` of the module alone need not load."""
    for attribute in attributes:
        inner = getattr(module, attribute, None)
        full = f"{module.__name__}.{attribute}"
        if not isinstance(inner, ModuleType) or sys.modules.get(full) is not inner:
            return
        yield full
        module = inner


def _is_installed(module: str | None) -> bool:
    """Whether a module is of Python's library or of an installed package, which the sandbox can open."""
    name = (module or "").partition(".")[0]
    if name in sys.stdlib_module_names and name != "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or file is None:
        return False
    return any(Path(file).resolve().is_relative_to(folder) for folder in readable_folders())


def _importable(value: Any) -> tuple[str, str] | None:
    """(module, name) of what an installed module has under its own name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not _is_installed(module):
        return None
    is_there = isinstance(value, type | FunctionType | BuiltinFunctionType) or callable(value)
    return (module, name) if is_there and getattr(sys.modules.get(module), name, None) is value else None


def _is_constant(value: Any) -> bool:
    """Whether its text in Python is the same value again."""
    if type(value) in (tuple, list, set, frozenset):
        return (
            type(value) is not frozenset and (type(value) is not set or bool(value)) and all(map(_is_constant, value))
        )
    if type(value) is dict:
        return all(_is_constant(one) for pair in value.items() for one in pair)
    return type(value) in _CONSTANTS and not (type(value) is float and not math.isfinite(value))


def _check_same(writer: _Writer, text: str) -> None:
    """Compare the sources with what runs, and execute the text. Raises TaskError."""
    for name, original in writer.functions.items():
        if not _is_same_code(_compiled(original), original.__code__):
            raise writer.refusal(
                f"the source of {name} is not what runs: its file was changed meanwhile, or a tool rewrites it, as pytest "
                "does with `assert`"
            )
    module = ModuleType("reward_file")
    try:
        exec(compile(text, "reward_file.py", "exec", dont_inherit=True), vars(module))  # noqa: S102  the caller's own  # nosec B102
    except Exception as error:
        raise writer.refusal(f"its text alone ends with {type(error).__name__}: {error}") from None
    for name, original in writer.functions.items():
        written = getattr(module, name)
        if (written.__defaults__, written.__kwdefaults__) != (original.__defaults__, original.__kwdefaults__):
            raise writer.refusal(f"defaults of {name} were computed from values that have changed")


def _compiled(function: FunctionType) -> CodeType:
    """What the source of a function is compiled to, with the features of its module."""
    features = function.__code__.co_flags & _FEATURES
    module = compile(_source_of(function), "source", "exec", flags=features, dont_inherit=True)
    inner = [one for one in module.co_consts if isinstance(one, CodeType) and one.co_name == function.__name__]
    return inner[-1]  # defaults and hints may hold further ones, which come before


def _is_same_code(one: CodeType, other: CodeType) -> bool:
    if any(getattr(one, name) != getattr(other, name) for name in _SAME) or len(one.co_consts) != len(other.co_consts):
        return False
    pairs = enumerate(zip(one.co_consts, other.co_consts, strict=True))
    return all(
        _is_same_code(a, b)
        if isinstance(a, CodeType) and isinstance(b, CodeType)
        else _shown(a, is_first=place == 0) == _shown(b, is_first=place == 0)
        for place, (a, b) in pairs
    )


def _shown(constant: Any, *, is_first: bool) -> Any:
    """A constant for comparison: 1 and 1.0 differ. The first one is the docstring, whose indentation does not count."""
    if is_first and isinstance(constant, str):
        return inspect.cleandoc(constant)
    return constant if isinstance(constant, frozenset) else repr(constant)
