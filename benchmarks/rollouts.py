"""What the parts of the rollout side are worth: a node that learns alone, each part switched by itself.

    python benchmarks/rollouts.py            60 s of work and two seeds for each arm; about a quarter of an hour
    python benchmarks/rollouts.py --quick    4 s of work, one seed; under a minute, too short to tell learning

All arms start from the bundled policy and take turns, a second of rounds at a time, so that what else the machine does, it
does to all. Compared are rounds per hour, and what a second of work bought: the mean reward of sampled answers over the
second half of the time, and the mean reward on held-out tasks at its end. `default` is a node as it comes; each other arm
differs from it in one setting. The last line of the output is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from swarm.config import Config
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend
from swarm.policy.policy import load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.tasks.task_mixture import TaskMixture

DEFAULT = "default"
ARMS: dict[str, Mapping[str, object]] = {
    DEFAULT: {},
    "no slots": {"engine": "transformers"},
    "partial 1.5": {"over_provision": 1.5},
    "thompson": {"task_choice": "thompson"},
    "variance": {"group_sizes": "variance"},
    "second round": {"extra_rollouts": "hard", "largest_group": 16},
    "refill": {"refill_draws": 2},
    "prune": {"prune": True, "prune_interval_tokens": 1},
}
_SLICE_S = 1.0


@dataclass
class Arm:
    """One learner, and what its work brought."""

    learner: Learner
    clock: Callable[[], float]
    worked_s: float = 0.0
    num_rounds: int = 0
    rewards: list[tuple[float, float]] = field(default_factory=list)
    """(seconds worked, mean reward of the round's answers)."""
    held_out: float = 0.0

    def work(self, until_s: float) -> None:
        """Whole rounds, until so much work is done in all."""
        while self.worked_s < until_s:
            start = self.clock()
            row = self.learner.run_round()
            self.worked_s += self.clock() - start
            self.num_rounds += 1
            self.rewards.append((self.worked_s, row["rollout/reward_mean"]))

    def late_reward(self) -> float:
        late = [reward for at, reward in self.rewards if at > self.worked_s / 2]
        return statistics.fmean(late)


def main() -> None:
    """Measure, print the table, print the figures."""
    options = _options()
    torch.set_num_threads(1)
    results: dict[str, list[Arm]] = defaultdict(list)
    for seed in range(options.seeds):
        arms = {name: _arm(settings, seed, options.clock) for name, settings in ARMS.items() if name in options.arms}
        until_s = 0.0
        while until_s < options.work_s:
            until_s += _SLICE_S
            for arm in arms.values():
                arm.work(until_s)
        for name, arm in arms.items():
            arm.held_out = arm.learner.evaluate("end")["accuracy_mean"]
            results[name].append(arm)
    figures = {name: _figures(arms) for name, arms in results.items()}
    _print(figures, options)
    default = figures[DEFAULT]
    ratios = {
        f"rounds_{name.replace(' ', '_').replace('.', '_')}": round(
            values["rounds_per_hour"] / default["rounds_per_hour"], 3
        )
        for name, values in figures.items()
        if name != DEFAULT
    }
    print(json.dumps({**ratios, "arms": figures}))


def _arm(settings: Mapping[str, object], seed: int, clock: Callable[[], float]) -> Arm:
    config = Config.model_validate(
        {
            "node": {"seed": seed},
            "network": {"backend": "off"},
            "sharing": {"swarm_groups": 0, "publish": False},
            "rollouts": dict(settings),
        }
    )
    policy = load_policy(config.policy, device="cpu")
    pool = ExperiencePool(":memory:", config.sharing, time.time)
    author = f"arm-{seed}"
    backend, mixture = local_backend(config, policy, author), TaskMixture(config.tasks)
    learner = Learner(config, backend, mixture=mixture, pool=pool, peer_id=author, ports=SwarmPorts())
    return Arm(learner, clock)


def _figures(arms: Sequence[Arm]) -> dict[str, float]:
    return {
        "rounds_per_hour": round(statistics.fmean(3600 * arm.num_rounds / arm.worked_s for arm in arms)),
        "late_reward": round(statistics.fmean(arm.late_reward() for arm in arms), 4),
        "late_reward_spread": round(max(a.late_reward() for a in arms) - min(a.late_reward() for a in arms), 4),
        "held_out": round(statistics.fmean(arm.held_out for arm in arms), 4),
        "held_out_spread": round(max(a.held_out for a in arms) - min(a.held_out for a in arms), 4),
    }


def _print(figures: Mapping[str, Mapping[str, float]], options: argparse.Namespace) -> None:
    print(f"{options.work_s:g} s of work, {options.seeds} seeds, one thread")
    print("| arm | rounds per hour | sampled reward, second half | held-out reward at the end |")
    print("|---|---|---|---|")
    for name, values in figures.items():
        print(
            f"| {name} | {values['rounds_per_hour']:,.0f} | {values['late_reward']:.3f} (seeds differ by "
            f"{values['late_reward_spread']:.3f}) | {values['held_out']:.3f} ({values['held_out_spread']:.3f}) |"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 s of work for each arm, one seed")
    parser.add_argument("--work-s", type=float, help="seconds of work of an arm, default 60")
    parser.add_argument("--seeds", type=int, help="default 2")
    parser.add_argument("--arms", help="names, separated by commas; default all. The first arm always takes part")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds: for a machine that others use too")
    options = parser.parse_args()
    options.clock = time.process_time if options.cpu_time else time.monotonic
    options.arms = {DEFAULT, *(options.arms.split(",") if options.arms else ARMS)}
    if unknown := options.arms - set(ARMS):
        parser.error(f"--arms must be of {', '.join(ARMS)}, got {', '.join(sorted(unknown))}")
    options.work_s = options.work_s or (4.0 if options.quick else 60.0)
    options.seeds = options.seeds or (1 if options.quick else 2)
    return options


if __name__ == "__main__":
    main()
