"""Tasks that may be answered with the help of tools: an answer that calls one is a turn, and the result is the reply.

answer ─┬▶ no call: the final answer ─▶ verifier of the source ─▶ reward
        └▶ call ─▶ tool ─▶ result, or why it failed ─▶ next answer
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import TOOLS
from swarm.extensions.registry import valid_parameters
from swarm.tasks.environments.tool import MAX_INPUT_CHARS, MAX_RESULT_CHARS, Marks, Tool, ToolError, called
from swarm.tasks.final_answers import answer_rule, written_by
from swarm.tasks.task_source import TaskSource, assess
from swarm.types import Step, Task

_RULES = "tools-1"


def tools_of(section: TaskSourceSection, tasks: TasksSection) -> list[Tool]:
    """The tools of a source. Raises TaskError for parameters that one does not accept."""
    found: list[Tool] = []
    for one in section.tools:
        made = TOOLS.load(one.name)
        setting = f"tasks.sources.tools of {section.source_name!r}"
        found.append(
            made(valid_parameters(made.Parameters, one.parameters, one.name, setting, TaskError), section, tasks)
        )
    return found


class ToolSource:
    """Wraps a source whose tasks have a verifier."""

    def __init__(self, source: TaskSource, section: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError for a tool that cannot be built."""
        self.name = source.name
        self.max_turns = section.max_turns
        self._source = source
        self._rule = answer_rule(section)
        self._tools = {tool.name: tool for tool in tools_of(section, tasks)}
        self._marks: Marks = {one.name: one.marks for one in section.tools}
        used = [[one.name, one.parameters, self._tools[one.name].rules, one.marks] for one in section.tools]
        facts = json.dumps([_RULES, source.config_digest, used, section.max_turns], sort_keys=True)
        self.config_digest = hashlib.sha256(facts.encode()).hexdigest()[:16]

    @property
    def num_held_out(self) -> int:
        return self._source.num_held_out

    def task(self, seed: int, index: int) -> Task:
        task = self._source.task(seed, index)
        begin = partial(ToolEpisode, task, self._tools, self._marks, self.max_turns)
        ref = replace(task.ref, config_digest=self.config_digest)
        return replace(task, ref=ref, begin=begin, max_turns=self.max_turns)

    def answer(self, seed: int, index: int) -> str:
        return self._source.answer(seed, index)

    def demonstrate(self, seed: int, index: int) -> Sequence[str]:
        """A right answer, after a call of the calculator where there is one and the prompt has an expression for it."""
        final = written_by(self._rule, self.answer(seed, index))
        found = _EXPRESSION.findall(self._source.task(seed, index).prompt) if "calculator" in self._tools else []
        if not found:
            return [final]
        opening, closing = self._marks["calculator"] or ("<tool>calculator: ", "</tool>")
        return [f"{opening}{found[-1].strip()}{closing}", final]


_EXPRESSION = re.compile(r"[-+(]*\d[\d.]*(?:\s*[-+*/%()]+\s*[-+(]*\d[\d.]*\)*)+")


class ToolEpisode:
    """One task with tools. The last of `max_turns` answers is final, even if it calls a tool."""

    def __init__(self, task: Task, tools: Mapping[str, Tool], marks: Marks, max_turns: int) -> None:
        self._task = task
        self._tools = tools
        self._marks = marks
        self._num_left = max_turns
        self._results: Sequence[str] = ()

    def step(self, answer: str) -> Step:
        self._num_left -= 1
        is_exact = True
        try:
            call = called(answer, self._tools, self._marks) if self._num_left else None
            if call is None:
                return Step("", assess(self._task, answer).reward, is_done=True)
            tool = self._tools.get(call.name)
            if tool is None:
                raise ToolError(f"there is no tool {call.name[:64]!r}; there is {', '.join(self._tools)}")
            if len(call.text) > MAX_INPUT_CHARS:
                raise ToolError(f"{tool.name} must get at most {MAX_INPUT_CHARS} characters, got {len(call.text)}")
            is_exact = tool.is_exact
            result = tool.run(call.text)
        except ToolError as error:
            result = f"error: {error}"
        reply = result if len(result) <= MAX_RESULT_CHARS else f"{result[:MAX_RESULT_CHARS]}…"
        self._results = (*self._results, reply)  # what the policy knows besides the prompt
        return Step(reply, 0.0, is_done=False, role="tool", state="\x1e".join(self._results), is_exact=is_exact)
