"""How a crew reaches a stage. `InProcessLink` is the one for stages in this process; one over the network does the same."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

from torch import Tensor

from swarm.pipeline.activation_wire import WirePrecision, decode_activation, encode_activation
from swarm.pipeline.orders import (
    BackwardOrder,
    CommitOrder,
    DecodeOrder,
    ForwardOrder,
    Settled,
    SettleOrder,
    StageFacts,
)
from swarm.pipeline.stage import Stage
from swarm.policy.logprobs import TokenLogprobs

T = TypeVar("T")


class StageLink(Protocol):
    """The orders of `Stage`, each once, in the order they were given.

    Every method raises NetworkError if the stage cannot be reached or does not answer, and PipelineError if it refuses. An
    order whose answer got lost may have been carried out: `commit`, `drop` and `end` may be repeated, nothing else may.
    The crew sets the deadlines, by cancelling.
    """

    async def describe(self) -> StageFacts:
        """See `Stage.describe`; so for all that follow."""
        ...

    async def forward(self, order: ForwardOrder) -> Tensor | TokenLogprobs: ...

    async def backward(self, order: BackwardOrder) -> Tensor | None: ...

    async def settle(self, order: SettleOrder) -> Settled: ...

    async def commit(self, order: CommitOrder) -> int: ...

    async def drop(self, batch: int) -> None: ...

    async def decode(self, order: DecodeOrder) -> Tensor: ...

    async def select(self, session: int, rows: Sequence[int]) -> None: ...

    async def end(self, session: int) -> None: ...

    async def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, int | float]]: ...

    async def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], rest: Mapping[str, int | float]) -> None: ...

    async def recover(self, weights: Mapping[str, Tensor], version: int, moments: Mapping[str, Tensor]) -> None: ...


class InProcessLink:
    """A stage of this process, on a thread of its own; one order at a time.

    Hidden states and their gradients pass through the wire format in `precision`, as they would between machines; ids, log-probs
    and logits are never rounded.
    """

    def __init__(self, stage: Stage, *, precision: WirePrecision = "fp32") -> None:
        self._stage = stage
        self._precision: WirePrecision = precision
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")

    def close(self) -> None:
        """End the thread once it has done what was ordered."""
        self._thread.shutdown()

    async def describe(self) -> StageFacts:
        return await self._do(self._stage.describe)

    async def forward(self, order: ForwardOrder) -> Tensor | TokenLogprobs:
        def compute() -> Tensor | TokenLogprobs:
            result = self._stage.forward(replace(order, states=self._sent(order.states)))
            return result if isinstance(result, TokenLogprobs) else self._sent(result)

        return await self._do(compute)

    async def backward(self, order: BackwardOrder) -> Tensor | None:
        def compute() -> Tensor | None:
            result = self._stage.backward(replace(order, gradient=self._sent(order.gradient)))
            return None if result is None else self._sent(result)

        return await self._do(compute)

    async def settle(self, order: SettleOrder) -> Settled:
        return await self._do(lambda: self._stage.settle(order))

    async def commit(self, order: CommitOrder) -> int:
        return await self._do(lambda: self._stage.commit(order))

    async def drop(self, batch: int) -> None:
        await self._do(lambda: self._stage.drop(batch))

    async def decode(self, order: DecodeOrder) -> Tensor:
        return await self._do(lambda: self._sent(self._stage.decode(replace(order, states=self._sent(order.states)))))

    async def select(self, session: int, rows: Sequence[int]) -> None:
        await self._do(lambda: self._stage.select(session, rows))

    async def end(self, session: int) -> None:
        await self._do(lambda: self._stage.end(session))

    async def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, int | float]]:
        return await self._do(self._stage.state)

    async def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], rest: Mapping[str, int | float]) -> None:
        await self._do(lambda: self._stage.restore(tensors, rest))

    async def recover(self, weights: Mapping[str, Tensor], version: int, moments: Mapping[str, Tensor]) -> None:
        await self._do(lambda: self._stage.recover(weights, version, moments))

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _sent(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        precision = self._precision if tensor.dim() == 3 else "fp32"
        # coming and going are each rounded once in a real line: rounding what was rounded changes nothing more
        return decode_activation(encode_activation(tensor, precision), tuple(tensor.shape), precision)
