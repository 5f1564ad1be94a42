"""How far predicted chances can be trusted: each was made before its outcome was known, and is compared with it."""

from collections.abc import Mapping, Sequence
from typing import Any

_NUM_BINS = 10
_MEMORY = 0.9
"""What one round leaves of the sums before it."""


class Reliability:
    """Fading sums over predictions, by tenths of the predicted chance."""

    def __init__(self) -> None:
        self._bins = [[0.0, 0.0, 0.0] for _ in range(_NUM_BINS)]  # weight, weighted chances, weighted successes
        self._squares = 0.0

    def observe(self, chances: Sequence[float], successes: Sequence[float], weights: Sequence[float]) -> None:
        """The predictions of one round."""
        self._bins = [[_MEMORY * value for value in sums] for sums in self._bins]
        self._squares *= _MEMORY
        for chance, success, weight in zip(chances, successes, weights, strict=True):
            sums = self._bins[min(int(chance * _NUM_BINS), _NUM_BINS - 1)]
            sums[0] += weight
            sums[1] += weight * chance
            sums[2] += weight * success
            self._squares += weight * (chance - success) ** 2

    @property
    def calibration_error(self) -> float:
        """Mean distance of predicted and observed rate over the tenths (expected calibration error); 1 before any."""
        if not self._weight:
            return 1.0
        return sum(abs(chances - successes) for _, chances, successes in self._bins) / self._weight

    @property
    def brier(self) -> float:
        """Mean squared error of the chances; 1 before any."""
        return self._squares / self._weight if self._weight else 1.0

    @property
    def skill(self) -> float:
        """1 − Brier score / that of always saying the mean rate: 0 knows nothing, 1 everything."""
        if not self._weight:
            return 0.0
        rate = sum(successes for _, _, successes in self._bins) / self._weight
        spread = rate * (1 - rate)
        return 1 - self.brier / spread if spread > 0 else 0.0

    def state(self) -> dict[str, Any]:
        return {"bins": [list(sums) for sums in self._bins], "squares": self._squares}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._bins = [list(sums) for sums in state["bins"]]
        self._squares = state["squares"]

    @property
    def _weight(self) -> float:
        return sum(weight for weight, _, _ in self._bins)
