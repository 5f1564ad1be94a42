"""What a round trains on: own groups, groups of others from the pool, and replayed ones.

    groups of the round ─ with signal, not too stale ──────────────────┐
    pool.draw ─ rebuild the task ─ translate by lineage ───────────────┼─▶ batch
    replay store (own groups of earlier rounds) ─ rebuild the task ────┘

Runs on the compute thread. What is left out is counted by reason.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarm.config import Config
from swarm.pool.experience_pool import ExperiencePool, Weigh
from swarm.pool.success_levels import SuccessLevels, has_success
from swarm.rollouts.worker import RolloutBatch
from swarm.tasks.task_mixture import TaskMixture, assess
from swarm.tasks.task_source import TaskFailure, UnknownTask
from swarm.training.advantages import configured_advantage
from swarm.training.experience import RolloutConverter, TrainingGroup
from swarm.training.replay import ReplayStore
from swarm.types import RolloutGroup, Task

_DRAWS = 3


class BatchBuilder:
    """Composes batches. It keeps the replay store, and what own answers reach, by which groups of others are judged."""

    def __init__(
        self,
        config: Config,
        mixture: TaskMixture,
        pool: ExperiencePool,
        translator: RolloutConverter,
        weigh: Weigh | None,
    ) -> None:
        """`weigh`: how useful a group of others is expected to be; without it they are drawn uniformly."""
        self._config = config
        self._mixture = mixture
        self._pool = pool
        self._translator = translator
        self._weigh = weigh
        self._replay = ReplayStore(config.training)
        self._advantage = configured_advantage(config.training)
        self.successes = SuccessLevels(config.sharing.success_quantile)
        self._dropped: Counter[str] = Counter()

    @property
    def dropped(self) -> Counter[str]:
        """Groups that were not trained on since the process began, by reason."""
        return self._dropped + self._translator.dropped + self._pool.dropped

    def batch(self, rollouts: RolloutBatch, policy_version: int, rng: random.Random) -> list[TrainingGroup]:
        """I own and J foreign groups with signal, where one kind is short the other fills up to I + J; then replayed ones.

        The groups of this round go into the replay store for later ones.
        """
        sharing = self._config.sharing
        self.successes.observe_own(rollouts.groups)
        self._pool.expect(self.successes.snapshot())
        tasks = {task.ref: task for task in rollouts.tasks}
        needs_signal = self._config.training.filter_groups
        fresh = self._not_too_stale(
            [g for g in rollouts.groups if g.has_reward_variance or not needs_signal], policy_version
        )
        own = [_weighted(self._translator.own(tasks[g.task].prompt, g), tasks[g.task]) for g in fresh]
        total = self._config.max_batch_groups - self._config.training.replay_groups
        num_own = min(len(own), total - sharing.swarm_groups)
        wanted = total - num_own if sharing.swarm_groups else 0
        max_answers, max_tokens = self._largest(rollouts.groups)
        foreign = [_no_heavier(group, max_tokens) for group in self._draw_foreign(wanted, max_answers, rng)]
        chosen = rng.sample(own, min(len(own), total - len(foreign)))
        replayed = [group for one in self._replay.draw(policy_version, rng) if (group := self._again(one))]
        self._replay.add([group for group in fresh if group.has_reward_variance])
        return chosen + foreign + replayed

    def _largest(self, own: Sequence[RolloutGroup]) -> tuple[int, int]:
        """(answers, tokens) of the largest own group, each on its own; as configured where there is none."""
        rollouts = self._config.rollouts
        if not own:
            return rollouts.group_size, rollouts.group_size * rollouts.max_new_tokens
        return max(2, *(len(group.rollouts) for group in own)), max(map(_num_tokens, own))

    def _draw_foreign(self, wanted: int, max_answers: int, rng: random.Random) -> list[TrainingGroup]:
        """Groups of at most `max_answers` each. It draws again for those that prove unusable, a few times: whoever sends what
        nobody can use must not shrink batches."""
        found: list[TrainingGroup] = []
        for _ in range(_DRAWS):
            drawn = self._pool.draw(wanted - len(found), rng, self._weigh)
            found += [group for one in drawn if (group := self._foreign(_thinned(one, max_answers, rng)))]
            if len(found) == wanted or not drawn:
                break
        return found

    def state(self) -> list[dict[str, Any]]:
        """The replay store, for a checkpoint."""
        return self._replay.state()

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        self._replay.restore(state)

    def _not_too_stale(self, own: list[RolloutGroup], policy_version: int) -> list[RolloutGroup]:
        """Own groups may have waited for rounds; their version is that of their oldest token."""
        bound = self._config.sharing.max_staleness
        kept = [group for group in own if not bound or policy_version - group.policy_version <= bound]
        if len(kept) < len(own):
            self._dropped["own_stale"] += len(own) - len(kept)
        return kept

    def _foreign(self, group: RolloutGroup) -> TrainingGroup | None:
        level = self._pool.success_level(group.task.source)
        if not has_success(group, level):  # it was one when the group came in
            self._dropped["no_success"] += 1
            return None
        task, group = self._rebuilt(group)
        translated = self._translator.foreign(task.prompt, group, level.reward) if task else None
        return _weighted(translated, task) if translated and task else None

    def _again(self, group: RolloutGroup) -> TrainingGroup | None:
        task, group = self._rebuilt(group)
        return _weighted(self._translator.own(task.prompt, group, is_replay=True), task) if task else None

    def _rebuilt(self, group: RolloutGroup) -> tuple[Task | None, RolloutGroup]:
        """Its task and the group with its reward signals, where they count: neither pool nor store keeps those.

        None where pool or store outlived a change of the task list.
        """
        try:
            task = self._mixture.rebuild(group.task)
            if task.weights and self._advantage.uses_signals:
                signals = [assess(task, rollout.text).signals for rollout in group.rollouts]
                rollouts = [replace(r, signals=s) for r, s in zip(group.rollouts, signals, strict=True)]
                group = replace(group, rollouts=tuple(rollouts))
            return task, group
        except (UnknownTask, TaskFailure):
            self._dropped["unknown_task"] += 1
            return None, group


def _thinned(group: RolloutGroup, max_answers: int, rng: random.Random) -> RolloutGroup:
    """At most so many of its answers, from the worst to the best at even distances in the order of their rewards, so that
    successes stay about as frequent and the only one is not lost: each answer costs time, and an author may send many."""
    num_answers = len(group.rollouts)
    if num_answers <= max_answers:
        return group
    ordered = sorted(rng.sample(group.rollouts, num_answers), key=lambda rollout: rollout.reward)
    step = (num_answers - 1) / (max_answers - 1)
    return replace(group, rollouts=tuple(ordered[round(number * step)] for number in range(max_answers)))


def _no_heavier(group: TrainingGroup, max_tokens: int) -> TrainingGroup:
    """A group of others with the weight of the largest own one at most: shares are of groups, while the loss sums over tokens,
    of which an author may send as many as it likes."""
    return replace(group, weight=min(1.0, max_tokens / max(_num_tokens(group.group), 1)))


def _num_tokens(group: RolloutGroup) -> int:
    return sum(len(rollout.token_ids) for rollout in group.rollouts)


def _weighted(group: TrainingGroup, task: Task) -> TrainingGroup:
    return replace(group, signal_weights=task.weights)
