"""The contract of a task source, and what each stream of tasks is for.

A stream is named by a seed. `seed * INDEX_SPAN + index` numbers every task of a source, so streams never overlap. A task source
is one class in a file of its own and one line in `swarm/extensions/points.py`; see docs/extending.md.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from swarm.types import Task

INDEX_SPAN = 2**20
"""Tasks per stream."""
MAX_TEXT_CHARS = 65_536
"""Longest prompt and longest right answer of a task that somebody else may have chosen."""
SUPERVISED_SEED = 0
"""The stream of the bundled policy's supervised training."""
EVALUATION_SEED = 1
"""The stream of held-out evaluation; nobody trains on it."""
FIRST_TRAINING_SEED = 16
"""The first stream for RL."""
MAX_SEED = 2**31 - 1
_REWARD_SLACK = 1e-6
CORRECT = "correct"
"""Name of the signal of a verifier that gives one number."""
LENGTH = "length"
"""Name of the signal that may be measured in tokens."""


class TaskFailure(Exception):
    """A task could not be built, or its verifier failed. It costs that task, never the node."""

    def __init__(self, source: str, message: str) -> None:
        super().__init__(f"{source}: {message}")
        self.source = source


class ForgedEpisode(Exception):
    """An episode has another reply, turn or end than the environment gives."""


class UnknownTask(Exception):
    """A reference to a source that this node does not have, or outside its bounds."""


def named_signals(value: float | Mapping[str, float]) -> dict[str, float]:
    """What a verifier gave, by name of the signal."""
    named = value if isinstance(value, Mapping) else {CORRECT: value}
    return {name: float(number) for name, number in named.items()}


def prompt_digest(prompt: str) -> str:
    """16 hex digits over a prompt's text, by which two nodes see whether they rebuilt the same task."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


class TaskSource(Protocol):
    """Numbered tasks of one kind. A class that is registered is constructed with (its section, all of `[tasks]`), raises
    TaskError for settings that it cannot work with, and declares `isolation`. Its methods are called from several threads."""

    name: str
    config_digest: str
    """16 hex digits over everything that decides what task a number means."""

    @property
    def num_held_out(self) -> int:
        """Number of different tasks in stream EVALUATION_SEED."""
        ...

    def task(self, seed: int, index: int) -> Task:
        """0 <= seed <= MAX_SEED, 0 <= index < INDEX_SPAN. Raises TaskFailure."""
        ...

    def answer(self, seed: int, index: int) -> str:
        """A right answer, for supervised data. Raises TaskFailure."""
        ...


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
    signals = tuple((name, within_range(task, f"signal {name}", named.get(name))) for name, _ in weights)
    reward = sum(weight * value for (_, weight), (_, value) in zip(weights, signals, strict=True))
    return Score(min(1.0, reward), signals if task.weights else ())


def score(task: Task, text: str, num_tokens: int | None = None) -> float:
    """The reward of an answer, in [0, 1]. Raises TaskFailure as `assess` does."""
    return assess(task, text, num_tokens).reward


def within_range(task: Task, name: str, value: float | None) -> float:
    """The value of a signal in [0, 1], without rounding beyond. Raises TaskFailure for anything else."""
    if value is None or not -_REWARD_SLACK <= value <= 1 + _REWARD_SLACK:  # NaN fails both
        raise TaskFailure(task.ref.source, f"{name} must be in [0, 1], got {value}; fix the reward function")
    return min(1.0, max(0.0, value))
