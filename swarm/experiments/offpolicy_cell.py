"""One cell of the off-policy experiment: one correction, one kind of data, one seed.

delayed:  version v - D samples ─▶ groups ─▶ version v trains on nothing else
foreign:  another lineage samples and learns by itself ─▶ groups ─▶ the policy trains on nothing else
"""

import random
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.config import Config, parse
from swarm.engine.make_engine import make_engine
from swarm.experiments.cells import Result
from swarm.experiments.offpolicy import FOREIGN
from swarm.policy.policy import Policy, load_policy
from swarm.rollouts.worker import RolloutBatch, RolloutWorker
from swarm.tasks.task_cursor import TaskCursor
from swarm.tasks.task_mixture import TaskMixture, training_seed
from swarm.training.adapter_steps import AdapterSteps
from swarm.training.experience import ExperienceTranslator
from swarm.training.trainer import Trainer
from swarm.training.training_group import TrainingGroup

_CHECKS = 12
"""Evaluations on the way, beside the first and the last."""


class OffPolicyLearner:
    """A policy that samples, and one that trains on what another one or an earlier self has sampled."""

    def __init__(self, config: Config, author: str, seed: int) -> None:
        self._config = config
        self.policy: Policy = load_policy(config.policy, device="cpu")
        self._mixture = TaskMixture(config.tasks)
        self._worker = RolloutWorker(config.rollouts, self.policy, make_engine(self.policy, config.rollouts), author)
        self._trainer = Trainer(
            config.training,
            self.policy,
            AdapterSteps(config.training, self.policy),
            temperature=config.rollouts.temperature,
            max_new_tokens=config.rollouts.max_new_tokens,
        )
        self._translator = ExperienceTranslator(
            self.policy, config.sharing.likelihood_floor_quantile, config.rollouts.max_new_tokens
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
        """One step on the groups with signal. Returns ESS / B; None where there was no step."""
        prompts = {task.ref: task.prompt for task in rollouts.tasks}
        batch = list[TrainingGroup]()
        for group in rollouts.groups:
            translate = self._translator.own if is_own else self._translator.foreign
            ready = translate(prompts[group.task], group) if group.has_signal else None
            batch += [ready] if ready is not None else []
        if not batch:
            return None
        report = self._trainer.step(batch)
        return None if report.skipped else report.ess_fraction

    def evaluate(self, tasks_per_source: int) -> float:
        """Mean over sources of the reward of one sampled answer per held-out task."""
        scores = self._worker.evaluate(self._mixture.held_out(tasks_per_source), temperature=1.0, seed=self._seed)
        return fmean(fmean(values) for values in scores.values())


def run(settings: Mapping[str, Any]) -> Result:
    """Keys of `settings`: those of `offpolicy.OffPolicyPlan.cell`."""
    learner = OffPolicyLearner(_config(settings, init_seed=0), "learner", settings["seed"])
    source = _source(settings, learner)
    every = max(1, settings["num_steps"] // _CHECKS)
    start = learner.evaluate(settings["held_out_tasks"])
    curve, shares = list[float](), list[float]()
    for step in range(settings["num_steps"]):
        rollouts = source.next()
        ess = learner.train(rollouts, is_own=source.is_own)
        shares += [] if ess is None else [ess]
        source.advance(rollouts)
        if (step + 1) % every == 0:
            curve.append(learner.evaluate(max(1, settings["held_out_tasks"] // 2)))
    end = learner.evaluate(settings["held_out_tasks"])
    return {
        "correction": settings["correction"],
        "data": settings["data"],
        "seed": settings["seed"],
        "start": start,
        "end": end,
        "curve": curve,
        "every": every,
        "ess_fraction": fmean(shares) if shares else 0.0,
        "num_steps": learner.policy.version,
    }


class _Delayed:
    """The learner's own data, `delay` policy versions old, or as old as there are versions."""

    def __init__(self, learner: OffPolicyLearner, delay: int) -> None:
        self.is_own = delay == 0
        self._learner = learner
        self._versions = deque([(0, read_adapter(learner.policy.model))], maxlen=delay + 1)

    def next(self) -> RolloutBatch:
        policy = self._learner.policy
        now = policy.version, read_adapter(policy.model)
        policy.version, adapter = self._versions[0]
        write_adapter(policy.model, adapter)
        rollouts = self._learner.sample()
        policy.version = now[0]
        write_adapter(policy.model, now[1])
        return rollouts

    def advance(self, rollouts: RolloutBatch) -> None:
        policy = self._learner.policy
        if policy.version != self._versions[-1][0]:
            self._versions.append((policy.version, read_adapter(policy.model)))


class _Foreign:
    """Data of a learner of another lineage, which trains on it as its own."""

    is_own = False

    def __init__(self, other: OffPolicyLearner) -> None:
        self._other = other

    def next(self) -> RolloutBatch:
        return self._other.sample()

    def advance(self, rollouts: RolloutBatch) -> None:
        self._other.train(rollouts, is_own=True)


def _source(settings: Mapping[str, Any], learner: OffPolicyLearner) -> _Delayed | _Foreign:
    if settings["data"] != FOREIGN:
        return _Delayed(learner, int(settings["data"]))
    return _Foreign(OffPolicyLearner(_config(settings, init_seed=1), "stranger", settings["seed"]))


def _config(settings: Mapping[str, Any], init_seed: int) -> Config:
    return parse(
        {
            "policy": {"lora": {"init_seed": init_seed}},
            "rollouts": {"groups_per_round": settings["groups_per_round"], "group_size": settings["group_size"]},
            "training": {"correction": settings["correction"]},
        }
    )
