"""The metrics row of one round: what was rolled out, what was trained on, and how long each part took."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.engine.pruning import Pruning
from swarm.rollouts.rollout_round import mean_reward_signals
from swarm.rollouts.worker import RolloutBatch
from swarm.training.experience import TrainingGroup
from swarm.types import RolloutGroup, Task

MetricsRow = dict[str, Any]
"""One line of metrics.jsonl."""


class RoundTimer:
    """Times the two halves of a round."""

    def __init__(self) -> None:
        self._started_at = self._rolled_out_at = time.monotonic()

    def rolled_out(self) -> None:
        """The rollouts are there, and training begins."""
        self._rolled_out_at = time.monotonic()

    @property
    def rollout_s(self) -> float:
        return self._rolled_out_at - self._started_at

    def row(self) -> MetricsRow:
        finished_at = time.monotonic()
        return {
            "time/rollout_s": self.rollout_s,
            "time/train_s": finished_at - self._rolled_out_at,
            "time/round_s": finished_at - self._started_at,
        }


def rollout_row(rollouts: RolloutBatch, duration_s: float, hinted: RolloutBatch) -> MetricsRow:
    """What the rollouts of a round gave, and their mean reward signals. `hinted` ones only count in what was paid for."""
    groups, num_tokens = rollouts.groups, rollouts.num_tokens + hinted.num_tokens
    return {
        "rollout/reward_mean": sum(g.mean_reward for g in groups) / len(groups) if groups else 0.0,
        "rollout/reward_by_source": _mean_by_source(groups),
        "rollout/tokens": num_tokens,
        "rollout/tokens_per_s": num_tokens / max(duration_s, 1e-9),
        "rollout/groups": len(groups),
        "rollout/stale_tokens": rollouts.num_stale_tokens,
        "rollout/answers": sum(len(group.rollouts) for group in groups),
        "rollout/groups_with_signal": sum(group.has_reward_variance for group in groups),
        "rollout/failed_tasks": sum(rollouts.failures.values()),
        "rollout/too_long_prompts": sum(rollouts.too_long.values()),
        **mean_reward_signals(groups),
    }


def evaluation_row(tasks: Sequence[Task], temperature: float, scores: Mapping[str, Sequence[float]]) -> MetricsRow:
    """The rewards on held-out tasks, by source. Every source has the same weight in their mean.

    Two evaluations compare if their `measured_on` is the same. It is empty where a source could not be scored.
    """
    found = {source: values for source, values in sorted(scores.items()) if values}
    accuracy = {source: sum(values) / len(values) for source, values in found.items()}
    squares = sum(mean * (1 - mean) / len(found[source]) for source, mean in accuracy.items())
    sources = sorted({task.ref.source for task in tasks})
    is_whole = sources == list(accuracy)
    return {
        "accuracy_mean": sum(accuracy.values()) / max(1, len(accuracy)),
        "accuracy_error": math.sqrt(max(0.0, squares)) / max(1, len(accuracy)),
        "accuracy": accuracy,
        "num_tasks": len(tasks),
        "measured_on": f"{len(tasks)} tasks of {', '.join(sources)} at temperature {temperature:g}" if is_whole else "",
    }


def _mean_by_source(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """{task source: mean reward of its groups}"""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        rewards.setdefault(group.task.source, []).append(group.mean_reward)
    return {source: sum(found) / len(found) for source, found in sorted(rewards.items())}


def hinted_row(hinted: RolloutBatch) -> MetricsRow:
    """What the groups that begin with a hint gave. Their mean reward is None in a round without any."""
    groups = hinted.groups
    return {
        "rollout/hinted_groups": len(groups),
        "rollout/failed_hints": sum(hinted.failures.values()),
        "rollout/hinted_groups_with_signal": sum(group.has_reward_variance for group in groups),
        "rollout/hinted_reward_mean": sum(g.mean_reward for g in groups) / len(groups) if groups else None,
    }


def pruning_row(rollouts: RolloutBatch, pruning: Pruning) -> MetricsRow:
    """With pruning, the mean reward is an estimate over all answers that were begun; those that were finished are better."""
    rewards = [rollout.reward for group in rollouts.groups for rollout in group.rollouts]
    return {
        "rollout/reward_mean": rollouts.pruned.reward_mean,
        "rollout/surviving_reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
        "rollout/pruned_answers": rollouts.pruned.num_pruned,
        "rollout/saved_tokens": rollouts.pruned.saved_tokens,
        "rollout/prune_calibration_error": pruning.reliability.calibration_error,
        "rollout/prune_skill": pruning.reliability.skill,
    }


def count_batch(totals: Counter[str], batch: Sequence[TrainingGroup]) -> MetricsRow:
    """Add the groups of a batch to the totals of the run, which a checkpoint keeps, and give both."""
    num_own = sum(group.is_own and not group.is_replay for group in batch)
    num_others = sum(not group.is_own for group in batch)
    totals["own_groups"] += num_own
    totals["swarm_groups"] += num_others
    return {
        "train/own_groups": num_own,
        "train/swarm_groups": num_others,
        "train/own_groups_total": totals["own_groups"],
        "train/swarm_groups_total": totals["swarm_groups"],
        "train/pooled_groups": sum(bool(group.siblings) for group in batch),
        "train/replayed_groups": sum(group.is_replay for group in batch),
    }
