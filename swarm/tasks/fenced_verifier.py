"""Scores answers of strangers behind a fence: verifiers of other packages run in a process that can be stopped.

A verifier of reasoning-gym may meet a text that makes it run for ever or take all memory. That costs its process then, and its
author some trust, never the node. Kinds of sources with bounds of their own are listed in `_BOUNDED_KINDS`: those of files by
`verifiers`, code by the sandbox. Reward functions of packages have a process of their own.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from swarm.config import TaskSourceSection, TasksSection
from swarm.tasks.line_process import Confinement, LineProcess, LineProcessError
from swarm.tasks.signals import BUILT_IN
from swarm.tasks.task_source import CORRECT, TaskFailure, TaskSource, UnknownTask
from swarm.types import Task, TaskRef

logger = logging.getLogger(__name__)

_BOUNDED_KINDS = frozenset({"jsonl", "code"})
"""Kinds whose verifiers take time and memory in proportion to a bounded text, or run in the sandbox."""
TIME_BUDGET_S = 10.0
"""For all answers to one task, where milliseconds are usual."""
MEMORY_BYTES = 2 << 30
"""Address space of the process, of which the interpreter and the libraries take a quarter. Not enforced on macOS."""


FILE_BYTES = 1 << 20
"""Libraries of reasoning-gym want a folder for temporary files."""


class Overrun(Exception):
    """The answers made the verifier take more time or memory than it has, or ended its process."""


class FencedVerifier:
    """Of the sources whose verifiers other packages bring. Its process takes 130 MiB, from the first answer of a stranger on."""

    def __init__(
        self, config: TasksSection, time_budget_s: float = TIME_BUDGET_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        sections = [section for section in config.sources if _needs_fence(section)]
        self._names = frozenset(section.source_name for section in sections)
        self._time_budget_s = time_budget_s
        tasks = config.model_copy(update={"sources": tuple(sections)})
        confinement = Confinement(memory_bytes, FILE_BYTES, "if possible")
        self._process = LineProcess("swarm.tasks.verifier_process", tasks.model_dump_json(), confinement)

    def close(self) -> None:
        """End its process. What is asked later is a TaskFailure."""
        self._process.close()

    def holds(self, source: str) -> bool:
        return source in self._names

    def rewards(self, ref: TaskRef, texts: Sequence[str]) -> tuple[str, tuple[float, ...]]:
        """(digest of the prompt, reward of each text), for a source that it holds.

        Raises UnknownTask and TaskFailure as `TaskMixture.rebuild` and `assess` do, Overrun beyond its bounds.
        """
        try:
            question = [ref.source, ref.config_digest, ref.seed, ref.index, list(texts)]
            reply = self._process.ask(question, self._time_budget_s)
        except LineProcessError as error:
            logger.warning("the process that scores answers of others was stopped: %s", error)
            if error.by_question:
                raise Overrun(str(error)) from None
            raise TaskFailure(ref.source, f"verifier process: {error}") from None
        if "overrun" in reply:
            raise Overrun(str(reply["overrun"]))
        if "unknown" in reply:
            raise UnknownTask(str(reply["unknown"]))
        if "failure" in reply:
            raise TaskFailure(ref.source, str(reply["failure"]).removeprefix(f"{ref.source}: "))
        return _checked(ref, reply, len(texts))


def _checked(ref: TaskRef, reply: dict[str, Any], count: int) -> tuple[str, tuple[float, ...]]:
    """(digest, rewards) of a reply. The process has met texts of strangers: what it says is checked like theirs."""
    digest, rewards = reply.get("prompt_digest"), reply.get("rewards")
    if not isinstance(digest, str) or not isinstance(rewards, list) or len(rewards) != count:
        raise TaskFailure(ref.source, f"verifier process: a reply must have a digest and {count} rewards")
    if not all(type(value) in (int, float) and 0 <= value <= 1 for value in rewards):  # NaN is not in that range
        raise TaskFailure(ref.source, "verifier process: rewards must be numbers in [0, 1]")
    return digest, tuple(float(value) for value in rewards)


class FencedScoring:
    """A source whose verifier always runs behind a fence, also for the node's own answers.

    For sources that mix such a verifier with reward functions of packages: these have processes of their own, which may not be
    started from inside of the fence. So the fence is around the verifier alone.
    """

    def __init__(self, source: TaskSource, section: TaskSourceSection, config: TasksSection) -> None:
        """`source`: what `section`, one of `config`, describes without its signals."""
        self._source = source
        self.name = source.name
        self.config_digest = source.config_digest
        bare = section.model_copy(update={"signals": ()})
        self._verifier = FencedVerifier(config.model_copy(update={"sources": (bare,)}))

    @property
    def num_held_out(self) -> int:
        return self._source.num_held_out

    def task(self, seed: int, index: int) -> Task:
        task = self._source.task(seed, index)
        return replace(task, verify=partial(self._verify, task.ref))

    def answer(self, seed: int, index: int) -> str:
        return self._source.answer(seed, index)

    def _verify(self, ref: TaskRef, text: str) -> float:
        try:
            return self._verifier.rewards(ref, [text])[1][0]
        except Overrun as error:
            raise TaskFailure(ref.source, str(error)) from None


def uses_packages(section: TaskSourceSection) -> bool:
    """Whether reward functions of packages are among its signals."""
    return any(signal.name not in {CORRECT, "tests", *BUILT_IN} for signal in section.signals)


def is_bounded(section: TaskSourceSection) -> bool:
    """Whether its verifier has bounds of its own. A kind of source that nobody has listed as such is fenced."""
    return section.kind in _BOUNDED_KINDS


def _needs_fence(section: TaskSourceSection) -> bool:
    return not is_bounded(section) and not uses_packages(section)  # with packages it is a FencedScoring
