"""All task sources of a node: rebuild any task from its reference, score any answer.

A source that cannot be built is set aside with its reason and the others go on.
"""

import hashlib
import logging
import math
from collections import Counter

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.tasks.jsonl_source import JsonlSource
from swarm.tasks.reasoning_gym_source import ReasoningGymSource
from swarm.tasks.task_source import (
    EVALUATION_SEED,
    FIRST_TRAINING_SEED,
    INDEX_SPAN,
    MAX_SEED,
    TaskFailure,
    TaskSource,
    UnknownTask,
)
from swarm.types import Task, TaskRef

logger = logging.getLogger(__name__)

_REWARD_SLACK = 1e-6


class TaskMixture:
    """The sources of one node by name."""

    def __init__(self, config: TasksSection) -> None:
        """Raises TaskError if not one source works."""
        self.sources: dict[str, TaskSource] = {}
        self.weights: dict[str, float] = {}
        self.broken: dict[str, str] = {}
        """Reason per source that could not be built."""
        self.held_out_failures: Counter[str] = Counter()
        """Held-out tasks that could not be built, by source."""
        for section in config.sources:
            try:
                self.sources[section.source_name] = _build(section)
                self.weights[section.source_name] = section.weight
            except TaskError as error:
                self.broken[section.source_name] = str(error)
                logger.warning("task source %s is left out: %s", section.source_name, error)
        if not self.sources:
            raise TaskError("no task source works: " + "; ".join(self.broken.values()))

    def rebuild(self, ref: TaskRef) -> Task:
        """The task a reference stands for. Raises UnknownTask or TaskFailure."""
        source = self.sources.get(ref.source)
        if source is None or source.config_digest != ref.config_digest:
            raise UnknownTask(f"source {ref.source[:64]!r} with digest {ref.config_digest[:16]}")
        if not (_is_within(ref.seed, MAX_SEED + 1) and _is_within(ref.index, INDEX_SPAN)):
            raise UnknownTask(f"a number outside the streams of {ref.source}")
        return source.task(ref.seed, ref.index)

    def held_out(self, tasks_per_source: int) -> list[Task]:
        """The first tasks of every source's evaluation stream; the same on every node."""
        tasks: list[Task] = []
        for source in self.sources.values():
            for index in range(min(tasks_per_source, source.num_held_out)):
                try:
                    tasks.append(source.task(EVALUATION_SEED, index))
                except TaskFailure as failure:
                    self.held_out_failures[source.name] += 1
                    logger.warning("held-out task left out: %s", failure)
        return tasks


def score(task: Task, text: str) -> float:
    """Reward in [0, 1] of an answer. Raises TaskFailure where the verifier fails or leaves that range."""
    try:
        reward = float(task.verify(text))
    except Exception as error:  # third-party verifiers meet hostile text
        raise TaskFailure(task.ref.source, f"verifier: {type(error).__name__}: {error}") from error
    if not math.isfinite(reward) or not -_REWARD_SLACK <= reward <= 1 + _REWARD_SLACK:
        raise TaskFailure(task.ref.source, f"verifier gave {reward}, outside [0, 1]")
    return min(1.0, max(0.0, reward))


def training_seed(peer_id: str, node_seed: int) -> int:
    """The stream of one node: far apart for any two, and bound to the identity."""
    digest = hashlib.sha256(f"stream:{peer_id}:{node_seed}".encode()).digest()
    return FIRST_TRAINING_SEED + int.from_bytes(digest[:8], "big") % (MAX_SEED + 1 - FIRST_TRAINING_SEED)


def _is_within(number: object, stop: int) -> bool:
    """Whether a number from the wire is a whole one in [0, stop)."""
    return type(number) is int and 0 <= number < stop


def _build(section: TaskSourceSection) -> TaskSource:
    return JsonlSource(section) if section.kind == "jsonl" else ReasoningGymSource(section)
