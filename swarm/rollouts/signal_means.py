"""Metrics of the reward signals of a round."""

from collections.abc import Sequence

from swarm.types import RolloutGroup


def signal_means(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """`reward/NAME`: mean of every reward signal over the answers whose task has it."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.rollouts:
            for name, value in rollout.signals:
                values.setdefault(f"reward/{name}", []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
