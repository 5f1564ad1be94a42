"""Replicas under RL: real learners without sharing, each with rollouts, trainer and stream of tasks of its own, on one base."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from torch import Tensor

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.config import Config, parse
from swarm.engine.make_engine import make_engine
from swarm.experiments.learner_swarm import LearnerSwarm
from swarm.experiments.merging.arms import NUM_REPLICAS, Arm
from swarm.experiments.merging.population import Adapter
from swarm.policy.policy import Policy
from swarm.rollouts.worker import RolloutWorker
from swarm.tasks.task_mixture import TaskMixture, training_seed

_EVALUATION_SEED = 0


class LearnerReplicas:
    """A `Population`; what it measures is the mean reward of a sampled answer, at temperature 1."""

    def __init__(self, arm: Arm, *, seed: int, groups_per_round: int, group_size: int, held_out_tasks: int) -> None:
        config = _config(seed, groups_per_round, group_size)
        self._swarm = LearnerSwarm([config] * NUM_REPLICAS, seed)
        self._policies = self._swarm.policies
        mixture = TaskMixture(config.tasks)
        self._held_out = mixture.held_out(held_out_tasks)
        names = sorted(mixture.sources)
        streams = [training_seed("private", seed * NUM_REPLICAS + replica) for replica in range(NUM_REPLICAS)]
        self._private = [
            [mixture.sources[names[k % len(names)]].task(stream, k // len(names)) for k in range(arm.gate_tasks)]
            for stream in streams
        ]
        self._workers = [_worker(config, policy) for policy in self._policies]
        self.num = NUM_REPLICAS
        self.start: Adapter = read_adapter(self._policies[0].model)
        self.scaling = config.policy.lora.alpha / config.policy.lora.rank

    def train(self, active: Sequence[int], progress: float, average_gradients: bool) -> list[float]:
        assert not average_gradients, "no arm under RL does"
        return list(self._swarm.run_round(active).rewards)

    def weights(self, replica: int) -> Adapter:
        return read_adapter(self._policies[replica].model)

    def set_weights(self, replica: int, weights: Mapping[str, Tensor]) -> None:
        write_adapter(self._policies[replica].model, weights)

    def reset_moments(self, replica: int, names: Sequence[str]) -> None:
        self._swarm.reset_moments(replica, names)

    def gate_score(self, replica: int, candidate: Adapter) -> float:
        before = self.weights(replica)
        self.set_weights(replica, candidate)
        scores = self._workers[replica].evaluate(self._private[replica], temperature=1.0, seed=_EVALUATION_SEED)
        self.set_weights(replica, before)
        return fmean(value for values in scores.values() for value in values)

    def measure(self, adapters: Sequence[Adapter]) -> list[dict[str, float]]:
        before = self.weights(0)
        found: list[dict[str, float]] = []
        for adapter in adapters:
            self.set_weights(0, adapter)
            scores = self._workers[0].evaluate(self._held_out, temperature=1.0, seed=_EVALUATION_SEED)
            found.append({source: fmean(values) for source, values in sorted(scores.items())})
        self.set_weights(0, before)
        return found


def _worker(config: Config, policy: Policy) -> RolloutWorker:
    return RolloutWorker(config.rollouts, policy, make_engine(policy, config.rollouts), "experiment")


def _config(seed: int, groups_per_round: int, group_size: int) -> Config:
    """A node as it comes, without sharing."""
    return parse(
        {
            "node": {"seed": seed},
            "rollouts": {"groups_per_round": groups_per_round, "group_size": group_size},
            "sharing": {"swarm_groups": 0, "publish": False},
        }
    )
