"""Environments of the package `verifiers` as a task source: `name` is an installed one, as in `load_environment(name)`.

    row of its data set ─▶ its own rollout ─▶ asks a model for an answer ─▶ prompt, or reply of a step
                                           ◀─ answer of the policy ────────┘
                             its rubric ─▶ reward of the last step

An environment runs the rollout that it has, with the policy's answers as its model. So one that overrides any part of its loop
works, too, as long as the conversation only grows. Calls of its tools are read from the text of an answer.

This module runs in the process that a task source of a package has. An environment that needs a judge, or all answers to a task
at once, is refused when it is built. Reviewed against verifiers 0.3.1 (`verifiers.legacy`).
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from typing import Any, ClassVar

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.registry import Isolation, versions_of
from swarm.tasks.environments.tool import ToolError, json_call
from swarm.tasks.jsonl_source import HELD_OUT_EVERY, shuffled_position
from swarm.tasks.task_source import EVALUATION_SEED, INDEX_SPAN, TaskFailure
from swarm.types import MAX_TURNS, Step, Task, TaskRef

_RULES = "verifiers-1"
_PACKAGE = "verifiers"
_NUM_SAMPLED = 64
_CALLS = 'To call a tool, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call> at the end of an answer. The tools:'


class VerifiersSource:
    """A task source of one environment.

    The reward is that of the environment's rubric, divided by the sum of the rubric's weights where that is above 1.
    """

    isolation: ClassVar[Isolation] = Isolation.PROCESS

    def __init__(self, config: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError where the environment is missing, cannot be built, or cannot be replayed."""
        self.name = config.source_name
        self.origin = _origin(config)
        """What decides its tasks beside its parameters."""
        self.loop = asyncio.new_event_loop()
        self.environment = self._loaded(config)
        self.scale = 1.0 / max(1.0, sum(max(0.0, weight) for one in self._rubrics() for weight in one.weights))
        """Reward of a step per reward of the rubric."""
        declared = getattr(self.environment, "max_turns", None)
        self.max_turns = min(declared, MAX_TURNS) if type(declared) is int and declared > 0 else MAX_TURNS
        self._training, self._held_out = self._data_sets()
        sampled = [_sample(rows) for rows in (self._training, self._held_out)]
        facts = json.dumps([_RULES, sampled, self.max_turns], sort_keys=True, default=str)
        self.config_digest = hashlib.sha256(facts.encode()).hexdigest()[:16]

    @property
    def num_held_out(self) -> int:
        return min(INDEX_SPAN, len(self._held_out))

    def task(self, seed: int, index: int) -> Task:
        row = self._row(seed, index)
        prompt = Conversation(self, row).prompt
        begin = partial(self._begin, row, prompt)
        ref = TaskRef(self.name, self.config_digest, seed, index)
        if self.max_turns == 1:
            return Task(ref, prompt, lambda text: begin().step(text).reward)
        return Task(ref, prompt, lambda text: 0.0, begin=begin, max_turns=self.max_turns)

    def answer(self, seed: int, index: int) -> str:
        answer = self._row(seed, index).get("answer")
        if not isinstance(answer, str) or not answer:
            raise TaskFailure(self.name, "the rows of this environment have no answer")
        return answer

    def _begin(self, row: Mapping[str, Any], prompt: str) -> "Conversation":
        begun = Conversation(self, row)
        if begun.prompt != prompt:
            raise TaskFailure(self.name, "environment: another prompt in a second run of one row")
        return begun

    def _row(self, seed: int, index: int) -> Mapping[str, Any]:
        if seed == EVALUATION_SEED:
            return self._held_out[index % len(self._held_out)]
        return self._training[shuffled_position(seed, index, len(self._training))]

    def _loaded(self, config: TaskSourceSection) -> Any:
        logging.getLogger(_PACKAGE).setLevel(logging.CRITICAL)
        try:
            environment = import_module(_PACKAGE).load_environment(config.name, **config.parameters)
        except Exception as error:  # environments fail in any way they like
            cause = error.__cause__ or error
            raise self._error(f"be built without a network, got {type(cause).__name__}: {cause}") from None
        if environment.rubric.has_group_rewards or environment.rubric.has_advantages:
            raise self._error("reward each answer by itself, got rewards over a group of answers")
        return environment

    def _rubrics(self) -> list[Any]:
        """The environment's rubrics without groups of them. Raises TaskError for one that nobody can replay."""
        found: list[Any] = []
        waiting = [self.environment.rubric]
        while waiting:
            one = waiting.pop()
            if "JudgeRubric" in (base.__name__ for base in type(one).__mro__):
                raise self._error(
                    "be scored without a judge, whose rewards nobody can compute again, got a JudgeRubric"
                )
            waiting += getattr(one, "rubrics", ())
            found.append(one)
        return found

    def _data_sets(self) -> tuple["_Rows", "_Rows"]:
        """(to train on, held out). Raises TaskError."""
        try:
            environment = self.environment
            has_training = environment.dataset is not None or environment.dataset_source is not None
            has_held_out = environment.eval_dataset is not None or environment.eval_dataset_source is not None
            training = environment.get_dataset() if has_training else environment.get_eval_dataset()
            held_out = environment.get_eval_dataset() if has_training and has_held_out else None
        except Exception as error:  # environments fail in any way they like
            raise self._error(f"have a data set without a network, got {type(error).__name__}: {error}") from None
        if held_out is not None:
            rows = _Rows(training, range(len(training))), _Rows(held_out, range(len(held_out)))
        else:
            numbers = range(len(training))
            kept = [number for number in numbers if number % HELD_OUT_EVERY]
            rows = _Rows(training, kept), _Rows(training, numbers[::HELD_OUT_EVERY])
        if not all(map(len, rows)):
            raise self._error(f"have rows to train on and to hold out, got {len(rows[0])} and {len(rows[1])}")
        return rows

    def _error(self, rule: str) -> TaskError:
        return TaskError(
            f"an environment of the package {_PACKAGE} must {rule}; change its parameters, or remove source {self.name!r}"
        )


