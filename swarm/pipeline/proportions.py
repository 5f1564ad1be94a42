"""Which stage ruins a batch, by the sizes of what the driver carries between stages and of what they report.

    states:     0 ─▶ 1 ─▶ 2 ─▶ last ─▶ loss          least and largest token of what a stage passes on
    gradients:  0 ◀─ 1 ◀─ 2 ◀─ last ◀─ loss          what a stage passes on, and its own norm, per what it was given

In one run each of these stays about what it was, and the gradients of stages are about alike. So where a batch cannot be
applied, the first of them, in the order of computing, that is out of proportion names the stage: what comes after it was only
computed from it. A stage that does so in one batch after the other is not believed any more.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from torch import Tensor

_OUT_OF_PROPORTION = math.log(1000.0)
_HISTORY_BATCHES = 16
_STRIKES = 3
"""Ruined batches in a row: one may be a numeric accident."""
Size = tuple[int, str]
"""(stage, what of it)."""


class BatchSizes:
    """Of one batch, gathered while it goes forward and back."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._tokens: dict[int, tuple[float, float]] = {}
        self._given: defaultdict[int, float] = defaultdict(float)
        self._passed_on: defaultdict[int, float] = defaultdict(float)

    def forward(self, stage: int, states: Tensor) -> None:
        """Hidden states [B, L, W] that `stage` passes on."""
        tokens = states.detach().float().square().mean(-1).sqrt()
        least, largest = self._tokens.get(stage, (math.inf, 0.0))
        self._tokens[stage] = min(least, tokens.min().item()), max(largest, tokens.max().item())

    def backward(self, stage: int, given: Tensor, passed_on: Tensor | None) -> None:
        """The gradient that `stage` was given, and what it passes on."""
        self._given[stage] += given.detach().double().square().sum().item()
        if passed_on is not None:
            self._passed_on[stage] += passed_on.detach().double().square().sum().item()

    def in_order(self, norms: Sequence[float]) -> Iterator[tuple[Size, float]]:
        """(which, logarithm) in the order of computing; `norms`: what the stages report. Those without a size are left out."""
        for stage in range(self._num_stages):
            for what, size in zip(("least", "largest"), self._tokens.get(stage, ()), strict=False):
                yield (stage, what), _log(size)
        for stage in reversed(range(self._num_stages)):
            if given := math.sqrt(self._given[stage]):
                passed_on = math.sqrt(self._passed_on[stage])
                sizes = {"norm": norms[stage], "gradient": passed_on} if passed_on else {"norm": norms[stage]}
                yield from (((stage, what), _log(size) - math.log(given)) for what, size in sizes.items())


class Proportions:
    """Of one crew, over its batches."""

    def __init__(self) -> None:
        self._history: dict[Size, deque[float]] = {}
        self._strikes: Counter[int] = Counter()

    def observe(self, sizes: BatchSizes, norms: Sequence[float]) -> None:
        """A batch that can be applied."""
        self._strikes.clear()
        for which, size in sizes.in_order(norms):
            if math.isfinite(size):
                self._history.setdefault(which, deque(maxlen=_HISTORY_BATCHES)).append(size)

    def ruined(self, sizes: BatchSizes, norms: Sequence[float]) -> tuple[int | None, bool]:
        """(the stage that ruined this batch, None where none is out of proportion; whether it is to go)."""
        found = dict(sizes.in_order(norms))
        for which, size in found.items():
            if not self._excess(which, size, found) <= _OUT_OF_PROPORTION:
                self._strikes[which[0]] += 1
                return which[0], self._strikes[which[0]] >= _STRIKES
        return None, False

    def _excess(self, which: Size, size: float, found: Mapping[Size, float]) -> float:
        """Distance from the batches before. Where there were none, above the other stages of this one, as far as comparable."""
        stage, what = which
        if which in self._history:
            return abs(size - median(self._history[which]))
        others = [one for (other, kind), one in found.items() if kind == what and other != stage and math.isfinite(one)]
        return size - median(others) if others and what in ("norm", "gradient") else 0.0

    def forget(self, stage: int) -> None:
        """Another machine holds it from now on."""
        del self._strikes[stage]
        self._history = {which: known for which, known in self._history.items() if which[0] != stage}


def _log(size: float) -> float:
    """Of a size that may be 0 or not finite."""
    return math.log(size) if 0 < size < math.inf else -math.inf if size == 0 else math.inf
