"""One run of several replicas under one way of merging, with partners that fail, are slow, or lie.

    every unit of time: replicas that are due take an inner step ─▶ Merger.after ─▶ offers are matched ─▶ Merger.after, once more

Pairs are merged by `swarm.merging.merger.Merger`, as in a node. DiLoCo is the same outer step on the mean of all.
"""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from swarm.config import MergingSection
from swarm.experiments.cells import Result
from swarm.experiments.merging.arms import OFF, MergingArm
from swarm.experiments.merging.backdoor import lie
from swarm.experiments.merging.memory_pairing import MemoryPairing, Terms
from swarm.experiments.merging.replicas import Adapter, Population
from swarm.merging.adapter_wire import encoded_bytes
from swarm.merging.merger import Merger, MergeSchedule
from swarm.merging.outer_optimizer import AdapterOrigin, OuterOptimizer
from swarm.types import Snapshot

_LINEAGE = "experiment"


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
    """Mean over replicas of `product_merge.drift` at the last merge; None where none merged in pairs."""
    product_layers: float
    """Mean number of layers merged as products in the last merge."""
    reasons: dict[str, int]
    """Outer steps of all honest replicas by `Merger`'s reasons."""
    training: list[float]
    """Mean loss or reward of the active ones, by unit of time."""
    curve: list[float]
    """Mean held-out loss or reward at the checks and the end."""


