"""Own groups → body and signed header → gossip → a moment later the index; the body stays here until a reader asks for it.

The index is for those whom gossip did not reach. An entry in it costs more than the gossip does, so it waits until those
who have heard of the record have pulled it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from swarm.config import SharingSection
from swarm.network.transport import Transport
from swarm.observability.tracing import traced
from swarm.records.codec import (
    MAX_BODY_BYTES,
    MAX_GROUPS_PER_BODY,
    MAX_RECORD_BYTES,
    body_hash,
    encode_body,
    encode_header,
    encode_record,
    fits_into_body,
)
from swarm.records.identity import Identity
from swarm.records.signing import sign_record
from swarm.sharing.beacons import Beacons
from swarm.sharing.body_store import BodyStore
from swarm.sharing.index import entry_time, experience_key, experience_topic, subkey
from swarm.sharing.shard import Shard
from swarm.types import GroupSummary, Header, RolloutGroup

logger = logging.getLogger(__name__)

HEAD_START_S = 1.0
"""Of gossip over the index."""
_MAX_WAITING_RECORDS = 64


class Publisher:
    """Announces groups of this node. Runs on the node's loop; compression and hashing go to a thread."""

    def __init__(
        self,
        config: SharingSection,
        swarm_id: str,
        identity: Identity,
        transport: Transport,
        bodies: BodyStore,
        next_sequence: Callable[[], int],
        shard: Callable[[], Shard],
        beacons: Beacons,
        *,
        head_start_s: float = HEAD_START_S,
    ) -> None:
        """`shard`: the one that this node shares in at this moment. `beacons`: by which its tasks were drawn.

        `head_start_s`: 0 where there is no gossip.
        """
        self._beacons = beacons
        self._config = config
        self._swarm_id = swarm_id
        self._identity = identity
        self._transport = transport
        self._bodies = bodies
        self._next_sequence = next_sequence
        self._shard = shard
        self._head_start_s = head_start_s
        self._gossiped: asyncio.Queue[tuple[float, Header, bytes]] = asyncio.Queue(_MAX_WAITING_RECORDS)
        self.num_published = 0
        """Records announced, ..."""
        self.num_indexed = 0
        """... and those of them that the index has taken."""

    async def publish(self, groups: Sequence[RolloutGroup]) -> None:
        """Gossip groups that carry signal, in as many records as their size needs; `enter_next` does the rest."""
        useful = [group for group in groups if group.has_signal]
        for start in range(0, len(useful), MAX_GROUPS_PER_BODY):
            await self._announce(useful[start : start + MAX_GROUPS_PER_BODY])

    async def enter_next(self) -> None:
        """Wait for the next record that was gossiped and had its head start, and enter it in the index."""
        gossiped_at, header, record = await self._gossiped.get()
        try:
            await asyncio.sleep(max(0.0, gossiped_at + self._head_start_s - self._transport.now()))
            entered_at = entry_time(header.created_at, self._transport.now())
            key = experience_key(self._swarm_id, self._shard(), entered_at)
            if await self._transport.store(key, subkey(header.author, header.sequence), record, header.expires_at):
                self.num_indexed += 1
            else:
                logger.debug("no replica took header %d", header.sequence)
        finally:
            self._gossiped.task_done()

    async def entered(self) -> None:
        """Wait until the index was offered all that was gossiped."""
        await self._gossiped.join()

    @traced("publish", lambda _, __, groups: {"groups": len(groups)})
    async def _announce(self, groups: list[RolloutGroup]) -> None:
        """Gossip one record; split in half where body or header outgrow their bounds."""
        beacon = self._beacons.of([group.task for group in groups])
        body, record, header = await asyncio.to_thread(self._pack, groups, beacon)
        if len(record) > MAX_RECORD_BYTES or len(body) > MAX_BODY_BYTES or not fits_into_body(groups):
            if len(groups) == 1:
                logger.warning(
                    "a group of %d rollouts is too large to share: %d bytes", len(groups[0].rollouts), len(body)
                )
                return
            await self._announce(groups[: len(groups) // 2])
            await self._announce(groups[len(groups) // 2 :])
            return
        self._beacons.note(header)
        self._bodies.put(header.body_hash, body, header.expires_at)
        self.num_published += 1
        await self._transport.publish(experience_topic(self._swarm_id, self._shard()), record)
        if self._gossiped.full():  # the index lags behind: the newest are wanted most
            self._gossiped.get_nowait()
            self._gossiped.task_done()
        self._gossiped.put_nowait((self._transport.now(), header, record))

    def _pack(self, groups: list[RolloutGroup], beacon: bytes) -> tuple[bytes, bytes, Header]:
        body = encode_body(groups)
        now = self._transport.now()
        header = Header(
            swarm_id=self._swarm_id,
            author=self._identity.peer_id,
            sequence=self._next_sequence(),
            body_hash=body_hash(body),
            body_bytes=len(body),
            groups=tuple(GroupSummary(group.task, len(group.rollouts), group.mean_reward) for group in groups),
            lineage=groups[0].lineage,
            policy_version=min(group.policy_version for group in groups),  # some may have waited for rounds
            created_at=now,
            expires_at=now + self._config.time_to_live_s,
            beacon=beacon,
        )
        return body, encode_record(sign_record(self._identity, self._swarm_id, encode_header(header))), header
