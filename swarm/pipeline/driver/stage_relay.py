"""Hidden states that pass from stage to stage, and not through the driver between them.

    through the driver   driver ─▶ 0 ─▶ driver ─▶ 1 ─▶ driver ─▶ 2 ─▶ driver
    relayed              driver ─▶ 0 ─▶ 1 ─▶ 2 ─▶ driver

Sampling and scoring are relayed. Training is not: the driver compares the sizes of what each stage returns, to find the one
that spoils a batch (`expected_stage`). A relayed command that fails says nothing about whose fault it is, since a stage may lie
about its neighbours. The stage group then sends every command itself, which shows a faulty stage as before.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from swarm.errors import NetworkError, PipelineError, StageRefusedError
from swarm.pipeline import commands as command_bytes
from swarm.pipeline.commands import DecodeCommand, ForwardCommand
from swarm.pipeline.driver.expected_stage import FRAME_BYTES, ExpectedStage
from swarm.pipeline.driver.schedule import all_of
from swarm.pipeline.stage_link import SendCommand, ask, replies_of
from swarm.pipeline.tensor_bundle import Bundle, WirePrecision


class StageRelay:
    """Passes states through the stages on other machines, in order. Call `connect` first.

    It is switched off by the first command that fails; StageRefusedError then asks the caller to repeat its work.
    """

    def __init__(
        self,
        send: SendCommand,
        peers: Sequence[str],
        expected: Sequence[ExpectedStage],
        *,
        precision: WirePrecision,
        timeout_s: float,
    ) -> None:
        """`peers`: the machines of the first stages, at least two and each once. `timeout_s`: for each command."""
        self.is_on = False
        self._send = send
        self._timeout_s = timeout_s
        self._peers = list(peers)
        self._slots = [one.part.start for one in expected[: len(peers)]]
        self._width = expected[0].hidden
        self._precision: WirePrecision = precision

    async def connect(self) -> None:
        """Tell every machine its neighbours. Raises as `ask` does, and TimeoutError."""
        async with asyncio.timeout(self._timeout_s):
            await all_of(self._route(place, is_on=True) for place in range(len(self._peers)))
        self.is_on = True

    async def decode(self, command: DecodeCommand) -> Tensor:
        """Return the hidden states [B, n, W] of the new columns after these stages. Raises StageRefusedError."""
        return await self._pass("decode", command_bytes.decode_command_bundle(command), command.states.shape)

    async def compute(self, command: ForwardCommand) -> Tensor:
        """Return the hidden states [B, L, W] after these stages, of a command of batch 0. Raises StageRefusedError."""
        return await self._pass("forward", command_bytes.forward_bundle(command), command.states.shape)

    async def _route(self, place: int, *, is_on: bool) -> None:
        last = len(self._peers) - 1
        fields: dict[str, Any] = {
            "slot": self._slots[place],
            "before": self._peers[place - 1] if is_on and place > 0 else None,
            "after": self._peers[place + 1] if is_on and place < last else None,
            "after_slot": self._slots[min(place + 1, last)],
        }
        await ask(self._send, self._peers[place], "route", Bundle(fields))

    async def _pass(self, kind: str, bundle: Bundle, shape: Sequence[int]) -> Tensor:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._passed(kind, bundle, shape)
        except (NetworkError, PipelineError, TimeoutError) as error:
            reason = str(error) or f"no answer within {self._timeout_s:g} s"
        if self.is_on:
            self.is_on = False
            # each then ignores what others pass on; one that cannot be told is found lost with the next command
            routes = (self._route(place, is_on=False) for place in range(len(self._peers)))
            await asyncio.gather(*routes, return_exceptions=True)
        raise StageRefusedError(f"stages must pass states to each other, got {reason}; they go through this node now")

    async def _passed(self, kind: str, bundle: Bundle, shape: Sequence[int]) -> Tensor:
        wanted = (*shape[:2], self._width)
        place = {"slot": self._slots[0], "precision": self._precision, "relayed": True}
        fields = await ask(
            self._send,
            self._peers[0],
            kind,
            Bundle({**bundle.fields, **place}, bundle.tensors),
            max_reply_bytes=FRAME_BYTES + 4 * wanted[0] * wanted[1] * wanted[2],
            relayed_to=self._peers[1:],
        )
        with replies_of(self._peers[-1]):
            return command_bytes.shaped(fields.tensor("states"), wanted)
