"""When averaging factors is wrong: pairs of silos, merged factor by factor and as products."""

import random
import statistics
import sys
from collections.abc import Sequence

import torch

from swarm.adapters.product_merge import LowRank, average_factors, drift, merge_products
from swarm.config import PolicySection, TasksSection
from swarm.experiments.merging.arms import NUM_REPLICAS
from swarm.experiments.merging.replicas import Adapter, Example, Replicas
from swarm.experiments.merging.supervised import LORA, LR, TASKS, make_examples
from swarm.policy.policy import load_policy
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import EVALUATION_SEED, FIRST_TRAINING_SEED

_BATCH, _EXAMPLES, _HELD_OUT = 2, 128, 24


def measure_drift(num_steps: int) -> list[dict[str, float]]:
    """Pairs of silos of one start, the longer and the faster they learn alone the further apart; and pairs of two starts."""
    policy, mixture = load_policy(PolicySection(lora=LORA), device="cpu"), TaskMixture(TasksSection())

    def examples(stream: int, count: int) -> list[Example]:
        return [one for task in TASKS for one in make_examples(policy, mixture, task, stream, count)]

    shards = [examples(FIRST_TRAINING_SEED + replica, _EXAMPLES) for replica in range(NUM_REPLICAS)]
    held_out = examples(EVALUATION_SEED, _HELD_OUT)
    rows: list[dict[str, float]] = []
    for lr, own_start in ((LR, False), (5 * LR, False), (15 * LR, False), (LR, True)):
        replicas, rng = Replicas(policy, NUM_REPLICAS, lr), random.Random(0)
        if own_start:
            for i in range(NUM_REPLICAS):
                replicas.set_weights(i, _other_start(replicas.start, i))
        for step in range(1, num_steps + 1):
            replicas.train({i: rng.choices(shards[i], k=_BATCH) for i in range(NUM_REPLICAS)})
            if step % (num_steps // 4) == 0:
                found = _pair_losses(replicas, held_out, LORA.rank, LORA.alpha / LORA.rank)
                rows.append({"lr": lr, "own_start": own_start, "step": step, **found})
                print(rows[-1], file=sys.stderr, flush=True)
    return sorted(rows, key=lambda row: row["drift"])


def _other_start(start: Adapter, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t if name.endswith("lora_B") else t.flatten()[torch.randperm(t.numel(), generator=generator)].view_as(t)
        for name, t in start.items()
    }


def _pair_losses(replicas: Replicas, held_out: Sequence[Example], rank: int, scaling: float) -> dict[str, float]:
    drifts: list[float] = []
    losses: list[list[float]] = []
    for first in range(0, NUM_REPLICAS, 2):
        one, two = replicas.weights(first), replicas.weights(first + 1)
        drifts.append(statistics.fmean(drift(one, two).values()))
        product = merge_products([LowRank(one, scaling), LowRank(two, scaling)], [0.5, 0.5], rank, scaling, like=one)
        candidates = [one, two, average_factors([one, two], [0.5, 0.5]), product.tensors]
        losses.append(replicas.loss(candidates, [held_out] * 4))
    one, two, factors, product = (statistics.fmean(column) for column in zip(*losses, strict=True))
    return {"drift": statistics.fmean(drifts), "alone": (one + two) / 2, "factors": factors, "product": product}
