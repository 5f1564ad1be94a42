"""What the trainer needs of whoever holds the weights, on this machine (`AdapterSteps`) or on a crew of them (`CrewSteps`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from swarm.policy.logprobs import TokenLogprobs, TokenSequence

LossOf = Callable[[int, TokenLogprobs], Tensor]
"""(number of the part, log-probs [B, T] with entropy) → its share of the loss of the batch, a scalar."""
AdapterTensors = dict[str, dict[str, Tensor]]
"""{"adapter": weights, "optimizer": moments as "kind:name"}, on the CPU."""


class PolicySteps(Protocol):
    """Gradients add up over the parts of a batch; then the batch is applied, or forgotten without a trace."""

    def accumulate(self, parts: Sequence[Sequence[TokenSequence]], loss_of: LossOf, temperature: float) -> float:
        """Norm of the gradient of the sum of all losses, before clipping; not finite where the gradient is not.

        Raises PipelineError where a batch cannot be computed for now; it is forgotten then.
        """
        ...

    def apply(self, lr: float) -> None:
        """One optimizer step; raises `policy.version`. Raises TrainingError where it would not move the adapter."""
        ...

    def drop(self) -> None:
        """Forget the batch; nothing happens where it was applied."""
        ...

    def adapter_norm(self) -> float | None:
        """L2 norm of all adapter weights; None where gathering them costs too much."""
        ...

    def read(self) -> dict[str, Tensor]:
        """A copy of all adapter weights on the CPU, by name."""
        ...

    def write(self, weights: Mapping[str, Tensor], turned: Iterable[str] = ()) -> None:
        """Replace all adapter weights between two batches; the version stays.

        AdamW's moments and step count stay too, but for tensors `turned`, whose basis is another one now.
        """
        ...

    def state(self) -> AdapterTensors:
        """All that `restore` needs, beside the policy's version."""
        ...

    def restore(self, tensors: AdapterTensors, version: int) -> None:
        """Continue from `state` at `version`. Raises CheckpointError for tensors of another adapter."""
        ...
