"""Environments of the OpenEnv protocol as a task source: `name` is a class, such as `echo_env.environment.EchoEnvironment`.

    seed of the task ─▶ reset(seed) ─▶ observation ─▶ prompt, or reply of a step
    answer ─▶ action ─▶ step(action) ─▶ observation, reward, done

The environment is an object in the process that a task source of a package has; none of its servers is started. Its action is
the class that its `step` takes: a text field of it gets the answer, or all of its fields come from an answer in JSON. Reviewed
against openenv 0.10.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions
from typing import Annotated, Any, ClassVar, get_type_hints

from pydantic import Field

from swarm.config import Section, TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.registry import Isolation, valid_parameters, versions_of
from swarm.machine.safe_files import parse_json_text
from swarm.tasks.task_source import INDEX_SPAN, TaskFailure
from swarm.types import MAX_TURNS, Step, Task, TaskRef, is_table

_RULES = "openenv-1"
_OWN_FIELDS = {"done", "reward", "metadata"}
"""Fields of an observation or action that say nothing to a policy."""


class NoAction(Exception):
    """An answer is no action of the environment. The policy reads why."""


class OpenEnvParameters(Section):
    """`parameters` of an environment of OpenEnv."""

    instruction: Annotated[str, Field(max_length=4096)] = ""
    """What the prompt says before the first observation."""
    max_turns: Annotated[int, Field(ge=1, le=MAX_TURNS)] = 8
    """Most answers of an episode."""
    reward_scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Largest sum of the rewards of an episode; ours are in [0, 1]."""


class OpenEnvSource:
    """A task source of one class of environments. It has no data set: every number is the seed of an episode."""

    Parameters = OpenEnvParameters
    isolation: ClassVar[Isolation] = Isolation.PROCESS

    def __init__(self, config: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError where the class is missing, is no environment, or cannot be built."""
        self.name = config.source_name
        setting = f"tasks.sources.parameters of {self.name!r}"
        self._parameters = valid_parameters(OpenEnvParameters, config.parameters, config.name, setting, TaskError)
        self.max_turns = self._parameters.max_turns
        self.num_held_out = INDEX_SPAN
        self.origin = _origin(config)
        """What decides its tasks beside its parameters."""
        self._class = self._imported(config.name)
        self._action = self._action_class()
        self._text_fields = [
            name
            for name, field in self._action.model_fields.items()
            if field.annotation is str and name not in _OWN_FIELDS
        ]
        self.config_digest = hashlib.sha256(f"{_RULES}:{config.name}".encode()).hexdigest()[:16]

    def task(self, seed: int, index: int) -> Task:
        begin = partial(OpenEnvEpisode, self._class, _seed(seed, index), self.action, self._parameters)
        prompt = begin().prompt
        ref = TaskRef(self.name, self.config_digest, seed, index)
        if self.max_turns == 1:
            return Task(ref, prompt, lambda text: begin().step(text).reward)
        return Task(ref, prompt, lambda text: 0.0, begin=begin, max_turns=self.max_turns)

    def answer(self, seed: int, index: int) -> str:
        raise TaskFailure(self.name, "an environment of OpenEnv has no right answers")

    def action(self, answer: str) -> Any:
        """The action of an answer. Raises NoAction where it is none.

        What the policy reads then is the same on every machine: messages of libraries differ between their versions, and a
        reader that gets another reply takes the episode for forged.
        """
        fields = self._action.model_fields.keys() - _OWN_FIELDS
        try:
            if len(fields) == 1 and self._text_fields:
                return self._action(**{self._text_fields[0]: answer})
            given = parse_json_text(answer.encode(errors="replace"))
            if is_table(given) and given.keys() <= fields:
                return self._action(**given)
        except ValueError:
            pass
        raise NoAction(f"the answer must be JSON with valid {', '.join(sorted(fields))}")

    def _imported(self, name: str) -> Any:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(import_module(module), attribute)
        except Exception as error:  # packages fail in any way they like
            raise self._error(f"be importable, got {type(error).__name__}: {error}") from None
        bases = inspect.getmro(found) if inspect.isclass(found) else ()
        if not any(base.__name__ == "Environment" and base.__module__.startswith("openenv") for base in bases):
            raise self._error(f"be a class derived from Environment of openenv, got {name}")
        return found

    def _action_class(self) -> Any:
        """The class of the first argument of `step`."""
        parameters = list(inspect.signature(self._class.step).parameters)
        try:
            found = get_type_hints(self._class.step)[parameters[1]]
        except Exception as error:  # annotations may name what cannot be imported
            raise self._error(f"have a step whose action has a class, got {type(error).__name__}: {error}") from None
        if not hasattr(found, "model_fields"):
            raise self._error(f"have a step whose action is a class of pydantic, got {found}")
        return found

    def _error(self, rule: str) -> TaskError:
        return TaskError(f"an environment of OpenEnv must {rule}; change or remove source {self.name!r}")


class OpenEnvEpisode:
    """One run of an environment."""

    def __init__(
        self, environment: Callable[[], Any], seed: int, action: Callable[[str], Any], parameters: OpenEnvParameters
    ) -> None:
        self._environment = environment()
        self._action = action
        self._scale = 1.0 / parameters.reward_scale
        self._num_left = parameters.max_turns
        told = _as_text(self._environment.reset(seed=seed))
        self.prompt = "\n\n".join(text for text in (parameters.instruction, told) if text)

    def step(self, answer: str) -> Step:
        self._num_left -= 1
        try:
            action = self._action(answer)
        except NoAction as error:
            return Step(f"error: {error}", 0.0, is_done=not self._num_left)
        seen = self._environment.step(action)
        is_done = bool(seen.done) or not self._num_left
        if is_done and (close := getattr(self._environment, "close", None)) is not None:
            close()
        return Step(_as_text(seen), float(seen.reward or 0.0) * self._scale, is_done=is_done)


def _seed(seed: int, index: int) -> int:
    """A seed that every random generator takes, which is below 2**32 for that of numpy."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4])


def _as_text(observation: Any) -> str:
    """An observation as a policy reads it: its only field where that is text, else JSON."""
    fields: Mapping[str, Any] = observation.model_dump(mode="json", exclude=_OWN_FIELDS)
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, sort_keys=True)


def _origin(config: TaskSourceSection) -> str:
    """The versions of the package that has the class, and of openenv. Raises TaskError."""
    top = config.name.partition(".")[0]
    owners = packages_distributions().get(top, [top])
    try:
        return versions_of(*sorted({*owners, "openenv"}))
    except PackageNotFoundError as error:
        raise TaskError(
            f"source {config.source_name!r} needs the installed package {error.args[0]}, got none; install it, and set name to "
            "PACKAGE.MODULE.CLASS"
        ) from None
