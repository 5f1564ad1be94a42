"""Builds tasks and scores answers, as the service in a sandboxed process (`line_process`).

opening:  the task sources as JSON
question: ["open", source]                                          {"config_digest": text, "num_held_out": number,
                                                                     "max_turns": number, "files": text} or {"error": text}
          ["prompts", source, config digest, seed, index, count]    {"prompts": [text, …]}, one at least
          ["answer", source, config digest, seed, index]            {"answer": text}
          ["facts", source, config digest, seed, index]             {"facts": {name: value, …}}
          ["rewards", source, config digest, seed, index, [[last answer, number of tokens or null, turns], …]]
                                                                    {"prompt_digest": text, "rewards": [number, …]}
          ["step", source, config digest, seed, index, [answer, …]] {"reply": text, "role": text, "reward": number,
                                                                     "is_done": boolean, "state": text}

`turns` are those before the last answer, [[answer, reply, role], …]. In place of an answer comes {"unknown": text},
{"failure": text}, {"overrun": text}, or {"forged": text} where an environment gives other replies. A source is built by the
first question about it, within the time of that question, so that one that hangs or takes memory does not harm the others.
"""

import json
import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from swarm.config import TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import TASK_SOURCES
from swarm.limits.bounded_maps import BoundedMap
from swarm.sandbox.inside.file_guard import close_files
from swarm.tasks.environments.episodes import Play, scored
from swarm.tasks.reasoning_gym_source import import_data_sets
from swarm.tasks.task_mixture import NONE_WORKS, TaskMixture, turns_of
from swarm.tasks.task_source import INDEX_SPAN, MAX_TEXT_CHARS, ForgedEpisode, TaskFailure, UnknownTask, prompt_digest
from swarm.types import Rollout, Task, TaskRef, Turn

_MAX_BATCH_CHARS = 65_536
_BATCH_S = 0.05
_MAX_MESSAGE_CHARS = 300
_KNOWN_TASKS = 256
_KNOWN_PLAYS = 256
_ALL_FILES = "all"
Reply = dict[str, Any]


def start(opening: str) -> Callable[[Any], Reply]:
    """Give up what the sources do not need. Raises ValidationError for invalid settings."""
    workshop = _Workshop(TasksSection.model_validate_json(opening))
    return lambda question: _answer(workshop, *question)


