"""Decides the rollouts of one round: which tasks, how many answers each, and more answers where that teaches something.

    cursor ─▶ tasks ─▶ sizes ─▶ worker ─▶ groups ─┬▶ more answers to hard tasks ─▶ joined groups
                                                  └▶ further tasks, while too few groups have signal
              difficulty table ◀── rewards and lengths of all of them

How many answers a task gets is a question of settings, each of which may be off:

    equal      every task gets group_size answers
    variance   more for sources whose reward varies and whose answers are short, at the same number of tokens
    second     after the first answers, more for tasks that turned out hard (DARS, 2508.13755)
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from swarm.config import RolloutsSection
from swarm.extensions.points import TASK_CHOICES
from swarm.observability.tracing import traced
from swarm.policy.counter_noise import derive_seed
from swarm.rollouts.open_group import OpenGroup
from swarm.rollouts.worker import RolloutBatch, RolloutWorker
from swarm.tasks.task_cursor import DifficultyTable, TaskChoice, TaskCursor
from swarm.tasks.task_source import TaskFailure, UnknownTask
from swarm.types import RolloutGroup, Task, TaskRef

logger = logging.getLogger(__name__)


SecondRound = Literal["off", "hard", "equal"]


def sizes_by_variance(
    success_rates: Sequence[float], answer_tokens: Sequence[float], *, group_size: int, smallest: int, largest: int
) -> list[int]:
    """Answers per task that cost what `group_size` for each would, in expected tokens, or less.

    The variance of a mean of n answers is p(1 − p)/n; for a given sum of tokens it is smallest, summed over tasks, with
    n ∝ √(p(1 − p) / tokens) (Neyman's allocation with costs). Every task keeps `smallest` (or group_size, if less), and
    tokens beyond `largest` answers are not spent.
    """
    num_tasks = len(success_rates)
    smallest = min(smallest, group_size)
    wishes = [math.sqrt(p * (1 - p) / tokens) for p, tokens in zip(success_rates, answer_tokens, strict=True)]
    budget = group_size * sum(answer_tokens)
    sizes, open_tasks = [float(smallest)] * num_tasks, set(range(num_tasks))
    while open_tasks:  # those that the rule would give less than the smallest leave the others less
        spare = budget - sum(smallest * answer_tokens[i] for i in range(num_tasks) if i not in open_tasks)
        share = spare / sum(wishes[i] * answer_tokens[i] for i in open_tasks)
        too_small = {i for i in open_tasks if wishes[i] * share < smallest}
        if not too_small:
            for i in open_tasks:
                sizes[i] = wishes[i] * share
            break
        open_tasks -= too_small
    return [min(largest, math.floor(size + 1e-9)) for size in sizes]


def second_round_size(rewards: Sequence[float], kind: SecondRound, *, largest: int) -> int:
    """How many answers to add to a task whose first answers got `rewards`, at most `largest`; 0 where it is not hard.

    With p the mean reward and N the answers so far: hard N(1/(2p) − 1), after which N/2 right ones are expected in all,
    as for a task of p = 1/2; equal N(1/(4p(1 − p)) − 1), which does that for the summed variance. Both are infinite where
    nothing was right; `largest` is added then.
    """
    num, rate = len(rewards), sum(rewards) / len(rewards)
    if kind == "off" or rate >= 0.5:
        return 0
    if rate == 0:
        return largest
    factor = 1 / (2 * rate) if kind == "hard" else 1 / (4 * rate * (1 - rate))
    return math.ceil(min(largest, num * (factor - 1) - 1e-9))


def mean_reward_signals(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """The metrics `reward/NAME`: mean of each reward signal over the answers whose task has it."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.rollouts:
            for name, value in rollout.signals:
                values.setdefault(f"reward/{name}", []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


class RolloutRound:
    """Draws tasks from `cursor`, lets `worker` answer them, and adds their rewards to `difficulty`.

    It belongs to the compute thread. Its open groups are part of the checkpoint.
    """

    def __init__(
        self, config: RolloutsSection, cursor: TaskCursor, worker: RolloutWorker, difficulty: DifficultyTable
    ) -> None:
        self._config = config
        self._cursor = cursor
        self._worker = worker
        self._difficulty = difficulty
        self._task_choice: TaskChoice = TASK_CHOICES.make(
            config.task_choice, config.task_choice_parameters, "rollouts.task_choice_parameters"
        )
        self._open: list[OpenGroup] = []  # oldest first

    @property
    def num_open(self) -> int:
        """Number of groups that wait to be continued."""
        return len(self._open)

    @traced("rollout", lambda batch, *_: {"groups": len(batch.groups), "tokens": batch.num_tokens})
    def run(self, seed: int) -> RolloutBatch:
        """All groups of a round. The same seed, cursor, table, open groups and weights give the same ones."""
        config = self._config
        batch = self._second_answers(self._first_answers(seed), derive_seed("second", seed))
        for draw in range(config.refill_draws):
            missing = config.groups_per_round - sum(group.has_reward_variance for group in batch.groups)
            if missing <= 0:
                break
            further = self._answer(self._draw(missing), derive_seed("refill", seed, draw))
            batch = batch.and_also(self._second_answers(further, derive_seed("second", seed, draw)))
        return batch

    def state(self) -> list[dict[str, Any]]:
        """The open groups, for a checkpoint."""
        return [group.state() for group in self._open]

    def restore(self, state: Sequence[dict[str, Any]], rebuild: Callable[[TaskRef], Task]) -> None:
        """Continue saved groups, except those whose task no longer exists or whose answers exceed the limit now."""
        self._open = []
        for saved in state:
            try:
                group = OpenGroup.from_state(saved, rebuild)
            except (UnknownTask, TaskFailure) as error:
                logger.warning("dropped an open group: %s", error)
                continue
            if all(len(a.token_ids) < self._config.max_new_tokens for a in group.answers if a.end == "open"):
                self._open.append(group)

    def _first_answers(self, seed: int) -> RolloutBatch:
        """groups_per_round groups. With over-provision, those that are complete first; the next round continues the rest."""
        config = self._config
        if config.over_provision == 1 and not self._open:
            return self._answer(self._draw(config.groups_per_round), seed)
        wanted = math.ceil(config.groups_per_round * config.over_provision)
        tasks = self._draw(max(0, wanted - len(self._open)))
        new = [OpenGroup.of(task, size) for task, size in zip(tasks, self._sizes(tasks), strict=True)]
        batch, self._open = self._worker.resume([*self._open, *new], config.groups_per_round, seed)
        self._observe(batch)
        return batch

    def _draw(self, count: int) -> list[Task]:
        return self._cursor.draw(count, partial(self._task_choice.choose, self._difficulty))

    def _answer(self, tasks: Sequence[Task], seed: int) -> RolloutBatch:
        batch = self._worker.rollout(tasks, seed, self._sizes(tasks))
        self._observe(batch)
        return batch

    def _observe(self, batch: RolloutBatch) -> None:
        for group in batch.groups:
            rewards = [rollout.reward for rollout in group.rollouts]
            self._difficulty.observe(group.task.source, rewards, [len(rollout.token_ids) for rollout in group.rollouts])

    def _sizes(self, tasks: Sequence[Task]) -> list[int]:
        config, table = self._config, self._difficulty
        if config.group_sizes == "equal":
            return [config.group_size] * len(tasks)
        sources = [task.ref.source for task in tasks]
        return sizes_by_variance(
            [table.success_rate(source) for source in sources],
            [table.answer_tokens(source) for source in sources],
            group_size=config.group_size,
            smallest=config.smallest_group,
            largest=config.largest_group,
        )

    def _second_answers(self, batch: RolloutBatch, seed: int) -> RolloutBatch:
        """The same groups, with more answers for hard tasks. These do not count in the difficulty table: a task is answered
        again because it was hard, so its source would look harder than it is."""
        config = self._config
        added: dict[TaskRef, int] = {}
        for group in batch.groups:
            largest = config.largest_group - len(group.rollouts)
            rewards = [rollout.reward for rollout in group.rollouts]
            if size := second_round_size(rewards, config.extra_rollouts, largest=largest):
                added[group.task] = size
        if not added:
            return batch
        tasks = [task for task in batch.tasks if task.ref in added]
        again = self._worker.rollout(tasks, seed, [added[task.ref] for task in tasks])
        more = {group.task: group for group in again.groups}
        groups = [_joined(group, more.get(group.task)) for group in batch.groups]
        return replace(batch, groups=groups).and_also(replace(again, tasks=[], groups=[]))


def _joined(group: RolloutGroup, more: RolloutGroup | None) -> RolloutGroup:
    """Both as one group. One that had waited has its older version; its further answers have segments of the later one."""
    if more is None:
        return group
    added = more.rollouts
    if more.policy_version != group.policy_version:
        added = tuple(replace(r, segments=((more.policy_version, len(r.token_ids)),)) for r in added)
    return replace(group, rollouts=group.rollouts + added)
