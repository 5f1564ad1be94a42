"""Runs one reward function of an installed package in a process of its own, so that it can be stopped.

    argv: entry point's name, its target, its arguments as JSON, "declared" where these have to pass `parameter_rules`
    out:  {"ready": true} or {"error": text}, then one {"value": number} or {"error": text} per line in
    in:   [prompt, expected answer, answer] per line

Standard library only: it is started for every reward function.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

from swarm.tasks.parameter_rules import check_declared, declared_by_function

GROUP = "swarm.rewards"
DECLARED = "declared"
_MAX_MESSAGE_CHARS = 300


def main() -> None:
    name, target, parameters, rule = sys.argv[1:]
    replies = os.dup(1)
    os.dup2(2, 1)  # what the function prints goes nowhere
    try:
        function = EntryPoint(name, target, GROUP).load()
        if not callable(function):
            raise TypeError(f"{target} is no function")
        if rule == DECLARED:
            check_declared(declared_by_function(function), json.loads(parameters))
    except Exception as error:  # packages fail to import in any way they like
        return _reply(replies, {"error": _told(error)})
    _reply(replies, {"ready": True})
    for line in sys.stdin.buffer:
        _reply(replies, _call(function, json.loads(line), json.loads(parameters)))
    return None


def _call(function: Callable[..., Any], arguments: list[str], parameters: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": float(function(*arguments, **parameters))}
    except Exception as error:  # reward functions meet hostile text
        return {"error": _told(error)}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]


def _reply(channel: int, reply: dict[str, Any]) -> None:
    os.write(channel, json.dumps(reply).encode() + b"\n")
