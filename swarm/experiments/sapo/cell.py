"""One cell of the sharing experiment: one arm with one seed, from the first round to the held-out tasks."""

import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any, cast

from swarm.config import Config, parse
from swarm.experiments.cells import Result
from swarm.experiments.learner_swarm import LearnerSwarm, RoundRow, mean_by_source
from swarm.experiments.sapo.sapo import ARMS, SapoArm
from swarm.experiments.sapo.tasks import NINE_TASKS, POLICY_FOLDER, Mix, node_sources


def run(settings: Mapping[str, Any]) -> Result:
    """Keys of `settings`: those of `sapo.SapoPlan.cell`."""
    started_s = time.monotonic()
    configs = [node_config(settings, number) for number in range(settings["num_nodes"])]
    swarm = LearnerSwarm(configs, settings["seed"])
    before = mean_by_source(swarm.evaluate("start", num_nodes=1))  # all nodes start from the same policy
    ready_s = time.monotonic()
    rows, round_s = list[RoundRow](), list[float]()
    for _ in range(settings["num_rounds"]):
        began_s = time.monotonic()
        rows.append(swarm.run_round())
        round_s.append(time.monotonic() - began_s)
        reward = fmean(rows[-1].rewards)
        print(f"round {len(rows)} of {settings['num_rounds']}: {round_s[-1]:.1f} s, reward {reward:.3f}", flush=True)
    after_s = time.monotonic()
    after = mean_by_source(swarm.evaluate("end"))
    return {
        "arm": settings["arm"],
        "seed": settings["seed"],
        "group_size": settings["group_size"],
        "rewards": [row.rewards for row in rows],
        "answers_sampled": [row.answers_sampled for row in rows],
        "answers_trained_on": [row.answers_trained_on for row in rows],
        "groups_with_signal": [row.groups_with_signal for row in rows],
        "swarm_groups": sum(row.swarm_groups for row in rows),
        "held_out_start": before,
        "held_out_end": after,
        "rejected": dict(swarm.rejected),
        "bytes_offered": swarm.num_bytes_offered,
        "round_s": round_s,
        "other_s": (ready_s - started_s) + (time.monotonic() - after_s),
    }


def node_config(settings: Mapping[str, Any], number: int) -> Config:
    """A node as it comes, but for its tasks and where its groups come from."""
    arm: SapoArm = ARMS[settings["arm"]]
    sources = node_sources(cast(Mix, settings["mix"]), number)
    return parse(
        {
            "node": {"seed": settings["seed"]},
            "policy": {"base": str(POLICY_FOLDER) if settings["base"] == NINE_TASKS else settings["base"]},
            "tasks": {"sources": [source.model_dump(exclude_defaults=True) for source in sources]},
            "rollouts": {"groups_per_round": settings["groups_per_round"], "group_size": settings["group_size"]},
            "sharing": {
                "own_groups": arm.own_groups,
                "swarm_groups": arm.swarm_groups,
                "publish": arm.swarm_groups > 0,
                "choice": arm.choice,
            },
            "training": {"filter_groups": arm.filter_groups, "replay_groups": arm.replay_groups},
            "evaluation": {"tasks_per_source": settings["held_out_tasks"]},
        }
    )
