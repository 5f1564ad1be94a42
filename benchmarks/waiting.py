"""What a node waits for inside itself: the disk, and its own sampling.

    python benchmarks/waiting.py            two seeds, a minute for each arm; about ten minutes
    python benchmarks/waiting.py --quick    one seed, 5 s for each arm; under a minute, too short to tell learning

Checkpoints: a round stands still for a copy, and a thread writes it. `pause_ms` is the longest time that training waited beside
the copy, `in_place_ms` what it would wait for a write in place, `step_beside_write` how many times as long a training step takes
while a checkpoint is written.

Overlap: one node that learns alone, for the same time on the clock and on two cores: sampling and training in turns on one core
or on both, and with `rollouts.overlap`, where a process trains on one core and another samples the next round on the other.
Compared are rounds per hour, and what a second bought: the mean reward of sampled answers in the second half of the time, and
the mean reward on held-out tasks at its end. Nothing else may run meanwhile. The last line of the output is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring.engine_models import small_llama

from swarm.adapters.checkpoint import CheckpointStore, CheckpointWriter
from swarm.adapters.load_pretrained import quiet_libraries
from swarm.config import Config, TrainingSection
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend
from swarm.policy.policy import Policy, load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.tasks.task_mixture import TaskMixture
from swarm.training.policy_optimizer import LocalOptimizer

ONE_CORE, BOTH_CORES, OVERLAP = "in turns, one core", "in turns, both cores", "overlap, a core each"
_ARMS = {ONE_CORE: (1, False), BOTH_CORES: (2, False), OVERLAP: (2, True)}
"""By arm: threads, whether sampling overlaps."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What an arm did in its time."""

    rounds_per_hour: float
    late_reward: float
    held_out: float


def main() -> None:
    """Measure, print the tables, print the figures."""
    options = _options()
    with quiet_libraries(), tempfile.TemporaryDirectory() as folder:
        figures = _checkpoints(Path(folder), num_turns=3 if options.quick else 20, wide=not options.quick)
    results = {arm: [_learn(arm, seed, options.work_s) for seed in range(options.seeds)] for arm in _ARMS}
    print(f"\n{options.work_s:g} s for each arm and seed, {options.seeds} seed(s)")
    print("| arm | rounds per hour | sampled reward, second half | held-out reward at the end |\n|---|---|---|---|")
    for arm, learned in results.items():
        rounds = statistics.fmean(one.rounds_per_hour for one in learned)
        late, held_out = [one.late_reward for one in learned], [one.held_out for one in learned]
        print(f"| {arm} | {rounds:,.0f} | {_with_spread(late)} | {_with_spread(held_out)} |")
    print(json.dumps(figures | _ratios(results)))


def _checkpoints(folder: Path, *, num_turns: int, wide: bool) -> dict[str, float]:
    """Pauses of training at checkpoints of an adapter on all layers of a model of 32 M parameters."""
    torch.set_num_threads(1)
    policy = small_llama(folder / "llama", rank=128 if wide else 16)
    optimizer = LocalOptimizer(TrainingSection(), policy)
    _step(policy, optimizer)
    store = CheckpointStore(folder / "checkpoints", 2)
    copies, pauses, in_place = list[float](), list[float](), list[float]()
    steps: dict[bool, list[float]] = {False: [], True: []}
    with CheckpointWriter(store, lambda round, error: None) as writer:
        for turn in range(num_turns):
            started = time.perf_counter()
            tensors = optimizer.state()
            copies.append(time.perf_counter() - started)
            writer.save(2 * turn, tensors, {})
            pauses.append(time.perf_counter() - started - copies[-1])
            steps[True].append(_step(policy, optimizer))
            writer.finish()
            steps[False].append(_step(policy, optimizer))
            started = time.perf_counter()
            store.save(2 * turn + 1, tensors, {})
            in_place.append(time.perf_counter() - started)
    mib = sum(one.nbytes for named in tensors.values() for one in named.values()) / 2**20
    slower = statistics.median(steps[True]) / statistics.median(steps[False])
    print(f"a checkpoint of {mib:.0f} MiB: {1000 * statistics.median(copies):.1f} ms for the copy")
    print(
        f"  training waits beside it {1000 * max(pauses):.1f} ms at most, {1000 * statistics.median(in_place):.0f} ms in place"
    )
    print(f"  a training step beside the write takes {slower:.2f} times as long", flush=True)
    return {
        "checkpoint_mib": round(mib, 1),
        "copy_ms": round(1000 * statistics.median(copies), 2),
        "pause_ms": round(1000 * max(pauses), 2),
        "in_place_ms": round(1000 * statistics.median(in_place), 1),
        "step_beside_write": round(slower, 3),
    }


def _step(policy: Policy, optimizer: LocalOptimizer) -> float:
    """Seconds of a gradient of made-up answers and an optimizer step."""
    part = [((5,) * 16, tuple(range(8, 40)))] * 4
    started = time.perf_counter()
    optimizer.accumulate([part], lambda _, found: -found.logprobs.sum(), 1.0)
    optimizer.apply(1e-6)
    optimizer.drop()
    return time.perf_counter() - started


def _learn(arm: str, seed: int, work_s: float) -> Learned:
    """A node that learns alone for `work_s` seconds on the clock, after a first round that does not count."""
    num_threads, overlap = _ARMS[arm]
    torch.set_num_threads(num_threads)
    config = Config.model_validate(
        {
            "node": {"seed": seed},
            "network": {"backend": "off"},
            "sharing": {"swarm_groups": 0, "publish": False},
            "rollouts": {"overlap": overlap},
        }
    )
    policy, author = load_policy(config.policy, device="cpu"), f"arm-{seed}"
    backend, mixture = local_backend(config, policy, author), TaskMixture(config.tasks)
    pool = ExperiencePool(":memory:", config.sharing, time.time)
    learner = Learner(config, backend, mixture=mixture, pool=pool, peer_id=author, ports=SwarmPorts())
    learner.run_round()
    rewards: list[tuple[float, float]] = []
    started = time.monotonic()
    while (worked_s := time.monotonic() - started) < work_s:
        rewards.append((worked_s, learner.run_round()["rollout/reward_mean"]))
    learner.close()
    return Learned(
        rounds_per_hour=3600 * len(rewards) / worked_s,
        late_reward=statistics.fmean(reward for at, reward in rewards if at >= rewards[-1][0] / 2),
        held_out=learner.evaluate("end")["accuracy_mean"],
    )


def _with_spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({max(values) - min(values):.3f})"


def _ratios(results: Mapping[str, Sequence[Learned]]) -> dict[str, float]:
    """Overlap against the better of the two forms without it."""

    def mean(arm: str, name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in results[arm])

    def best(name: str) -> float:
        return max(mean(ONE_CORE, name), mean(BOTH_CORES, name))

    return {
        "overlap_rounds": round(mean(OVERLAP, "rounds_per_hour") / best("rounds_per_hour"), 3),
        "overlap_late_reward_gain": round(mean(OVERLAP, "late_reward") - best("late_reward"), 4),
        "overlap_held_out_gain": round(mean(OVERLAP, "held_out") - best("held_out"), 4),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 s for each arm, one seed, a smaller checkpoint")
    parser.add_argument("--work-s", type=float, help="seconds of each arm and seed, default 60")
    parser.add_argument("--seeds", type=int, help="default 2")
    options = parser.parse_args()
    options.work_s = options.work_s or (5.0 if options.quick else 60.0)
    options.seeds = options.seeds or (1 if options.quick else 2)
    return options


if __name__ == "__main__":
    main()
