"""Scores answers of strangers behind a fence: verifiers of other packages run in a process that can be stopped.

A verifier of reasoning-gym may meet a text that makes it run for ever or take all memory. That costs its process then, and its
author some trust, never the node. Other verifiers are bounded already: those of files by `verifiers`, code by the sandbox, reward
functions of packages by their own process.
"""

import logging
from collections.abc import Sequence
from typing import Any

from swarm.config import TaskSourceSection, TasksSection
from swarm.tasks.line_process import Confinement, LineProcess, LineProcessError
from swarm.tasks.signals import BUILT_IN
from swarm.tasks.task_source import CORRECT, TaskFailure, UnknownTask
from swarm.types import TaskRef

logger = logging.getLogger(__name__)

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


def _needs_fence(section: TaskSourceSection) -> bool:
    """Signals of packages have a process of their own, which would not fit into the bounds of this one."""
    own_signals = {CORRECT, *BUILT_IN}
    return section.kind == "reasoning_gym" and all(signal.name in own_signals for signal in section.signals)
