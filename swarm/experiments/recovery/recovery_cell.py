"""One cell of the recovery experiment: a toy trained by one way of recovery, once for each rate of failures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.experiments.cells import Result
from swarm.experiments.recovery.clocks import lost_stages
from swarm.experiments.recovery.plan import ADAPTER, FULL, NUM_STAGES, Strategy
from swarm.experiments.recovery.toy import Toy, Weights

_COPY_INTERVAL_STEPS = 10


def run(settings: Mapping[str, Any]) -> Result:
    """{"runs": one for each rate}. Keys of `settings`: those of `plan.RecoveryPlan`."""
    return {"runs": [_run(settings, rate) for rate in settings["rates"]]}


def _run(settings: Mapping[str, Any], rate: float) -> Result:
    is_full = settings["training"] == "full"
    arm = (FULL if is_full else ADAPTER)[settings["arm"]]
    toy = Toy(settings["training"], settings["seed"], None if is_full else Path(settings["folder"]))
    lost = lost_stages(settings["seed"], rate, settings["num_steps"])
    curve, jumps, copies = [toy.held_out_loss()], list[dict[str, float]](), Weights()
    for step in range(settings["num_steps"]):
        if arm.strategy == "own_copy" and step % _COPY_INTERVAL_STEPS == 0:
            copies = toy.stage_weights(range(NUM_STAGES))
        if step in lost:
            jumps.append(_lose(toy, step, lost[step], arm.strategy, copies))
        toy.step(swaps=arm.swaps)
        if (step + 1) % settings["check_interval"] == 0:
            curve.append(toy.held_out_loss())
    if "write_to" in settings:
        toy.save(Path(settings["write_to"]))
    keys = ("training", "arm", "seed", "check_interval", "num_steps")
    return {**{key: settings[key] for key in keys}, "rate": rate, "curve": curve, "jumps": jumps}


def _lose(toy: Toy, step: int, stage: int, strategy: Strategy, copies: Weights) -> dict[str, float]:
    before = toy.held_out_loss()
    toy.rebuild(stage, _weights(toy, stage, strategy, copies))
    return {"step": step, "stage": stage, "before": before, "after": toy.held_out_loss()}


def _weights(toy: Toy, stage: int, strategy: Strategy, copies: Weights) -> Weights:
    if strategy == "own_copy":
        return {name: copies[name] for name in toy.stage_weights([stage])}
    if strategy == "base":
        return toy.start_of(stage)
    if strategy == "copy":
        return toy.copy_of_next(stage)
    return toy.average(stage)  # CheckFree+ differs in how it trains: an edge's neighbour is its twin then
