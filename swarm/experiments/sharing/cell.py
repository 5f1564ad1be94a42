"""One cell of the sharing experiment: one arm with one seed and learning rate, with held-out reward by what was sampled."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from swarm.config import DEMO_TASKS, REASONING_TASKS, Config, parse
from swarm.config.policy import BUNDLED_REASONING
from swarm.experiments.cells import Result
from swarm.experiments.learner_swarm import LearnerSwarm, RoundRow
from swarm.experiments.sharing.arms import ARMS, SILO, MemberKind, Settings, overlaid

HELD_OUT_SHARE = 0.125
"""Twice the default: two of the short tasks have only a hundred prompts."""
REGIMES: Mapping[str, Settings] = {
    "short": {"tasks": {"sources": [task.model_dump(exclude_defaults=True) for task in DEMO_TASKS]}},
    "reasoning": {
        "tasks": {"sources": [task.model_dump(exclude_defaults=True) for task in REASONING_TASKS]},
        "policy": {"base": BUNDLED_REASONING},
        "rollouts": {"max_new_tokens": 256},
    },
}
"""Answers of four tokens, and of two hundred."""
REFERENCE_ROUND_S: Mapping[str, float] = {"short": 0.18, "reasoning": 2.8}
"""Processor time of `reference_round_s` on the idle machine of docs/benchmarks.md; times of cells are scaled to that machine."""
_REFERENCE_ROUNDS = 3
_OUTSIDE_WEIGHT = 1e-3
"""Of a source that a specialist does not draw from; a source without weight could not check others."""


def run(settings: Mapping[str, Any]) -> Result:
    """Keys of `settings`: those of `plan.SharingPlan.cell`."""
    arm = ARMS[settings["arm"]]
    kinds = arm.kinds_of_members(settings["num_members"])
    paid_by = arm.members(settings["num_members"]) if arm.is_oracle else 1
    before = reference_round_s(settings["regime"])
    swarm = LearnerSwarm([node_config(settings, kind) for kind in kinds], settings["seed"])
    rows = list[RoundRow]()
    evaluated, held_out = [0], [_evaluated(swarm, 0, paid_by)]
    for number in range(1, settings["num_rounds"] + 1):
        rows.append(swarm.run_round({place for place, kind in enumerate(kinds) if kind.rests(number)}))
        print(f"round {number} of {settings['num_rounds']}: reward {fmean(rows[-1].rewards):.3f}", flush=True)
        if number % settings["evaluation_interval_rounds"] == 0:
            evaluated.append(number)
            held_out.append(_evaluated(swarm, number, paid_by))
    slowness = fmean((before, reference_round_s(settings["regime"]))) / REFERENCE_ROUND_S[settings["regime"]]
    return {
        "arm": settings["arm"],
        "seed": settings["seed"],
        "lr_factor": settings["lr_factor"],
        "regime": settings["regime"],
        "rewards": [round(fmean(row.rewards), 4) for row in rows],
        "evaluated": evaluated,
        "members": [
            {
                "kind": kind.name,
                "held_out": [row[place] for row in held_out],
                "tokens": [row.tokens_sampled[place] / paid_by for row in rows],
                "tokens_trained": [round(row.tokens_trained[place] / paid_by, 1) for row in rows],
                "processor_s": [round(row.processor_s[place] / paid_by / slowness, 3) for row in rows],
            }
            for place, kind in enumerate(kinds)
        ],
        "groups_with_signal": [row.groups_with_signal for row in rows],
        "swarm_groups": [row.swarm_groups for row in rows],
        "answers_trained_on": [row.answers_trained_on for row in rows],
        "rejected": dict(swarm.rejected),
        "slowness": round(slowness, 3),
    }


def reference_round_s(regime: str) -> float:
    """Processor time that a round of one node alone takes here and now, always with the same work.

    Cells are computed on different days and beside other work, so their times are scaled by it.
    """
    usual = {"seed": 0, "lr_factor": 1.0, "regime": regime, "num_members": 1, "groups_per_round": 8, "group_size": 8}
    swarm = LearnerSwarm([node_config({**usual, "arm": SILO, "held_out_tasks": 1}, MemberKind("", 1))], 0)
    swarm.run_round()  # compiles and caches
    return fmean(swarm.run_round().processor_s[0] for _ in range(_REFERENCE_ROUNDS))


def node_config(settings: Mapping[str, Any], kind: MemberKind) -> Config:
    """A node as it comes, but for what the arm and the kind of member change, and its learning rate."""
    arm = ARMS[settings["arm"]]
    base = {
        "node": {"seed": settings["seed"]},
        "tasks": {"held_out_share": HELD_OUT_SHARE},
        "rollouts": {"group_size": settings["group_size"]},
        "evaluation": {"tasks_per_source": settings["held_out_tasks"]},
    }
    own = arm.node_settings(settings["num_members"], settings["groups_per_round"])
    regime = REGIMES[settings["regime"]]
    sources = [
        {**source, "weight": 1.0 if place in kind.sources else _OUTSIDE_WEIGHT} if kind.sources else source
        for place, source in enumerate(regime["tasks"]["sources"])
    ]
    config = parse(overlaid(base, regime, own, {"tasks": {"sources": sources}}))
    lr = config.training.lr * settings["lr_factor"]
    return config.model_copy(update={"training": config.training.model_copy(update={"lr": lr})})


def _evaluated(swarm: LearnerSwarm, number: int, num_draws: int) -> list[float]:
    """Held-out reward of each node, as a mean over sources and draws.

    All arms are measured on the same tasks. The oracle, which is one node, answers each as often as the members together
    do, so that the noise of all curves is alike.
    """
    draws = [swarm.evaluate(f"round {number}", draw=draw) for draw in range(num_draws)]
    return [round(fmean(fmean(one.values()) for one in of_node), 4) for of_node in zip(*draws, strict=True)]
