"""All task sources of a node: rebuild any task from its reference, score any answer.

A source that cannot be built is set aside with its reason and the others go on.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.tasks.code_source import CodeSource
from swarm.tasks.jsonl_source import JsonlSource
from swarm.tasks.reasoning_gym_source import ReasoningGymSource
from swarm.tasks.sandboxed_verifier import SandboxedSource, SandboxedVerifier, is_bounded
from swarm.tasks.signalled_source import MultiRewardSource, package_signals
from swarm.tasks.task_source import (
    CORRECT,
    EVALUATION_SEED,
    FIRST_TRAINING_SEED,
    INDEX_SPAN,
    MAX_SEED,
    TaskFailure,
    TaskSource,
    UnknownTask,
    named_signals,
)
from swarm.types import Task, TaskRef

logger = logging.getLogger(__name__)

STREAMS_PER_PEER = 64
"""So few that a reader computes them all."""
NONE_WORKS = "no task source works: "
_REWARD_SLACK = 1e-6


class TaskMixture:
    """The sources of one node by name."""

    def __init__(self, config: TasksSection, *, is_in_fence: bool = False) -> None:
        """Raises TaskError if not one source works.

        Sources that `_is_fenced` names are built and scored in a process of their own; `is_in_fence`: this is it.
        """
        fenced = () if is_in_fence else tuple(one for one in config.sources if _is_fenced(one, config))
        self._fence = SandboxedVerifier(_without_signals(config, fenced)) if fenced else None
        self.sources: dict[str, TaskSource] = {}
        self.weights: dict[str, float] = {}
        self.broken: dict[str, str] = {}
        """Reason per source that could not be built."""
        self.held_out_failures: Counter[str] = Counter()
        """Held-out tasks that could not be built, by source."""
        for section in config.sources:
            try:
                self.sources[section.source_name] = _build(section, config, self._fence)
                self.weights[section.source_name] = section.weight
            except TaskError as error:
                self.broken[section.source_name] = str(error)
                logger.warning("task source %s is left out: %s", section.source_name, error)
        if not self.sources:
            raise TaskError(NONE_WORKS + "; ".join(self.broken.values()))

    def close(self) -> None:
        """End the process that builds tasks, where there is one. Tasks that are asked for later fail."""
        if self._fence is not None:
            self._fence.close()

    def rebuild(self, ref: TaskRef) -> Task:
        """The task a reference stands for. Raises UnknownTask or TaskFailure."""
        source = self.sources.get(ref.source)
        if source is None or source.config_digest != ref.config_digest:
            raise UnknownTask(f"source {ref.source[:64]!r} with digest {ref.config_digest[:16]}")
        if not (_is_within(ref.seed, MAX_SEED + 1) and _is_within(ref.index, INDEX_SPAN)):
            raise UnknownTask(f"a number outside the streams of {ref.source}")
        return source.task(ref.seed, ref.index)

    def prompt_of(self, ref: TaskRef) -> str | None:
        """To be read; None where the task cannot be rebuilt here."""
        try:
            return self.rebuild(ref).prompt
        except (UnknownTask, TaskFailure):
            return None

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


@dataclass(frozen=True, slots=True)
class Score:
    """Of one answer."""

    reward: float
    """In [0, 1]."""
    signals: tuple[tuple[str, float], ...]
    """(name, value in [0, 1]) of every signal of the reward; empty where there is only one."""


def assess(task: Task, text: str) -> Score:
    """What an answer is worth. Raises TaskFailure where the verifier fails or leaves [0, 1]."""
    try:
        named = named_signals(task.verify(text))
    except TaskFailure:
        raise
    except Exception as error:  # third-party verifiers meet hostile text
        raise TaskFailure(task.ref.source, f"verifier: {type(error).__name__}: {error}") from error
    weights = task.weights or ((CORRECT, 1.0),)
    signals = tuple((name, _within_range(task, name, named.get(name))) for name, _ in weights)
    reward = sum(weight * value for (_, weight), (_, value) in zip(weights, signals, strict=True))
    return Score(min(1.0, reward), signals if task.weights else ())


def score(task: Task, text: str) -> float:
    """The reward of an answer, in [0, 1]. Raises TaskFailure as `assess` does."""
    return assess(task, text).reward


def _within_range(task: Task, name: str, value: float | None) -> float:
    if value is None or not -_REWARD_SLACK <= value <= 1 + _REWARD_SLACK:  # NaN fails both
        raise TaskFailure(task.ref.source, f"signal {name} must be in [0, 1], got {value}; mend the reward function")
    return min(1.0, max(0.0, value))


def training_seed(peer_id: str, node_seed: int) -> int:
    """The stream of one node: far apart for any two, and bound to the identity, of which anybody can tell (`owns_stream`)."""
    digest = hashlib.sha256(f"stream:{peer_id}:{node_seed % STREAMS_PER_PEER}".encode()).digest()
    return FIRST_TRAINING_SEED + int.from_bytes(digest[:8], "big") % (MAX_SEED + 1 - FIRST_TRAINING_SEED)


def owns_stream(peer_id: str, seed: int) -> bool:
    """Whether a task stream is one of those that this peer may draw from. Nodes of older versions used others, too."""
    return seed in _streams(peer_id)


@lru_cache(maxsize=1024)
def _streams(peer_id: str) -> frozenset[int]:
    return frozenset(training_seed(peer_id, number) for number in range(STREAMS_PER_PEER))


def _is_within(number: object, stop: int) -> bool:
    """Whether a number from the wire is a whole one in [0, stop)."""
    return type(number) is int and 0 <= number < stop


def _is_fenced(section: TaskSourceSection, config: TasksSection) -> bool:
    """Whether even the node's own tasks and answers go through the fence, as a verifier without bounds of its own demands.

    So it is with sources of a manifest, and with those beside reward functions of packages: these have processes of their
    own, which may not be started from inside of the fence.
    """
    return not is_bounded(section) and (config.sandboxed or bool(package_signals(section)))


def _without_signals(config: TasksSection, sections: Sequence[TaskSourceSection]) -> TasksSection:
    """These sources without their signals, which are computed in the node or in processes of their own."""
    return config.model_copy(update={"sources": tuple(one.model_copy(update={"signals": ()}) for one in sections)})


def _build(section: TaskSourceSection, config: TasksSection, fence: SandboxedVerifier | None) -> TaskSource:
    source: TaskSource
    if section.kind == "code":
        source = CodeSource(section, may_be_unfenced=config.run_code_unsandboxed)
    elif section.kind == "jsonl":
        source = JsonlSource(section)
    elif fence is not None and fence.holds(section.source_name):
        source = SandboxedSource(section, fence)
    else:
        source = ReasoningGymSource(section, takes_anything=not config.sandboxed)
    return MultiRewardSource(source, section, config) if section.signals else source
