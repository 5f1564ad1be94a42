"""A task source whose reward is the weighted sum of several reward signals, and the signals that every node has.

    text ─┬▶ the source's own verifier ─▶ correct (tests, …) ─┐
          ├▶ built-in signals ─────────▶ format, length ──────┼▶ Σ weight · value / Σ weight = reward in [0, 1]
          └▶ plug-ins ─────────────────▶ their names ─────────┘

Names, weights, parameters and the versions of plug-ins are part of the config digest: nodes with others do not share tasks.

Built-in signals are functions of the answer's text alone, so that every receiver computes the same value: length is counted
in characters, since another tokenizer counts other tokens. All take time in proportion to the text.

A built-in signal is one class here, or in a file of its own, and one line in `swarm/extensions/points.py`. Reward functions of
packages run in processes of their own (`reward_plugin`).
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import Field, model_validator

from swarm.config import (
    NonNegativeInt,
    PositiveInt,
    RewardSignalSection,
    Section,
    TaskSourceFacts,
    TaskSourceSection,
    TasksSection,
)
from swarm.errors import TaskError
from swarm.extensions.points import REWARDS, TASK_SOURCES
from swarm.tasks.reward_plugin import TIME_BUDGET_S, RewardPlugin
from swarm.tasks.task_source import CORRECT, TaskSource, named_signals
from swarm.tasks.verifiers import check_pattern, regex
from swarm.types import Task


class RewardSignal(ABC):
    """A built-in signal with its parameters. It is constructed from its `Parameters`, and called from several threads."""

    rules: str = ""
    """Part of the config digest: changes whenever answers are valued differently with the same parameters."""

    @abstractmethod
    def value(self, text: str) -> float:
        """The value, in [0, 1], of an answer's text, which may be anybody's and of any length."""


class FormatParameters(Section):
    """Either of the two."""

    pattern: str = ""
    """Regular expression (RE2) that the whole text must match, except for white space at both ends."""
    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")], ...] = ()
    """Names of tags: the text must be `<a>…</a> <b>…</b>` in this order, each once, and nothing else."""

    @model_validator(mode="after")
    def _one_of_them(self) -> "FormatParameters":
        if bool(self.pattern) == bool(self.tags):
            raise ValueError("format needs a pattern or tags, and not both")
        if self.pattern:
            check_pattern(self.pattern)
        return self


class LengthParameters(Section):
    """Soft penalty for answers that are too long."""

    max_chars: PositiveInt
    """Answers of so many characters or more have the value 0."""
    buffer_chars: NonNegativeInt = 0
    """The value falls from 1 to 0 over the last so many characters before that."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> "LengthParameters":
        if self.buffer_chars > self.max_chars:
            raise ValueError(f"buffer_chars must be at most max_chars, got {self.buffer_chars} > {self.max_chars}")
        return self


def tagged(tags: tuple[str, ...], text: str) -> float:
    """1 where the text is the tagged parts in order, with white space between them."""
    position = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return 0.0
        begin, end = text.find(opening), text.find(closing)
        if begin < position or end < begin or text[position:begin].strip():
            return 0.0
        position = end + len(closing)
    return float(not text[position:].strip())


def brevity(max_chars: int, buffer_chars: int, text: str) -> float:
    """1 + R of DAPO's overlong shaping (2503.14476), in characters: 1, then linearly down to 0 at `max_chars`."""
    left = max_chars - len(text)
    if left <= 0:
        return 0.0
    return min(1.0, left / buffer_chars) if buffer_chars else 1.0


class Format(RewardSignal):
    """1 where the whole text has the form that the parameters describe, else 0."""

    Parameters = FormatParameters

    def __init__(self, parameters: FormatParameters) -> None:
        self._parameters = parameters
        self.rules = "re2" if parameters.pattern else ""

    def value(self, text: str) -> float:
        pattern = self._parameters.pattern
        return regex(pattern, text) if pattern else tagged(self._parameters.tags, text)


