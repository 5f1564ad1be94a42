"""Mean and standard deviation over seeds."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class Spread:
    """Values by seed, in the order of seeds."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        return cls(tuple(values))

    @property
    def mean(self) -> float:
        """0 without values."""
        return fmean(self.values) if self.values else 0.0

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 for fewer than two seeds."""
        return stdev(self.values) if len(self.values) > 1 else 0.0

    def over(self, other: "Spread") -> "Spread":
        """Ratio seed by seed; seeds in which `other` is 0 are left out."""
        return Spread.of(a / b for a, b in zip(self.values, other.values, strict=True) if b)

    def rounded(self) -> dict[str, float]:
        return {"mean": round(self.mean, 4), "std": round(self.std, 4)}

    def text(self, digits: int) -> str:
        if len(self.values) < 2:
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ± {self.std:.{digits}f}"
