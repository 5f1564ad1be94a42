"""What a merge run needs of replicas, however they learn."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

Adapter = dict[str, Tensor]


class Population(Protocol):
    """Replicas of one lineage, by number."""

    num: int
    start: Adapter
    """What all of them begin from."""
    scaling: float
    """alpha / rank."""

    def train(self, active: Sequence[int], progress: float, average_gradients: bool) -> list[float]:
        """One inner step of each that is active; `progress` in [0, 1) is how far the run is. Returns loss or reward of each.

        `average_gradients`: all step on the mean gradient.
        """
        ...

    def weights(self, replica: int) -> Adapter:
        """Copies."""
        ...

    def set_weights(self, replica: int, weights: Mapping[str, Tensor]) -> None: ...

    def reset_moments(self, replica: int, names: Sequence[str]) -> None:
        """Forget what the inner optimizer knows of these tensors."""
        ...

    def gate_score(self, replica: int, candidate: Adapter) -> Sequence[float]:
        """On the tasks that this replica keeps private, one by one; larger is better."""
        ...

    def measure(self, adapters: Sequence[Adapter]) -> list[dict[str, float]]:
        """{task: held-out loss or reward} of each."""
        ...
