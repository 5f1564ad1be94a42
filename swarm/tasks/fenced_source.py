"""A reasoning-gym source whose tasks are built and scored in the fenced process, which opens none of a node's files."""

import logging
import threading
from functools import partial

from swarm.config import TaskSourceSection
from swarm.sandbox.inside.file_guard import AUDIT_HOOK
from swarm.tasks.fenced_verifier import FencedVerifier, Overrun
from swarm.tasks.reasoning_gym_source import base_digest
from swarm.tasks.task_source import INDEX_SPAN, TaskFailure, UnknownTask
from swarm.types import Task, TaskRef

logger = logging.getLogger(__name__)

_AHEAD = 32
"""Prompts asked for at once where a stream is walked through, since a question costs as much time as several tasks."""


class FencedSource:
    """One source. It is safe from any thread: questions are answered one after the other."""

    def __init__(self, config: TaskSourceSection, fence: FencedVerifier) -> None:
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
