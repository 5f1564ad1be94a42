"""Own groups → body and signed header → gossip → a moment later the index; the body stays here until a reader asks for it.

The index is for those whom gossip did not reach. An entry in it costs more than the gossip does, so it waits until those
who have heard of the record have pulled it.

Tasks bound to a moment: a node's next tasks follow from its name and from a record of another that it has just heard.

    headers heard ─ note ─▶ one of them is the beacon for EPOCH_S ─▶ the cursor goes on at H(own name, beacon, source)
    groups to publish ─ of ─▶ the beacon that they were drawn by, which goes into their header
    a header of another ─ judge ─▶ holds, does not, or says nothing

A record holds sampled answers, so nobody knows it before it is there: tasks that follow from it cannot have been solved ahead
of it, nor picked. That is soft evidence and no proof: whoever makes the record that others take as their beacon can try many.
So only records count whose author this node knows, as long as it knows anybody.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from swarm.config import SharingSection
from swarm.limits.bounded_maps import FairMap
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
from swarm.sharing.body_store import BodyStore
from swarm.sharing.index import Shard, entry_time, experience_key, experience_topic, subkey
from swarm.tasks.task_cursor import beacon_index
from swarm.tasks.task_source import INDEX_SPAN
from swarm.types import BEACON_BYTES, GroupSummary, Header, RolloutGroup, TaskRef

logger = logging.getLogger(__name__)


EPOCH_S = 300.0
"""A beacon is used so long."""
MAX_AGE_S = 1800.0
"""Of a beacon when a header names it: several epochs, for groups that waited."""
_AGE_MARGIN_S = 60.0
"""A reader may have heard of it before this node did."""
MAX_AHEAD = 4096
"""Tasks of one source that a node may draw by one beacon: an hour of rounds of dozens."""
_MAX_HEARD = 8192
_MAX_USED = 16


class Evidence(Enum):
    """What a header's beacon says of its tasks."""

    HOLDS = "holds"
    MISSING = "missing"
    """It names none."""
    BROKEN = "broken"
    """Most tasks do not follow from it, or it was old."""
    UNKNOWN = "unknown"
    """This node has not heard of it."""


@dataclass(frozen=True, slots=True)
class _Heard:
    author: str
    at: float


class Beacons:
    """Of one node. Runs on its loop; `current` may be read from any thread."""

    def __init__(
        self,
        own_peer_id: str,
        clock: Callable[[], float],
        is_known: Callable[[str], bool],
        has_known: Callable[[], bool],
    ) -> None:
        """`is_known`: whether an author's probation is over. `has_known`: whether anybody's is."""
        self._own_peer_id = own_peer_id
        self._clock = clock
        self._is_known = is_known
        self._has_known = has_known
        self._heard: FairMap[bytes, _Heard] = FairMap(_MAX_HEARD, is_known=is_known)
        self._used: deque[tuple[bytes, float]] = deque(maxlen=_MAX_USED)
        """With the time when each was heard, the latest first."""
        self._current = b""
        self._since = -math.inf

    def note(self, header: Header) -> None:
        """A header that was admitted, or published by this node."""
        beacon, now = beacon_of(header), self._clock()
        if beacon in self._heard:  # announced again, it would look new to who follows it and old to all who read that
            return
        self._heard.add(header.author, beacon, _Heard(header.author, now))
        is_over = now - self._since > EPOCH_S
        if is_over and header.author != self._own_peer_id and self._counts(header.author):
            self._current, self._since = beacon, now
            self._used.appendleft((beacon, now))

    def current(self) -> bytes:
        """To draw tasks by; empty where nobody was heard yet."""
        return self._current

    def of(self, tasks: Sequence[TaskRef]) -> bytes:
        """The beacon that most of these own tasks were drawn by; empty where there is none, or it would be old to readers: a
        round may take longer than that, and who is slow must not look like who solves ahead."""
        oldest = self._clock() - MAX_AGE_S + _AGE_MARGIN_S
        young = [beacon for beacon, since in self._used if since > oldest]
        return next((beacon for beacon in young if follow(self._own_peer_id, beacon, tasks)), b"")

    def judge(self, header: Header) -> Evidence:
        """Of a header by another."""
        if not header.beacon:
            return Evidence.MISSING
        heard = self._heard.get(header.beacon)
        if heard is None or heard.author == header.author or not self._counts(heard.author):
            return Evidence.UNKNOWN
        is_recent = header.created_at - heard.at <= MAX_AGE_S
        tasks = [group.task for group in header.groups]
        return Evidence.HOLDS if is_recent and follow(header.author, header.beacon, tasks) else Evidence.BROKEN

    def _counts(self, author: str) -> bool:
        return author == self._own_peer_id or self._is_known(author) or not self._has_known()


def beacon_of(header: Header) -> bytes:
    """What a header is as a beacon."""
    return header.body_hash[:BEACON_BYTES]


def follow(author: str, beacon: bytes, tasks: Sequence[TaskRef]) -> bool:
    """Whether most of the tasks follow from the beacon; some may have waited for rounds."""
    starts = {task.source: beacon_index(author, beacon, task.source) for task in tasks}
    near = sum((task.index - starts[task.source]) % INDEX_SPAN < MAX_AHEAD for task in tasks)
    return 2 * near > len(tasks)


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
        useful = [group for group in groups if group.has_reward_variance]
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
