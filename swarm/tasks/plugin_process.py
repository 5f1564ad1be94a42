"""Runs one reward function of an installed package, as the service in a sandboxed process (`line_process`).

opening:  [entry point's name, its target, its parameters, whether a manifest set them]
question: [prompt, expected answer, answer]
reply:    {"value": number} or {"error": text}
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

from swarm.tasks.parameter_rules import check_declared, declared_by_function

_MAX_MESSAGE_CHARS = 300


def start(opening: list[Any]) -> Callable[[Any], dict[str, Any]]:
    """Load the function. Raises ValueError for refused parameters, and whatever its package raises."""
    name, target, parameters, is_by_manifest = opening
    function: Callable[..., Any] = EntryPoint(name, target, "").load()
    if not callable(function):
        raise TypeError(f"{target} is no function")
    if is_by_manifest:
        check_declared(declared_by_function(function), parameters)

    def answer(question: list[str]) -> dict[str, Any]:
        try:
            return {"value": float(function(*question, **parameters))}
        except Exception as error:  # reward functions meet hostile text
            return {"error": f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]}

    return answer
