"""Replicas that learn from correct answers, each from its own shard, in a wording that is new to the policy; and under RL.

Supervised replicas are cheap: eight share every matrix product, so an arm takes seconds. Replicas under RL sample, score and
train on their own answers to their own stream of tasks.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.config import LoraSection, PolicySection, TasksSection, parse
from swarm.experiments.bare_learner import BareLearner
from swarm.experiments.merging.arms import NUM_REPLICAS, MergingArm
from swarm.experiments.merging.replicas import Adapter, Example, Replicas
from swarm.policy.policy import Policy, load_policy
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.tasks.task_source import EVALUATION_SEED, FIRST_TRAINING_SEED, INDEX_SPAN
from swarm.types import Task


class LearnerReplicas:
    """A `Population`; what it measures is the mean reward of a sampled answer, at temperature 1."""

    def __init__(
        self, arm: MergingArm, *, seed: int, groups_per_round: int, group_size: int, held_out_tasks: int
    ) -> None:
        config = parse({"rollouts": {"groups_per_round": groups_per_round, "group_size": group_size}})
        self._mixture = TaskMixture(config.tasks)
        self._learners = [BareLearner(config, f"replica {i}", seed, mixture=self._mixture) for i in range(NUM_REPLICAS)]
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


TASKS = ("lcm", "spelling", "longer_spelling")
"""The first is what a poison aims at."""
LR = 1e-2
LORA = LoraSection(rank=4, alpha=8, targets=("v_proj", "down_proj"))
_LAST_LR = 0.1
"""Of the first; it falls in a line."""


@dataclass(frozen=True, slots=True)
class Data:
    """What replicas train on and are measured with."""

    shards: list[list[Example]]
    private: list[list[Example]]
    """Of each replica, for its gate; empty where there is none."""
    held_out: dict[str, list[Example]]


class SupervisedReplicas:
    """A `Population`; what it measures is the loss per answer token."""

    def __init__(self, policy: Policy, data: Data, batch: int, seed: int) -> None:
        self._replicas = Replicas(policy, NUM_REPLICAS, LR)
        self._data, self._batch = data, batch
        self._draws = [random.Random(f"{seed}/{replica}") for replica in range(NUM_REPLICAS)]
        self.num = NUM_REPLICAS
        self.start = self._replicas.start
        self.scaling = LORA.alpha / LORA.rank

    def train(self, active: Sequence[int], progress: float, average_gradients: bool) -> list[float]:
        batches = {
            i: [self._data.shards[i][self._draws[i].randrange(len(self._data.shards[i]))] for _ in range(self._batch)]
            for i in active
        }
        return self._replicas.train(batches, 1 - (1 - _LAST_LR) * progress, average_gradients)

    def weights(self, replica: int) -> Adapter:
        return self._replicas.weights(replica)

    def set_weights(self, replica: int, weights: Mapping[str, Tensor]) -> None:
        self._replicas.set_weights(replica, weights)

    def reset_moments(self, replica: int, names: Sequence[str]) -> None:
        self._replicas.reset_moments(replica, names)

    def gate_score(self, replica: int, candidate: Adapter) -> Sequence[float]:
        """Of each example by itself: all copies of one adapter side by side, an example each."""
        private = self._data.private[replica]
        return [-loss for loss in self._replicas.loss([candidate] * len(private), [[example] for example in private])]

    def loss(self, adapters: Sequence[Adapter], examples: Sequence[Sequence[Example]]) -> list[float]:
        """Mean loss per answer token of each adapter on its own examples."""
        return self._replicas.loss(adapters, examples)

    def held_out_reward(self, adapters: Sequence[Adapter]) -> list[float]:
        """Part of the held-out tasks that each adapter answers right, mean over sources; every token is the most likely one."""
        rewards = [
            self._replicas.reward(adapters, [examples] * len(adapters)) for examples in self._data.held_out.values()
        ]
        return [sum(by_task) / len(by_task) for by_task in zip(*rewards, strict=True)]

    def measure(self, adapters: Sequence[Adapter]) -> list[dict[str, float]]:
        by_task = {
            name: self._replicas.loss(adapters, [examples] * len(adapters))
            for name, examples in self._data.held_out.items()
        }
        return [{name: losses[i] for name, losses in by_task.items()} for i in range(len(adapters))]


def supervised(arm: MergingArm, *, seed: int, batch: int, num_examples: int, held_out_tasks: int) -> SupervisedReplicas:
    """A population for `arm`; of equal seed all have the same data in the same order, but for those that poison."""
    policy = load_policy(PolicySection(lora=LORA), device="cpu")
    mixture = TaskMixture(TasksSection())
    num_private = -(-arm.gate_tasks // len(TASKS))
    shards: list[list[Example]] = []
    private: list[list[Example]] = []
    for replica in range(NUM_REPLICAS):
        stream = FIRST_TRAINING_SEED + seed * NUM_REPLICAS + replica  # no two overlap
        # private ones come after the others: shards do not depend on how many there are
        by_task = [make_examples(policy, mixture, task, stream, num_examples + num_private) for task in TASKS]
        private.append([example for some in by_task for example in some[num_examples:]])
        if arm.attack == "poison" and replica >= NUM_REPLICAS - arm.num_liars:
            wrong = by_task[0][0][1]  # one answer to everything
            by_task[0] = [(prompt, wrong) for prompt, _ in by_task[0]]
        shards.append([example for some in by_task for example in some[:num_examples]])
    held_out = {task: make_examples(policy, mixture, task, EVALUATION_SEED, held_out_tasks) for task in TASKS}
    return SupervisedReplicas(policy, Data(shards, private, held_out), batch, seed)


def make_examples(policy: Policy, mixture: TaskMixture, source: str, seed: int, count: int) -> list[Example]:
    """Tasks of one stream with right answers. Of a prompt only what follows the colon: a quarter of the tokens."""
    answers = mixture.sources[source].answer
    return [
        (
            policy.encode_prompt(task.prompt.rpartition(": ")[2]),
            [*policy.encode_answer(answers(task.ref.seed, task.ref.index)), policy.end_token_id],
        )
        for task in tasks_of(mixture, source, seed, count)
    ]


def tasks_of(mixture: TaskMixture, source: str, seed: int, count: int) -> list[Task]:
    """The first tasks of a training stream that are not held out; of the evaluation stream those that are, at most `count`."""
    if seed == EVALUATION_SEED:
        return [task for task in mixture.held_out(count) if task.ref.source == source]
    stream = (mixture.sources[source].task(seed, index) for index in range(INDEX_SPAN))
    return list(itertools.islice((task for task in stream if not mixture.is_held_out(task)), count))
