"""Procedural tasks of reasoning-gym, each with the library's own verifier.

Task `index` of stream `seed` is item 0 of the data set built with seed `seed * INDEX_SPAN + index` and size 1. Nearly all
data sets generate item i from `Random(seed + i)`, so one object serves every stream at no cost per stream; whether that
holds is checked when the source is built, and a data set of which it does not hold is built anew for every task.
"""

import difflib
import hashlib
import json
from functools import partial
from typing import Any

from swarm.config import TaskSourceSection
from swarm.errors import TaskError
from swarm.tasks.answer_guard import REFUSED, score_once
from swarm.tasks.parameter_rules import check_declared, declared_by_class
from swarm.tasks.task_source import INDEX_SPAN, TaskFailure
from swarm.types import Task, TaskRef

_RULES = "reasoning_gym-2"
"""Changes whenever answers are judged differently, so that nodes with other rules do not share these tasks."""
_PROBE_NUMBER = 7 * INDEX_SPAN + 3
"""A task of a stream that nobody draws from."""


class ReasoningGymSource:
    """One reasoning-gym data set."""

    def __init__(self, config: TaskSourceSection, *, takes_anything: bool = False) -> None:
        """Raises TaskError for a data set that is unknown or refused, or parameters that it does not accept.

        `takes_anything`: the parameters are the operator's own, who may name files. All others have to pass
        `check_declared`.
        """
        self.name = config.source_name
        self.config_digest = base_digest(config)
        self._data_set_name = config.name
        self._parameters = config.parameters
        _check_name(config.name)
        try:
            if not takes_anything:
                _check_declared(config)
            self._shared = self._build(0)
        except Exception as error:  # each data set refuses parameters in a way of its own
            raise TaskError(
                f"parameters must be such that {config.name} accepts them, got {config.parameters}: "
                f"{str(error) or type(error).__name__}; set tasks.sources.parameters of {config.source_name!r}"
            ) from None
        self._is_shareable = self._numbers_items_by_seed()

    @property
    def num_held_out(self) -> int:
        return INDEX_SPAN

    def task(self, seed: int, index: int) -> Task:
        data_set, entry = self._item(seed, index)
        ref = TaskRef(self.name, self.config_digest, seed, index)
        return Task(ref, entry["question"], partial(score_once, self._data_set_name, data_set.score_answer, entry))

    def answer(self, seed: int, index: int) -> str:
        return str(self._item(seed, index)[1]["answer"])

    def _item(self, seed: int, index: int) -> tuple[Any, dict[str, Any]]:
        number = seed * INDEX_SPAN + index
        try:
            data_set, position = (self._shared, number) if self._is_shareable else (self._build(number), 0)
            entry = data_set[position]
        except Exception as error:  # third-party generators fail in any way they like
            raise TaskFailure(self.name, f"building task {seed}/{index}: {type(error).__name__}: {error}") from error
        if not isinstance(entry.get("question"), str):
            raise TaskFailure(self.name, f"building task {seed}/{index}: no question")
        return data_set, entry

    def _build(self, number: int) -> Any:
        import reasoning_gym  # slow to import, and not needed by nodes without such tasks

        return reasoning_gym.create_dataset(self._data_set_name, seed=number, size=1, **self._parameters)

    def _numbers_items_by_seed(self) -> bool:
        """Whether the shared object gives the same item as one built for its number."""
        try:
            shared, own = self._shared[_PROBE_NUMBER], self._build(_PROBE_NUMBER)[0]
        except (
            Exception
        ):  # items fixed at construction: IndexError, ValueError; the slow way reports what is wrong per task
            return False
        return (shared["question"], shared["answer"]) == (own["question"], own["answer"])


def base_digest(config: TaskSourceSection) -> str:
    """16 hex digits over what decides the tasks, signals left out. Raises TaskError for values that JSON does not have."""
    try:
        canonical = json.dumps([_RULES, config.name, config.parameters], sort_keys=True, separators=(",", ":"))
    except TypeError as error:
        raise TaskError(
            f"parameters must be numbers, texts, lists or tables, got {config.parameters}: {error}; "
            f"set tasks.sources.parameters of {config.source_name!r}"
        ) from None
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _check_declared(config: TaskSourceSection) -> None:
    import reasoning_gym

    check_declared(declared_by_class(reasoning_gym.factory.DATASETS[config.name][1]), config.parameters)


def _check_name(name: str) -> None:
    import reasoning_gym  # waits for another thread that imports it; its factory alone is there early, and empty

    data_sets = reasoning_gym.factory.DATASETS

    if name in REFUSED:
        raise TaskError(
            f"a source must be safe and the same on every node, got {name!r}: {REFUSED[name]}; choose another"
        )
    if name not in data_sets:
        close = difflib.get_close_matches(name, data_sets, n=1)
        hint = f"did you mean {close[0]}?" if close else "see reasoning_gym.factory.DATASETS"
        raise TaskError(f"a reasoning_gym source must be one of its data sets, got {name!r}; {hint}")
