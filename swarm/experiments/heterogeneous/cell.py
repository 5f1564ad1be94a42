"""One cell of the experiment on different models: a mixed swarm, or the same nodes each alone."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from swarm.config import Config, parse
from swarm.experiments.cells import Result
from swarm.experiments.heterogeneous.heterogeneous import BUNDLED, MIXED, MODELS, SECOND
from swarm.experiments.learner_swarm import LearnerSwarm, RoundRow


def run(settings: Mapping[str, Any]) -> Result:
    """Keys of `settings`: those of `heterogeneous.HeterogeneousPlan`."""
    models = [model for _ in range(settings["nodes_per_model"]) for model in MODELS]
    swarm = LearnerSwarm([_config(settings, model) for model in models], settings["seed"])
    before = swarm.evaluate("start")
    rows = list[RoundRow]()
    for _ in range(settings["num_rounds"]):
        rows.append(swarm.run_round())
        print(f"round {len(rows)} of {settings['num_rounds']}", flush=True)
    after = swarm.evaluate("end")
    places = {model: [number for number, other in enumerate(models) if other == model] for model in MODELS}
    return {
        "arm": settings["arm"],
        "seed": settings["seed"],
        "rewards": {m: [fmean(row.rewards[n] for n in places[m]) for row in rows] for m in MODELS},
        "held_out_start": {m: fmean(_mean(before[n]) for n in places[m]) for m in MODELS},
        "held_out_end": {m: fmean(_mean(after[n]) for n in places[m]) for m in MODELS},
        "swarm_groups": sum(row.swarm_groups for row in rows),
        "rejected": dict(swarm.rejected),
    }


def _config(settings: Mapping[str, Any], model: str) -> Config:
    shares = settings["arm"] == MIXED
    base = {BUNDLED: "bundled", SECOND: settings["second_base"]}[model]
    return parse(
        {
            "node": {"seed": settings["seed"]},
            "policy": {"base": base},
            "rollouts": {"groups_per_round": settings["groups_per_round"], "group_size": settings["group_size"]},
            "sharing": {"swarm_groups": 8 if shares else 0, "publish": shares},
            "evaluation": {"tasks_per_source": settings["held_out_tasks"]},
        }
    )


def _mean(by_source: Mapping[str, float]) -> float:
    return fmean(by_source.values())
