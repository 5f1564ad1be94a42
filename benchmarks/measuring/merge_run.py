"""One run of several replicas under one way of merging, with partners that fail, are slow, or lie."""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from measuring.replicas import Adapter, Example, Replicas, draw
from swarm.adapters.product_merge import drift
from swarm.config import MergingSection
from swarm.errors import MergeError
from swarm.merging.adapter_wire import Precision, decode_adapter, encode_adapter, encoded_bytes
from swarm.merging.gate import SHARES, GateResult, choose_share
from swarm.merging.outer_optimizer import OuterOptimizer
from swarm.merging.robust import NormClip, centered_clip, refuse_unusable, trimmed_mean
from swarm.merging.schedule import MergeSchedule

Method = str
"""silo, pairs (NoLoCo), mean (DiLoCo), average (pairs, plain), gradients (data parallel)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How replicas merge, and what goes wrong."""

    method: Method
    precision: Precision = "bf16"
    from_origin: bool = False
    late: bool = False
    drop_rate: float = 0.0
    """Share of exchanges that fail."""
    speeds: tuple[float, ...] = ()
    """Inner steps per unit of time of each replica; all 1 if empty."""
    attack: str = ""
    num_liars: int = 0
    safety: str = "off"
    """off, clip (norm clipping and gate), trimmed (five pulled, trimmed mean), centered (five pulled)."""


@dataclass(frozen=True, slots=True)
class Data:
    """What replicas train on and are measured with."""

    shards: list[list[Example]]
    private: list[list[Example]]
    """Of each replica, for its gate."""
    held_out: dict[str, list[Example]]
    poisoned: list[list[Example]]
    """The shards with wrong answers for one task, for liars that poison."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How long and how wide a run is."""

    num_steps: int
    inner_steps: int
    batch: int
    seed: int


@dataclass
class Outcome:
    """What came of one run; honest replicas only."""

    losses: list[float]
    merged_loss: float
    target_loss: float
    """On the task that a poison aims at."""
    consensus: float
    """Root mean square distance of replicas from their mean, over the distance of the mean from the start."""
    sent_bytes: float
    """Per replica, in all."""
    blocking_hops: float
    """Messages one after another that training waits for, per replica; those that overlap with training are not counted."""
    num_inner_steps: float
    drift: float
    """Mean over layers and merges of `product_merge.drift` between partners; NaN where none merged in pairs."""
    shares: list[float]
    """What the gates chose, over the run."""

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)


