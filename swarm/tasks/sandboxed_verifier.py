"""Tasks and answers of strangers behind a fence: what other packages do with them happens in a process that can be stopped.

A verifier of reasoning-gym may meet a text that makes it run for ever or take all memory. That costs its process then, and its
author some trust, never the node. Kinds of sources with bounds of their own are listed in `_BOUNDED_KINDS`: those of files by
`verifiers`, code by the sandbox. Reward functions of packages have a process of their own.

A reasoning-gym source whose tasks are built and scored in the fenced process, which opens none of a node's files.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.sandbox.inside.file_guard import AUDIT_HOOK
from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError
from swarm.tasks.reasoning_gym_source import base_digest
from swarm.tasks.signalled_source import package_signals
from swarm.tasks.task_source import INDEX_SPAN, MAX_TEXT_CHARS, TaskFailure, UnknownTask
from swarm.types import Task, TaskRef

logger = logging.getLogger(__name__)


_BOUNDED_KINDS = frozenset({"jsonl", "code"})
"""Kinds whose verifiers take time and memory in proportion to a bounded text, or run in the sandbox."""
TIME_BUDGET_S = 10.0
"""For all answers to one task, where milliseconds are usual."""
OPENING_BUDGET_S = 60.0
"""For building all sources together: a manifest may name 64 that hang."""
MEMORY_BYTES = 2 << 30
"""Address space of the process, of which the interpreter and the libraries take a quarter. Not enforced on macOS."""
FILE_BYTES = 1 << 20
"""Libraries of reasoning-gym want a folder for temporary files."""


class Overrun(Exception):
    """The answers made the verifier take more time or memory than it has, or ended its process."""


class SandboxedVerifier:
    """A process that builds the tasks of reasoning-gym sources and scores answers to them.

    It holds the sources whose verifiers other packages bring, and takes 130 MiB from the first question on.
    """

    def __init__(
        self, config: TasksSection, time_budget_s: float = TIME_BUDGET_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        sections = [section for section in config.sources if _needs_fence(section)]
        self._names = frozenset(section.source_name for section in sections)
        self._time_budget_s = time_budget_s
        self._memory_bytes = memory_bytes
        self._opening_s = 0.0
        tasks = config.model_copy(update={"sources": tuple(sections)})
        readable = () if config.sandboxed else tuple(_named_files(sections))
        confinement = Confinement(memory_bytes, FILE_BYTES, "if possible", readable)
        self._process = LineProcess("swarm.tasks.verifier_process", tasks.model_dump_json(), confinement)

    def close(self) -> None:
        """End its process. What is asked later is a TaskFailure."""
        self._process.close()

    def holds(self, source: str) -> bool:
        return source in self._names

    def open(self, source: str) -> str:
        """Build a source; returns what keeps it from files. Raises TaskError where it cannot be built within the bounds."""
        if self._opening_s > OPENING_BUDGET_S:
            raise TaskError(
                f"all sources must be built within {OPENING_BUDGET_S:g} s, got more before {source}; remove some"
            )
        started_at = time.monotonic()
        try:
            reply = self._ask(source, ["open", source])
        except (Overrun, TaskFailure) as error:
            raise TaskError(
                f"a source must be built within {self._time_budget_s:g} s and {self._memory_bytes >> 20} MiB, got {error} "
                f"of {source}; change its parameters, or remove it"
            ) from None
        finally:
            self._opening_s += time.monotonic() - started_at
        if "files" not in reply:
            raise TaskError(str(reply.get("error", f"the process of {source} gave no answer; remove the source")))
        return str(reply["files"])

    def prompts(self, ref: TaskRef, count: int) -> list[str]:
        """Prompts of that task and, as far as they come quickly, of those after it, `count` at most.

        Raises as `rewards`.
        """
        prompts = self._ask(ref.source, ["prompts", *_facts(ref), count]).get("prompts")
        if not isinstance(prompts, list) or not 0 < len(prompts) <= count or not all(map(_is_text, prompts)):
            raise TaskFailure(ref.source, f"verifier process: a reply must have 1 to {count} prompts")
        return prompts

    def answer(self, ref: TaskRef) -> str:
        """A right answer. Raises as `rewards`."""
        answer = self._ask(ref.source, ["answer", *_facts(ref)]).get("answer")
        if not _is_text(answer):
            raise TaskFailure(ref.source, "verifier process: a reply must have a text as answer")
        return str(answer)

    def rewards(self, ref: TaskRef, texts: Sequence[str]) -> tuple[str, tuple[float, ...]]:
        """(digest of the prompt, reward of each text), for a source that it holds.

        Raises UnknownTask and TaskFailure as `TaskMixture.rebuild` and `assess` do, Overrun beyond its bounds.
        """
        return _checked(ref, self._ask(ref.source, ["rewards", *_facts(ref), list(texts)]), len(texts))

    def _ask(self, source: str, question: list[object]) -> dict[str, Any]:
        try:
            reply = self._process.ask(question, self._time_budget_s)
        except LineProcessError as error:
            logger.warning("the process that builds and scores tasks was stopped: %s", error)
            if error.by_question:
                self._renew()
                raise Overrun(str(error)) from None
            raise TaskFailure(source, f"verifier process: {error}") from None
        if "overrun" in reply:
            self._renew()  # what is left of its memory might not be enough for answers that are in order
            raise Overrun(str(reply["overrun"]))
        if "unknown" in reply:
            raise UnknownTask(str(reply["unknown"]))
        if "failure" in reply:
            raise TaskFailure(source, str(reply["failure"]).removeprefix(f"{source}: "))
        return reply

    def _renew(self) -> None:
        """Start the next process in the time of whose answers spoiled the last one: that takes seconds, which would otherwise
        count against the author who comes next."""
        with contextlib.suppress(LineProcessError):  # it is tried again, and told of, when it is needed
            self._process.renew()


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARS


def _facts(ref: TaskRef) -> tuple[object, ...]:
    return ref.source, ref.config_digest, ref.seed, ref.index


def _checked(ref: TaskRef, reply: dict[str, Any], count: int) -> tuple[str, tuple[float, ...]]:
    """(digest, rewards) of a reply. The process has met texts of strangers: what it says is checked like theirs."""
    digest, rewards = reply.get("prompt_digest"), reply.get("rewards")
    if not isinstance(digest, str) or not isinstance(rewards, list) or len(rewards) != count:
        raise TaskFailure(ref.source, f"verifier process: a reply must have a digest and {count} rewards")
    if not all(type(value) in (int, float) and 0 <= value <= 1 for value in rewards):  # NaN is not in that range
        raise TaskFailure(ref.source, "verifier process: rewards must be numbers in [0, 1]")
    return digest, tuple(float(value) for value in rewards)


def _named_files(sections: Sequence[TaskSourceSection]) -> Iterator[str]:
    """Files that the operator's own parameters name, by absolute paths."""
    for value in (value for section in sections for value in section.parameters.values()):
        if isinstance(value, str) and Path(value).is_absolute() and Path(value).is_file():
            yield value


