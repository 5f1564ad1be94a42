"""Builds tasks and scores answers, as the service in a sandboxed process (`line_process`).

opening:  the task sources as JSON
question: ["open", source]                                          {"config_digest": text, "num_held_out": number,
                                                                     "files": text} or {"error": text}
          ["prompts", source, config digest, seed, index, count]    {"prompts": [text, …]}, one at least
          ["answer", source, config digest, seed, index]            {"answer": text}
          ["rewards", source, config digest, seed, index, [answer, …], [number of tokens or null, …]]
                                                                    {"prompt_digest": text, "rewards": [number, …]}

or, in place of an answer, {"unknown": text}, {"failure": text} or {"overrun": text}. A source is built by the first question
about it, within the time of that question, so that one that hangs or takes memory does not harm the others.
"""

import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from swarm.config import TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import TASK_SOURCES
from swarm.sandbox.inside.file_guard import close_files
from swarm.tasks.task_mixture import NONE_WORKS, TaskMixture, score
from swarm.tasks.task_source import INDEX_SPAN, MAX_TEXT_CHARS, TaskFailure, UnknownTask, prompt_digest
from swarm.types import Task, TaskRef

_MAX_BATCH_CHARS = 65_536
_BATCH_S = 0.05
_MAX_MESSAGE_CHARS = 300
_KNOWN_TASKS = 256
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
            import reasoning_gym  # noqa: F401  what it loads from the system's folders is loaded before they are closed

            self.files = close_files() if config.sandboxed else _ALL_FILES
        self._config = config
        self._sections = {section.source_name: section for section in config.sources}
        self._mixture = cache(self._build)
        self._task = lru_cache(_KNOWN_TASKS)(self._rebuild)

    def open(self, source: str) -> Reply:
        try:
            opened = self._mixture(source).sources[source]
            facts = {"config_digest": opened.config_digest, "num_held_out": opened.num_held_out}
            return {**facts, "files": self.files}
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

    def rewards(self, *facts: Any) -> Reply:
        *task_facts, texts, num_tokens = facts
        task = self._task(*task_facts)
        rewards = [score(task, text, length) for text, length in zip(texts, num_tokens, strict=True)]
        return {"prompt_digest": prompt_digest(task.prompt), "rewards": rewards}

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
        "rewards": workshop.rewards,
    }
    try:
        return answers[question](*facts)
    except UnknownTask as error:
        return {"unknown": _message(error)}
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


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
