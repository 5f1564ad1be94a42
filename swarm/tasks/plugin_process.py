"""The service that runs one reward function of an installed package, behind the fence of `line_process`.

opening:  [entry point's name, its target, its parameters]
question: [prompt, expected answer, answer]
reply:    {"value": number} or {"error": text}
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

GROUP = "swarm.rewards"
_MAX_MESSAGE_CHARS = 300


def start(opening: list[Any]) -> Callable[[Any], dict[str, Any]]:
    """Load the function. Raises whatever its package raises."""
    name, target, parameters = opening
    function = EntryPoint(name, target, GROUP).load()
    if not callable(function):
        raise TypeError(f"{target} is no function")
    reward: Callable[..., Any] = function

    def answer(question: list[str]) -> dict[str, Any]:
        try:
            return {"value": float(reward(*question, **parameters))}
        except Exception as error:  # reward functions meet hostile text
            return {"error": f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]}

    return answer
