"""An environment of several turns: a pile of stones, of which the policy and the environment take turns."""

import random
from typing import ClassVar

from swarm.config import TaskSourceSection, TasksSection
from swarm.extensions.registry import Isolation
from swarm.tasks.task_source import INDEX_SPAN
from swarm.types import Step, Task, TaskRef


class Stones:
    """Take 1 or 2 of the stones that are left; who takes the last one wins. The environment plays well."""

    isolation: ClassVar[Isolation] = Isolation.PROCESS
    max_turns = 8

    def __init__(self, config: TaskSourceSection, tasks: TasksSection) -> None:
        self.name = config.source_name
        self.config_digest = "stones-1"
        self.num_held_out = INDEX_SPAN

    def task(self, seed: int, index: int) -> Task:
        count = random.Random(seed * INDEX_SPAN + index).randint(4, 9)
        prompt = f"There are {count} stones. Take 1 or 2; who takes the last one wins. How many do you take?"
        ref = TaskRef(self.name, self.config_digest, seed, index)
        return Task(ref, prompt, lambda text: 0.0, begin=lambda: Pile(count), max_turns=self.max_turns)

    def answer(self, seed: int, index: int) -> str:
        return "1"


class Pile:
    def __init__(self, count: int) -> None:
        self.count = count

    def step(self, answer: str) -> Step:
        if answer.strip() == "hang":
            while True:
                pass
        if answer.strip() not in ("1", "2") or int(answer) > self.count:
            return Step("", 0.0, is_done=True)  # a wrong move loses
        self.count -= int(answer)
        if not self.count:
            return Step("", 1.0, is_done=True)
        taken = min(self.count, self.count % 3 or 1)
        self.count -= taken
        return Step(f"I take {taken}, {self.count} are left.", 0.0, is_done=not self.count)