class Length(RewardSignal):
    """See `brevity`."""

    Parameters = LengthParameters

    def __init__(self, parameters: LengthParameters) -> None:
        self._parameters = parameters

    def value(self, text: str) -> float:
        return brevity(self._parameters.max_chars, self._parameters.buffer_chars, text)


def package_signals(source: TaskSourceFacts) -> list[str]:
    """Names of the signals of a source that reward functions of packages compute, each in a process of its own."""
    known = {*verifier_signals(source.kind), *REWARDS.names}
    return [signal.name for signal in source.signals if signal.name not in known]


def verifier_signals(kind: str) -> tuple[str, ...]:
    """The signals that the verifier of a kind of source gives: `signal_names` of a built-in class, else `correct` alone."""
    if not TASK_SOURCES.is_built_in(kind):
        return (CORRECT,)
    names: tuple[str, ...] = getattr(TASK_SOURCES.load(kind), "signal_names", (CORRECT,))
    return names


class MultiRewardSource:
    """Wraps the source that `config` describes."""

    def __init__(self, source: TaskSource, config: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError for a signal that is unknown, or cannot be built from its parameters.

        `tasks` says how reward functions of packages are isolated, and whether their parameters come from a manifest.
        """
        self._tasks = tasks
        self._source = source
        self.name = source.name
        self._of_verifier = verifier_signals(config.kind)
        self._built_in: dict[str, RewardSignal] = {}
        self._plugins: dict[str, RewardPlugin] = {}
        for signal in config.signals:
            self._add(signal)
        total = sum(signal.weight for signal in config.signals)
        self._weights = tuple((signal.name, signal.weight / total) for signal in config.signals)
        self.config_digest = self._digest(config)

    @property
    def num_held_out(self) -> int:
        return self._source.num_held_out

    def task(self, seed: int, index: int) -> Task:
        task = self._source.task(seed, index)
        verify = partial(self._verify, task, partial(self._source.answer, seed, index))
        return Task(replace(task.ref, config_digest=self.config_digest), task.prompt, verify, self._weights)

    def answer(self, seed: int, index: int) -> str:
        return self._source.answer(seed, index)

    def _verify(self, task: Task, expected: Callable[[], str], text: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, _ in self._weights:
            if name in values:
                continue
            if name in self._built_in:
                values[name] = self._built_in[name].value(text)
            elif name in self._plugins:
                values[name] = self._plugins[name](task.prompt, expected(), text)
            else:
                values |= named_signals(task.verify(text))
        return {name: values[name] for name, _ in self._weights}

    def _add(self, signal: RewardSignalSection) -> None:
        name = signal.name
        if name in self._of_verifier:
            if signal.parameters:
                raise TaskError(
                    f"signal {name} takes no parameters, got {signal.parameters}; "
                    f"set tasks.sources.signals of {self.name!r}"
                )
        elif REWARDS.is_built_in(name):
            self._built_in[name] = REWARDS.make(name, signal.parameters, f"tasks.sources.signals of {self.name!r}")
        else:
            self._plugins[name] = self._plugin(signal)

    def _plugin(self, signal: RewardSignalSection) -> RewardPlugin:
        installed = REWARDS.installed()
        if signal.name not in installed:
            known = sorted({*self._of_verifier, *REWARDS.names, *installed})
            raise TaskError(
                f"a signal must be one of {', '.join(known)}, got {signal.name!r}; install the package that offers it "
                f"or set tasks.sources.signals of {self.name!r}"
            )
        entry = installed[signal.name]
        return RewardPlugin(self.name, entry, signal.parameters, self._tasks, time_budget_s=TIME_BUDGET_S)

    def _digest(self, config: TaskSourceSection) -> str:
        signals = [[s.name, s.weight, s.parameters, self._version(s)] for s in config.signals]
        canonical = json.dumps([self._source.config_digest, signals], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def _version(self, signal: RewardSignalSection) -> str:
        """What decides the values of a signal beside its parameters: the package of a plug-in, the rules of a built-in one."""
        name = signal.name
        if name in self._plugins:
            return self._plugins[name].version
        return self._built_in[name].rules if name in self._built_in else ""
