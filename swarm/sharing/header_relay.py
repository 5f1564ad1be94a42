"""Passes headers on between nodes that cannot reach each other. It needs no tasks, no model and no bodies.

topics of the shards ─ HeaderValidator (all checks that need no tasks) ─ passed on by the gossip plane
Directory: lists the relay for newcomers with its gossip address; the levels of the listed nodes say which shards there are
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from swarm.admission.admission import HeaderAdmission
from swarm.config import SharingSection
from swarm.network.context import NodeContext
from swarm.network.transport import ValidationResult
from swarm.observability.repeat import repeat
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.directory import Directory
from swarm.sharing.header_validator import HeaderValidator
from swarm.sharing.index import Shard, experience_topic, shard_of
from swarm.sharing.totals import SharingTotals
from swarm.tasks.task_source import FIRST_TRAINING_SEED
from swarm.types import TaskRef

MAX_SHARDS = 32
"""All of a swarm of some 3,000 nodes. In a larger one each carrier has others; a peer may be in 64 topics at most."""


class HeaderRelay:
    """The relay of one bootstrap peer. It runs on the peer's loop; `work` does the work."""

    def __init__(self, sharing: SharingSection, context: NodeContext) -> None:
        self._swarm_id = context.swarm_id
        self._transport = context.transport
        self.rejected: Counter[str] = Counter()
        """Headers that were not passed on, by reason."""
        admission = HeaderAdmission(sharing, context, check_task=check_not_held_out)
        self._validator = HeaderValidator(context, admission, sharing.max_age_s, rejected=self.rejected, by_shard=True)
        totals = SharingTotals(context.clock, publishes=False, reads=False)
        self._directory = Directory(context, totals, stays_widest=True)
        self._relayed: set[Shard] = set()
        self.num_relayed = 0
        """Headers that were passed on."""

    @property
    def shards(self) -> frozenset[Shard]:
        """Those whose headers are passed on at this moment."""
        return frozenset(self._relayed)

    def work(self, on_failure: Callable[[], None]) -> Coroutine[Any, Any, None]:
        """What runs from the transport's start to its stop. Ends only when cancelled, or raises what is a bug."""
        self._follow({})
        return repeat(self._turn, "follow the shards of the swarm", on_failure=on_failure)

    async def _turn(self) -> None:
        pause_s = await self._directory.turn()
        if self._directory.levels:  # else the index did not answer, or nobody is there yet
            self._follow(self._directory.levels)
        await asyncio.sleep(pause_s)

    def _follow(self, levels: Mapping[int, int]) -> None:
        shards = shards_to_relay(self._swarm_id, self._transport.peer_id, levels)
        for shard in self._relayed - shards:
            self._transport.unsubscribe(experience_topic(self._swarm_id, shard))
        for shard in shards - self._relayed:
            self._transport.subscribe(experience_topic(self._swarm_id, shard), self._handler(shard))
        self._relayed = shards

    def _handler(self, shard: Shard) -> Callable[[str, bytes], ValidationResult]:
        def validate(forwarder: str, record: bytes) -> ValidationResult:
            result, _ = self._validator.validate_gossip(shard, record)
            self.num_relayed += result is ValidationResult.ACCEPT
            return result

        return validate


def check_not_held_out(ref: TaskRef) -> None:
    """Check what can be checked of a task without its source. Raises InvalidRecord with HELD_OUT_TASK."""
    if ref.seed < FIRST_TRAINING_SEED:
        raise InvalidRecord(Rejection.HELD_OUT_TASK, f"stream {ref.seed}")


def shards_to_relay(swarm_id: str, peer_id: str, levels: Mapping[int, int]) -> set[Shard]:
    """At most MAX_SHARDS, from {level: members that are at it}: the widest one, then level by level, most members first.

    Of a level with more shards than that a carrier takes those around a place of its own, so that several share them out.
    """
    chosen = {Shard(0, 0)}
    for level in sorted(levels, key=lambda level: (-levels[level], level)):
        own = shard_of(swarm_id, peer_id, level, 0.0).number
        for step in range(min(1 << level, MAX_SHARDS)):
            if len(chosen) < MAX_SHARDS:
                chosen.add(Shard(level, own ^ step))
    return chosen