class MergeRun:
    """Trains the replicas of one arm; `run` once."""

    def __init__(self, population: Population, arm: MergingArm, scale: Scale) -> None:
        self._population, self._arm, self._scale = population, arm, scale
        self._inner_steps = scale.inner_steps * arm.steps_factor
        self._config = MergingSection(
            inner_steps=self._inner_steps,
            alpha=arm.alpha,
            beta=arm.beta,
            precision=arm.precision,
            schedule="late" if arm.late else "fixed",
            clip_factor=arm.clip_factor,
            strangers_factor=arm.strangers_factor,
            drift_threshold=arm.drift_threshold,
        )
        self._liars = frozenset(range(population.num - arm.num_liars, population.num))
        self._rng = random.Random(scale.seed)
        self._noise = torch.Generator().manual_seed(scale.seed)
        terms = Terms(arm.drop_rate, round(arm.overlap * self._inner_steps), round(arm.patience * self._inner_steps))
        self._pairing = MemoryPairing(terms, self._rng, self._tampered)
        self._mergers = [self._merger(i) for i in range(population.num)] if arm.method == "pairs" else []
        self._outer = [OuterOptimizer(arm.alpha, arm.beta, population.start) for _ in range(population.num)]
        self._steps = [0] * population.num
        self._hops = self._sent_bytes = 0.0

    def run(self) -> Outcome:
        every = max(1, self._scale.num_steps // max(1, self._scale.num_checks))
        training, curve = list[float](), list[float]()
        for tick in range(self._scale.num_steps):
            active = [i for i in range(self._population.num) if self._moves(i, tick)]
            if active:
                values = self._population.train(
                    active, tick / self._scale.num_steps, average_gradients=self._arm.method == "gradients"
                )
                training.append(statistics.fmean(values))
            for i in active:
                self._steps[i] += 1
            self._merge(active, tick + 1)
            if self._scale.num_checks and (tick + 1) % every == 0 and tick + 1 < self._scale.num_steps:
                curve.append(statistics.fmean(_means(self._population.measure(self._honest_weights()))))
        return self._outcome(training, curve)

    def _merger(self, i: int) -> Merger:
        schedule = MergeSchedule(self._config, self._scale.seed)
        guarded = self._arm.gate_tasks > 0 and i not in self._liars
        config = self._config if i not in self._liars else self._config.model_copy(update={"clip_factor": OFF})
        return Merger(
            config,
            AdapterOrigin(_LINEAGE, self._population.scaling, self._population.start),
            schedule,
            pairer=self._pairing.pairer(i),
            score=partial(self._population.gate_score, i) if guarded else None,
        )

    def _tampered(self, sender: int, snapshot: Snapshot) -> Snapshot | None:
        if sender not in self._liars:
            return snapshot
        slow = self._mergers[sender].slow
        return lie(self._arm.attack, snapshot, self._population.start, slow, self._noise)

    def _moves(self, replica: int, tick: int) -> bool:
        if not self._arm.speeds:
            return True
        inner = self._inner_steps
        if self._arm.method == "mean" and self._steps[replica] >= (min(self._steps) // inner + 1) * inner:
            return False  # waits for the slowest
        speed = self._arm.speeds[replica]
        return math.floor((tick + 1) * speed) > math.floor(tick * speed)

    def _merge(self, active: Sequence[int], now: int) -> None:
        num = self._population.num
        if self._arm.method == "gradients":
            self._sent_bytes += 2 * (num - 1) / num * 4 * sum(t.numel() for t in self._population.start.values())
            self._hops += 2 * math.log2(num)
        elif self._arm.method == "mean":
            if active and min(self._steps) % self._inner_steps == 0 and min(self._steps) == max(self._steps):
                self._merge_all()
        elif self._arm.method == "pairs":
            everybody = range(num)
            for i in everybody if self._arm.by_time else active:
                self._after(i, 1, now)
            self._pairing.advance(now)
            for i in everybody:
                self._after(i, 0, now)

    def _after(self, i: int, num_steps: int, now: int) -> None:
        progress = now / self._scale.num_steps
        step = self._mergers[i].after(num_steps, partial(self._population.weights, i), self._steps[i], progress)
        if step is not None:
            self._population.set_weights(i, step.weights)
            self._population.reset_moments(i, step.reset_names)

    def _merge_all(self) -> None:
        """DiLoCo: the mean of those present, by the same outer step; who is absent steps alone."""
        num = self._population.num
        present = [i for i in range(num) if self._rng.random() >= self._arm.drop_rate]
        fast = [self._population.weights(i) for i in range(num)]
        mean = {n: torch.stack([fast[i][n] for i in present]).mean(0) for n in fast[0]} if present else {}
        for i in range(num):
            self._population.set_weights(i, self._outer[i].step(mean if i in present else fast[i], None))
        # a ring sends 2(P − 1)/P of an adapter from each of the P present; a tree as much on average
        shapes = {name: tuple(tensor.shape) for name, tensor in fast[0].items()}
        self._sent_bytes += 2 * max(len(present) - 1, 0) * encoded_bytes(shapes, self._arm.precision) / num
        self._hops += 2 * math.log2(num)  # and nobody goes on before the slowest

    def _honest_weights(self) -> list[Adapter]:
        return [self._population.weights(i) for i in range(self._population.num) if i not in self._liars]

    def _outcome(self, training: list[float], curve: list[float]) -> Outcome:
        weights = self._honest_weights()
        merged = hypercube_mean(weights)
        measured = self._population.measure([*weights, merged])
        values, num = _means(measured), self._population.num
        target = next(iter(measured[0]))
        spread = statistics.fmean(_distance(one, merged) ** 2 for one in weights) ** 0.5
        rows = [merger.row() for i, merger in enumerate(self._mergers) if i not in self._liars]
        drifts = [row["merge/drift"] for row in rows if "merge/drift" in row]
        hops = self._hops + 2 * self._pairing.num_exchanges / num  # both ways at once, of two replicas
        return Outcome(
            values=values[:-1],
            merged=values[-1],
            target=statistics.fmean(by_task[target] for by_task in measured[:-1]),
            consensus=spread / max(_distance(merged, self._population.start), 1e-12),
            sent_bytes=self._sent_bytes + self._pairing.sent_bytes / num,
            hops=hops,
            blocking_hops=self._hops if self._arm.overlap or self._arm.patience else hops,
            num_inner_steps=statistics.fmean(self._steps),
            drift=statistics.fmean(drifts) if drifts else None,
            product_layers=statistics.fmean(row.get("merge/product_layers", 0) for row in rows) if rows else 0.0,
            reasons=_totals([row["merge/reasons"] for row in rows]),
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


def _totals(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {key: sum(one.get(key, 0) for one in counts) for key in sorted({key for one in counts for key in one})}


def _distance(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum((first[name] - second[name]).double().square().sum().item() for name in first))


def run(settings: Mapping[str, Any]) -> Result:
    """Keys of `settings`: those of `merging.merging_plan`."""
    arm = MergingArm(**{**settings["how"], "speeds": tuple(settings["how"]["speeds"])})
    population = _population(settings, arm)
    scale = Scale(settings["num_steps"], settings["inner_steps"], settings["num_checks"], settings["seed"])
    outcome = MergeRun(population, arm, scale).run()
    return {"learning": settings["learning"], "arm": settings["arm"], "seed": settings["seed"], **asdict(outcome)}


def _population(settings: Mapping[str, Any], arm: MergingArm) -> Population:
    if settings["learning"] == "supervised":
        from swarm.experiments.merging.supervised import supervised

        return supervised(
            arm,
            seed=settings["seed"],
            batch=settings["batch"],
            num_examples=settings["num_examples"],
            held_out_tasks=settings["held_out_tasks"],
        )
    from swarm.experiments.merging.supervised import LearnerReplicas

    return LearnerReplicas(
        arm,
        seed=settings["seed"],
        groups_per_round=settings["groups_per_round"],
        group_size=settings["group_size"],
        held_out_tasks=settings["held_out_tasks"],
    )
