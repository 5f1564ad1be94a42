"""All task sources of a node: rebuilds any task from its reference and scores any answer.

A source that cannot be built is left out, with its reason, and the others work on.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Self

from swarm.config import SharingSection, TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import FINAL_ANSWERS, TASK_SOURCES
from swarm.tasks.environments.episodes import check_repeatable
from swarm.tasks.environments.tool_source import ToolSource
from swarm.tasks.final_answers import Whole, answer_rule, final_answer
from swarm.tasks.held_out import HeldOut
from swarm.tasks.prompted_source import PROMPT, PromptedSource, PromptTemplate, prompt_context
from swarm.tasks.sandboxed_verifier import SandboxedSource, SandboxedVerifier, is_wrapped, needs_process
from swarm.tasks.signalled_source import MultiRewardSource
from swarm.tasks.task_source import (
    FIRST_TRAINING_SEED,
    INDEX_SPAN,
    MAX_SEED,
    TaskFailure,
    TaskSource,
    UnknownTask,
    prompt_digest,
)
from swarm.types import MAX_TURNS, RolloutGroup, Task, TaskRef

logger = logging.getLogger(__name__)

STREAMS_PER_PEER = 64
"""Few enough for a reader to compute them all."""
COMMON_EPOCH_S = 300.0
"""How long all nodes of a swarm draw their common tasks from one stream."""
MAX_COMMON_TASKS = 4096
"""Tasks of a common stream that may be drawn. Readers treat tasks behind them as those of any other stream."""
_COMMON_EPOCHS = 24
"""Streams of so many epochs, two hours, count as common: groups may wait, and rounds may be long."""
_CLOCK_SKEW_S = 10.0
"""A node whose clock is ahead may draw from a stream that begins here so much later."""
NONE_WORKS = "no task source works: "


class TaskMixture:
    """The task sources of one node, by name. It is safe from any thread."""

    def __init__(self, config: TasksSection, *, is_sandboxed: bool = False) -> None:
        """Raises TaskError if not one source works.

        Sources for which `_must_be_sandboxed` holds are built and scored in a sandboxed process. With `is_sandboxed` this is that
        process.
        """
        self._is_sandboxed = is_sandboxed
        sandboxed = () if is_sandboxed else tuple(one for one in config.sources if _must_be_sandboxed(one, config))
        self._sandboxed = SandboxedVerifier(_without_wrappers(config, sandboxed)) if sandboxed else None
        self.sources: dict[str, TaskSource] = {}
        self.weights: dict[str, float] = {}
        self.configured_weights = {section.source_name: section.weight for section in config.sources}
        """Those of sources that do not work here, too: the same on all nodes with the same tasks."""
        self.contexts = {section.source_name: prompt_context(section) for section in config.sources}
        """What chat templates write around the prompts of each source."""
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
        self._held_out = {
            name: HeldOut(source, config.held_out_share, self._leave_out) for name, source in self.sources.items()
        }
        self._answer_rules = {
            section.source_name: answer_rule(section)
            for section in config.sources
            if section.source_name in self.sources and FINAL_ANSWERS.is_built_in(section.answer)
        }
        self._safe_for_strangers = {
            section.source_name for section in config.sources if section in sandboxed or not needs_process(section)
        }
        if not self.sources:
            raise TaskError(NONE_WORKS + "; ".join(self.broken.values()))
        for name, reason in self.broken.items():
            logger.warning("task source %s is left out: %s", name, reason)

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
        if section.signals and turns_of(source) > 1:
            raise TaskError(
                f"signals belong to tasks of one answer, got the environment {section.source_name!r}; remove its signals"
            )
        source = MultiRewardSource(source, section, config) if section.signals else source
        if section.tools and turns_of(source) > 1:
            raise TaskError(
                f"tools belong to tasks with a verifier, got the game {section.source_name!r}; remove its tools"
            )
        source = ToolSource(source, section, config) if section.tools else source
        if turns_of(source) > 1 and not isinstance(source, SandboxedSource):  # its process has checked it
            check_repeatable(source)
        return source

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

    def final_answer_in(self, source: str, text: str) -> str | None:
        """What the verifier reads of an answer, for a person to see; "" where there is none.

        None: it reads all of it, or it is not known here.
        """
        rule = self._answer_rules.get(source)
        return None if rule is None or isinstance(rule, Whole) else final_answer(rule, text) or ""

    @property
    def episodic(self) -> list[str]:
        """The sources whose tasks have environments."""
        return [name for name, source in self.sources.items() if turns_of(source) > 1]

    def held_out(self, tasks_per_source: int) -> list[Task]:
        """At most so many tasks of every source for evaluation; the same on every node, and none that anybody trains on."""
        return [task for rule in self._held_out.values() for task in rule.tasks(tasks_per_source)]

    def may_score_strangers(self, source: str) -> bool:
        """Whether its tasks may score texts of strangers: they have a process for it, or need none."""
        return source in self._safe_for_strangers

    def is_held_out(self, task: Task) -> bool:
        """Whether nobody may train on the prompt of a task. One of another mixture is compared with all sources here."""
        return self.holds_out(task.ref.source, prompt_digest(task.prompt))

    def holds_out(self, source: str, digest: str) -> bool:
        """As `is_held_out`, by source and `prompt_digest`."""
        rules = [self._held_out[source]] if source in self._held_out else self._held_out.values()
        return any(rule.holds(digest) for rule in rules)

    def _leave_out(self, failure: TaskFailure) -> None:
        self.held_out_failures[failure.source] += 1
        if self.held_out_failures[failure.source] == 1:  # a source may fail thousands of times
            logger.warning("held-out task left out, as others of %s may be: %s", failure.source, failure)


class PackageSource:
    """A task source of an installed package, inside of its sandboxed process, which alone imports it.

    Package and version are a part of the config digest, so that nodes with other versions do not share tasks. A source that
    builds on other packages names these as its `origin` instead.
    """

    def __init__(self, section: TaskSourceSection, config: TasksSection) -> None:
        """Raises TaskError where the package cannot be imported, or refuses the section in any way."""
        try:
            self._source: TaskSource = TASK_SOURCES.load(section.kind)(section, config)
            own_digest = str(self._source.config_digest)
            origin = str(getattr(self._source, "origin", "")) or TASK_SOURCES.origin(section.kind)
        except TaskError:
            raise
        except Exception as error:  # packages fail in any way they like
            raise TaskError(
                f"task source {section.kind} must accept its section, got {type(error).__name__}: {error}; set "
                f"tasks.sources of {section.source_name!r}"
            ) from None
        self.name = section.source_name
        self.max_turns = turns_of(self._source)
        self._template = PromptTemplate(section, {PROMPT})
        facts = [origin, section.kind, section.name, section.parameters, own_digest]
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
        ref = TaskRef(self.name, self.config_digest, seed, index)
        return Task(ref, prompt, verify, facts=task.facts, begin=task.begin, max_turns=self.max_turns)

    def answer(self, seed: int, index: int) -> str:
        try:
            return str(self._source.answer(seed, index))
        except Exception as error:  # as above
            raise TaskFailure(self.name, f"answer {seed}/{index}: {type(error).__name__}: {error}") from error


def turns_of(source: TaskSource) -> int:
    """Most answers of an episode of a source; 1 where it declares no `max_turns`. Raises TaskError for what is no such number."""
    found = getattr(source, "max_turns", 1)
    if type(found) is not int or not 1 <= found <= MAX_TURNS:
        raise TaskError(
            f"max_turns of a source must be in [1, {MAX_TURNS}], got {str(found)[:20]} of {source.name!r}; fix it"
        )
    return found


def training_seed(peer_id: str, node_seed: int) -> int:
    """The stream of one node. Those of any two nodes are far apart, and anybody can check whose it is (`owns_stream`)."""
    return _stream_of(f"stream:{peer_id}:{node_seed % STREAMS_PER_PEER}")


def owns_stream(peer_id: str, seed: int) -> bool:
    """Whether a task stream is one that this peer may draw from. Nodes of older versions used others, too."""
    return seed in _streams(peer_id)


def common_seed(swarm_id: str, epoch: int) -> int:
    """The stream from which all nodes of a swarm draw their common tasks in one epoch of the swarm's clock."""
    return _stream_of(f"common:{swarm_id}:{epoch}")


