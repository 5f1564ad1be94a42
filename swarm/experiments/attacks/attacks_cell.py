"""Runs one cell: honest learners with some hostile nodes among them, from the first round to the held-out tasks."""

import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any, cast

import psutil

from swarm.config import Config, TaskSourceSection, parse
from swarm.engine.make_engine import make_engine
from swarm.experiments.attacks.hostile import HostileNode, HostileSetup
from swarm.experiments.attacks.plan import ABSENT, ALL, ATTACKS, DEFENDED, EPISODES
from swarm.experiments.attacks.readers import GuardedReader, OpenReader
from swarm.experiments.cells import Result
from swarm.experiments.learner_swarm import LearnerSwarm, RoundRow, mean_by_source
from swarm.policy.policy import load_policy
from swarm.rollouts.worker import RolloutWorker
from swarm.tasks.task_mixture import TaskMixture


def run(settings: Mapping[str, Any]) -> Result:
    """Keys of `settings`: those of `plan.AttackPlan`. Honest nodes are numbered alike in all cells of a seed."""
    started_s = time.monotonic()
    config = _config(settings)
    num_honest = settings["num_nodes"] - settings["num_hostile"]
    make_reader = GuardedReader if settings["defence"] == DEFENDED else OpenReader
    swarm = LearnerSwarm([config] * num_honest, settings["seed"], make_reader)
    hostile_nodes = _hostile_nodes(settings, config, swarm)
    rows, memory_mib = list[RoundRow](), list[float]()
    for number in range(settings["num_rounds"]):
        for place, hostile in enumerate(hostile_nodes):
            turn = ATTACKS[(number + place) % len(ATTACKS)]
            hostile.act(turn if settings["attack"] == ALL else settings["attack"], swarm.now_s)
        rows.append(swarm.run_round())
        memory_mib.append(psutil.Process().memory_info().rss / 2**20)
        print(f"round {len(rows)} of {settings['num_rounds']}: reward {fmean(rows[-1].rewards):.3f}", flush=True)
    held_out = swarm.evaluate("end")
    readers = [cast("GuardedReader | OpenReader", reader) for reader in swarm.readers]
    honest = {identity.peer_id for identity in swarm.identities}
    admitted = sum((reader.num_admitted for reader in readers), start=type(readers[0].num_admitted)())
    return {
        "attack": settings["attack"],
        "num_hostile": settings["num_hostile"],
        "defence": settings["defence"],
        "seed": settings["seed"],
        "rewards": [row.rewards for row in rows],
        "held_out": [fmean(by_source.values()) for by_source in held_out],
        "held_out_by_source": mean_by_source(held_out),
        "swarm_groups": sum(row.swarm_groups for row in rows),
        "hostile_bodies": sum(count for author, count in admitted.items() if author not in honest),
        "honest_bodies": sum(count for author, count in admitted.items() if author in honest),
        "answers_below_floor": swarm.num_answers_below_floor,
        "rejected": dict(swarm.rejected),
        "banned_honest": sum(
            reader.reputation.is_banned(peer_id)
            for reader in readers
            if isinstance(reader, GuardedReader)
            for peer_id in honest
        ),
        "memory_mib": memory_mib,
        "duration_s": time.monotonic() - started_s,
    }


def _hostile_nodes(settings: Mapping[str, Any], config: Config, swarm: LearnerSwarm) -> list[HostileNode]:
    """The hostile nodes, which share one copy of the base."""
    if not settings["num_hostile"] or settings["attack"] == ABSENT:
        return []
    policy = load_policy(config.policy, device="cpu")
    worker = RolloutWorker(config.rollouts, policy, make_engine(policy, config.rollouts), author="")
    mixture = TaskMixture(config.tasks)
    honest = [identity.peer_id for identity in swarm.identities]
    setup = HostileSetup(
        config, swarm.exchange, worker, policy, mixture, honest, settings["hostile_groups"], settings["num_sybils"]
    )
    return [HostileNode(setup, number) for number in range(settings["num_hostile"])]


GAME = TaskSourceSection(kind="game", name="guess_number", parameters={"highest": 9, "max_turns": 3})
"""The task of the attack on episodes."""


def _config(settings: Mapping[str, Any]) -> Config:
    """The default configuration, with smaller rounds; a game where episodes are attacked."""
    unguarded = {} if settings["defence"] == DEFENDED else {"likelihood_floor_quantile": 0.0, "success_quantile": 0.0}
    game = {"tasks": {"sources": [GAME.model_dump()]}} if settings["attack"] == EPISODES else {}
    lengths = {"max_new_tokens": 96} if game else {}
    training = {"training": {"correction": settings["correction"]}} if "correction" in settings else {}
    baseline = {"baseline": settings["baseline"]} if "baseline" in settings else {}
    sizes = {"groups_per_round": settings["groups_per_round"], "group_size": settings["group_size"]}
    return parse(
        {
            "node": {"seed": settings["seed"]},
            "rollouts": {**sizes, **lengths},
            **game,
            **training,
            "sharing": {"swarm_groups": settings["swarm_groups"], **unguarded, **baseline},
            "evaluation": {"tasks_per_source": settings["held_out_tasks"]},
        }
    )
