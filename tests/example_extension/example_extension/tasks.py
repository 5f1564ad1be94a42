"""Sums whose reward grows as the answer comes near."""

import random
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field

from swarm.config import Section, TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.registry import Isolation, valid_parameters
from swarm.tasks.task_source import INDEX_SPAN
from swarm.types import Task, TaskRef


class NearSumsParameters(Section):
    """`parameters` of a source of this kind."""

    largest: Annotated[int, Field(ge=1, le=1000)] = 9
    """Largest number of a sum."""


class NearSums:
    """Task `index` of stream `seed` is drawn from those two numbers alone, so that every node builds the same."""

    Parameters = NearSumsParameters
    isolation: ClassVar[Isolation] = Isolation.PROCESS

    def __init__(self, config: TaskSourceSection, tasks: TasksSection) -> None:
        self.name = config.source_name
        self.config_digest = "near-sums-1"  # swarm adds the package, its version and all settings
        self.num_held_out = INDEX_SPAN
        where = f"tasks.sources.parameters of {self.name!r}"
        self._largest = valid_parameters(self.Parameters, config.parameters, config.kind, where, TaskError).largest

    def task(self, seed: int, index: int) -> Task:
        first, second = self._numbers(seed, index)
        ref = TaskRef(self.name, self.config_digest, seed, index)
        return Task(ref, f"What is {first} + {second}?", partial(nearness, first + second))

    def answer(self, seed: int, index: int) -> str:
        return str(sum(self._numbers(seed, index)))

    def _numbers(self, seed: int, index: int) -> tuple[int, int]:
        rng = random.Random(seed * INDEX_SPAN + index)
        return rng.randint(0, self._largest), rng.randint(0, self._largest)


def nearness(expected: int, text: str) -> float:
    """1 / (1 + distance) for a plain number of at most 6 digits, else 0. The text may be a stranger's."""
    text = text.strip()
    return 1 / (1 + abs(int(text) - expected)) if text.isascii() and text.isdigit() and len(text) <= 6 else 0.0
