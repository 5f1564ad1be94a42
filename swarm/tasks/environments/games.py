"""Bundled environments: games of a few turns, which a reader replays from seed and answers.

`guess_number`: the environment has drawn a whole number. After each guess it tells whether the number is higher or lower. The
reward is 1 if a guess is right within `max_turns`, else 0. Halving what is left finds every number soon enough.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from swarm.config import Section, TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.registry import Isolation, valid_parameters
from swarm.tasks.prompted_source import PROMPT, PromptTemplate
from swarm.tasks.task_source import INDEX_SPAN, TaskFailure
from swarm.types import Step, Task, TaskRef

GUESS_NUMBER = "guess_number"
_RULES = "games-1"
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)


class GuessParameters(Section):
    """`parameters` of guess_number."""

    lowest: Annotated[int, Field(ge=0, le=10**6)] = 1
    """Smallest number."""
    highest: Annotated[int, Field(ge=0, le=10**6)] = 15
    """Largest number."""
    max_turns: Annotated[int, Field(ge=2, le=32)] = 4
    """Guesses."""

    @model_validator(mode="after")
    def _is_range(self) -> "GuessParameters":
        if self.highest <= self.lowest:
            raise ValueError(f"highest must be above lowest = {self.lowest}, got {self.highest}")
        return self


class GuessNumber:
    """One game."""

    def __init__(self, parameters: GuessParameters, number: int) -> None:
        self._number = number
        self._limits = (parameters.lowest, parameters.highest)
        self._low, self._high = self._limits
        self._num_left = parameters.max_turns

    def step(self, answer: str) -> Step:
        self._num_left -= 1
        text = answer.strip().removesuffix(".")
        lowest, highest = self._limits
        guess = int(text) if _NUMBER.fullmatch(text) else -1
        if guess == self._number:
            return Step("", 1.0, is_done=True)
        if not lowest <= guess <= highest:
            reply = f"That is no whole number from {lowest} to {highest}."
        elif guess < self._number:
            reply, self._low = "higher", max(self._low, guess + 1)
        else:
            reply, self._high = "lower", min(self._high, guess - 1)
        return Step(reply, 0.0, not self._num_left, state=f"{self._low} {self._high} {self._num_left}")


class GameSource:
    """A task source of games."""

    Parameters = GuessParameters
    isolation: ClassVar[Isolation] = Isolation.NONE_NEEDED

    def __init__(self, config: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError for an unknown game and for parameters that it refuses."""
        if config.name != GUESS_NUMBER:
            raise TaskError(f"a game must be {GUESS_NUMBER}, got {config.name!r}; set tasks.sources.name")
        self.name = config.source_name
        self._parameters = valid_parameters(
            GuessParameters, config.parameters, self.name, f"tasks.sources.parameters of {self.name!r}", TaskError
        )
        self.max_turns = self._parameters.max_turns
        self._template = PromptTemplate(config, {PROMPT})
        facts = f"{_RULES}:{config.name}:{self._parameters.model_dump_json()}"
        self.config_digest = hashlib.sha256(facts.encode()).hexdigest()[:16]

    @property
    def num_held_out(self) -> int:
        return INDEX_SPAN

    def task(self, seed: int, index: int) -> Task:
        chosen = self._parameters
        prompt = self._template.render(
            {
                PROMPT: f"I have drawn a whole number from {chosen.lowest} to {chosen.highest}. You have {chosen.max_turns} "
                "guesses. After each of them I say whether my number is higher or lower. Answer with one number."
            }
        )
        ref = TaskRef(self.name, self.config_digest, seed, index)
        begin = partial(GuessNumber, chosen, self._number(seed, index))
        return Task(ref, prompt, self._no_verifier, begin=begin, max_turns=self.max_turns)

    def answer(self, seed: int, index: int) -> str:
        return str(self._number(seed, index))

    def demonstrate(self, seed: int, index: int) -> Sequence[str]:
        """The guesses that halve what is left."""
        number, low, high = self._number(seed, index), self._parameters.lowest, self._parameters.highest
        guesses: list[int] = []
        while not guesses or guesses[-1] != number:
            guesses.append((low + high) // 2)
            low, high = (guesses[-1] + 1, high) if guesses[-1] < number else (low, guesses[-1] - 1)
        return [str(guess) for guess in guesses]

    def _number(self, seed: int, index: int) -> int:
        return random.Random(seed * INDEX_SPAN + index).randint(self._parameters.lowest, self._parameters.highest)

    def _no_verifier(self, text: str) -> float:
        raise TaskFailure(self.name, "a game is scored by its turns")
