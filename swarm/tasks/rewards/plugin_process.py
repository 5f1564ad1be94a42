"""Runs one reward function that is not built in, as the service in a sandboxed process (`line_process`).

opening:  {"target": "module:attribute", or the attribute of a file, "file": its name or "", "code": its text,
           "parameters": {…}, "is_offered": whether a package offers it by an entry point, "is_by_manifest": …}
question: "form"                                      {"takes_task": whether it is called with facts of the task}
          [prompt, expected answer, facts, answer]    {"value": number}, {"values": {name: number}} or {"error": text}

A reply with an error may have "is_spent": true where the process has no memory left for the next answer.

A function with a parameter `completions` is one of TRL's GRPOTrainer: reward_func(prompts, completions, **columns) -> [number].
It is called by name, with lists of one item.
"""

import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import MappingProxyType, ModuleType
from typing import Any

from swarm.tasks.parameter_rules import check_declared, declared_by_function

_MAX_MESSAGE_CHARS = 300
_MAX_SHOWN_CHARS = 60
FORM = "form"


@dataclass(frozen=True, slots=True)
class RewardTask:
    """What a reward function sees of a task."""

    prompt: str
    """The user's message, as the policy was asked it."""
    answer: str
    """The expected answer; empty where the source has none."""
    facts: Mapping[str, Any]
    """Further fields of the task, such as the other keys of a line."""


class Facts(dict[str, Any]):
    """`RewardTask.facts`, which says what there is where a name is missing."""

    def __missing__(self, name: str) -> Any:
        known = ", ".join(sorted(self)) or "none"
        raise KeyError(f"{name}: facts of this task are {known}; the source's `columns` say which columns become facts")


def start(opening: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Load the function. Raises ValueError for refused parameters, and whatever its module raises."""
    target, file, parameters = opening["target"], opening["file"], opening["parameters"]
    try:
        function: Callable[..., Any] = _of_file(target, file, opening["code"]) if file else _of_module(target)
    except (Exception, SystemExit) as error:  # a module may do anything when it is imported
        raise ImportError(_message(error, file)) from None
    if not callable(function):
        raise TypeError(f"{target} is no function")
    columns = _columns_of(function, parameters)
    takes_task = columns is not None or _takes_task(function, parameters, is_offered=opening["is_offered"])
    if opening["is_by_manifest"] and parameters:  # hints of types need not be loadable otherwise
        check_declared(declared_by_function(function, 2 if takes_task else 3), parameters)

    def answer(question: Any) -> dict[str, Any]:
        if question == FORM:
            return {"takes_task": takes_task}
        prompt, expected, facts, text = question
        try:
            if columns is not None:
                return {"value": _number(_of_lists(function, columns, RewardTask(prompt, expected, facts), text))}
            if not takes_task:
                return {"value": float(function(prompt, expected, text, **parameters))}
            return _values(function(RewardTask(prompt, expected, MappingProxyType(Facts(facts))), text, **parameters))
        except MemoryError as error:
            return {"error": _message(error, file), "is_spent": True}
        except (Exception, SystemExit) as error:  # reward functions meet hostile text
            return {"error": _message(error, file)}

    return answer


def _of_module(target: str) -> Any:
    return EntryPoint("", target, "").load()


def _of_file(name: str, file: str, code: str) -> Any:
    """The function of a file, whose text is enough: the process need not be able to read the file."""
    module = ModuleType(f"reward_file_{file.rpartition('/')[2].removesuffix('.py')}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # where dataclasses look for it
    exec(compile(code, file, "exec"), vars(module))  # noqa: S102  a file that the operator has chosen  # nosec B102
    if not hasattr(module, name):
        raise AttributeError(f"there is no function {name} in {file}")
    return getattr(module, name)


def _takes_task(function: Callable[..., Any], parameters: Mapping[str, Any], *, is_offered: bool) -> bool:
    """Whether it takes (task, answer) and not (prompt, expected, answer). Raises TypeError where it takes neither."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        return not is_offered
    fits_two, fits_three = (_fits(signature, count, parameters) for count in (2, 3))
    if not (fits_two or fits_three):
        wanted = ", ".join(["task", "answer", *parameters])
        raise TypeError(f"a reward function must take ({wanted}), got {signature}")
    is_for_task = not is_offered or next(iter(signature.parameters)) == "task"
    return fits_two and (is_for_task or not fits_three)


def _fits(signature: inspect.Signature, count: int, parameters: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*range(count), **parameters)
    except TypeError:
        return False
    return True


_LISTS = ("prompts", "completions")
_MESSAGES = "prompt_messages"
"""The fact that holds a prompt as the messages of a conversation; completions are messages then, too."""


def _columns_of(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Collection[str] | None:
    """The columns that a function of TRL's form must get, beside prompts and completions; None for one of another form.

    Raises TypeError for parameters, which such a function does not take.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        return None
    if "completions" not in signature.parameters:
        return None
    if parameters:
        raise TypeError(
            f"a reward function that takes completions takes columns and no parameters, got {[*parameters]}"
        )
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [one for one in signature.parameters.values() if one.kind in kinds]
    return [one.name for one in named if one.default is one.empty and one.name not in _LISTS]


def _of_lists(function: Callable[..., Any], needed: Collection[str], task: RewardTask, text: str) -> Any:
    """The value of one answer, from a function that takes lists. Raises TypeError or KeyError."""
    columns = {"answer": task.answer, **task.facts} if task.answer else {**task.facts}
    messages = columns.pop(_MESSAGES, None)
    if missing := [name for name in needed if name not in columns]:
        raise KeyError(f"{missing[0]}: columns of this task are {', '.join(sorted(columns)) or 'none'}")
    signature = inspect.signature(function)
    if not any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
        columns = {name: value for name, value in columns.items() if name in signature.parameters}
    asked = {"prompts": messages or task.prompt} if _takes(signature, "prompts") else {}
    said = [{"role": "assistant", "content": text}] if messages else text
    given = function(**{name: [value] for name, value in {**columns, **asked, "completions": said}.items()})
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__len__"):
        raise TypeError(f"rewards must be a list of numbers, one per completion, got {repr(given)[:_MAX_SHOWN_CHARS]}")
    if len(given) != 1:
        raise ValueError(f"rewards must be one number per completion, got {len(given)} for 1 completion")
    return given[0]


def _takes(signature: inspect.Signature, name: str) -> bool:
    return name in signature.parameters or any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())


def _values(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {"values": {str(name): _number(value) for name, value in given.items()}}
    return {"value": _number(given)}


def _number(value: Any) -> float:
    """A number of any kind, also of numpy or torch. Raises TypeError or ValueError."""
    if value is None or isinstance(value, str | bytes):
        hint = "; is a `return` missing?" if value is None else ""
        raise TypeError(f"a reward must be a number, or a dict of numbers, got {repr(value)[:_MAX_SHOWN_CHARS]}{hint}")
    return float(value)


def _message(error: BaseException, file: str) -> str:
    """The error for a person, with the last line of the file that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    where = f"{file.rpartition('/')[2]}:{lines[-1]}: " if lines else ""
    is_missing = isinstance(error, ModuleNotFoundError) and bool(file)
    hint = "; a reward file stands alone and imports installed packages only" if is_missing else ""
    return f"{where}{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS] + hint
