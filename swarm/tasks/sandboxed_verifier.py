"""Runs task sources in sandboxed processes, which can be stopped: what other packages do with texts of strangers stays there.

A verifier of a package may meet a text that makes it run for ever or take all memory. That costs its process then, and the
author of the text some reputation, never the node.

    source                                    process
    built in, Isolation.NONE_NEEDED           the node
    built in, Isolation.OWN_SANDBOX           the node; it has a sandbox of its own
    built in, Isolation.PROCESS               one process for all of these, with namespaces where the system has them
    of a package, whatever it declares        a process of its own, with namespaces or not at all
    of a package in tasks.unsandboxed_kinds      a process of its own, with limits only

`SandboxedVerifier` is the processes; `SandboxedSource` is one source in them, as the node uses it.
"""

import contextlib
import itertools
import logging
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import TASK_SOURCES
from swarm.extensions.registry import Isolation
from swarm.sandbox.inside.file_guard import AUDIT_HOOK
from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError
from swarm.tasks.prompted_source import prompt_context
from swarm.tasks.signalled_source import package_signals
from swarm.tasks.task_source import INDEX_SPAN, MAX_TEXT_CHARS, ForgedEpisode, TaskFailure, UnknownTask
from swarm.types import MAX_TURNS, Rollout, Step, Task, TaskRef, is_table

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IN_THE_NODE = frozenset({Isolation.NONE_NEEDED, Isolation.OWN_SANDBOX})
TIME_BUDGET_S = 10.0
"""For all answers to one task, where milliseconds are usual."""
OPENING_BUDGET_S = 60.0
"""For building all sources together: a manifest may name 64 that hang."""
MEMORY_BYTES = 2 << 30
"""Address space of a process, of which the interpreter and the libraries take a quarter. Not enforced on macOS."""
FILE_BYTES = 1 << 20
"""Size of a process's folder for temporary files, which libraries of reasoning-gym want."""
_DIGEST = re.compile("[0-9a-f]{16}")


class Overrun(Exception):
    """The answers made the verifier exceed its time or memory, or ended its process."""


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """What a process reports about a source that it has built."""

    config_digest: str
    num_held_out: int
    max_turns: int
    """Most answers of an episode; 1 where its tasks have no environment."""
    files: str
    """What keeps the process from the operator's files."""


