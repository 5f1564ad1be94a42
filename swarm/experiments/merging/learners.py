"""Replicas under RL: each samples, scores and trains on answers of its own, to a stream of tasks of its own."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from torch import Tensor

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.config import parse
from swarm.experiments.bare_learner import BareLearner
from swarm.experiments.merging.arms import NUM_REPLICAS, Arm
from swarm.experiments.merging.population import Adapter
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.types import Task


class LearnerReplicas:
    """A `Population`; what it measures is the mean reward of a sampled answer, at temperature 1."""

    def __init__(self, arm: Arm, *, seed: int, groups_per_round: int, group_size: int, held_out_tasks: int) -> None:
        config = parse({"rollouts": {"groups_per_round": groups_per_round, "group_size": group_size}})
        self._mixture = TaskMixture(config.tasks)
        self._learners = [BareLearner(config, f"replica {i}", seed, self._mixture) for i in range(NUM_REPLICAS)]
        self._gate_streams = [training_seed(f"private {i}", seed) for i in range(NUM_REPLICAS)]
        self._gate_tasks = arm.gate_tasks
        self._held_out = self._mixture.held_out(held_out_tasks)
        self.num = NUM_REPLICAS
        self.start: Adapter = read_adapter(self._learners[0].policy.model)
        self.scaling = config.policy.lora.alpha / config.policy.lora.rank

    def train(self, active: Sequence[int], progress: float, average_gradients: bool) -> list[float]:
        """One round of each: mean reward of the answers that it sampled."""
        assert not average_gradients, "no arm under RL does"
        rewards: list[float] = []
        for i in active:
            rollouts = self._learners[i].sample()
            self._learners[i].train(rollouts, is_own=True)
            rewards.append(fmean(group.mean_reward for group in rollouts.groups))
        return rewards

    def weights(self, replica: int) -> Adapter:
        return read_adapter(self._learners[replica].policy.model)

    def set_weights(self, replica: int, weights: Mapping[str, Tensor]) -> None:
        write_adapter(self._learners[replica].policy.model, weights)

    def reset_moments(self, replica: int, names: Sequence[str]) -> None:
        self._learners[replica].reset_moments(names)

    def gate_score(self, replica: int, candidate: Adapter) -> Sequence[float]:
        """As `PolicyMerging` has it: other tasks for each merge, all sources in turn."""
        learner = self._learners[replica]
        found = self._rewards(learner, candidate, self._private(replica, learner.policy.version))
        return [reward for source in sorted(found) for reward in found[source]]

    def measure(self, adapters: Sequence[Adapter]) -> list[dict[str, float]]:
        found = [self._rewards(self._learners[0], adapter, self._held_out) for adapter in adapters]
        return [{source: fmean(values) for source, values in sorted(one.items())} for one in found]

    def _rewards(self, learner: BareLearner, adapter: Adapter, tasks: Sequence[Task]) -> dict[str, list[float]]:
        before = read_adapter(learner.policy.model)
        write_adapter(learner.policy.model, adapter)
        rewards = learner.rewards(tasks)
        write_adapter(learner.policy.model, before)
        return rewards

    def _private(self, replica: int, version: int) -> list[Task]:
        names, count = sorted(self._mixture.sources), self._gate_tasks
        numbers = range(version * count, (version + 1) * count)
        stream = self._gate_streams[replica]
        return [self._mixture.sources[names[k % len(names)]].task(stream, k // len(names)) for k in numbers]