class CommonStreams:
    """The streams of one swarm from which all its nodes draw, so that answers of several nodes to one task meet.

    There is one for each epoch. It follows from the swarm's id and the clock, so nodes need no agreement, and anybody knows its
    tasks in advance: see docs/security/rollouts.md. Safe from any thread.
    """

    def __init__(self, swarm_id: str, clock: Callable[[], float], *, is_on: bool, shares_solved: bool = False) -> None:
        """`clock`: swarm time in seconds. Where it is not on, no task is a common one.

        `shares_solved`: whether groups without a wrong answer are shared on all tasks (`sharing.solved_groups`).
        """
        self._shares_solved = shares_solved
        self._swarm_id = swarm_id
        self._clock = clock
        self._is_on = is_on

    @classmethod
    def of(cls, config: SharingSection, swarm_id: str, clock: Callable[[], float]) -> Self:
        """As `sharing.common_tasks` says. A node that neither reads nor publishes has none."""
        is_on = config.common_tasks > 0 and (config.publish or config.swarm_groups > 0)
        return cls(swarm_id, clock, is_on=is_on, shares_solved=config.solved_groups)

    def current(self) -> int | None:
        """The seed of the stream to draw from now; None where there is none."""
        return common_seed(self._swarm_id, int(self._clock() // COMMON_EPOCH_S)) if self._is_on else None

    def holds(self, task: TaskRef) -> bool:
        """Whether a task is a common one of this epoch, or of one of the last two hours."""
        if not self._is_on or task.index >= MAX_COMMON_TASKS:
            return False
        return task.seed in _common_seeds(self._swarm_id, int((self._clock() + _CLOCK_SKEW_S) // COMMON_EPOCH_S))

    def is_worth_sharing(self, group: RolloutGroup) -> bool:
        """Whether others may learn from a group: its rewards differ, or all are alike and above 0, where those of others may be
        lower: on common tasks, and on all with `sharing.solved_groups`."""
        if group.has_reward_variance:
            return True
        return group.rollouts[0].reward > 0 and (self._shares_solved or self.holds(group.task))


def no_common_streams() -> CommonStreams:
    """For a node without a swarm."""
    return CommonStreams("", lambda: 0.0, is_on=False)


def _stream_of(name: str) -> int:
    """A hash of the name, in the range of training seeds."""
    digest = hashlib.sha256(name.encode()).digest()
    return FIRST_TRAINING_SEED + int.from_bytes(digest[:8], "big") % (MAX_SEED + 1 - FIRST_TRAINING_SEED)


@lru_cache(maxsize=64)
def _common_seeds(swarm_id: str, newest: int) -> frozenset[int]:
    return frozenset(common_seed(swarm_id, newest - back) for back in range(_COMMON_EPOCHS))


@lru_cache(maxsize=1024)
def _streams(peer_id: str) -> frozenset[int]:
    return frozenset(training_seed(peer_id, number) for number in range(STREAMS_PER_PEER))


def _is_within(number: object, stop: int) -> bool:
    """Whether a value from the wire is a whole number in [0, stop)."""
    return type(number) is int and 0 <= number < stop


def _must_be_sandboxed(section: TaskSourceSection, config: TasksSection) -> bool:
    """Whether even the node's own tasks and answers go through the sandboxed process.

    They do for sources of packages, of a manifest, and of a section with tools or with reward functions of packages: these have
    processes of their own, which may not be started from inside of the sandbox.
    """
    is_of_package = not TASK_SOURCES.is_built_in(section.kind)
    return needs_process(section) and (is_of_package or config.sandboxed or is_wrapped(section))


def _without_wrappers(config: TasksSection, sections: Sequence[TaskSourceSection]) -> TasksSection:
    """The sources without their reward signals and tools, which run in the node or in processes of their own."""
    bare = {"signals": (), "tools": ()}
    return config.model_copy(update={"sources": tuple(one.model_copy(update=bare) for one in sections)})
