"""A stage on another machine: `StageLink` over orders as bytes, whatever carries them."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from swarm.errors import PipelineError, RequestError
from swarm.pipeline import order_bytes
from swarm.pipeline.activation_wire import WirePrecision
from swarm.pipeline.model_shape import ModelShape
from swarm.pipeline.order_bytes import Fields, StageState
from swarm.pipeline.orders import (
    BackwardOrder,
    CommitOrder,
    DecodeOrder,
    ForwardOrder,
    Settled,
    SettleOrder,
    StageFacts,
)
from swarm.pipeline.tensor_bundle import MAX_HEAD_BYTES, Bundle, decode_bundle, encode_bundle
from swarm.policy.logprobs import TokenLogprobs

_FRAME_BYTES = 4096
"""Of a reply without tensors, or beside them."""
STATE_TENSORS = 3
"""Weights and two moments."""


class Give(Protocol):
    """Give an order to one peer. Raises NetworkError."""

    async def __call__(self, peer_id: str, kind: str, payload: bytes, *, max_reply_bytes: int) -> bytes: ...


async def ask(
    give: Give,
    peer_id: str,
    kind: str,
    bundle: Bundle,
    *,
    max_reply_bytes: int = _FRAME_BYTES,
    precision: WirePrecision | None = None,
) -> Fields:
    """One order and its reply. Raises NetworkError, and PipelineError where the peer refuses or its reply is odd."""
    precisions: dict[str, WirePrecision] = {} if precision is None else {"states": precision}
    payload = await asyncio.to_thread(encode_bundle, bundle, precisions)
    reply = await give(peer_id, kind, payload, max_reply_bytes=max_reply_bytes)
    fields = Fields(await asyncio.to_thread(decode_bundle, reply))
    if fields.has("gone"):  # its process ended, and another one answers in its name
        raise RequestError(_printable(fields.text("gone")), "refused")
    if fields.has("refused"):
        raise PipelineError(_printable(fields.text("refused")))
    return fields


def weight_reply_bytes(facts: StageFacts) -> int:
    """Most bytes of a reply with all that a stage trains."""
    return MAX_HEAD_BYTES + 4 * sum(math.prod(shape) for shape in facts.shapes.values())


class RemoteLink:
    """See `StageLink`; the stage is the one that begins with layer `slot` on `peer_id`."""

    def __init__(self, give: Give, peer_id: str, slot: int, shape: ModelShape, precision: WirePrecision) -> None:
        self.peer_id = peer_id
        self._give = give
        self._slot = slot
        self._shape = shape
        self._precision: WirePrecision = precision
        self._state_bytes = MAX_HEAD_BYTES
        self._shared_bytes = MAX_HEAD_BYTES

    async def describe(self) -> StageFacts:
        facts = order_bytes.facts_of(await self._ask("describe", Bundle(), MAX_HEAD_BYTES))
        self._shared_bytes = weight_reply_bytes(facts)
        self._state_bytes = STATE_TENSORS * self._shared_bytes
        return facts

    async def forward(self, order: ForwardOrder) -> Tensor | TokenLogprobs:
        num_states = order.states.shape[0] * order.states.shape[1]
        limit = _FRAME_BYTES + 4 * num_states * max(self._shape.hidden, 2)
        fields = await self._ask_states("forward", order_bytes.forward_bundle(order), limit)
        return order_bytes.forward_result(fields, order)

    async def backward(self, order: BackwardOrder) -> Tensor | None:
        # where the micro-batch ended the gradient is [B, T] and the reply [B, L, W], whose L is not known here
        limit = MAX_HEAD_BYTES + 4 * _LONGEST_STATES * self._shape.hidden
        if order.gradient.dim() == 3:
            limit = _FRAME_BYTES + 4 * order.gradient.numel()
        return (await self._ask_states("backward", order_bytes.backward_bundle(order), limit)).optional("states")

    async def settle(self, order: SettleOrder) -> Settled:
        return order_bytes.settled_result(
            await self._ask("settle", order_bytes.settle_bundle(order), self._shared_bytes)
        )

    async def commit(self, order: CommitOrder) -> int:
        return (await self._ask("commit", order_bytes.commit_bundle(order))).integer("version")

    async def drop(self, batch: int) -> None:
        await self._ask("drop", Bundle({"batch": batch}))

    async def decode(self, order: DecodeOrder) -> Tensor:
        num_rows, num_new = order.states.shape[:2]
        largest = num_rows * max(num_new * self._shape.hidden, self._shape.vocab)
        fields = await self._ask_states("decode", order_bytes.decode_order_bundle(order), _FRAME_BYTES + 4 * largest)
        return order_bytes.decode_result(fields, order)

    async def select(self, session: int, rows: Sequence[int]) -> None:
        await self._ask("select", Bundle({"session": session, "rows": list(rows)}))

    async def end(self, session: int) -> None:
        await self._ask("end", Bundle({"session": session}))

    async def state(self) -> StageState:
        return order_bytes.state_of(await self._ask("state", Bundle(), self._state_bytes))

    async def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], rest: Mapping[str, int | float]) -> None:
        await self._ask("restore", order_bytes.state_bundle((tensors, rest)))

    async def recover(self, weights: Mapping[str, Tensor], version: int, moments: Mapping[str, Tensor]) -> None:
        await self._ask("recover", order_bytes.recover_bundle(weights, version, moments))

    async def _ask(self, kind: str, bundle: Bundle, max_reply_bytes: int = _FRAME_BYTES) -> Fields:
        addressed = Bundle({**bundle.fields, "slot": self._slot}, bundle.tensors)
        return await ask(self._give, self.peer_id, kind, addressed, max_reply_bytes=max_reply_bytes)

    async def _ask_states(self, kind: str, bundle: Bundle, max_reply_bytes: int) -> Fields:
        """As `_ask`, hidden states in the wire's precision; ids and log-prob gradients exactly."""
        states = bundle.tensors["states"]
        precision = self._precision if states.is_floating_point() and states.dim() == 3 else None
        addressed = Bundle({**bundle.fields, "slot": self._slot, "precision": self._precision}, bundle.tensors)
        return await ask(
            self._give, self.peer_id, kind, addressed, max_reply_bytes=max_reply_bytes, precision=precision
        )


_LONGEST_STATES = 1 << 16
"""As `StageSettings.max_states`."""


def _printable(text: str) -> str:
    """One line, whatever a peer put there."""
    return "".join(c if c.isprintable() else "?" for c in text)[:500]