class SandboxedVerifier:
    """The processes that build tasks and score answers for the sources that need one. Safe from any thread.

    A process starts with the first question about its sources, or with `start`. That of the built-in sources takes 130 MiB.
    """

    def __init__(
        self, config: TasksSection, time_budget_s: float = TIME_BUDGET_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._time_budget_s = time_budget_s
        self._memory_bytes = memory_bytes
        self._opening_s = 0.0
        self._is_closed = False
        self._processes: dict[str, list[LineProcess]] = {}
        """By name of the source. Those of a package's environments may be several, of which the first does all but steps."""
        # Beside packages even the node itself asks the process: see `TaskMixture`.
        sections = [one for one in config.sources if needs_process(one) and not is_wrapped(one)]
        shared = [one for one in sections if TASK_SOURCES.is_built_in(one.kind)]
        for group in [shared, *([one] for one in sections if one not in shared)]:
            if group:
                count = 1 if group is shared else config.environment_processes
                processes = [self._process(group, config) for _ in range(count)]
                self._processes |= {one.source_name: processes for one in group}
        self._built_in = self._processes[shared[0].source_name][0] if shared else None

    def close(self) -> None:
        """End the processes. Questions then fail with TaskFailure, also those that are being answered."""
        self._is_closed = True
        for process in itertools.chain.from_iterable(self._processes.values()):
            process.close()

    def start(self) -> None:
        """Start the process of the built-in sources before the first question, since a start takes seconds.

        If it does not start, the next question tries again and reports it.
        """
        if self._built_in is not None:
            with contextlib.suppress(LineProcessError):
                self._built_in.start()

    @contextlib.contextmanager
    def reserved(self, source: str) -> Iterator[None]:
        """Hold the process of a source for this thread, started: what follows is the time of its questions alone."""
        process = self._processes[source][0]
        with process.reserved():
            with contextlib.suppress(LineProcessError):  # the next question tries again, and reports it
                process.start()
            yield

    def holds(self, source: str) -> bool:
        return source in self._processes

    def open(self, source: str) -> OpenedSource:
        """Build a source. Raises TaskError where it cannot be built within the bounds."""
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
        if "error" in reply:
            raise TaskError(str(reply["error"]))
        digest, num_held_out, max_turns = (reply.get(name) for name in ("config_digest", "num_held_out", "max_turns"))
        is_whole = isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None
        if not is_whole or type(num_held_out) is not int or not 0 < num_held_out <= INDEX_SPAN:
            raise TaskError(f"the process of {source} gave no answer; remove the source")
        if type(max_turns) is not int or not 1 <= max_turns <= MAX_TURNS:
            raise TaskError(
                f"an environment must have 1 to {MAX_TURNS} turns, got {str(max_turns)[:20]!a} of {source}; fix it"
            )
        return OpenedSource(str(digest), num_held_out, max_turns, str(reply.get("files")))

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

    def facts(self, ref: TaskRef) -> dict[str, Any]:
        """Further fields of the task. Raises as `rewards`."""
        facts = self._ask(ref.source, ["facts", *_facts(ref)]).get("facts")
        if not is_table(facts):
            raise TaskFailure(ref.source, "verifier process: a reply must have a table of facts")
        return facts

    def rewards(
        self, ref: TaskRef, texts: Sequence[str], num_tokens: Sequence[int] | None = None
    ) -> tuple[str, tuple[float, ...]]:
        """(digest of the prompt, reward of each text of so many tokens), for a source that it holds.

        Raises UnknownTask and TaskFailure as `TaskMixture.rebuild` and `assess` do, Overrun beyond its bounds.
        """
        lengths = [None] * len(texts) if num_tokens is None else list(num_tokens)
        return self._rewards(ref, [[text, length, []] for text, length in zip(texts, lengths, strict=True)])

    def rewards_of(self, ref: TaskRef, rollouts: Sequence[Rollout]) -> tuple[str, tuple[float, ...]]:
        """The same for rollouts, whose episodes are replayed. Raises also ForgedEpisode."""
        told = [
            [one.text, len(one.token_ids), [[turn.text, turn.reply, turn.role] for turn in one.turns]]
            for one in rollouts
        ]  # fmt: skip
        return self._rewards(ref, told)

    def step(self, ref: TaskRef, answers: Sequence[str]) -> Step:
        """What the environment of a task makes of the last of `answers`, which begin the episode. Raises as `rewards`."""
        episode = f"{ref.seed}/{ref.index}/{answers[0]}"  # all of its steps go to one process, which knows it
        reply = self._ask(ref.source, ["step", *_facts(ref), list(answers)], episode)
        text, role, reward = reply.get("reply"), reply.get("role"), reply.get("reward")
        state, is_done = reply.get("state"), reply.get("is_done")
        if not (_is_text(text) and _is_text(state) and role in ("user", "tool") and isinstance(is_done, bool)):
            raise TaskFailure(ref.source, "verifier process: a step must have a reply")
        if type(reward) not in (int, float):
            raise TaskFailure(ref.source, "verifier process: a step must have a reward")
        return Step(str(text), float(reward or 0), is_done, "tool" if role == "tool" else "user", str(state))

    def _rewards(self, ref: TaskRef, told: list[list[Any]]) -> tuple[str, tuple[float, ...]]:
        return _checked(ref, self._ask(ref.source, ["rewards", *_facts(ref), told]), len(told))

    def _ask(self, source: str, question: list[object], episode: str = "") -> dict[str, Any]:
        processes = self._processes[source]
        process = processes[zlib.crc32(episode.encode(errors="replace")) % len(processes)] if episode else processes[0]
        try:
            reply = process.ask(question, self._time_budget_s)
        except LineProcessError as error:
            if self._is_closed:  # the node ends; the process did nothing wrong
                raise TaskFailure(source, "verifier process: closed") from None
            logger.warning("the process that builds and scores tasks of %s was stopped: %s", source, error)
            if error.by_question:
                _renew(process)
                raise Overrun(str(error)) from None
            raise TaskFailure(source, f"verifier process: {error}") from None
        if "overrun" in reply:
            _renew(process)  # what is left of its memory might not be enough for the next answers
            raise Overrun(str(reply["overrun"]))
        if "unknown" in reply:
            raise UnknownTask(str(reply["unknown"]))
        if "forged" in reply:
            raise ForgedEpisode(str(reply["forged"]))
        if "failure" in reply:
            raise TaskFailure(source, str(reply["failure"]).removeprefix(f"{source}: "))
        return reply

    def _process(self, sections: Sequence[TaskSourceSection], config: TasksSection) -> LineProcess:
        """One process for `sections`, which are built in, or one of a package."""
        namespaces: Literal["required", "if possible", "none"] = "if possible"
        if not TASK_SOURCES.is_built_in(sections[0].kind):
            namespaces = "none" if sections[0].kind in config.unsandboxed_kinds else "required"
        readable = () if config.sandboxed else tuple(_named_files(sections))
        tasks = config.model_copy(update={"sources": tuple(sections)})
        confinement = Confinement(
            self._memory_bytes, None if namespaces == "none" else FILE_BYTES, namespaces, readable
        )
        return LineProcess("swarm.tasks.verifier_process", tasks.model_dump_json(), confinement)


def _renew(process: LineProcess) -> None:
    """Start the next process in the time of the author whose answers spoiled the last one: a start takes seconds, which
    would otherwise count against the next author."""
    with contextlib.suppress(LineProcessError):  # it is tried again, and reported, when it is needed
        process.renew()


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARS


def _facts(ref: TaskRef) -> tuple[object, ...]:
    return ref.source, ref.config_digest, ref.seed, ref.index


def _checked(ref: TaskRef, reply: dict[str, Any], count: int) -> tuple[str, tuple[float, ...]]:
    """(digest, rewards) of a reply. The process has read texts of strangers, so its reply is checked as one of theirs."""
    digest, rewards = reply.get("prompt_digest"), reply.get("rewards")
    if not isinstance(digest, str) or not isinstance(rewards, list) or len(rewards) != count:
        raise TaskFailure(ref.source, f"verifier process: a reply must have a digest and {count} rewards")
    if not all(type(value) in (int, float) and 0 <= value <= 1 for value in rewards):  # NaN is not in that range
        raise TaskFailure(ref.source, "verifier process: rewards must be numbers in [0, 1]")
    return digest, tuple(float(value) for value in rewards)


def _named_files(sections: Sequence[TaskSourceSection]) -> Iterator[str]:
    """Files that the operator's own settings name, by absolute paths."""
    for section in sections:
        for value in (section.path and str(section.path), *section.parameters.values()):
            if isinstance(value, str) and Path(value).is_absolute() and Path(value).is_file():
                yield value


def is_wrapped(section: TaskSourceSection) -> bool:
    """Whether a source has parts with processes of their own: reward functions of packages, or tools."""
    return bool(package_signals(section) or section.tools)


def needs_process(section: TaskSourceSection) -> bool:
    """Whether answers of strangers reach its verifier in a process only. It is so unless a built-in source declares otherwise."""
    if not TASK_SOURCES.is_built_in(section.kind):
        return True
    return TASK_SOURCES.load(section.kind).isolation not in _IN_THE_NODE


class _Facts(Mapping[str, Any]):
    """Facts of a task, for which its process is asked when they are read. Reading raises TaskFailure."""

    def __init__(self, ask: Callable[[], dict[str, Any]]) -> None:
        self._ask = cache(ask)

    def __getitem__(self, name: str) -> Any:
        return self._ask()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ask())

    def __len__(self) -> int:
        return len(self._ask())


