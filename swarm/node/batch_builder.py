"""What a round trains on: own groups, groups of others from the pool, and replayed ones.

    own_groups      groups of the round ─ with signal, not too stale ──────────────┐
    hinted_groups   groups that begin with a hint (`right_answers`) ─ with signal ─┤
    draw_from_pool  pool.draw ─ rebuild the task ─ convert by lineage ─────────────┼─▶ compose ─▶ batch
                    replay store (own groups of earlier rounds) ─ rebuild the task ┘

On common tasks all groups go through `CommonGroups`, too: it knows what other authors' answers earned, and holds groups without
signal until it can compare them with such answers. It runs on the compute thread. What is left out is counted by reason.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarm.config import Config
from swarm.pool.experience_pool import ExperiencePool, PooledGroup, Weigh
from swarm.pool.success_levels import SuccessLevels, has_success
from swarm.rollouts.hints import FULL_REWARD, SOLVED_RATE, RightAnswer
from swarm.rollouts.worker import RolloutBatch
from swarm.tasks.environments.episodes import with_scores
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import ForgedEpisode, TaskFailure, UnknownTask
from swarm.training.advantages import configured_advantage
from swarm.training.common_groups import CommonGroups, spread
from swarm.training.experience import ForeignGroup, RolloutConverter, TrainingGroup
from swarm.training.replay import ReplayStore
from swarm.types import RolloutGroup, Task, TaskRef

_DRAWS = 3
_LOOKS_PER_HINT = 4
"""Groups of others that are looked at for each hint, as some have none."""


@dataclass(frozen=True, slots=True)
class OwnGroups:
    """The groups of a round that may be trained on."""

    fresh: Sequence[RolloutGroup]
    """As they were sampled, for the replay store."""
    converted: Sequence[TrainingGroup]
    """The same groups, for a batch, and those of earlier rounds that have found others to be compared with."""
    max_answers: int
    """Answers of the largest group of the round; groups of others are thinned to it."""
    max_tokens: int
    """Tokens of the largest group of the round; heavier groups of others get a smaller weight."""


class BatchBuilder:
    """Composes batches. It keeps the replay store and the success levels of own answers, which groups of others must reach."""

    def __init__(
        self,
        config: Config,
        *,
        mixture: TaskMixture,
        pool: ExperiencePool,
        converter: RolloutConverter,
        weigh: Weigh | None,
        expected_reward: Callable[[str], float],
        is_common: Callable[[TaskRef], bool] = lambda task: False,
    ) -> None:
        """`weigh`: how useful a group of others is expected to be; without it they are drawn uniformly.

        `expected_reward`: what own answers to a source usually earn. `is_common`: whether all nodes draw a task.
        """
        self._expected_reward = expected_reward
        self._config = config
        self._mixture = mixture
        self._pool = pool
        self._converter = converter
        self._weigh = weigh
        self._is_common = is_common
        self.common = CommonGroups()
        """Groups on common tasks, of this node and of others."""
        self._replay = ReplayStore(config.training)
        self._advantage = configured_advantage(config.training)
        self.successes = SuccessLevels(config.sharing.success_quantile)
        self._dropped: Counter[str] = Counter()

    @property
    def dropped(self) -> Counter[str]:
        """Groups that were not trained on since the process began, by reason."""
        return self._dropped + self._converter.dropped + self._pool.dropped

    def own_groups(self, rollouts: RolloutBatch, policy_version: int) -> OwnGroups:
        """The groups of this round with signal that are not too stale, ready for training."""
        self.successes.observe_own(rollouts.groups)
        self._pool.expect(self.successes.snapshot())
        tasks = {task.ref: task for task in rollouts.tasks}
        needs_signal = self._config.training.filter_groups
        self._note_own(rollouts.groups, holds_back=needs_signal)
        fresh = self._not_too_stale(
            [g for g in rollouts.groups if g.has_reward_variance or not needs_signal], policy_version
        )
        own = [self._own(tasks[group.task], group) for group in fresh]
        own += self._met(policy_version, self._num_fresh - self._config.sharing.swarm_groups - len(own))
        return OwnGroups(fresh, own, *self._largest(rollouts.groups))

    def right_answers(self, rng: random.Random) -> Iterator[RightAnswer]:
        """Right answers of others to tasks of one turn, of sources where own answers seldom are right, for hints.

        None is below the likelihood floor. The harder a source is here, the sooner its groups come. They are not used up by this:
        they may be drawn for a batch as well.
        """
        count = _LOOKS_PER_HINT * self._config.rollouts.hints
        for group in self._pool.look(self._converter.tokenizer, count, rng, self._hint_weight):
            right = [rollout for rollout in group.rollouts if rollout.reward >= FULL_REWARD]
            answer = rng.choice(right) if right else None
            task = self._task_of_one_turn(group.task) if answer else None
            if answer and task and self._converter.may_be_hint(task.prompt, answer, task.context):
                yield RightAnswer(task, answer, group.author)

    def hinted_groups(self, hinted: RolloutBatch) -> list[TrainingGroup]:
        """The groups that begin with a hint and have signal, ready for training."""
        tasks = {task.ref: task for task in hinted.tasks}
        needs_signal = self._config.training.filter_groups
        return [
            self._own(tasks[group.task], group)
            for group in hinted.groups
            if group.has_reward_variance or not needs_signal
        ]

    def draw_from_pool(self, own: OwnGroups, rng: random.Random) -> list[TrainingGroup]:
        """`sharing.swarm_groups` groups of others, and more where own groups are short.

        It draws again for groups that prove unusable, a few times: whoever sends what nobody can use must not shrink batches.
        """
        num_swarm = self._config.sharing.swarm_groups
        # the share of the swarm, and what own groups lack
        wanted = self._num_fresh - min(len(own.converted), self._num_fresh - num_swarm) if num_swarm else 0
        found = self._foreign(self.common.take_ready(wanted, is_own=False))
        for _ in range(_DRAWS):
            drawn = self._pool.draw(wanted - len(found), rng, self._weigh)
            found += self._foreign([_thinned(one, own.max_answers, rng) for one in drawn])
            if len(found) == wanted or not drawn:
                break
        return [_no_heavier(group, own.max_tokens) for group in found]

    def compose(
        self,
        own: OwnGroups,
        others: Sequence[TrainingGroup],
        policy_version: int,
        rng: random.Random,
        hinted: Sequence[TrainingGroup] = (),
    ) -> list[TrainingGroup]:
        """The batch: as many own groups as there is room for beside those of others, then replayed ones and all hinted ones.

        The groups of this round go into the replay store for later rounds; hinted ones do not.
        """
        num_own = self._num_fresh - len(others)
        chosen = rng.sample(own.converted, min(len(own.converted), num_own))
        chosen += self._met(policy_version, num_own - len(chosen))  # by groups that were drawn a moment ago
        replayed = [group for one in self._replay.draw(policy_version, rng) if (group := self._again(one))]
        self._replay.add([group for group in own.fresh if group.has_reward_variance])
        return [*map(self._compared, chosen), *others, *map(self._compared, replayed), *hinted]

    @property
    def _num_fresh(self) -> int:
        """Groups in a batch that are neither replayed nor hinted."""
        return self._config.max_shared_groups

    def _hint_weight(self, group: PooledGroup) -> float:
        """How much a group of others is wanted for a hint: 1 minus the own success rate at its source, if that is low."""
        if group.source not in self._mixture.sources or not group.mean_reward:
            return 0.0
        rate = self._expected_reward(group.source)
        return 1 - rate if rate < SOLVED_RATE else 0.0

    def _largest(self, own: Sequence[RolloutGroup]) -> tuple[int, int]:
        """The most answers, and the most tokens, that an own group has; as configured where there is none."""
        rollouts = self._config.rollouts
        if not own:
            return rollouts.group_size, rollouts.group_size * rollouts.max_new_tokens
        return max(2, *(len(group.rollouts) for group in own)), max(map(_num_tokens, own))

    def state(self) -> list[dict[str, Any]]:
        """The replay store, for a checkpoint."""
        return self._replay.state()

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        self._replay.restore(state)

    def _note_own(self, groups: Sequence[RolloutGroup], *, holds_back: bool) -> None:
        """Remember the groups of this round on common tasks. With `holds_back`, those without signal wait for others' answers."""
        self.common.begin_round()
        for group in groups:
            if self._is_pooled(group.task):
                self.common.note(group, is_own=True)
                if holds_back and not group.has_reward_variance:
                    self.common.hold(group, is_own=True)

    def _is_pooled(self, task: TaskRef) -> bool:
        """Whether answers to a task are compared with those of other authors: on common tasks, unless answers are compared by
        several signals, of which only the sum is remembered."""
        return self._is_common(task) and not self._advantage.uses_signals

    def _met(self, policy_version: int, most: int) -> list[TrainingGroup]:
        """Own groups that waited, and have signal beside the answers of others."""
        ready = self._not_too_stale(self.common.take_ready(most, is_own=True), policy_version)
        rebuilt = [self._rebuilt(group) for group in ready]
        return [self._own(task, group) for task, group in rebuilt if task is not None]

    def _compared(self, own: TrainingGroup) -> TrainingGroup:
        """An own group with what others earned with the same task."""
        return replace(own, siblings=self.common.siblings(own.group))

    def _not_too_stale(self, own: list[RolloutGroup], policy_version: int) -> list[RolloutGroup]:
        """Leave out own groups that waited too many rounds; the version of a group is that of its oldest token."""
        bound = self._config.sharing.max_staleness
        kept = [group for group in own if not bound or policy_version - group.policy_version <= bound]
        if len(kept) < len(own):
            self._dropped["own_stale"] += len(own) - len(kept)
        return kept

    def _foreign(self, groups: Sequence[RolloutGroup]) -> list[TrainingGroup]:
        """Those that can be trained on here."""
        of_reader = self._config.sharing.baseline == "reader"
        tasks: list[Task] = []
        offered: list[ForeignGroup] = []
        for group in self._comparable(groups):
            level = self._pool.success_level(group.task.source)
            if not has_success(group, level):  # it was one when the group came in
                self._dropped["no_success"] += 1
                continue
            task, group = self._rebuilt(group)
            if task is not None:
                baseline = self._expected_reward(task.ref.source) if of_reader else None
                tasks.append(task)
                siblings = self.common.siblings(group)
                offered.append(ForeignGroup(task.prompt, group, level.reward, task.context, baseline, siblings))
        found: list[TrainingGroup] = []
        for task, one, converted in zip(tasks, offered, self._converter.foreign_groups(offered), strict=True):
            if converted is not None:
                found.append(_weighted(converted, task))
            elif self._is_pooled(task.ref):
                self.common.forget(one.group)
        return found

    def _comparable(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Those that have signal beside what is known; groups on common tasks all of whose answers are right wait for that."""
        common = [
            group
            for group in groups
            if self._is_common(group.task) and has_success(group, self._pool.success_level(group.task.source))
        ]
        pooled = [group for group in common if self._is_pooled(group.task)]
        for group in pooled:
            self.common.note(group, is_own=False)
        if self._config.sharing.baseline == "reader":  # all groups are compared with what own answers earn
            return list(groups)
        left_out = {id(group) for group in common if not self.common.has_signal(group)}
        for group in pooled:
            if id(group) in left_out:
                self.common.hold(group, is_own=False)
        return [group for group in groups if id(group) not in left_out]

    def _again(self, group: RolloutGroup) -> TrainingGroup | None:
        task, group = self._rebuilt(group)
        return self._own(task, group, is_replay=True) if task else None

    def _own(self, task: Task, group: RolloutGroup, *, is_replay: bool = False) -> TrainingGroup:
        converted = self._converter.own(task.prompt, group, is_replay=is_replay, context=task.context)
        return _weighted(converted, task)

    def _task_of_one_turn(self, ref: TaskRef) -> Task | None:
        """The task; None where it has an environment, is held out, no longer exists, or is scored in the node although its
        verifier needs a process: a part of a stranger's answer is a text that no process has seen yet."""
        try:
            task = self._mixture.rebuild(ref)
            is_of_one_turn = task.begin is None and self._mixture.may_score_strangers(ref.source)
            return task if is_of_one_turn and not self._mixture.is_held_out(task) else None
        except (UnknownTask, TaskFailure):
            return None

    def _rebuilt(self, group: RolloutGroup) -> tuple[Task | None, RolloutGroup]:
        """The task of a group, and the group with its reward signals where they count: neither pool nor store keeps those.

        The task is None where pool or store outlived a change of the task list, or of what is held out.
        """
        try:
            task = self._mixture.rebuild(group.task)
            if self._mixture.is_held_out(task):
                self._dropped["held_out"] += 1
                return None, group
            hides_cut = self._config.training.mask_truncated and bool(self._config.rollouts.stop)
            hides_cut = hides_cut and not all(
                rollout.finished for rollout in group.rollouts
            )  # a stop string may have ended one
            is_played = task.begin is not None and (self._advantage.uses_turns or hides_cut)
            if is_played or (task.weights and self._advantage.uses_signals):
                group = replace(group, rollouts=tuple(with_scores(task, rollout) for rollout in group.rollouts))
            return task, group
        except (UnknownTask, TaskFailure, ForgedEpisode):
            self._dropped["unknown_task"] += 1
            return None, group


def _thinned(group: RolloutGroup, max_answers: int, rng: random.Random) -> RolloutGroup:
    """Keep at most `max_answers`, because each answer costs time and an author may send many.

    They are taken at even distances from the worst to the best reward, so that successes stay about as frequent and a single
    success is not lost.
    """
    num_answers = len(group.rollouts)
    if num_answers <= max_answers:
        return group
    ordered = sorted(rng.sample(group.rollouts, num_answers), key=lambda rollout: rollout.reward)
    return replace(group, rollouts=tuple(ordered[place] for place in spread(num_answers, max_answers)))


def _no_heavier(group: TrainingGroup, max_tokens: int) -> TrainingGroup:
    """Give a group of others at most the weight of the largest own group. Shares count groups, while the loss sums over tokens,
    of which an author may send as many as it likes."""
    return replace(group, weight=min(1.0, max_tokens / max(_num_tokens(group.group), 1)))


def _num_tokens(group: RolloutGroup) -> int:
    return sum(len(rollout.token_ids) for rollout in group.rollouts)


def _weighted(group: TrainingGroup, task: Task) -> TrainingGroup:
    return replace(group, signal_weights=task.weights)