class _Rows(Sequence[Mapping[str, Any]]):
    """Some rows of a data set."""

    def __init__(self, rows: Any, numbers: Sequence[int]) -> None:
        self._rows = rows
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: Any) -> Any:
        return self._rows[self._numbers[position]]


def _sample(rows: _Rows) -> list[object]:
    """The number of rows and some of them, over the whole length."""
    step = max(1, len(rows) // _NUM_SAMPLED)
    return [len(rows), *(rows[position] for position in range(0, len(rows), step))]


def _origin(config: TaskSourceSection) -> str:
    """The versions of `verifiers` and of the environment's package, which must declare that it needs it. Raises TaskError."""
    try:
        found = versions_of(_PACKAGE, config.name)
    except PackageNotFoundError as error:
        raise TaskError(
            f"source {config.source_name!r} needs the installed package {error.args[0]}, got none; pip install "
            "'verifiers>=0.1.14,<0.4' and the environment in its version of the swarm"
        ) from None
    if not any(line.startswith(_PACKAGE) for line in requires(config.name) or ()):
        raise TaskError(
            f"an environment must be a package that needs {_PACKAGE}, got {config.name}; set name of source "
            f"{config.source_name!r}"
        )
    return found


class Conversation:
    """One rollout of an environment, which goes on whenever it gets an answer."""

    def __init__(self, source: VerifiersSource, row: Mapping[str, Any]) -> None:
        """Raises TaskFailure where the environment fails before the first answer."""
        self._source = source
        self._model = _model_class()()
        self._rollout = source.loop.create_task(_scored(source.environment, row, self._model))
        self._said: list[tuple[str, str]] = []
        """(role, text) of the messages so far."""
        told = self._told()
        if told is None:
            raise TaskFailure(source.name, "environment: it ended before the first answer")
        tools = [one.model_dump(include={"name", "description", "parameters"}) for one in self._model.tools]
        described = ["\n".join([_CALLS, *map(json.dumps, tools)])] if tools else []
        self.prompt = "\n\n".join([*described, _as_text(told)])

    def __del__(self) -> None:
        if not self._source.loop.is_closed():
            self._rollout.cancel()

    def step(self, answer: str) -> Step:
        self._said.append(("assistant", answer))
        self._model.give(answer)
        told = self._told()
        if told is not None:
            role = "tool" if all(role == "tool" for role, _ in told) else "user"
            return Step("\n\n".join(text for _, text in told), 0.0, is_done=False, role=role)
        ended = self._rollout.result()
        if (error := ended.get("error")) is not None:
            raise TaskFailure(self._source.name, f"environment: {type(error).__name__}: {error}"[:300])
        return Step("", float(ended["reward"]) * self._source.scale, is_done=True)

    def _told(self) -> list[tuple[str, str]] | None:
        """Run the environment until it asks for an answer, and return what it has told; None where it ends instead."""
        loop = self._source.loop
        asked = loop.create_task(self._model.asked.wait())
        loop.run_until_complete(asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED))
        asked.cancel()
        if self._rollout.done():
            return None
        self._model.asked.clear()
        said = [(str(one.role), _text(one.content)) for one in self._model.messages]
        known = len(self._said)
        if said[:known] != self._said:
            raise TaskFailure(
                self._source.name, "environment: a conversation must only grow, got one that was rewritten"
            )
        self._said = said
        return said[known:]


