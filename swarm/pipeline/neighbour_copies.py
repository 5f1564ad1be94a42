"""Copies of stages' adapters with their neighbours: taken every few steps, fetched when a stage is lost.

A stage's copy is with the machine of the stage behind it; that of the last but one is with the driver, which holds the last.
The driver checks a copy, passes it on in its own words, and remembers its SHA-256: a holder can give back what it was given,
or nothing.
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from swarm.errors import NetworkError, PipelineError, StageReplyError
from swarm.pipeline.crew import Crew
from swarm.pipeline.expected_stage import FRAME_BYTES, ExpectedStage
from swarm.pipeline.order_bytes import Fields
from swarm.pipeline.recovery import NeighbourCopy, Recovery
from swarm.pipeline.remote_link import Give, ask, replies_of
from swarm.pipeline.tensor_bundle import Bundle, decode_bundle, encode_bundle

logger = logging.getLogger(__name__)


class NeighbourCopies:
    """Which copies there are, their digests, and the driver's own."""

    def __init__(self, give: Give) -> None:
        self._give = give
        self._known: dict[int, NeighbourCopy] = {}
        self._digests: dict[int, bytes] = {}  # SHA-256 of what the holder was given
        self._own: dict[int, bytes] = {}

    @property
    def known(self) -> tuple[NeighbourCopy, ...]:
        """Without their weights, which are where the copies are."""
        return tuple(self._known.values())

    def forget(self, stage: int) -> None:
        """A copy that was not to be had."""
        self._known.pop(stage, None)

    async def take(self, crew: Crew, peers: Sequence[str], expected: Sequence[ExpectedStage], timeout_s: float) -> None:
        """Renew all copies; one that fails is left as it is: a machine that is lost shows with the next order."""
        await asyncio.gather(
            *(self._take_one(crew, peers, stage, expected[stage], timeout_s) for stage in range(len(peers)))
        )

    async def fetch(self, plan: Recovery, peers: Sequence[str], expected: ExpectedStage) -> tuple[NeighbourCopy, ...]:
        """The copy that the plan asks for, weights included; none where it asks for none.

        Raises NetworkError, and PipelineError where it is not to be had as it was given.
        """
        if plan.strategy != "neighbour_copy":
            return ()
        known = self._known[plan.stage]
        if known.holder == len(peers):
            copy = self._own[plan.stage]
        else:
            order = encode_bundle(Bundle({"of": expected.part.start}))
            copy = await self._give(peers[known.holder], "kept", order, max_reply_bytes=expected.tensor_bytes())
        digest = await asyncio.to_thread(_digest_of, copy)
        if digest != self._digests[plan.stage]:
            raise StageReplyError("a copy must be what its holder was given, got something else; it is left out")
        return (replace(known, weights=Fields(decode_bundle(copy)).under("adapter/")),)

    async def _take_one(
        self, crew: Crew, peers: Sequence[str], stage: int, expected: ExpectedStage, timeout_s: float
    ) -> None:
        slot, holder, version = expected.part.start, stage + 1, crew.version
        try:
            async with asyncio.timeout(timeout_s):
                limit = expected.tensor_bytes()
                fields = await ask(self._give, peers[stage], "copy", Bundle({"slot": slot}), max_reply_bytes=limit)
                with replies_of(peers[stage]):
                    weights = fields.under("adapter/")
                    expected.check_weights(weights)
                    crew.check_weights(weights)
                    if fields.integer("version") != version:
                        raise StageReplyError(f"a copy must be of version {version}, got {fields.integer('version')}")
                named = {f"adapter/{name}": value for name, value in weights.items()}
                copy = await asyncio.to_thread(encode_bundle, Bundle({"of": slot, "version": version}, named))
                if holder == len(peers):
                    self._own[stage] = copy
                else:
                    reply = await self._give(peers[holder], "keep", copy, max_reply_bytes=FRAME_BYTES)
                    if decode_bundle(reply).fields:
                        raise PipelineError("the copy was refused")
        except (NetworkError, PipelineError, TimeoutError) as error:
            logger.info("no new copy of stage %d: %s", stage, error or "it takes too long")
            return
        self._digests[stage] = await asyncio.to_thread(_digest_of, copy)
        self._known[stage] = NeighbourCopy(stage, holder, version, {})


def _digest_of(copy: bytes) -> bytes:
    return hashlib.sha256(copy).digest()
