"""One cell of the part `hostile` of the merging experiment: one company, one stage, one seed."""

from collections.abc import Mapping
from typing import Any

from swarm.experiments.cells import Result
from swarm.experiments.merging.hostile_run import HostileRun, HostileScale
from swarm.experiments.merging.merging_plan import COMPANIES


def run(settings: Mapping[str, Any]) -> Result:
    """Keys of `settings`: those of `plan.MergingPlan.hostile_cells`."""
    scale = HostileScale(**settings["scale"], seed=settings["seed"])
    figures = HostileRun(COMPANIES[settings["arm"]], settings["stage"], scale).run()
    return {
        "learning": "hostile",
        "arm": settings["arm"],
        "stage": settings["stage"],
        "seed": settings["seed"],
        **figures,
    }