async def _scored(environment: Any, row: Mapping[str, Any], model: "_Answers") -> Mapping[str, Any]:
    """The state of an environment after a whole rollout, with its reward."""
    state: dict[str, Any] = await environment.rollout(dict(row), model, "policy", {})
    await environment.rubric.score_rollout(state)
    await environment.rubric.cleanup(state)
    return state


def _text(content: Any) -> str:
    """The text of a message, whose parts must all be text."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part["text"] for part in content)  # anything but text raises, and costs the task


def _as_text(messages: Sequence[tuple[str, str]]) -> str:
    """What is asked first, as one text: roles are named where somebody has answered before."""
    if any(role == "assistant" for role, _ in messages):
        return "\n\n".join(text if role == "system" else f"{role.capitalize()}: {text}" for role, text in messages)
    return "\n\n".join(text for _, text in messages)


class _Answers:
    """The model of an environment: it waits for the next answer of the policy."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.messages: Sequence[Any] = ()
        self.tools: Sequence[Any] = ()
        self._next: asyncio.Future[str] | None = None

    def give(self, answer: str) -> None:
        if self._next is None or self._next.done():
            raise RuntimeError("the environment has not asked for an answer")
        self._next.set_result(answer)

    async def get_response(
        self, prompt: Sequence[Any], model: str, sampling_args: Any, tools: Sequence[Any] | None = None, **_: Any
    ) -> Any:
        """What an environment calls in place of a model's server."""
        if self._next is not None and not self._next.done():
            raise RuntimeError("an environment must ask for one answer at a time")
        self.messages, self.tools = prompt, tools or ()
        self._next = asyncio.get_running_loop().create_future()
        self.asked.set()
        return _response(await self._next, has_tools=bool(tools))


def _response(answer: str, *, has_tools: bool) -> Any:
    """An answer as an environment expects it of a server."""
    types = import_module("verifiers.types")
    try:
        call = json_call(answer) if has_tools else None
    except ToolError:
        call = ("unreadable", None)
    calls = None if call is None else [types.ToolCall(id="call", name=call[0], arguments=_arguments(call[1]))]
    message = types.ResponseMessage(
        content=answer, tool_calls=calls, finish_reason="tool_calls" if calls else "stop", is_truncated=False
    )
    return types.Response(id="answer", created=0, model="policy", usage=None, message=message)


def _arguments(arguments: Mapping[str, Any] | None) -> str:
    """As JSON; a call that cannot be read keeps arguments that cannot be, so that the environment says so."""
    return "" if arguments is None else json.dumps(arguments)


@cache
def _model_class() -> type[_Answers]:
    """`_Answers` as a client of the package: it needs none of the methods that lead to a server."""
    client = import_module("verifiers.clients.client").Client
    made = type("Answers", (_Answers, client), {"__init__": _Answers.__init__})
    made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return made