_AHEAD = 32
"""Prompts asked for at once where a stream is drawn in order, since a question takes as long as several tasks."""


class SandboxedSource:
    """One source in its process. Safe from any thread: questions are answered one after the other."""

    def __init__(self, config: TaskSourceSection, verifier: SandboxedVerifier) -> None:
        """Raises TaskError for a source that is unknown or refused, and for parameters that are refused or fail."""
        self.name = config.source_name
        opened = verifier.open(self.name)
        self.config_digest = opened.config_digest
        self.num_held_out = opened.num_held_out
        self.max_turns = opened.max_turns
        self._context = prompt_context(config)
        self._verifier = verifier
        self._lock = threading.Lock()
        self._ahead: dict[tuple[int, int], str] = {}
        self._next = (-1, -1)
        """(seed, index) after the last task that was asked for."""
        if opened.files == AUDIT_HOOK:
            logger.warning("tasks of %s are kept from this machine's files by Python alone", self.name)

    def task(self, seed: int, index: int) -> Task:
        ref = TaskRef(self.name, self.config_digest, seed, index)
        begin = partial(_SandboxedEpisode, self._verifier, ref) if self.max_turns > 1 else None
        return Task(
            ref,
            self._prompt(ref),
            partial(self._verify, ref),
            context=self._context,
            facts=_Facts(partial(self._asked, self._verifier.facts, ref)),
            begin=begin,
            max_turns=self.max_turns,
        )

    def answer(self, seed: int, index: int) -> str:
        return self._asked(self._verifier.answer, TaskRef(self.name, self.config_digest, seed, index))

    def _asked(self, question: Callable[[TaskRef], T], ref: TaskRef) -> T:
        try:
            return question(ref)
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
            first, *following = self._verifier.prompts(ref, _AHEAD if is_walk else 1)
        except (Overrun, UnknownTask) as error:
            raise TaskFailure(self.name, f"building task {ref.seed}/{ref.index}: {error}") from None
        if following:
            with self._lock:
                self._ahead = {(ref.seed, ref.index + step): text for step, text in enumerate(following, 1)}
        return first

    def _verify(self, ref: TaskRef, text: str) -> float:
        try:
            return self._verifier.rewards(ref, [text])[1][0]
        except (Overrun, UnknownTask) as error:
            raise TaskFailure(self.name, f"verifier: {error}") from None


class _SandboxedEpisode:
    """An episode whose environment is in the process of its source, which may forget it: each question has all answers."""

    def __init__(self, verifier: SandboxedVerifier, ref: TaskRef) -> None:
        self._verifier = verifier
        self._ref = ref
        self._answers: list[str] = []

    def step(self, answer: str) -> Step:
        self._answers.append(answer)
        try:
            return self._verifier.step(self._ref, self._answers)
        except (Overrun, UnknownTask) as error:
            raise TaskFailure(self._ref.source, f"environment: {error}") from None
