"""A task source whose reward is the weighted sum of several reward signals, and the signals that every node has.

    text ─┬▶ the source's own verifier ─▶ correct (tests, …) ─┐
          ├▶ built-in signals ─────────▶ format, length ──────┼▶ Σ weight · value / Σ weight = reward in [0, 1]
          └▶ reward functions ─────────▶ their names ─────────┘

Names, weights, parameters and the versions of functions are part of the config digest: nodes with others do not share tasks.

Built-in signals are functions of the answer's text, so that every receiver computes the same value. Length may also be counted
in tokens: in those of the author, whose number is in the record. All take time in proportion to the text. `format` and `length`
read the whole text; the source's verifier and reward functions read the final answer (`final_answers`).

A built-in signal is one class here, or in a file of its own, and one line in `swarm/extensions/points.py`. Reward functions
of files and packages run in processes of their own (`reward_plugin`).
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
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
from swarm.extensions.registry import valid_parameters
from swarm.tasks.final_answers import answer_rule, final_answer
from swarm.tasks.prompted_source import verifier_signals
from swarm.tasks.rewards.judge import JUDGE, Judge, JudgeParameters
from swarm.tasks.rewards.reward_plugin import TIME_BUDGET_S, RewardPlugin
from swarm.tasks.task_source import EVALUATION_SEED, LENGTH, TaskFailure, TaskSource, named_signals
from swarm.tasks.verifiers import MAX_ANSWER_CHARS, check_pattern, regex
from swarm.types import Task

_NUM_TRIED = 8
"""Tasks of which one must be built, for reward functions to be tried on."""


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
    """Names of the signals of a source that are not built in. Their functions run in a process of their own each."""
    known = {*verifier_signals(source.kind), *REWARDS.names}
    return [signal.name for signal in source.signals if signal.function or signal.name not in known]


class MultiRewardSource:
    """Wraps the source that `config` describes."""

    def __init__(self, source: TaskSource, config: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError for a signal that is unknown, or cannot be built from its parameters.

        `tasks` says how reward functions are isolated, and whether their parameters come from a manifest.
        """
        self._tasks = tasks
        self._source = source
        self.name = source.name
        self._verifier_names = verifier_signals(config.kind)
        self._of_verifier: set[str] = set()
        """Signals of the reward that the source's own verifier gives."""
        self._rule = answer_rule(config)
        self._built_in: dict[str, RewardSignal] = {}
        self._token_length: Callable[[int], float] | None = None
        self._plugins: dict[str, RewardPlugin] = {}
        self._judge: Judge | None = None
        for signal in config.signals:
            self._add(signal)
        self._try_out()
        self._weights = self._weights_of(config.signals)
        self.config_digest = self._digest(config)

    @property
    def num_held_out(self) -> int:
        return self._source.num_held_out

    def task(self, seed: int, index: int) -> Task:
        task = self._source.task(seed, index)
        verify = partial(self._verify, task, cache(partial(self._source.answer, seed, index)))
        ref = replace(task.ref, config_digest=self.config_digest)
        return replace(
            task,
            ref=ref,
            verify=verify,
            weights=self._weights,
            token_length=self._token_length,
            has_judge=self._judge is not None,
        )

    def answer(self, seed: int, index: int) -> str:
        return self._source.answer(seed, index)

    def _verify(self, task: Task, expected: Callable[[], str], text: str) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._of_verifier:
            given = named_signals(task.verify(text))
            values |= {name: given[name] for name in self._of_verifier & given.keys()}
        for name, signal in self._built_in.items():
            if name != LENGTH or self._token_length is None:
                values[name] = signal.value(text)
        answer = final_answer(self._rule, text) if self._plugins or self._judge else None
        for plugin in self._plugins.values():
            values |= plugin(task, expected, answer)
        if self._judge is not None:
            values[JUDGE] = self._judge(task.prompt, expected(), answer)
        return values

    def _add(self, signal: RewardSignalSection) -> None:
        name = signal.name
        is_known = name in (*self._verifier_names, JUDGE) or REWARDS.is_built_in(name)
        if signal.function and is_known:
            raise TaskError(
                f"a function must not have the name of a built-in signal, got {name}; set another `name` beside `function` in "
                f"tasks.sources.signals of {self.name!r}"
            )
        if name in self._verifier_names:
            self._of_verifier.add(name)
            if signal.parameters:
                raise TaskError(
                    f"signal {name} takes no parameters, got {signal.parameters}; "
                    f"set tasks.sources.signals of {self.name!r}"
                )
        elif signal.is_judge:
            setting = f"tasks.sources.signals of {self.name!r}"
            parameters = valid_parameters(JudgeParameters, signal.parameters, name, setting, TaskError)
            self._judge = Judge(self.name, parameters, self._tasks.judge)
        elif is_known:
            made = REWARDS.make(name, signal.parameters, f"tasks.sources.signals of {self.name!r}")
            self._built_in[name] = made
            if isinstance(made, Length) and made.counts_tokens:
                self._token_length = made.by_tokens
        else:
            self._plugins[name] = self._plugin(signal)

    def _plugin(self, signal: RewardSignalSection) -> RewardPlugin:
        installed = REWARDS.installed()
        if not signal.function and signal.name not in installed:
            known = [*sorted({*self._verifier_names, *REWARDS.names, *installed}), JUDGE]
            raise TaskError(
                f"a signal must be one of {', '.join(known)}, got {signal.name!r}; install the package that offers it, or set "
                f"`function` to one of your own, in tasks.sources.signals of {self.name!r}"
            )
        return RewardPlugin(self.name, signal, self._tasks, time_budget_s=TIME_BUDGET_S)

    def _try_out(self) -> None:
        """Call each function once, with the right answer to a task, so that mistakes show before the first round."""
        tried = [plugin for plugin in self._plugins.values() if plugin.takes_task]
        if not tried:
            return
        task, right = self._first_task()
        for plugin in tried:
            plugin.try_out(task, right)

    def _first_task(self) -> tuple[Task, str]:
        """(the first held-out task that can be built, its right answer). Raises TaskError."""
        failed = ""
        for index in range(min(_NUM_TRIED, self._source.num_held_out)):
            try:
                return self._source.task(EVALUATION_SEED, index), self._source.answer(EVALUATION_SEED, index)
            except TaskFailure as failure:
                failed = str(failure)
        raise TaskError(f"a task must be built to try reward functions on it, got {failed}; change the source")

    def _weights_of(self, signals: Sequence[RewardSignalSection]) -> tuple[tuple[str, float], ...]:
        """(signal, weight), with a sum of 1. Raises TaskError where two functions give a signal of the same name."""
        total = sum(signal.weight for signal in signals)
        weights: dict[str, float] = {}
        for signal in signals:
            shares = self._plugins[signal.name].shares if signal.name in self._plugins else {signal.name: 1.0}
            if doubled := sorted(weights.keys() & shares.keys()):
                raise TaskError(
                    f"each signal must have a name of its own, got {doubled[0]} twice: function of {signal.name} gives it, too; "
                    f"rename it there, or in tasks.sources.signals of {self.name!r}"
                )
            weights |= {name: signal.weight / total * share for name, share in shares.items()}
        return tuple(weights.items())

    def _digest(self, config: TaskSourceSection) -> str:
        signals: list[list[object]] = [[s.name, s.weight, s.parameters, self._version(s)] for s in config.signals]
        for facts, signal in zip(signals, config.signals, strict=True):
            facts += [signal.weights] if signal.weights else []  # so that the digest of earlier signals stays
        canonical = json.dumps([self._source.config_digest, signals], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def _version(self, signal: RewardSignalSection) -> str:
        """What decides the values of a signal beside its parameters: file or package of a function, rules of a built-in one."""
        name = signal.name
        if name in self._plugins:
            return self._plugins[name].version
        if signal.is_judge:
            return Judge.rules
        return self._built_in[name].rules if name in self._built_in else ""