def is_bounded(section: TaskSourceSection) -> bool:
    """Whether its verifier has bounds of its own. A kind of source that nobody has listed as such is fenced."""
    return section.kind in _BOUNDED_KINDS


def _needs_fence(section: TaskSourceSection) -> bool:
    # Beside packages even the node itself asks the fence: see `TaskMixture`.
    return not is_bounded(section) and not package_signals(section)


_AHEAD = 32
"""Prompts asked for at once where a stream is walked through, since a question costs as much time as several tasks."""


class SandboxedSource:
    """One source. It is safe from any thread: questions are answered one after the other."""

    def __init__(self, config: TaskSourceSection, fence: SandboxedVerifier) -> None:
        """Raises TaskError for a data set that is unknown or refused, and for parameters that are refused or fail."""
        self.name = config.source_name
        self.config_digest = base_digest(config)
        self._fence = fence
        self._lock = threading.Lock()
        self._ahead: dict[tuple[int, int], str] = {}
        self._next = (-1, -1)
        """(seed, index) after the last task that was asked for."""
        if fence.open(self.name) == AUDIT_HOOK:
            logger.warning("tasks of %s are kept from this machine's files by Python alone", self.name)

    @property
    def num_held_out(self) -> int:
        return INDEX_SPAN

    def task(self, seed: int, index: int) -> Task:
        ref = TaskRef(self.name, self.config_digest, seed, index)
        return Task(ref, self._prompt(ref), partial(self._verify, ref))

    def answer(self, seed: int, index: int) -> str:
        try:
            return self._fence.answer(TaskRef(self.name, self.config_digest, seed, index))
        except (Overrun, UnknownTask) as error:
            raise TaskFailure(self.name, str(error)) from None

    def _prompt(self, ref: TaskRef) -> str:
        place = (ref.seed, ref.index)
        with self._lock:
            is_walk, self._next = place == self._next, (ref.seed, ref.index + 1)
            prompt = self._ahead.pop(place, None)
        if prompt is not None:
            return prompt
        try:
            first, *following = self._fence.prompts(ref, _AHEAD if is_walk else 1)
        except (Overrun, UnknownTask) as error:
            raise TaskFailure(self.name, f"building task {ref.seed}/{ref.index}: {error}") from None
        if following:
            with self._lock:
                self._ahead = {(ref.seed, ref.index + step): text for step, text in enumerate(following, 1)}
        return first

    def _verify(self, ref: TaskRef, text: str) -> float:
        try:
            return self._fence.rewards(ref, [text])[1][0]
        except (Overrun, UnknownTask) as error:
            raise TaskFailure(self.name, f"verifier: {error}") from None
