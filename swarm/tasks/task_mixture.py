"""All task sources of a node: rebuilds any task from its reference and scores any answer.

A source that cannot be built is left out, with its reason, and the others work on.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import TASK_SOURCES
from swarm.tasks.prompted_source import PROMPT, PromptedSource, PromptTemplate
from swarm.tasks.sandboxed_verifier import SandboxedSource, SandboxedVerifier, needs_process
from swarm.tasks.signalled_source import MultiRewardSource, package_signals
from swarm.tasks.task_source import (
    CORRECT,
    EVALUATION_SEED,
    FIRST_TRAINING_SEED,
    INDEX_SPAN,
    LENGTH,
    MAX_SEED,
    TaskFailure,
    TaskSource,
    UnknownTask,
    named_signals,
)
from swarm.types import Task, TaskRef

logger = logging.getLogger(__name__)

STREAMS_PER_PEER = 64
"""Few enough for a reader to compute them all."""
NONE_WORKS = "no task source works: "
_REWARD_SLACK = 1e-6


class TaskMixture:
    """The task sources of one node, by name. It is safe from any thread."""

    def __init__(self, config: TasksSection, *, is_sandboxed: bool = False) -> None:
        """Raises TaskError if not one source works.

        Sources for which `_must_be_sandboxed` holds are built and scored in a sandboxed process. With `is_sandboxed` this is that
        process.
        """
        self._is_sandboxed = is_sandboxed
        sandboxed = () if is_sandboxed else tuple(one for one in config.sources if _must_be_sandboxed(one, config))
        self._sandboxed = SandboxedVerifier(_without_signals(config, sandboxed)) if sandboxed else None
        self.sources: dict[str, TaskSource] = {}
        self.weights: dict[str, float] = {}
        self.broken: dict[str, str] = {}
        """The reason why a source could not be built, by name."""
        self.held_out_failures: Counter[str] = Counter()
        """Number of held-out tasks that could not be built, by source."""
        for section in config.sources:
            try:
                self.sources[section.source_name] = self._build(section, config)
                self.weights[section.source_name] = section.weight
            except TaskError as error:
                self.broken[section.source_name] = str(error)
                logger.warning("task source %s is left out: %s", section.source_name, error)
        if not self.sources:
            raise TaskError(NONE_WORKS + "; ".join(self.broken.values()))

    def close(self) -> None:
        """End the processes that build tasks, where there are any. Tasks that are asked for later fail."""
        if self._sandboxed is not None:
            self._sandboxed.close()

    def _build(self, section: TaskSourceSection, config: TasksSection) -> TaskSource:
        source: TaskSource
        if self._sandboxed is not None and self._sandboxed.holds(section.source_name):
            source = SandboxedSource(section, self._sandboxed)
        else:
            source = self._build_here(section, config)
            source = PromptedSource(source, section) if section.form else source
        return MultiRewardSource(source, section, config) if section.signals else source

    def _build_here(self, section: TaskSourceSection, config: TasksSection) -> TaskSource:
        if TASK_SOURCES.is_built_in(section.kind):
            source: TaskSource = TASK_SOURCES.load(section.kind)(section, config)
            return source
        if self._is_sandboxed:
            return PackageSource(section, config)
        raise TaskError(
            f"a task source of a package must run in a process, got {section.kind} in the node; report this"
        )

    def rebuild(self, ref: TaskRef) -> Task:
        """The task of a reference, which may be anybody's. Raises UnknownTask or TaskFailure."""
        source = self.sources.get(ref.source)
        if source is None or source.config_digest != ref.config_digest:
            raise UnknownTask(f"source {ref.source[:64]!r} with digest {ref.config_digest[:16]}")
        if not (_is_within(ref.seed, MAX_SEED + 1) and _is_within(ref.index, INDEX_SPAN)):
            raise UnknownTask(f"a number outside the streams of {ref.source}")
        return source.task(ref.seed, ref.index)

    def prompt_of(self, ref: TaskRef) -> str | None:
        """The prompt, for a person to read; None where the task cannot be rebuilt here."""
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