class MergeRun:
    """Trains the replicas of one arm; `run` once."""

    def __init__(self, replicas: Replicas, arm: Arm, data: Data, scale: Scale) -> None:
        self._replicas, self._arm, self._data, self._scale = replicas, arm, data, scale
        config = MergingSection(inner_steps=scale.inner_steps, schedule="late" if arm.late else "fixed")
        num = replicas.num
        self._outer = [OuterOptimizer(config.alpha, config.beta, replicas.start) for _ in range(num)]
        self._clips = [NormClip(config.clip_factor) for _ in range(num)]
        self._schedule = MergeSchedule(config, scale.num_steps, scale.seed)
        self._rng = random.Random(scale.seed)
        self._noise = torch.Generator().manual_seed(scale.seed)
        self._liars = set(range(num - arm.num_liars, num))
        self._shapes = {name: tuple(tensor.shape) for name, tensor in replicas.start.items()}
        self._adapter_bytes = encoded_bytes(self._shapes, arm.precision)
        self._steps = [0] * num
        self._sent = 0
        self._hops = 0.0
        self._shares: list[float] = []
        self._drifts: list[float] = []

    def run(self) -> Outcome:
        draws = [random.Random(f"{self._scale.seed}/{replica}") for replica in range(self._replicas.num)]
        poisons = self._arm.attack == "poison"
        for tick in range(self._scale.num_steps):
            active = [i for i in range(self._replicas.num) if self._moves(i, tick)]
            shards = {
                i: self._data.poisoned[i] if poisons and i in self._liars else self._data.shards[i] for i in active
            }
            batches = {i: draw(shards[i], self._scale.batch, draws[i]) for i in active}
            if batches:
                lr_factor = 1 - 0.9 * tick / self._scale.num_steps  # decays to a tenth
                self._replicas.train(batches, lr_factor, average_gradients=self._arm.method == "gradients")
            for i in active:
                self._steps[i] += 1
            self._merge(active)
        return self._outcome()

    def _moves(self, replica: int, tick: int) -> bool:
        if not self._arm.speeds:
            return True
        inner = self._scale.inner_steps
        if self._arm.method == "mean" and self._steps[replica] >= (min(self._steps) // inner + 1) * inner:
            return False  # waits for the slowest
        speed = self._arm.speeds[replica]
        return math.floor((tick + 1) * speed) > math.floor(tick * speed)

    def _merge(self, active: Sequence[int]) -> None:
        inner = self._scale.inner_steps
        if self._arm.method == "gradients":
            self._sent += 2 * (self._replicas.num - 1) * 4 * sum(math.prod(s) for s in self._shapes.values())
            self._hops += 2 * math.log2(self._replicas.num)
        elif self._arm.method == "mean":
            if active and min(self._steps) % inner == 0 and min(self._steps) == max(self._steps):
                self._merge_all()
        elif self._arm.method in ("pairs", "average"):
            due = [i for i in active if self._steps[i] % inner == 0]
            if due:
                self._merge_pairs(due)

    def _merge_all(self) -> None:
        """DiLoCo: the mean of those present, by the same outer step; who is absent steps alone."""
        present = [i for i in range(self._replicas.num) if self._rng.random() >= self._arm.drop_rate]
        fast = [self._replicas.weights(i) for i in range(self._replicas.num)]
        if present:
            mean = {name: torch.stack([fast[i][name] for i in present]).mean(0) for name in self._shapes}
        for i in range(self._replicas.num):
            self._replicas.set_weights(i, self._outer[i].step(mean if i in present else fast[i], None))
        self._sent += 2 * max(len(present) - 1, 0) * self._adapter_bytes  # ring: 2(N − 1)/N of an adapter each
        self._hops += 2 * math.log2(self._replicas.num)  # and nobody goes on before the slowest

    def _merge_pairs(self, due: Sequence[int]) -> None:
        fast = {i: self._replicas.weights(i) for i in range(self._replicas.num)}
        if self._schedule.after(self._steps[due[0]]) == "step alone":
            partners: dict[int, int | None] = dict.fromkeys(due)
        else:
            partners = self._partners(due)
        new = {i: self._stepped(i, fast, partners[i]) for i in due}
        for i, weights in new.items():
            self._replicas.set_weights(i, weights)

    def _partners(self, due: Sequence[int]) -> dict[int, int | None]:
        """Random pairs where all are due, else a random other one, as it is at the moment; None where the exchange fails."""
        if len(due) < self._replicas.num:
            others = {i: [j for j in range(self._replicas.num) if j != i] for i in due}
            return {i: None if self._rng.random() < self._arm.drop_rate else self._rng.choice(others[i]) for i in due}
        order = list(due)
        self._rng.shuffle(order)
        partners: dict[int, int | None] = {}
        for first, second in zip(order[::2], order[1::2], strict=True):
            fails = self._rng.random() < self._arm.drop_rate
            partners |= {first: None, second: None} if fails else {first: second, second: first}
        return partners

    def _stepped(self, i: int, fast: Mapping[int, Adapter], partner: int | None) -> Adapter:
        received = None if partner is None else self._received(i, partner, fast)
        if received is not None and not self._arm.attack:
            self._drifts.append(statistics.fmean(drift(fast[i], received).values()))
        if self._arm.method == "average":
            self._outer[i].num_steps += 1
            return fast[i] if received is None else {n: (t + received[n]) / 2 for n, t in fast[i].items()}
        lag = 0 if partner is None else self._outer[i].num_steps - self._outer[partner].num_steps
        self._clips[i].observe(fast[i], self._outer[i].slow)
        if received is None or self._arm.safety == "off" or i in self._liars:
            return self._outer[i].step(fast[i], received, lag)
        if self._arm.safety == "clip":
            received = self._clips[i].clip(received, self._outer[i].slow)
        gate = self._gate(i, fast[i], received, lag)
        self._shares.append(gate.share)
        return self._outer[i].step(fast[i], received, lag, gate.share)

    def _gate(self, i: int, fast: Adapter, received: Adapter, lag: int) -> GateResult[float]:
        """All shares at once on the replica's private examples."""
        candidates = [self._outer[i].preview(fast, received, lag, share) for share in SHARES]
        losses = self._replicas.loss(candidates, [self._data.private[i]] * len(SHARES))
        scores = dict(zip(SHARES, (-loss for loss in losses), strict=True))
        return choose_share(lambda share: share, lambda share: scores[share])

    def _received(self, i: int, partner: int, fast: Mapping[int, Adapter]) -> Adapter | None:
        """What arrives from the partner, or, with a majority, what five of the others say together."""
        if self._arm.safety in ("trimmed", "centered") and i not in self._liars:
            sources = self._rng.sample([j for j in fast if j != i], 5)
            pulled = [one for j in sources if (one := self._sent_by(j, fast)) is not None]
            usable = [one for one in pulled if _is_usable(one, fast[i])]
            if len(usable) < 5:
                return None
            if self._arm.safety == "trimmed":
                return trimmed_mean(usable, fast[i], num_trimmed=2)
            return centered_clip(usable, fast[i], {name: self._clips[i].radius(name) for name in self._shapes})
        received = self._sent_by(partner, fast)
        if received is not None and self._arm.safety == "clip" and not _is_usable(received, fast[i]):
            return None
        return received

    def _sent_by(self, sender: int, fast: Mapping[int, Adapter]) -> Adapter | None:
        """Over the wire and back; lies skip it, as a liar writes any bytes it likes."""
        self._sent += self._adapter_bytes
        if sender in self._liars and self._arm.attack != "poison":
            return _lie(self._arm.attack, fast[sender], self._outer[sender].slow, self._noise)
        origin = self._replicas.start if self._arm.from_origin else None
        data = encode_adapter(fast[sender], self._arm.precision, origin)
        return decode_adapter(data, self._shapes, self._arm.precision, origin)

    def _outcome(self) -> Outcome:
        honest = [i for i in range(self._replicas.num) if i not in self._liars]
        weights = [self._replicas.weights(i) for i in honest]
        merged = hypercube_mean(weights)
        by_task = {
            name: self._replicas.loss([*weights, merged], [examples] * (len(honest) + 1))
            for name, examples in self._data.held_out.items()
        }
        losses = [statistics.fmean(values) for values in zip(*by_task.values(), strict=True)]
        num = self._replicas.num
        spread = statistics.fmean(_distance(one, merged) ** 2 for one in weights) ** 0.5
        return Outcome(
            losses=losses[:-1],
            merged_loss=losses[-1],
            target_loss=statistics.fmean(by_task[next(iter(by_task))][:-1]),
            consensus=spread / max(_distance(merged, self._replicas.start), 1e-12),
            sent_bytes=self._sent / num,
            blocking_hops=self._hops,
            num_inner_steps=statistics.fmean(self._steps),
            drift=statistics.fmean(self._drifts) if self._drifts else math.nan,
            shares=self._shares,
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


def _lie(kind: str, fast: Adapter, slow: Mapping[str, torch.Tensor], noise: torch.Generator) -> Adapter:
    makers: dict[str, Callable[[str], torch.Tensor]] = {
        "random": lambda name: torch.randn(fast[name].shape, generator=noise) * fast[name].std(),
        "sign-flip": lambda name: 2 * slow[name] - fast[name],
        "x100": lambda name: slow[name] + 100 * (fast[name] - slow[name]),
        "nan": lambda name: torch.where(torch.zeros_like(fast[name]) == 0, torch.nan, 0.0),
    }
    return {name: makers[kind](name) for name in fast}


def _is_usable(received: Adapter, own: Adapter) -> bool:
    try:
        refuse_unusable(received, own)
    except MergeError:
        return False
    return True


def _distance(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum((first[name] - second[name]).double().square().sum().item() for name in first))
