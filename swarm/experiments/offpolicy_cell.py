"""One cell of the off-policy experiment: one correction, one kind of data, one seed.

delayed:  version v - D samples ─▶ groups ─▶ version v trains on nothing else
foreign:  another lineage samples and learns by itself ─▶ groups ─▶ the policy trains on nothing else
"""

from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.config import Config, parse
from swarm.experiments.bare_learner import BareLearner
from swarm.experiments.cells import Result
from swarm.experiments.offpolicy import FOREIGN
from swarm.rollouts.worker import RolloutBatch

_CHECKS = 12
"""Evaluations on the way, beside the first and the last."""


def run(settings: Mapping[str, Any]) -> Result:
    """Keys of `settings`: those of `offpolicy.OffPolicyPlan.cell`."""
    learner = BareLearner(_config(settings, init_seed=0), "learner", settings["seed"])
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

    def __init__(self, learner: BareLearner, delay: int) -> None:
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

    def __init__(self, other: BareLearner) -> None:
        self._other = other

    def next(self) -> RolloutBatch:
        return self._other.sample()

    def advance(self, rollouts: RolloutBatch) -> None:
        self._other.train(rollouts, is_own=True)


def _source(settings: Mapping[str, Any], learner: BareLearner) -> _Delayed | _Foreign:
    if settings["data"] != FOREIGN:
        return _Delayed(learner, int(settings["data"]))
    return _Foreign(BareLearner(_config(settings, init_seed=1), "stranger", settings["seed"]))


def _config(settings: Mapping[str, Any], init_seed: int) -> Config:
    return parse(
        {
            "policy": {"lora": {"init_seed": init_seed}},
            "rollouts": {"groups_per_round": settings["groups_per_round"], "group_size": settings["group_size"]},
            "sharing": {"likelihood_floor_quantile": 0.0},  # it samples nothing of its own to measure others by
            "training": {"correction": settings["correction"]},
        }
    )
