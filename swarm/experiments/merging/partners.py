"""What one replica receives from others and what it makes of it, with the parts that a node has: wire, clip, gate, outer step."""

import random
import statistics
from collections.abc import Mapping

import torch

from swarm.adapters.product_merge import drift
from swarm.config import MergingSection
from swarm.errors import MergeError
from swarm.experiments.merging.arms import Arm
from swarm.experiments.merging.lies import lie
from swarm.experiments.merging.population import Adapter, Population
from swarm.merging.adapter_wire import decode_adapter, encode_adapter, encoded_bytes
from swarm.merging.gate import SHARES, choose_share
from swarm.merging.outer_optimizer import OuterOptimizer
from swarm.merging.robust import NormClip, centered_clip, refuse_unusable, trimmed_mean

_NUM_PULLED = 5
"""For a majority."""


class Partners:
    """The merging side of all replicas: slow weights, momenta and clips, by number."""

    def __init__(self, population: Population, arm: Arm, config: MergingSection, seed: int) -> None:
        self._population, self._arm = population, arm
        num = population.num
        self.outer = [OuterOptimizer(config.alpha, config.beta, population.start) for _ in range(num)]
        self._clips = [NormClip(arm.clip_factor) for _ in range(num)]
        self.liars = frozenset(range(num - arm.num_liars, num))
        self._shapes = {name: tuple(tensor.shape) for name, tensor in population.start.items()}
        self._rng = random.Random(f"partners/{seed}")
        self._noise = torch.Generator().manual_seed(seed)
        self.adapter_bytes = encoded_bytes(self._shapes, arm.precision)
        self.sent_bytes = 0
        self.shares: list[float] = []
        """What gates chose, so far."""
        self.drifts: list[float] = []
        """Of partners, where nobody lies."""

    def merged(self, i: int, fast: Mapping[int, Adapter], partner: int | None, weight: float = 1.0) -> Adapter:
        """New weights of replica `i`; takes its outer step. `fast`: weights of all. `weight` scales the partner's half."""
        received = None if partner is None else self._received(i, partner, fast)
        if received is not None and not self._arm.attack:
            self.drifts.append(statistics.fmean(drift(fast[i], received).values()))
        outer = self.outer[i]
        if self._arm.method == "average":
            outer.num_steps += 1
            return fast[i] if received is None else {n: (t + received[n]) / 2 for n, t in fast[i].items()}
        lag = 0 if partner is None or self._arm.by_time else outer.num_steps - self.outer[partner].num_steps
        self._clips[i].observe(fast[i], outer.slow)
        if received is None or self._arm.safety == "off" or i in self.liars:
            return outer.step(fast[i], received, lag, weight)
        if self._arm.safety == "default":
            received = self._clips[i].clip(received, outer.slow)
        share = self._gate(i, fast[i], received, lag, weight) if self._arm.gate_tasks else 1.0
        self.shares.append(share)
        return outer.step(fast[i], received, lag, weight * share)

    def _gate(self, i: int, fast: Adapter, received: Adapter, lag: int, weight: float) -> float:
        """All shares at once on the replica's private tasks."""
        candidates = [self.outer[i].preview(fast, received, lag, weight * share) for share in SHARES]
        scores = dict(zip(SHARES, self._population.gate_scores(i, candidates), strict=True))
        return choose_share(lambda share: share, lambda share: scores[share]).share

    def _received(self, i: int, partner: int, fast: Mapping[int, Adapter]) -> Adapter | None:
        """What arrives from the partner, or, with a majority, what five of the others say together."""
        if self._arm.safety in ("trimmed", "centered") and i not in self.liars:
            return self._majority(i, fast)
        received = self._sent_by(partner, fast)
        checks = self._arm.safety == "default" and i not in self.liars
        return None if received is None or (checks and not _is_usable(received, fast[i])) else received

    def _majority(self, i: int, fast: Mapping[int, Adapter]) -> Adapter | None:
        sources = self._rng.sample([j for j in fast if j != i], _NUM_PULLED)
        pulled = [one for j in sources if (one := self._sent_by(j, fast)) is not None]
        usable = [one for one in pulled if _is_usable(one, fast[i])]
        if len(usable) < _NUM_PULLED:
            return None
        if self._arm.safety == "trimmed":
            return trimmed_mean(usable, fast[i], num_trimmed=2)
        return centered_clip(usable, fast[i], {name: self._clips[i].radius(name) for name in self._shapes})

    def _sent_by(self, sender: int, fast: Mapping[int, Adapter]) -> Adapter | None:
        """Over the wire and back; lies skip it, as a liar writes any bytes it likes."""
        self.sent_bytes += self.adapter_bytes
        if sender in self.liars:
            return lie(self._arm.attack, fast[sender], self.outer[sender].slow, self._noise)
        origin = self._population.start if self._arm.from_origin else None
        data = encode_adapter(fast[sender], self._arm.precision, origin)
        return decode_adapter(data, self._shapes, self._arm.precision, origin)


def _is_usable(received: Adapter, own: Adapter) -> bool:
    try:
        refuse_unusable(received, own)
    except MergeError:
        return False
    return True
