"""Tasks and answers of strangers behind a fence: what other packages do with them happens in a process that can be stopped.

A verifier of reasoning-gym may meet a text that makes it run for ever or take all memory. That costs its process then, and its
author some trust, never the node. Kinds of sources with bounds of their own are listed in `_BOUNDED_KINDS`: those of files by
`verifiers`, code by the sandbox. Reward functions of packages have a process of their own.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError
from swarm.tasks.signals import package_signals
from swarm.tasks.task_source import MAX_TEXT_CHARS, TaskFailure, UnknownTask
from swarm.types import TaskRef

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


class FencedVerifier:
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
        readable = () if config.fenced else tuple(_named_files(sections))
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
