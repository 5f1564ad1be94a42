"""A task source whose reward is the weighted sum of several signals.

    text ─┬▶ the source's own verifier ─▶ correct (tests, …) ─┐
          ├▶ built-in signals ─────────▶ format, length ──────┼▶ Σ weight · value / Σ weight = reward in [0, 1]
          └▶ plug-ins ─────────────────▶ their names ─────────┘

Names, weights, parameters and the versions of plug-ins are part of the config digest: nodes with others do not share tasks.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from swarm.config import SignalSection, TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.tasks.reward_plugin import TIME_BUDGET_S, RewardPlugin, installed_rewards
from swarm.tasks.signals import BUILT_IN, Signal, build_signal
from swarm.tasks.task_source import CORRECT, TaskSource, named_signals
from swarm.types import Task

_OF_VERIFIER = {"code": (CORRECT, "tests")}
"""What the verifier of a kind of source tells; others tell `correct`."""


class SignalledSource:
    """Wraps the source that `config` describes."""

    def __init__(self, source: TaskSource, config: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError for a signal that is unknown, or cannot be built from its parameters.

        `tasks`: how reward functions are fenced, and whether their parameters come from a manifest.
        """
        self._tasks = tasks
        self._source = source
        self.name = source.name
        self._of_verifier = _OF_VERIFIER.get(config.kind, (CORRECT,))
        self._built_in: dict[str, Signal] = {}
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
                values[name] = self._built_in[name](text)
            elif name in self._plugins:
                values[name] = self._plugins[name](task.prompt, expected(), text)
            else:
                values |= named_signals(task.verify(text))
        return {name: values[name] for name, _ in self._weights}

    def _add(self, signal: SignalSection) -> None:
        name = signal.name
        if name in self._of_verifier:
            if signal.parameters:
                raise TaskError(
                    f"signal {name} takes no parameters, got {signal.parameters}; "
                    f"set tasks.sources.signals of {self.name!r}"
                )
        elif name in BUILT_IN:
            self._built_in[name] = build_signal(name, signal.parameters, self.name)
        else:
            self._plugins[name] = self._plugin(signal)

    def _plugin(self, signal: SignalSection) -> RewardPlugin:
        installed = installed_rewards()
        if signal.name not in installed:
            known = sorted({*self._of_verifier, *BUILT_IN, *installed})
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

    def _version(self, signal: SignalSection) -> str:
        """What decides the values of a signal beside its parameters: the package of a plug-in, the engine of a pattern."""
        if signal.name in self._plugins:
            return self._plugins[signal.name].version
        return "re2" if signal.name == "format" and "pattern" in signal.parameters else ""
