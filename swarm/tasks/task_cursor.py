"""Decides which task comes next: a task choice picks the source, then comes the next task of its stream.

    rewards, lengths of answers ─▶ Beta(α, β) and mean length per source ─▶ task choice ─▶ cursor ─▶ task
                       the swarm's common stream, for a share of the tasks (sharing.common_tasks) ──┘

The difficulty of a source is estimated from the node's own answers. Old answers fade, since the policy that gave them has
moved on: a source that was solved or hopeless is tried again. Cursor and difficulty are part of every checkpoint.

A task choice is one class here, or in a file of its own, and one line in `swarm/extensions/points.py`.
"""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from swarm.errors import TaskError
from swarm.tasks.task_mixture import MAX_COMMON_TASKS, TaskMixture
from swarm.tasks.task_source import INDEX_SPAN, TaskFailure
from swarm.types import Task

logger = logging.getLogger(__name__)


PRIOR_SUCCESSES = 1.0
PRIOR_FAILURES = 1.0
"""α₀ and β₀: before any answer every success rate is equally likely."""


class DifficultyTable:
    """The Beta posterior of the success rate and the mean answer length, by source.

    Rewards in [0, 1] count as fractions of a success. It belongs to the compute thread.
    """

    def __init__(self, sources: Iterable[str], *, memory: float, default_tokens: float) -> None:
        """`memory`: λ in [0, 1], the weight of the old estimate when a group arrives. `default_tokens`: length before that."""
        self._memory = memory
        self._beliefs = {name: [PRIOR_SUCCESSES, PRIOR_FAILURES, float(default_tokens)] for name in sources}

    def observe(self, source: str, rewards: Sequence[float], num_tokens: Sequence[int]) -> None:
        """Add one group: α ← λα + (1 − λ)α₀ + successes, β likewise (VADE, 2511.18902). Unknown sources are ignored."""
        belief = self._beliefs.get(source)
        if belief is None or not rewards:
            return
        kept, fresh = self._memory, 1 - self._memory
        successes = sum(rewards)
        belief[0] = kept * belief[0] + fresh * PRIOR_SUCCESSES + successes
        belief[1] = kept * belief[1] + fresh * PRIOR_FAILURES + len(rewards) - successes
        belief[2] = kept * belief[2] + fresh * sum(num_tokens) / len(num_tokens)

    def success_rate(self, source: str) -> float:
        """Posterior mean, strictly within (0, 1)."""
        successes, failures, _ = self._beliefs[source]
        return successes / (successes + failures)

    def answer_tokens(self, source: str) -> float:
        """Mean length of an answer, in tokens."""
        return self._beliefs[source][2]

    def draw_success_rate(self, source: str, rng: random.Random) -> float:
        """A draw from the posterior."""
        successes, failures, _ = self._beliefs[source]
        return rng.betavariate(successes, failures)

    def state(self) -> dict[str, list[float]]:
        return {name: list(belief) for name, belief in self._beliefs.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue a saved table; sources that were added since start at the prior."""
        self._beliefs |= {name: list(belief) for name, belief in state.items() if name in self._beliefs}


class TaskChoice(Protocol):
    """Picks the source of each task. The same arguments give the same source, so that a resumed run draws the same tasks."""

    def choose(self, difficulty: DifficultyTable, weights: Mapping[str, float], rng: random.Random) -> str:
        """One of the sources in `weights`, which are those that work, with their configured weights."""
        ...


class WeightedChoice:
    """Sources by their weight, whatever their difficulty."""

    def choose(self, difficulty: DifficultyTable, weights: Mapping[str, float], rng: random.Random) -> str:
        return by_weight(weights, rng)


class ThompsonChoice:
    """Thompson sampling: draws a success rate p for each source and takes the largest weight · p(1 − p) (VADE, 2511.18902).

    p(1 − p) is the variance of the reward, which bounds what a group can teach: sources neither solved nor hopeless.
    """

    def choose(self, difficulty: DifficultyTable, weights: Mapping[str, float], rng: random.Random) -> str:
        def value(source: str) -> float:
            rate = difficulty.draw_success_rate(source, rng)
            return weights[source] * rate * (1 - rate)

        return max(weights, key=value)


MAX_CONSECUTIVE_FAILURES = 20
"""A source that fails so often in a row is left out for the rest of the run."""
_MAX_HELD_OUT = 100
"""So many held-out tasks in a row are a failure. By chance it does not happen: at most every fourth prompt is held out."""

_ROUNDING = 1e-9
"""Shares are added up round after round, so that a sum may be a little below a whole number."""

Choice = Callable[[Mapping[str, float], random.Random], str]
"""(weights of the sources that work, rng) -> one of them."""


def by_weight(weights: Mapping[str, float], rng: random.Random) -> str:
    """A `Choice`."""
    return rng.choices(list(weights), list(weights.values()))[0]


def beacon_index(peer_id: str, beacon: bytes, source: str) -> int:
    """Index from which a node continues its stream of a source after a beacon: a hash, so that nobody can choose it."""
    digest = hashlib.sha256(b"tasks:" + beacon + f":{peer_id}:{source}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % INDEX_SPAN


class TaskCursor:
    """Draws tasks of the node's own stream, and a share of them from the stream that is common to the swarm.

    The same state draws the same tasks. It belongs to the compute thread.
    """

    def __init__(self, mixture: TaskMixture, seed: int, rng: random.Random, *, common_share: float = 0.0) -> None:
        """`common_share`: part of the tasks that come from the common stream, while `follow` names one."""
        self._mixture = mixture
        self._seed = seed
        self._rng = rng
        self._next_index: dict[str, int] = dict.fromkeys(mixture.sources, 0)
        self._beacon = b""
        self._common_share = common_share
        self._common_seed: int | None = None
        self._next_common = 0
        self._common_due = 0.0
        """Part of a common task, in [0, 1), that earlier draws have left over."""
        self._consecutive: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Tasks that could not be built, by source."""

    def follow(self, peer_id: str, beacon: bytes, common_seed: int | None = None) -> None:
        """Continue where this beacon points, once for each beacon; an empty one changes nothing.

        `common_seed`: the common stream of this time, which is begun anew where it is another one; None: there is none.
        """
        if common_seed != self._common_seed:
            self._common_seed, self._next_common = common_seed, 0
        if beacon and beacon != self._beacon:
            self._beacon = beacon
            self._next_index = {name: beacon_index(peer_id, beacon, name) for name in self._next_index}

    def draw(self, count: int, choose: Choice = by_weight) -> list[Task]:
        """The next `count` tasks; a failing one is skipped and counted. Raises TaskError if no source is left.

        `choose` picks the source of each that is not a common one.
        """
        tasks = self._draw_common(count)
        while len(tasks) < count:
            name = self._choose(choose)
            try:
                tasks.append(self._next_of(name))
                self._consecutive[name] = 0
            except TaskFailure as failure:
                self._count_failure(name, failure)
        return tasks

    def state(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "next_index": dict(self._next_index),
            "beacon": self._beacon.hex(),
            "common": {"seed": self._common_seed, "next_index": self._next_common, "due": self._common_due},
            "consecutive_failures": dict(self._consecutive),
            "rng": rng_state(self._rng),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue a saved cursor; sources that were added since start at their beginning."""
        self._seed = state["seed"]
        self._beacon = bytes.fromhex(state.get("beacon", ""))
        self._next_index |= {name: i for name, i in state["next_index"].items() if name in self._next_index}
        common = state.get("common", {"seed": None, "next_index": 0, "due": 0.0})  # absent in older checkpoints
        self._common_seed, self._next_common = common["seed"], common["next_index"]
        self._common_due = common["due"]
        self._consecutive = Counter(state["consecutive_failures"])
        restore_rng(self._rng, state["rng"])

    def _next_of(self, name: str) -> Task:
        """The next task of a source that is not held out. Raises TaskFailure."""
        for _ in range(_MAX_HELD_OUT):
            index = self._next_index[name]
            self._next_index[name] = (index + 1) % INDEX_SPAN
            task = self._mixture.sources[name].task(self._seed, index)
            if not self._mixture.is_held_out(task):
                return task
        raise TaskFailure(name, f"{_MAX_HELD_OUT} tasks in a row are held out; give it more prompts, or remove it")

    def _draw_common(self, count: int) -> list[Task]:
        """The common tasks among the next `count`: their share, or fewer where the stream is used up."""
        tasks: list[Task] = []
        if self._common_seed is None:
            return tasks
        self._common_due += self._common_share * count
        num_wanted = int(self._common_due + _ROUNDING)
        self._common_due = max(0.0, self._common_due - num_wanted)
        while len(tasks) < num_wanted and self._next_common < MAX_COMMON_TASKS:
            task = self._common_task(self._common_seed, self._next_common)
            self._next_common += 1
            if task is not None:
                tasks.append(task)
        return tasks

    def _common_task(self, seed: int, index: int) -> Task | None:
        """Common task `index`; None where it is held out, or cannot be built here.

        Its source follows from seed, index and the configured weights alone, and every index has one source. So all nodes with
        the same tasks agree, whatever each of them skips.
        """
        weights = dict(sorted(self._mixture.configured_weights.items()))
        name = by_weight(weights, random.Random(f"{seed}:{index}"))
        if name not in self._next_index or self._consecutive[name] >= MAX_CONSECUTIVE_FAILURES:
            return None
        try:
            task = self._mixture.sources[name].task(seed, index)
        except TaskFailure as failure:
            self._count_failure(name, failure)
            return None
        self._consecutive[name] = 0
        return None if self._mixture.is_held_out(task) else task

    def _choose(self, choose: Choice) -> str:
        names = [name for name in self._next_index if self._consecutive[name] < MAX_CONSECUTIVE_FAILURES]
        if not names:
            raise TaskError(f"every task source failed {MAX_CONSECUTIVE_FAILURES} times in a row; check tasks.sources")
        return choose({name: self._mixture.weights[name] for name in names}, self._rng)

    def _count_failure(self, name: str, failure: TaskFailure) -> None:
        self.failures[name] += 1
        self._consecutive[name] += 1
        logger.warning("skipped a task: %s", failure)
        if self._consecutive[name] == MAX_CONSECUTIVE_FAILURES:
            logger.error("task source %s is left out after %d failures in a row", name, MAX_CONSECUTIVE_FAILURES)


def rng_state(rng: random.Random) -> list[Any]:
    """The state of a generator as JSON returns it, for `restore_rng`."""
    version, words, gauss = rng.getstate()
    return [version, list(words), gauss]


def restore_rng(rng: random.Random, state: Sequence[Any]) -> None:
    version, words, gauss = state
    rng.setstate((version, tuple(words), gauss))
