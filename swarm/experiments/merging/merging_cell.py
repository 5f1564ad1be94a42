"""One cell of the merging experiment: one arm, one way of learning, one seed."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from swarm.experiments.cells import Result
from swarm.experiments.merging.arms import MergingArm
from swarm.experiments.merging.merge_run import MergeRun, Scale
from swarm.experiments.merging.replicas import Population


def run(settings: Mapping[str, Any]) -> Result:
    """Keys of `settings`: those of `merging.merging_plan`."""
    arm = MergingArm(**{**settings["how"], "speeds": tuple(settings["how"]["speeds"])})
    population = _population(settings, arm)
    scale = Scale(settings["num_steps"], settings["inner_steps"], settings["num_checks"], settings["seed"])
    outcome = MergeRun(population, arm, scale).run()
    return {"learning": settings["learning"], "arm": settings["arm"], "seed": settings["seed"], **asdict(outcome)}


def _population(settings: Mapping[str, Any], arm: MergingArm) -> Population:
    if settings["learning"] == "supervised":
        from swarm.experiments.merging.supervised import supervised

        return supervised(
            arm,
            seed=settings["seed"],
            batch=settings["batch"],
            num_examples=settings["num_examples"],
            held_out_tasks=settings["held_out_tasks"],
        )
    from swarm.experiments.merging.supervised import LearnerReplicas

    return LearnerReplicas(
        arm,
        seed=settings["seed"],
        groups_per_round=settings["groups_per_round"],
        group_size=settings["group_size"],
        held_out_tasks=settings["held_out_tasks"],
    )
