"""A task source whose reward is the weighted sum of several reward signals, and the signals that every node has.

    text ─┬▶ the source's own verifier ─▶ correct (tests, …) ─┐
          ├▶ built-in signals ─────────▶ format, length ──────┼▶ Σ weight · value / Σ weight = reward in [0, 1]
          └▶ plug-ins ─────────────────▶ their names ─────────┘

Names, weights, parameters and the versions of plug-ins are part of the config digest: nodes with others do not share tasks.

Built-in signals are functions of the answer's text, so that every receiver computes the same value. Length may also be counted
in tokens: in those of the author, whose number is in the record. All take time in proportion to the text. `format` and `length`
read the whole text; the source's verifier and plug-ins read the final answer (`final_answers`).

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
from swarm.extensions.points import REWARDS
from swarm.tasks.final_answers import answer_rule, final_answer
from swarm.tasks.prompted_source import verifier_signals
from swarm.tasks.reward_plugin import TIME_BUDGET_S, RewardPlugin
from swarm.tasks.task_source import LENGTH, TaskSource, named_signals
from swarm.tasks.verifiers import MAX_ANSWER_CHARS, check_pattern, regex
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
    max_chars: Annotated[int, Field(ge=1, le=1 << 20)] = MAX_ANSWER_CHARS
    """Longer texts do not match a pattern."""
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
    """Soft penalty for answers that are too long, in characters or in tokens."""

    max_chars: PositiveInt | None = None
    """Answers of so many characters or more have the value 0."""
    buffer_chars: NonNegativeInt = 0
    """The value falls from 1 to 0 over the last so many characters before that."""
    max_tokens: PositiveInt | None = None
    """Answers of so many tokens or more have the value 0. The end-of-text token counts."""
    buffer_tokens: NonNegativeInt = 0
    """The value falls from 1 to 0 over the last so many tokens before that."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> "LengthParameters":
        if (self.max_chars is None) == (self.max_tokens is None):
            raise ValueError("length needs max_chars or max_tokens, and not both")
        for unit, limit, buffer in (
            ("chars", self.max_chars, self.buffer_chars),
            ("tokens", self.max_tokens, self.buffer_tokens),
        ):
            if buffer > (limit or 0):
                raise ValueError(f"buffer_{unit} must be at most max_{unit}, got {buffer} > {limit}")
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


def brevity(limit: int, buffer: int, length: int) -> float:
    """1 + R of DAPO's soft over-long penalty (2503.14476): 1 up to `limit - buffer`, then linearly down to 0 at `limit`."""
    left = limit - length
    if left <= 0:
        return 0.0
    return min(1.0, left / buffer) if buffer else 1.0


class Format(RewardSignal):
    """1 where the whole text has the form that the parameters describe, else 0."""

    Parameters = FormatParameters

    def __init__(self, parameters: FormatParameters) -> None:
        self._parameters = parameters
        self.rules = "re2" if parameters.pattern else ""

    def value(self, text: str) -> float:
        pattern = self._parameters.pattern
        return regex(pattern, text, self._parameters.max_chars) if pattern else tagged(self._parameters.tags, text)


class Length(RewardSignal):
    """See `brevity`. In tokens it is no function of the text; `by_tokens` is called then in place of `value`."""

    Parameters = LengthParameters

    def __init__(self, parameters: LengthParameters) -> None:
        self._parameters = parameters

    @property
    def counts_tokens(self) -> bool:
        return self._parameters.max_tokens is not None

    def value(self, text: str) -> float:
        return brevity(self._parameters.max_chars or 0, self._parameters.buffer_chars, len(text))

    def by_tokens(self, num_tokens: int) -> float:
        return brevity(self._parameters.max_tokens or 0, self._parameters.buffer_tokens, num_tokens)


def package_signals(source: TaskSourceFacts) -> list[str]:
    """Names of the signals of a source that reward functions of packages compute, each in a process of its own."""
    known = {*verifier_signals(source.kind), *REWARDS.names}
    return [signal.name for signal in source.signals if signal.name not in known]


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
        self._rule = answer_rule(config)
        self._built_in: dict[str, RewardSignal] = {}
        self._token_length: Callable[[int], float] | None = None
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
        ref = replace(task.ref, config_digest=self.config_digest)
        return replace(task, ref=ref, verify=verify, weights=self._weights, token_length=self._token_length)

    def answer(self, seed: int, index: int) -> str:
        return self._source.answer(seed, index)

    def _verify(self, task: Task, expected: Callable[[], str], text: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, _ in self._weights:
            if name in values or (name == LENGTH and self._token_length is not None):
                continue
            if name in self._built_in:
                values[name] = self._built_in[name].value(text)
            elif name in self._plugins:
                answer = final_answer(self._rule, text)
                values[name] = 0.0 if answer is None else self._plugins[name](task.prompt, expected(), answer)
            else:
                values |= named_signals(task.verify(text))
        return {name: values[name] for name, _ in self._weights if name in values}

    def _add(self, signal: RewardSignalSection) -> None:
        name = signal.name
        if name in self._of_verifier:
            if signal.parameters:
                raise TaskError(
                    f"signal {name} takes no parameters, got {signal.parameters}; "
                    f"set tasks.sources.signals of {self.name!r}"
                )
        elif REWARDS.is_built_in(name):
            made = REWARDS.make(name, signal.parameters, f"tasks.sources.signals of {self.name!r}")
            self._built_in[name] = made
            if isinstance(made, Length) and made.counts_tokens:
                self._token_length = made.by_tokens
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