class _Workshop:
    """The sources, each of which is built by the first question about it."""

    def __init__(self, config: TasksSection) -> None:
        """With `config.sandboxed` this process can open no file of the operator from here on.

        For a source of a package the namespaces of the process see to that, unless the operator let it out of them.
        """
        self.files = _ALL_FILES
        if all(TASK_SOURCES.is_built_in(section.kind) for section in config.sources):
            # What libraries load from the system's folders is loaded before these are closed.
            import_data_sets(section.name for section in config.sources if section.kind == "reasoning_gym")
            self.files = close_files() if config.sandboxed else _ALL_FILES
        self._config = config
        self._sections = {section.source_name: section for section in config.sources}
        self._mixture = cache(self._build)
        self._task = lru_cache(_KNOWN_TASKS)(self._rebuild)
        self._plays: BoundedMap[tuple[Any, ...], Play] = BoundedMap(_KNOWN_PLAYS)
        """Episodes that go on, by their task and answers so far."""

    def open(self, source: str) -> Reply:
        try:
            opened = self._mixture(source).sources[source]
            facts = {"config_digest": opened.config_digest, "num_held_out": opened.num_held_out}
            return {**facts, "max_turns": turns_of(opened), "files": self.files}
        except TaskError as error:
            return {"error": str(error).removeprefix(NONE_WORKS)}

    def prompts(self, source: str, config_digest: str, seed: int, index: int, count: int) -> Reply:
        """The prompts of that task and those after it, as many as a short time and one line allow."""
        prompts = [self._prompt(source, config_digest, seed, index)]
        ends_at, num_chars = time.monotonic() + _BATCH_S, len(prompts[0])
        for following in range(index + 1, min(index + count, INDEX_SPAN)):
            if time.monotonic() > ends_at or num_chars > _MAX_BATCH_CHARS:
                break
            try:
                prompts.append(self._prompt(source, config_digest, seed, following))
            except TaskFailure:  # reported when that task is asked for
                break
            num_chars += len(prompts[-1])
        return {"prompts": prompts}

    def answer(self, source: str, config_digest: str, seed: int, index: int) -> Reply:
        self._task(source, config_digest, seed, index)
        return {"answer": _bounded(source, self._mixture(source).sources[source].answer(seed, index))}

    def facts(self, source: str, config_digest: str, seed: int, index: int) -> Reply:
        """What JSON cannot hold is text; facts that are too large for a reply are left out."""
        facts = self._task(source, config_digest, seed, index).facts
        text = json.dumps({str(name): value for name, value in facts.items()}, default=str)
        return {"facts": json.loads(text) if len(text) <= MAX_TEXT_CHARS else {}}

    def rewards(self, *facts: Any) -> Reply:
        *task_facts, told = facts
        task = self._task(*task_facts)
        rewards = [scored(task, _rollout(*one)).reward for one in told]
        return {"prompt_digest": prompt_digest(task.prompt), "rewards": rewards}

    def step(self, *facts: Any) -> Reply:
        """The step that the last of the answers leads to. The episode is played from the beginning where it is not known."""
        *task_facts, answers = facts
        task, last = self._task(*task_facts), len(answers) - 1
        key = (*task_facts, *answers[:last])
        play = self._plays.pop(key, None)
        if play is None:
            play = Play.of(task)
            for answer in answers[:last]:
                play.step(answer)
        step = play.step(answers[last])
        self._plays[(*task_facts, *answers)] = play
        return {
            "reply": _bounded(task.ref.source, step.reply),
            "role": step.role,
            "reward": step.reward,
            "is_done": step.is_done,
            "state": _bounded(task.ref.source, step.state),
        }

    def _prompt(self, source: str, config_digest: str, seed: int, index: int) -> str:
        return _bounded(source, self._task(source, config_digest, seed, index).prompt)

    def _build(self, source: str) -> TaskMixture:
        if source not in self._sections:
            raise UnknownTask(f"source {source[:64]!r}")
        return TaskMixture(self._config.model_copy(update={"sources": (self._sections[source],)}), is_sandboxed=True)

    def _rebuild(self, source: str, config_digest: str, seed: int, index: int) -> Task:
        try:
            return self._mixture(source).rebuild(TaskRef(source, config_digest, seed, index))
        except TaskError as error:
            raise UnknownTask(str(error)) from None


def _answer(workshop: _Workshop, question: str, *facts: Any) -> Reply:
    answers = {
        "open": workshop.open,
        "prompts": workshop.prompts,
        "answer": workshop.answer,
        "facts": workshop.facts,
        "rewards": workshop.rewards,
        "step": workshop.step,
    }
    try:
        return answers[question](*facts)
    except UnknownTask as error:
        return {"unknown": _message(error)}
    except ForgedEpisode as error:
        return {"forged": _message(error)}
    except TaskFailure as failure:
        is_overrun = isinstance(failure.__cause__, MemoryError)
        return {"overrun" if is_overrun else "failure": str(failure)[:_MAX_MESSAGE_CHARS]}
    except MemoryError:
        return {"overrun": "out of memory"}


def _bounded(source: str, text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise TaskFailure(
            source, f"a prompt and an answer must have at most {MAX_TEXT_CHARS} characters, got {len(text)}"
        )
    return text


def _rollout(text: str, num_tokens: int | None, turns: list[list[Any]]) -> Rollout:
    """The rollout of a question, as far as its reward depends on it."""
    return Rollout(
        text=text,
        token_ids=(0,) * (num_tokens or 0),
        logprobs=(),
        finished=True,
        reward=0.0,
        turns=tuple(Turn(answer, reply, role, 0, 0) for answer, reply, role in turns),
    )


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
