"""Links from the driver to its stages: `InProcessLink` for a stage of this process, `RemoteLink` for another machine.

The driver compares every reply with what it expects before it uses the reply, and it decides how many bytes it reads. A
reply that no honest stage gives raises StageReplyError.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

from torch import Tensor

from swarm.errors import PipelineError, RequestError, StageRefusedError, StageReplyError
from swarm.pipeline import commands as command_bytes
from swarm.pipeline.commands import (
    BackwardCommand,
    BatchGradient,
    CloseBatchCommand,
    CommitCommand,
    DecodeCommand,
    Fields,
    ForwardCommand,
    StageFacts,
    StageState,
)
from swarm.pipeline.driver.expected_stage import FRAME_BYTES, ExpectedStage
from swarm.pipeline.stage.stage import Stage
from swarm.pipeline.tensor_bundle import (
    Bundle,
    WirePrecision,
    decode_activation,
    decode_bundle,
    encode_activation,
    encode_bundle,
    is_finite,
)
from swarm.policy.logprobs import TokenLogprobs

T = TypeVar("T")
_MAX_BYTES_ON_LOOP = 1 << 17
"""Bundles up to this size are encoded and decoded on the event loop: a switch of threads takes longer."""
Limit = int
"""Most bytes of a reply."""


class SendCommand(Protocol):
    """Sends one command to a peer and returns the reply. Raises NetworkError."""

    async def __call__(
        self, peer_id: str, kind: str, payload: bytes, *, max_reply_bytes: int, relayed_to: Sequence[str] = ()
    ) -> bytes:
        """`relayed_to`: the machines that pass it on, of which the last one replies."""
        ...


async def ask(
    send: SendCommand,
    peer_id: str,
    kind: str,
    bundle: Bundle,
    *,
    max_reply_bytes: int = FRAME_BYTES,
    precision: WirePrecision | None = None,
    relayed_to: Sequence[str] = (),
) -> Fields:
    """Send one command and read its reply.

    Raises NetworkError, StageRefusedError where the peer refuses, and StageReplyError for a malformed reply.
    """
    precisions: dict[str, WirePrecision] = {} if precision is None else {"states": precision}
    is_small = sum(tensor.nbytes for tensor in bundle.tensors.values()) <= _MAX_BYTES_ON_LOOP
    payload = (
        encode_bundle(bundle, precisions) if is_small else await asyncio.to_thread(encode_bundle, bundle, precisions)
    )
    reply = await send(peer_id, kind, payload, max_reply_bytes=max_reply_bytes, relayed_to=relayed_to)
    with replies_of(peer_id):
        is_small = len(reply) <= _MAX_BYTES_ON_LOOP
        fields = Fields(decode_bundle(reply) if is_small else await asyncio.to_thread(decode_bundle, reply))
        not_loaded = fields.text("gone") if fields.has("gone") else ""
        refused = fields.text("refused") if fields.has("refused") else ""
    if not_loaded:  # the process that held the layers ended, and a new one answers under its name
        raise RequestError(_printable(not_loaded), "refused")
    if refused:
        raise StageRefusedError(_printable(refused))
    return fields


@contextmanager
def replies_of(peer_id: str) -> Iterator[None]:
    """Turn each PipelineError about a reply into a StageReplyError that names the peer."""
    try:
        yield
    except PipelineError as error:
        raise StageReplyError(f"{peer_id} gave an answer that no honest stage gives: {error}") from None


class RemoteLink:
    """The `StageLink` to the stage on `peer_id` that begins with the first layer of `expected`."""

    def __init__(self, send: SendCommand, peer_id: str, expected: ExpectedStage, precision: WirePrecision) -> None:
        self.peer_id = peer_id
        self._send = send
        self._expected = expected
        self._precision: WirePrecision = precision
        self._batch = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # rows and columns of each micro-batch of the batch

    async def describe(self) -> StageFacts:
        def read(fields: Fields) -> StageFacts:
            facts = command_bytes.facts_of(fields)
            self._expected.check_facts(facts)
            return facts

        return await self._ask("describe", Bundle(), self._expected.facts_bytes, read=read)

    async def forward(self, command: ForwardCommand) -> Tensor | TokenLogprobs:
        num_rows, num_columns = command.states.shape[:2]
        if command.batch not in (0, self._batch):
            self._batch = command.batch
            self._sizes.clear()
        if command.batch:
            self._sizes[command.micro_batch] = (num_rows, num_columns)
        limit = FRAME_BYTES + 4 * num_rows * num_columns * max(self._expected.hidden, 2)
        width = self._expected.hidden
        return await self._ask_states(
            "forward", command_bytes.forward_bundle(command), limit,
            read=lambda fields: command_bytes.forward_result(fields, command, width),
        )  # fmt: skip

    async def backward(self, command: BackwardCommand) -> Tensor | None:
        # a micro-batch that was never sent forward can only be refused
        shape = (*self._sizes.get(command.micro_batch, (0, 0)), self._expected.hidden)
        return await self._ask_states(
            "backward", command_bytes.backward_bundle(command), FRAME_BYTES + 4 * shape[0] * shape[1] * shape[2],
            read=lambda fields: command_bytes.backward_result(fields, shape),
        )  # fmt: skip

    async def close_batch(self, command: CloseBatchCommand) -> BatchGradient:
        shapes = {name: self._expected.shapes[name] for name in command.shared}
        return await self._ask(
            "settle", command_bytes.close_batch_bundle(command), self._expected.tensor_bytes(command.shared),
            read=lambda fields: command_bytes.gradient_result(fields, shapes),
        )  # fmt: skip

    async def commit(self, command: CommitCommand) -> int:
        return await self._ask(
            "commit", command_bytes.commit_bundle(command), FRAME_BYTES, read=lambda fields: fields.integer("version")
        )

    async def drop(self, batch: int) -> None:
        await self._command("drop", Bundle({"batch": batch}))

    async def decode(self, command: DecodeCommand) -> Tensor:
        num_rows, num_new = command.states.shape[:2]
        hidden, vocab = self._expected.hidden, self._expected.vocab
        shape = (num_rows, vocab) if command.is_last else (num_rows, num_new, hidden)
        return await self._ask_states(
            "decode", command_bytes.decode_command_bundle(command), FRAME_BYTES + 4 * num_rows * max(num_new * hidden, vocab),
            read=lambda fields: command_bytes.shaped(fields.tensor("states"), shape),
        )  # fmt: skip

    async def end(self, session: int) -> None:
        await self._command("end", Bundle({"session": session}))

    async def state(self) -> StageState:
        def read(fields: Fields) -> StageState:
            tensors, rest = command_bytes.state_of(fields)
            self._expected.check_state(tensors, rest["lr_factor"])
            return tensors, rest

        return await self._ask("state", Bundle(), self._expected.state_bytes, read=read)

    async def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], rest: Mapping[str, int | float]) -> None:
        await self._command("restore", command_bytes.state_bundle((tensors, rest)))

    async def recover(self, weights: Mapping[str, Tensor], version: int, moments: Mapping[str, Tensor]) -> None:
        await self._command("recover", command_bytes.recover_bundle(weights, version, moments))

    async def _command(self, kind: str, bundle: Bundle) -> None:
        await self._ask(kind, bundle, FRAME_BYTES, read=lambda fields: None)

    async def _ask(self, kind: str, bundle: Bundle, limit: Limit, read: Callable[[Fields], T]) -> T:
        addressed = Bundle({**bundle.fields, "slot": self._expected.part.start}, bundle.tensors)
        fields = await ask(self._send, self.peer_id, kind, bundle=addressed, max_reply_bytes=limit)
        with replies_of(self.peer_id):
            return read(fields)

    async def _ask_states(self, kind: str, bundle: Bundle, limit: Limit, read: Callable[[Fields], T]) -> T:
        """As `_ask`, with hidden states in the wire precision; ids and gradients of log-probs are sent exactly."""
        states = bundle.tensors["states"]
        precision = self._precision if states.is_floating_point() and states.dim() == 3 else None
        place = {"slot": self._expected.part.start, "precision": self._precision}
        addressed = Bundle({**bundle.fields, **place}, bundle.tensors)
        fields = await ask(self._send, self.peer_id, kind, bundle=addressed, max_reply_bytes=limit, precision=precision)
        with replies_of(self.peer_id):
            return read(fields)


def _printable(text: str) -> str:
    """Make one printable line of a peer's text."""
    return "".join(c if c.isprintable() else "?" for c in text)[:500]


