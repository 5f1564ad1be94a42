"""Own groups → body and signed header → gossip → a moment later the index. The body stays here until a reader asks for it.

The index is for nodes that gossip did not reach. An entry in it costs more than the gossip does, so it waits until the nodes that
gossip reached have pulled the record.
"""

import asyncio
import logging
from collections.abc import Sequence

from swarm.config import SharingSection
from swarm.observability.tracing import traced
from swarm.pool.experience_pool import ExperiencePool
from swarm.pool.success_levels import has_success
from swarm.records.codec import (
    MAX_GROUPS_PER_BODY,
    MAX_RECORD_BYTES,
    encode_body,
    encode_header,
    encode_record,
    fits_into_body,
    header_of,
    readable_answer_tokens,
)
from swarm.records.signing import sign_record
from swarm.sharing.index import entry_time, experience_key, experience_topic, subkey
from swarm.sharing.parts import SharingParts
from swarm.types import Header, RolloutGroup

logger = logging.getLogger(__name__)


HEAD_START_S = 1.0
"""How long a record is gossiped before it is entered in the index."""
_MAX_WAITING_RECORDS = 64


class Publisher:
    """Publishes the groups of one node. It runs on the node's loop; compression and hashing run in a thread."""

    def __init__(
        self, config: SharingSection, parts: SharingParts, pool: ExperiencePool, *, head_start_s: float
    ) -> None:
        """`pool`: numbers the own headers and never gives a number twice. `head_start_s`: 0 where there is no gossip."""
        self._config = config
        self._parts = parts
        self._context = parts.context
        self._transport = parts.context.transport
        self._beacons = parts.tracker.beacons
        self._common = parts.tracker.common
        self._pool = pool
        self._head_start_s = head_start_s
        self._gossiped: asyncio.Queue[tuple[float, Header, bytes]] = asyncio.Queue(_MAX_WAITING_RECORDS)

    async def publish(self, groups: Sequence[RolloutGroup]) -> None:
        """Gossip the groups with signal, in as many records as their size needs; `enter_next` enters these in the index.

        Groups whose answers are all equally right, as the node's own level of success has it, are gossiped, too, on common tasks
        and with `sharing.solved_groups`.
        """
        useful = [group for group in groups if self._is_useful(group)]
        for start in range(0, len(useful), MAX_GROUPS_PER_BODY):
            await self._announce(useful[start : start + MAX_GROUPS_PER_BODY])

    def _is_useful(self, group: RolloutGroup) -> bool:
        is_success = group.has_reward_variance or has_success(group, self._pool.success_level(group.task.source))
        return is_success and self._common.is_worth_sharing(group)

    async def enter_next(self) -> None:
        """Wait for the next record that was gossiped and had its head start, and enter it in the index."""
        gossiped_at, header, record = await self._gossiped.get()
        try:
            await asyncio.sleep(max(0.0, gossiped_at + self._head_start_s - self._transport.now()))
            entered_at = entry_time(header.created_at, self._transport.now())
            key = experience_key(self._context.swarm_id, self._parts.directory.shard, entered_at)
            if await self._transport.store(key, subkey(header.author, header.sequence), record, header.expires_at):
                self._parts.totals.num_indexed += 1
            else:
                logger.debug("no replica stored header %d", header.sequence)
        finally:
            self._gossiped.task_done()

    async def entered(self) -> None:
        """Wait until everything that was gossiped was offered to the index."""
        await self._gossiped.join()

    @traced("publish", lambda _, __, groups: {"groups": len(groups)})
    async def _announce(self, groups: list[RolloutGroup]) -> None:
        """Gossip one record, or two with half of the groups each where body or header would be too large."""
        beacon = self._beacons.of([group.task for group in groups])
        body, record, header = await asyncio.to_thread(self._pack, groups, beacon)
        limit = readable_answer_tokens(self._config.max_answer_tokens)
        if len(record) > MAX_RECORD_BYTES or header.max_answer_tokens > limit or not fits_into_body(groups):
            if len(groups) == 1:
                logger.warning(
                    "a group of %d rollouts is too large to share: %d bytes, as for answers of %d tokens; this node reads "
                    "and shares up to %d. Raise sharing.max_answer_tokens on all nodes (32,768 at most), or lower "
                    "rollouts.max_new_tokens or rollouts.group_size",
                    len(groups[0].rollouts), len(body), header.max_answer_tokens, limit,
                )  # fmt: skip
                return
            await self._announce(groups[: len(groups) // 2])
            await self._announce(groups[len(groups) // 2 :])
            return
        self._beacons.note(header)
        self._parts.bodies.put(header.body_hash, body, header.expires_at)
        self._parts.totals.num_published += 1
        await self._transport.publish(experience_topic(self._context.swarm_id, self._parts.directory.shard), record)
        if self._gossiped.full():  # the index lags behind: the newest records are the most useful
            self._gossiped.get_nowait()
            self._gossiped.task_done()
        self._gossiped.put_nowait((self._transport.now(), header, record))

    def _pack(self, groups: list[RolloutGroup], beacon: bytes) -> tuple[bytes, bytes, Header]:
        body = encode_body(groups)
        header = header_of(
            groups,
            body,
            swarm_id=self._context.swarm_id,
            sequence=self._pool.next_number("header"),
            now=self._transport.now(),
            time_to_live_s=self._config.time_to_live_s,
            beacon=beacon,
        )
        return (
            body,
            encode_record(sign_record(self._context.identity, self._context.swarm_id, encode_header(header))),
            header,
        )
