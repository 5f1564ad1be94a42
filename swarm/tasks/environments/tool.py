"""The contract of tools, and how a call of one is read from an answer.

Models write calls in the form of their chat template. Three forms are read; all of them name one tool and give one text:

    <tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>     Qwen, Hermes and others
    {"name": "calculator", "parameters": {"expression": "6 * 7"}}                           Llama; a list of it: Mistral
    <tool>calculator: 6 * 7</tool>                                                          plain text

A source may set other marks for a tool, such as <search> and </search>. The last call of an answer counts, and the others are
ignored. An answer without a call is the final one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swarm.machine.safe_files import parse_json_text
from swarm.types import is_list, is_table

MAX_INPUT_CHARS = 16_384
MAX_RESULT_CHARS = 2_048
"""Longer results are cut."""
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_PLAIN, _PLAIN_END = "<tool>", "</tool>"


class ToolError(Exception):
    """A tool cannot do what it was asked for. The policy reads why."""


class Tool(Protocol):
    """One tool. A class that is registered is constructed with (its parameters, the section of its source, all of `[tasks]`),
    raises TaskError for settings that it cannot work with, and declares `isolation`. It is safe from any thread."""

    name: str
    description: str
    """What it does, in one sentence for the policy."""
    argument: str
    """Name of its only argument, a text."""
    is_exact: bool
    """Whether every machine gives the same result."""

    @property
    def rules(self) -> str:
        """What decides its results beside its parameters and this version's code, such as the content of a folder."""
        ...

    def run(self, text: str) -> str:
        """The result for an argument of at most MAX_INPUT_CHARS characters, in bounded time. Raises ToolError."""
        ...


def described(tools: Sequence[Tool]) -> str:
    """The tools as chat templates want them: JSON of a list of functions."""
    return json.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": {
                        "type": "object",
                        "properties": {tool.argument: {"type": "string"}},
                        "required": [tool.argument],
                    },
                },
            }
            for tool in tools
        ]
    )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an answer asks for."""

    name: str
    text: str


Marks = Mapping[str, tuple[str, ...]]
"""What stands before and after a call, by name of the tool; none for tools that are called in the usual forms."""


def called(answer: str, tools: Mapping[str, Tool], marks: Marks) -> ToolCall | None:
    """The call of an answer; None where it has none. Raises ToolError for one that cannot be read."""
    marked = [(answer.rfind(pair[0]), name) for name, pair in marks.items() if pair]
    at, name = max(marked, default=(-1, ""))
    if at >= 0:
        opening, closing = marks[name]
        return ToolCall(name, answer[at + len(opening) :].partition(closing)[0].strip())
    begin = answer.rfind(_PLAIN)
    if begin > answer.rfind(_CALL):
        name, _, text = answer[begin + len(_PLAIN) :].partition(_PLAIN_END)[0].partition(":")
        return ToolCall(name.strip(), text.strip())
    found = json_call(answer)
    if found is None:
        return None
    name, arguments = found
    tool = tools.get(name)
    given = arguments.get(tool.argument) if tool else None
    if tool and not isinstance(given, str | int | float):
        raise ToolError(f"{tool.name} must get the argument {tool.argument}")
    return ToolCall(name, str(given))


def json_call(answer: str) -> tuple[str, Mapping[str, Any]] | None:
    """(name, arguments) of the last call in JSON; None where an answer has none. Raises ToolError for one that cannot be read."""
    text, begin = answer.strip(), answer.rfind(_CALL)
    if begin >= 0:
        text = answer[begin + len(_CALL) :].partition(_CALL_END)[0].strip()
    elif text[:1] not in ("{", "[") or '"name"' not in text:
        return None
    try:
        value: Any = parse_json_text(text.encode(errors="replace"))
    except ValueError:
        raise ToolError("the call must be JSON with a name and arguments") from None
    if is_list(value) and value:
        value = value[-1]
    arguments = value.get("arguments", value.get("parameters")) if is_table(value) else None
    if not is_table(value) or not isinstance(value.get("name"), str) or not is_table(arguments):
        raise ToolError("the call must have a name and arguments")
    return value["name"], arguments
