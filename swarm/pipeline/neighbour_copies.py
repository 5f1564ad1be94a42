"""Copies of stages' adapters with their neighbours: taken every few steps, fetched when a stage is lost.

A stage's copy is with the machine of the stage behind it; that of the last but one is with the driver, which holds the last.
The driver passes bytes on and keeps track of versions only.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from swarm.errors import NetworkError, PipelineError
from swarm.pipeline.crew import Crew
from swarm.pipeline.order_bytes import Fields
from swarm.pipeline.orders import StageFacts
from swarm.pipeline.recovery import NeighbourCopy, Recovery
from swarm.pipeline.remote_link import Give, ask, weight_reply_bytes
from swarm.pipeline.tensor_bundle import Bundle, decode_bundle, encode_bundle

logger = logging.getLogger(__name__)


class NeighbourCopies:
    """Which copies there are, and the driver's own."""

    def __init__(self, give: Give) -> None:
        self._give = give
        self._known: dict[int, NeighbourCopy] = {}
        self._own: dict[int, bytes] = {}

    @property
    def known(self) -> tuple[NeighbourCopy, ...]:
        """Without their weights, which are where the copies are."""
        return tuple(self._known.values())

    def forget(self, stage: int) -> None:
        """A copy that was not to be had."""
        self._known.pop(stage, None)

    async def take(self, crew: Crew, peers: Sequence[str], timeout_s: float) -> None:
        """Renew all copies; one that fails is left as it is: a machine that is lost shows with the next order."""
        await asyncio.gather(*(self._take_one(crew, peers, stage, timeout_s) for stage in range(len(peers))))

    async def fetch(self, plan: Recovery, peers: Sequence[str], facts: StageFacts) -> tuple[NeighbourCopy, ...]:
        """The copy that the plan asks for, weights included; none where it asks for none.

        Raises NetworkError and PipelineError where it is not to be had.
        """
        if plan.strategy != "neighbour_copy":
            return ()
        known = self._known[plan.stage]
        if known.holder == len(peers):
            fields = Fields(decode_bundle(self._own[plan.stage]))
        else:
            limit, order = weight_reply_bytes(facts), Bundle({"of": facts.part.start})
            fields = await ask(self._give, peers[known.holder], "kept", order, max_reply_bytes=limit)
        if fields.integer("version") != known.version:
            raise PipelineError(f"a copy must be of version {known.version}, got another; it is left out")
        return (replace(known, weights=fields.under("adapter/")),)

    async def _take_one(self, crew: Crew, peers: Sequence[str], stage: int, timeout_s: float) -> None:
        facts, holder = crew.facts[stage], stage + 1
        order = encode_bundle(Bundle({"slot": facts.part.start}))
        try:
            async with asyncio.timeout(timeout_s):
                copy = await self._give(peers[stage], "copy", order, max_reply_bytes=weight_reply_bytes(facts))
                fields = Fields(await asyncio.to_thread(decode_bundle, copy))
                version = fields.integer("version")
                if holder == len(peers):
                    self._own[stage] = copy
                else:
                    reply = await self._give(peers[holder], "keep", copy, max_reply_bytes=4096)
                    if decode_bundle(reply).fields:
                        raise PipelineError("the copy was refused")
        except (NetworkError, PipelineError, TimeoutError) as error:
            logger.info("no new copy of stage %d: %s", stage, error or "it takes too long")
            return
        self._known[stage] = NeighbourCopy(stage, holder, version, {})