class PackageSource:
    """A task source of an installed package, inside of its sandboxed process, which alone imports it.

    Package and version are a part of the config digest, so that nodes with other versions do not share tasks.
    """

    def __init__(self, section: TaskSourceSection, config: TasksSection) -> None:
        """Raises TaskError where the package cannot be imported, or refuses the section in any way."""
        try:
            self._source: TaskSource = TASK_SOURCES.load(section.kind)(section, config)
            own_digest = str(self._source.config_digest)
        except TaskError:
            raise
        except Exception as error:  # packages fail in any way they like
            raise TaskError(
                f"task source {section.kind} must accept its section, got {type(error).__name__}: {error}; set "
                f"tasks.sources of {section.source_name!r}"
            ) from None
        self.name = section.source_name
        self._template = PromptTemplate(section, {PROMPT})
        facts = [TASK_SOURCES.origin(section.kind), section.kind, section.name, section.parameters, own_digest]
        self.config_digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def num_held_out(self) -> int:
        return self._source.num_held_out

    def task(self, seed: int, index: int) -> Task:
        try:
            task = self._source.task(seed, index)
            prompt, verify = self._template.render({PROMPT: str(task.prompt)}), task.verify
        except TaskFailure:
            raise
        except Exception as error:  # as above
            raise TaskFailure(self.name, f"building task {seed}/{index}: {type(error).__name__}: {error}") from error
        return Task(TaskRef(self.name, self.config_digest, seed, index), prompt, verify)

    def answer(self, seed: int, index: int) -> str:
        try:
            return str(self._source.answer(seed, index))
        except Exception as error:  # as above
            raise TaskFailure(self.name, f"answer {seed}/{index}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Score:
    """What one answer is worth."""

    reward: float
    """In [0, 1]."""
    signals: tuple[tuple[str, float], ...]
    """(name, value in [0, 1]) of every signal of the reward; empty where there is only one."""


def assess(task: Task, text: str, num_tokens: int | None = None) -> Score:
    """The score of an answer of so many tokens; None where the number is not known.

    Raises TaskFailure where the verifier fails or gives a value outside [0, 1], and where the number is needed.
    """
    try:
        named = named_signals(task.verify(text))
    except TaskFailure:
        raise
    except Exception as error:  # third-party verifiers meet hostile text
        raise TaskFailure(task.ref.source, f"verifier: {type(error).__name__}: {error}") from error
    if task.token_length is not None:
        if num_tokens is None:
            raise TaskFailure(task.ref.source, "signal length is measured in tokens, and their number is not known")
        named[LENGTH] = task.token_length(num_tokens)
    weights = task.weights or ((CORRECT, 1.0),)
    signals = tuple((name, _within_range(task, name, named.get(name))) for name, _ in weights)
    reward = sum(weight * value for (_, weight), (_, value) in zip(weights, signals, strict=True))
    return Score(min(1.0, reward), signals if task.weights else ())


def score(task: Task, text: str, num_tokens: int | None = None) -> float:
    """The reward of an answer, in [0, 1]. Raises TaskFailure as `assess` does."""
    return assess(task, text, num_tokens).reward


def _within_range(task: Task, name: str, value: float | None) -> float:
    if value is None or not -_REWARD_SLACK <= value <= 1 + _REWARD_SLACK:  # NaN fails both
        raise TaskFailure(task.ref.source, f"signal {name} must be in [0, 1], got {value}; fix the reward function")
    return min(1.0, max(0.0, value))


def training_seed(peer_id: str, node_seed: int) -> int:
    """The stream of one node. Those of any two nodes are far apart, and anybody can check whose it is (`owns_stream`)."""
    digest = hashlib.sha256(f"stream:{peer_id}:{node_seed % STREAMS_PER_PEER}".encode()).digest()
    return FIRST_TRAINING_SEED + int.from_bytes(digest[:8], "big") % (MAX_SEED + 1 - FIRST_TRAINING_SEED)


def owns_stream(peer_id: str, seed: int) -> bool:
    """Whether a task stream is one that this peer may draw from. Nodes of older versions used others, too."""
    return seed in _streams(peer_id)


@lru_cache(maxsize=1024)
def _streams(peer_id: str) -> frozenset[int]:
    return frozenset(training_seed(peer_id, number) for number in range(STREAMS_PER_PEER))


def _is_within(number: object, stop: int) -> bool:
    """Whether a value from the wire is a whole number in [0, stop)."""
    return type(number) is int and 0 <= number < stop


def _must_be_sandboxed(section: TaskSourceSection, config: TasksSection) -> bool:
    """Whether even the node's own tasks and answers go through the sandboxed process.

    They do for sources of packages, of a manifest, and of a section with reward functions of packages: these have processes of
    their own, which may not be started from inside of the sandbox.
    """
    is_of_package = not TASK_SOURCES.is_built_in(section.kind)
    return needs_process(section) and (is_of_package or config.sandboxed or bool(package_signals(section)))


def _without_signals(config: TasksSection, sections: Sequence[TaskSourceSection]) -> TasksSection:
    """The sources without their reward signals, which are computed in the node or in processes of their own."""
    return config.model_copy(update={"sources": tuple(one.model_copy(update={"signals": ()}) for one in sections)})
