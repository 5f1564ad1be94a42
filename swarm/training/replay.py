"""Keeps own groups of earlier rounds that taught most, to be trained on a second time.

    own groups with signal ─▶ [store: newest few] ─ not older than replay_max_versions ─ drawn by p(1 − p) ─▶ batch

A group is trained on afresh once and replayed at most once. Its log-probs stay those of the time of sampling, so the
corrections see how far the policy has moved since; the loss weighs each token by min(w, C). The store is part of the
checkpoint: a run that was killed and resumed replays what an uninterrupted one would.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.config import TrainingSection
from swarm.limits.weighted_sample import weighted_order
from swarm.types import Lineage, Rollout, RolloutGroup, TaskRef, Turn

_KEPT_BATCHES = 16


class ReplayStore:
    """The newest own groups, at most 16 times `config.replay_groups`; nothing where replay is off.

    It belongs to the compute thread and is part of every checkpoint.
    """

    def __init__(self, config: TrainingSection) -> None:
        self._config = config
        self._groups: list[RolloutGroup] = []  # oldest first

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Store own groups that the policy has just been trained on; those whose rewards are equal are ignored."""
        self._groups += [group for group in groups if group.has_reward_variance]
        del self._groups[: max(0, len(self._groups) - _KEPT_BATCHES * self._config.replay_groups)]

    def draw(self, policy_version: int, rng: random.Random) -> list[RolloutGroup]:
        """Up to `replay_groups` of them, which leave the store, by p(1 − p) of their mean reward p.

        Groups that are too old are removed first. Without replay nothing is drawn from `rng`.
        """
        oldest = policy_version - self._config.replay_max_versions
        self._groups = [group for group in self._groups if group.policy_version >= oldest]
        if not self._groups:
            return []
        rates = [group.mean_reward for group in self._groups]
        order = weighted_order([rate * (1 - rate) for rate in rates], rng)[: self._config.replay_groups]
        drawn = [self._groups[index] for index in order]
        self._groups = [group for index, group in enumerate(self._groups) if index not in order]
        return drawn

    def state(self) -> list[dict[str, Any]]:
        """The whole store, for JSON."""
        return [group_state(group) for group in self._groups]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        self._groups = [group_from(saved) for saved in state]


def group_state(group: RolloutGroup) -> dict[str, Any]:
    """A group, for JSON."""
    ref = group.task
    return {
        "task": [ref.source, ref.config_digest, ref.seed, ref.index],
        "prompt_digest": group.prompt_digest,
        "author": group.author,
        "lineage": [group.lineage.policy, group.lineage.tokenizer],
        "policy_version": group.policy_version,
        "rollouts": [
            {
                "text": rollout.text,
                "token_ids": list(rollout.token_ids),
                "logprobs": list(rollout.logprobs),
                "finished": rollout.finished,
                "reward": rollout.reward,
                "signals": [list(signal) for signal in rollout.signals],
                "segments": [list(segment) for segment in rollout.segments],
                "turns": [[turn.text, turn.reply, turn.role, turn.start, turn.stop] for turn in rollout.turns],
            }
            for rollout in group.rollouts
        ],
    }


def group_from(state: Mapping[str, Any]) -> RolloutGroup:
    """The group of a `group_state`."""
    return RolloutGroup(
        task=TaskRef(*state["task"]),
        prompt_digest=state["prompt_digest"],
        rollouts=tuple(_rollout_from(saved) for saved in state["rollouts"]),
        author=state["author"],
        lineage=Lineage(*state["lineage"]),
        policy_version=state["policy_version"],
    )


def _rollout_from(state: Mapping[str, Any]) -> Rollout:
    return Rollout(
        text=state["text"],
        token_ids=tuple(state["token_ids"]),
        logprobs=tuple(state["logprobs"]),
        finished=state["finished"],
        reward=state["reward"],
        signals=tuple((name, value) for name, value in state["signals"]),
        segments=tuple((version, num) for version, num in state["segments"]),
        turns=tuple(Turn(*turn) for turn in state.get("turns", [])),  # absent in checkpoints of older versions
    )
