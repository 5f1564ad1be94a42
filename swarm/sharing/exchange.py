"""Everything that a node shares with others over one transport.

groups of a round ─ outbox (bounded, the newest win) ─ Publisher ─→ gossip, index
gossip, index ─→ Reader ─ Admission ─→ ExperiencePool
Directory: lists this node, finds others, and chooses the shard to share in
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from swarm.admission.admission import Admission
from swarm.config import NetworkSection, SharingSection
from swarm.observability.repeat import repeat
from swarm.pool.experience_pool import ExperiencePool
from swarm.sharing.parts import SharingParts
from swarm.sharing.publisher import HEAD_START_S, Publisher
from swarm.sharing.reader import Reader
from swarm.types import RolloutGroup

_OUTBOX_ROUNDS = 8


class Exchange:
    """One node's share in the swarm's experience. It runs on the node's loop; `work` does the work."""

    def __init__(
        self,
        sharing: SharingSection,
        network: NetworkSection,
        parts: SharingParts,
        *,
        admission: Admission,
        pool: ExperiencePool,
        rng: random.Random,
    ) -> None:
        head_start_s = 0.0 if network.gossip == "off" else HEAD_START_S
        self.parts = parts
        self.publisher = Publisher(sharing, parts, pool, head_start_s=head_start_s)
        self.reader = Reader(sharing, network, parts, admission=admission, pool=pool, rng=rng)
        self._outbox: asyncio.Queue[tuple[int, Sequence[RolloutGroup]]] = asyncio.Queue(_OUTBOX_ROUNDS)
        """With the number of pauses before each round was handed out."""

    def hand_out(self, groups: Sequence[RolloutGroup]) -> None:
        """Publish the groups of a round when there is time; where the network lags behind, the oldest round is dropped."""
        pause = self.parts.pause
        if pause.is_paused:
            return
        self.parts.tracker.stats.shared(groups)
        if self._outbox.full():
            self._outbox.get_nowait()
            self.parts.totals.num_rounds_not_published += 1
        self._outbox.put_nowait((pause.num_pauses, groups))

    def work(self, on_failure: Callable[[], None]) -> list[Coroutine[Any, Any, None]]:
        """What runs from the transport's start to its stop. Each ends only when cancelled, or raises what is a bug.

        While sharing is paused nothing is published and nothing pulled; headers are passed on, and bodies given to who asks.
        """
        held = self.parts.pause.held
        steps = {
            "publish the groups of a round": held(self._publish_next),
            "enter a header into the index": held(self.publisher.enter_next),
            "follow the shards of the swarm": self._turn_directory,
        }
        if self.parts.totals.reads:
            steps["read groups of peers"] = held(self.reader.poll)
        return [repeat(step, what, on_failure=on_failure) for what, step in steps.items()]

    async def _publish_next(self) -> None:
        num_pauses, groups = await self._outbox.get()
        if num_pauses == self.parts.pause.num_pauses:  # rounds from before a pause are too old after it
            await self.publisher.publish(groups)

    async def _turn_directory(self) -> None:
        await asyncio.sleep(await self.parts.directory.turn())
