"""A learner that samples, trains on given groups and is evaluated, without the pool, records and rounds of a node."""

import random
from collections.abc import Iterable, Sequence
from statistics import fmean

from swarm.config import Config
from swarm.engine.make_engine import make_engine
from swarm.policy.policy import Policy, load_policy
from swarm.rollouts.worker import RolloutBatch, RolloutWorker
from swarm.tasks.task_cursor import TaskCursor
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.training.experience import RolloutConverter, TrainingGroup
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.training.trainer import Trainer
from swarm.types import Task


class BareLearner:
    """Policy, engine, trainer and a stream of tasks bound to `author` and `seed`."""

    def __init__(self, config: Config, author: str, seed: int, mixture: TaskMixture | None = None) -> None:
        """`mixture`: that of `config.tasks`, where it was built already."""
        self._config = config
        self.policy: Policy = load_policy(config.policy, device="cpu")
        self._mixture = mixture or TaskMixture(config.tasks)
        self._worker = RolloutWorker(
            config.rollouts, self.policy, make_engine(self.policy, config.rollouts), author=author
        )
        self._optimizer = LocalOptimizer(config.training, self.policy)
        self._trainer = Trainer(
            config.training,
            self.policy,
            self._optimizer,
            temperature=config.rollouts.temperature,
            max_new_tokens=config.rollouts.max_new_tokens,
        )
        self._converter = RolloutConverter(
            self.policy,
            config.sharing.likelihood_floor_quantile,
            config.rollouts.max_new_tokens,
        )
        stream = training_seed(author, seed)
        self._cursor = TaskCursor(self._mixture, stream, random.Random(f"{author}/{seed}"))
        self._seed = seed
        self._num_rounds = 0

    def sample(self) -> RolloutBatch:
        """One round of groups by the policy as it is."""
        self._num_rounds += 1
        tasks = self._cursor.draw(self._config.rollouts.groups_per_round)
        return self._worker.rollout(tasks, 1_000_003 * (self._seed + 1) + self._num_rounds)

    def train(self, rollouts: RolloutBatch, *, is_own: bool) -> float | None:
        """One step on the groups with signal. Returns ESS / N; None where there was no step."""
        prompts = {task.ref: task.prompt for task in rollouts.tasks}
        batch = list[TrainingGroup]()
        for group in rollouts.groups:
            translate = self._converter.own if is_own else self._converter.foreign
            ready = translate(prompts[group.task], group) if group.has_reward_variance else None
            batch += [ready] if ready is not None else []
        if not batch:
            return None
        report = self._trainer.step(batch)
        return None if report.skipped else report.ess_fraction

    def evaluate(self, tasks_per_source: int) -> float:
        """Mean over sources of the reward of one sampled answer per held-out task."""
        return fmean(map(fmean, self.rewards(self._mixture.held_out(tasks_per_source)).values()))

    def rewards(self, tasks: Sequence[Task]) -> dict[str, list[float]]:
        """{source: reward of one sampled answer to each task}, at temperature 1."""
        return self._worker.evaluate(tasks, temperature=1.0, seed=self._seed)

    def reset_moments(self, names: Iterable[str]) -> None:
        """As `LocalOptimizer.reset_moments`."""
        self._optimizer.reset_moments(names)
