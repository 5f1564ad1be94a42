"""One run of several replicas under one way of merging, with partners that fail, are slow, or lie.

    every unit of time: those whose turn it is take an inner step ─▶ those that are due merge ─▶ (late: what was on its way is taken)
"""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.config import MergingSection
from swarm.experiments.merging.arms import Arm
from swarm.experiments.merging.partners import Partners
from swarm.experiments.merging.population import Adapter, Population
from swarm.merging.outer_optimizer import carry_over
from swarm.merging.schedule import MergeSchedule


@dataclass(frozen=True, slots=True)
class Scale:
    """How long a run is."""

    num_steps: int
    """Inner steps of a replica of speed 1."""
    inner_steps: int
    """H, before the arm's factor."""
    num_checks: int
    """Measurements of all replicas on the way."""
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run; honest replicas only."""

    values: list[float]
    """Held-out loss or reward of each replica."""
    merged: float
    """That of the mean of all."""
    target: float
    """On the first task, at which a poison aims; mean over replicas."""
    consensus: float
    """Root mean square distance of replicas from their mean, over the distance of the mean from the start."""
    sent_bytes: float
    """Per replica, in all."""
    hops: float
    """Messages one after another in all outer steps, per replica."""
    blocking_hops: float
    """Those that training waits for."""
    num_inner_steps: float
    drift: float | None
    """Mean over layers and merges of `product_merge.drift` between partners; None where none merged in pairs."""
    share: float | None
    """Mean of what the gates chose; None without one."""
    training: list[float]
    """Mean loss or reward of the active ones, by unit of time."""
    curve: list[float]
    """Mean held-out loss or reward at the checks."""


class MergeRun:
    """Trains the replicas of one arm; `run` once."""

    def __init__(self, population: Population, arm: Arm, scale: Scale) -> None:
        self._population, self._arm, self._scale = population, arm, scale
        self._inner_steps = scale.inner_steps * arm.steps_factor
        config = MergingSection(inner_steps=self._inner_steps, schedule="late" if arm.late else "fixed")
        self._partners = Partners(population, arm, config, scale.seed)
        self._schedule = MergeSchedule(config, scale.num_steps, scale.seed)
        self._delay = round(arm.overlap * self._inner_steps)
        self._rng = random.Random(scale.seed)
        self._steps = [0] * population.num
        self._steps_at_merge = [0] * population.num
        self._on_the_way: list[tuple[int, int, Adapter, Adapter]] = []  # due time, replica, new weights, snapshot
        self._hops = self._blocking_hops = 0.0
        self._sent_bytes = 0.0

    def run(self) -> Outcome:
        every = max(1, self._scale.num_steps // max(1, self._scale.num_checks))
        training, curve = list[float](), list[float]()
        for tick in range(self._scale.num_steps):
            active = [i for i in range(self._population.num) if self._moves(i, tick)]
            if active:
                progress = tick / self._scale.num_steps
                values = self._population.train(active, progress, self._arm.method == "gradients")
                training.append(statistics.fmean(values))
            for i in active:
                self._steps[i] += 1
            self._merge(active, tick + 1)
            self._land(tick + 1)
            if self._scale.num_checks and (tick + 1) % every == 0 and tick + 1 < self._scale.num_steps:
                curve.append(statistics.fmean(_means(self._population.measure(self._honest_weights()))))
        return self._outcome(training, curve)

    def _moves(self, replica: int, tick: int) -> bool:
        if not self._arm.speeds:
            return True
        inner = self._inner_steps
        if self._arm.method == "mean" and self._steps[replica] >= (min(self._steps) // inner + 1) * inner:
            return False  # waits for the slowest
        speed = self._arm.speeds[replica]
        return math.floor((tick + 1) * speed) > math.floor(tick * speed)

    def _merge(self, active: Sequence[int], now: int) -> None:
        num, inner = self._population.num, self._inner_steps
        if self._arm.method == "gradients":
            self._sent_bytes += 2 * (num - 1) / num * 4 * sum(t.numel() for t in self._population.start.values())
            self._count_hops(2 * math.log2(num), blocks=True)
        elif self._arm.method == "mean":
            if active and min(self._steps) % inner == 0 and min(self._steps) == max(self._steps):
                self._merge_all()
        elif self._arm.method in ("pairs", "average"):
            due = [i for i in active if self._steps[i] % inner == 0]
            if self._arm.by_time:
                due = list(range(num)) if now % inner == 0 else []
            if due:
                self._merge_pairs(due, now)

    def _merge_all(self) -> None:
        """DiLoCo: the mean of those present, by the same outer step; who is absent steps alone."""
        num = self._population.num
        present = [i for i in range(num) if self._rng.random() >= self._arm.drop_rate]
        fast = [self._population.weights(i) for i in range(num)]
        mean = {n: torch.stack([fast[i][n] for i in present]).mean(0) for n in fast[0]} if present else {}
        for i in range(num):
            stepped = self._partners.outer[i].step(mean if i in present else fast[i], None)
            self._population.set_weights(i, stepped)
        # ring: 2(P − 1)/P of an adapter from each of the P present
        self._sent_bytes += 2 * max(len(present) - 1, 0) * self._partners.adapter_bytes / num
        self._count_hops(2 * math.log2(num), blocks=True)  # and nobody goes on before the slowest

    def _merge_pairs(self, due: Sequence[int], now: int) -> None:
        fast = {i: self._population.weights(i) for i in range(self._population.num)}
        if self._schedule.after(self._inner_steps * (self._partners.outer[due[0]].num_steps + 1)) == "step alone":
            partners: dict[int, int | None] = dict.fromkeys(due)
        else:
            partners = self._drawn(due)
            self._count_hops(len(due) / self._population.num, blocks=not self._delay)
        new = {i: self._partners.merged(i, fast, partners[i], self._weight(i, partners[i])) for i in due}
        for i in due:
            self._steps_at_merge[i] = self._steps[i]
            self._on_the_way.append((now + self._delay, i, new[i], fast[i]))

    def _land(self, now: int) -> None:
        """Take what has arrived, or all at the end; what was learned since the snapshot is kept."""
        is_last = now == self._scale.num_steps
        ready = [one for one in self._on_the_way if one[0] <= now or is_last]
        self._on_the_way = [one for one in self._on_the_way if not (one[0] <= now or is_last)]
        for _, i, new, snapshot in ready:
            self._population.set_weights(i, carry_over(new, snapshot, self._population.weights(i)))

    def _weight(self, i: int, partner: int | None) -> float:
        """Of 1 for a half; with `weigh_steps` the partner's part of the inner steps that both took since they merged."""
        if partner is None or not self._arm.weigh_steps:
            return 1.0
        own, other = (self._steps[k] - self._steps_at_merge[k] for k in (i, partner))
        return 2 * other / max(own + other, 1)

    def _drawn(self, due: Sequence[int]) -> dict[int, int | None]:
        """Random pairs where all are due, else a random other one, as it is at the moment; None where the exchange fails."""
        num, drop_rate = self._population.num, self._arm.drop_rate
        if len(due) < num:
            others = {i: [j for j in range(num) if j != i] for i in due}
            return {i: None if self._rng.random() < drop_rate else self._rng.choice(others[i]) for i in due}
        order = list(due)
        self._rng.shuffle(order)
        partners: dict[int, int | None] = {}
        for first, second in zip(order[::2], order[1::2], strict=True):
            fails = self._rng.random() < drop_rate
            partners |= {first: None, second: None} if fails else {first: second, second: first}
        return partners

    def _count_hops(self, hops: float, *, blocks: bool) -> None:
        self._hops += hops
        self._blocking_hops += hops if blocks else 0.0

    def _honest_weights(self) -> list[Adapter]:
        return [self._population.weights(i) for i in range(self._population.num) if i not in self._partners.liars]

    def _outcome(self, training: list[float], curve: list[float]) -> Outcome:
        weights = self._honest_weights()
        merged = hypercube_mean(weights)
        measured = self._population.measure([*weights, merged])
        values = _means(measured)
        target = next(iter(measured[0]))
        spread = statistics.fmean(_distance(one, merged) ** 2 for one in weights) ** 0.5
        return Outcome(
            values=values[:-1],
            merged=values[-1],
            target=statistics.fmean(by_task[target] for by_task in measured[:-1]),
            consensus=spread / max(_distance(merged, self._population.start), 1e-12),
            sent_bytes=self._sent_bytes + self._partners.sent_bytes / self._population.num,
            hops=self._hops,
            blocking_hops=self._blocking_hops,
            num_inner_steps=statistics.fmean(self._steps),
            drift=statistics.fmean(self._partners.drifts) if self._partners.drifts else None,
            share=statistics.fmean(self._partners.shares) if self._partners.shares else None,
            training=training,
            curve=[*curve, statistics.fmean(values[:-1])] if self._scale.num_checks else [],
        )


def hypercube_mean(weights: Sequence[Adapter]) -> Adapter:
    """log₂ N rounds of exchanges in pairs i, i xor 2^d: the exact mean for N = 2^k; otherwise the mean as it is."""
    if len(weights) & (len(weights) - 1):
        return {name: torch.stack([one[name] for one in weights]).mean(0) for name in weights[0]}
    current = list(weights)
    for dimension in range(len(weights).bit_length() - 1):
        current = [
            {name: (tensor + current[i ^ (1 << dimension)][name]) / 2 for name, tensor in one.items()}
            for i, one in enumerate(current)
        ]
    return current[0]


def _means(measured: Sequence[Mapping[str, float]]) -> list[float]:
    """Over tasks, of each."""
    return [statistics.fmean(by_task.values()) for by_task in measured]


def _distance(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum((first[name] - second[name]).double().square().sum().item() for name in first))