class StageLink(Protocol):
    """The commands of `Stage`. Each is sent once, and a stage carries them out in the order of sending.

    Every method raises NetworkError if the stage cannot be reached or does not answer, and PipelineError if it refuses. A
    command without an answer may have been carried out: `commit`, `drop` and `end` may be repeated, nothing else may. The
    stage group sets deadlines by cancelling.
    """

    async def describe(self) -> StageFacts:
        """See `Stage.describe`; the same holds for all methods below."""
        ...

    async def forward(self, command: ForwardCommand) -> Tensor | TokenLogprobs: ...

    async def backward(self, command: BackwardCommand) -> Tensor | None: ...

    async def close_batch(self, command: CloseBatchCommand) -> BatchGradient: ...

    async def commit(self, command: CommitCommand) -> int: ...

    async def drop(self, batch: int) -> None: ...

    async def decode(self, command: DecodeCommand) -> Tensor: ...

    async def end(self, session: int) -> None: ...

    async def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, int | float]]: ...

    async def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], rest: Mapping[str, int | float]) -> None: ...

    async def recover(self, weights: Mapping[str, Tensor], version: int, moments: Mapping[str, Tensor]) -> None: ...


class InProcessLink:
    """A link to a stage of this process, which runs one command at a time on a thread of its own.

    Hidden states and their gradients pass through the wire format in `precision`, as between machines; ids, log-probs and
    logits are never rounded. Without `precision` they are passed on as they are: the links to the other stages round them.
    """

    def __init__(self, stage: Stage, *, precision: WirePrecision | None = "fp32") -> None:
        self._stage = stage
        self._precision: WirePrecision | None = precision
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")

    def close(self) -> None:
        """End the thread after the commands that were sent."""
        self._thread.shutdown()

    async def describe(self) -> StageFacts:
        return await self._do(self._stage.describe)

    async def forward(self, command: ForwardCommand) -> Tensor | TokenLogprobs:
        def compute() -> Tensor | TokenLogprobs:
            result = self._stage.forward(replace(command, states=self._sent(command.states)))
            return result if isinstance(result, TokenLogprobs) else self._sent(result)

        return await self._do(compute)

    async def backward(self, command: BackwardCommand) -> Tensor | None:
        def compute() -> Tensor | None:
            result = self._stage.backward(replace(command, gradient=self._sent(command.gradient)))
            return None if result is None else self._sent(result)

        return await self._do(compute)

    async def close_batch(self, command: CloseBatchCommand) -> BatchGradient:
        return await self._do(lambda: self._stage.close_batch(command))

    async def commit(self, command: CommitCommand) -> int:
        return await self._do(lambda: self._stage.commit(command))

    async def drop(self, batch: int) -> None:
        await self._do(lambda: self._stage.drop(batch))

    async def decode(self, command: DecodeCommand) -> Tensor:
        return await self._do(
            lambda: self._sent(self._stage.decode(replace(command, states=self._sent(command.states))))
        )

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
        if self._precision is None:
            if not is_finite(tensor):
                raise PipelineError("an activation must be finite, got NaN or infinity; drop the batch")
            return tensor
        precision = self._precision if tensor.dim() == 3 else "fp32"
        # a network rounds once in each direction; rounding a rounded tensor again changes nothing
        return decode_activation(encode_activation(tensor, precision), tuple(tensor.shape), precision)
