"""Candidates → pull the body → body admission → pool.

    poll:  wait for a header or the end of the interval ─ sweep the index where that is due, and pull
    pull:  while the pool holds fewer fresh groups than wanted: pick candidates ─ fetch ─ admit_body ─ pool.add

Nothing of this waits for anything else: a holder that stays silent costs a place for a while, and nobody else's body; a
header is pulled when it comes in.
A node pulls what it is going to train on, not all that is offered: cost per node stays flat as the swarm grows.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from swarm.config import NetworkSection, SharingSection
from swarm.network.transport import Transport, Verdict
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.admission import Admission
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.absences import UNREACHED_PAUSE_S
from swarm.sharing.body_fetcher import BodyFetcher, TryLater
from swarm.sharing.body_store import BodyStore
from swarm.sharing.choice import READ_AHEAD_BATCHES
from swarm.sharing.inbox import Inbox
from swarm.sharing.index import WINDOW_S, experience_key, experience_topic
from swarm.sharing.known_authors import KnownAuthors
from swarm.sharing.shard import Shard
from swarm.sharing.sweep_pace import SweepPace
from swarm.types import Header, RolloutGroup

logger = logging.getLogger(__name__)

_MAX_PULLS_AT_ONCE = 4
_MAX_WINDOWS_BACK = 8
"""That a sweep reads beyond the last two, where those say that gossip has lost something since the sweep before."""


class Reader:
    """Keeps the pool supplied with fresh groups of other nodes."""

    def __init__(
        self,
        sharing: SharingSection,
        network: NetworkSection,
        swarm_id: str,
        transport: Transport,
        admission: Admission,
        pool: ExperiencePool,
        bodies: BodyStore,
        rng: random.Random,
        shard: Callable[[], Shard],
        authors: KnownAuthors,
    ) -> None:
        """`shard`: the one that this node shares in at this moment. `authors`: told of every header and body."""
        self._sharing = sharing
        self._network = network
        self._swarm_id = swarm_id
        self._transport = transport
        self._admission = admission
        self._pool = pool
        self._bodies = bodies
        self._shard = shard
        self._topic: str | None = None
        self._pace = SweepPace(network.poll_interval_s, transport.now)
        self._authors = authors
        self._inbox = Inbox(sharing, swarm_id, transport.peer_id, admission, pool, transport.now, rng, authors)
        self._fetcher = BodyFetcher(network, transport, rng, self._inbox.answered)
        self._refused: Counter[str] = Counter()  # bodies and groups, by reason
        self.num_headers_gossiped = 0
        """Headers admitted that gossip brought first, ..."""
        self.num_headers_swept = 0
        """... and those that it did not."""
        self.num_records_admitted = 0
        self.num_groups_admitted = 0
        self.on_admitted: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None
        """Shown all groups of every body that was admitted, ..."""
        self.on_refused: Callable[[Header, InvalidRecord, bytes | None], None] = lambda header, error, body: None
        """... and every body that was turned away, None where none came; in a thread, as it may open it."""

    @property
    def rejected(self) -> Counter[str]:
        """Records, bodies and groups turned away, by reason. Safe from any thread: only copies are iterated."""
        return Counter(self._inbox.rejected) + Counter(self._refused)

    def num_authors_heard(self) -> int:
        """Authors of whom a header was admitted of late."""
        return self._inbox.num_authors_heard()

    async def poll(self) -> None:
        """Wait for something to do, at most one poll interval, and do it."""
        self._follow_shard()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._network.poll_interval_s):
                await self._inbox.arrived.wait()
        await self._sweep_and_pull()

    def _follow_shard(self) -> None:
        """Listen in the topic of the own shard, which changes from epoch to epoch."""
        shard = self._shard()
        topic = experience_topic(self._swarm_id, shard)
        if topic == self._topic:
            return
        if self._topic is not None:
            self._transport.unsubscribe(self._topic)
        self._topic = topic
        self._pace.start_anew()

        def take(forwarder: str, record: bytes) -> Verdict:
            verdict = self._inbox.take_gossip(shard, record)
            if verdict is Verdict.ACCEPT:
                self.num_headers_gossiped += 1
                self._pace.heard()
            return verdict

        self._transport.subscribe(topic, take)

    async def _sweep_and_pull(self) -> None:
        """Side by side, until the pool has enough or nobody offers more, and nothing is under way."""
        pulls: dict[asyncio.Task[None], Header] = {}
        sweep: asyncio.Task[None] | None = None
        try:
            while True:
                self._inbox.arrived.clear()
                if sweep is None and self._pace.is_due:
                    sweep = asyncio.create_task(self._sweep())
                for header in self._choose(pulls.values()):
                    pulls[asyncio.create_task(self._pull(header))] = header
                under_way = {*pulls} if sweep is None else {*pulls, sweep}
                if not under_way:
                    return
                for task in await self._first_news(under_way):
                    pulls.pop(task, None)
                    sweep = None if task is sweep else sweep
                    task.result()
                self._follow_shard()
        finally:
            left = [*pulls] if sweep is None else [*pulls, sweep]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _first_news(self, under_way: Collection[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """The tasks that ended; none where a header came in first, or nothing happened for a poll interval."""
        arrival = asyncio.create_task(self._inbox.arrived.wait())
        try:
            done, _ = await asyncio.wait(
                [*under_way, arrival], timeout=self._network.poll_interval_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            arrival.cancel()
        return {task for task in under_way if task in done}

    async def _sweep(self) -> None:
        """Read the current window of the own shard and the one before; those since the last sweep where these have news."""
        now, before = self._transport.now(), self._pace.swept_at
        self._pace.swept_at = now  # whatever comes of it
        num_new = await self._read_window(now) + await self._read_window(now - WINDOW_S)
        if num_new and not math.isinf(before):
            num_unread = min(int(now // WINDOW_S) - int(before // WINDOW_S) - 1, _MAX_WINDOWS_BACK)
            for back in range(2, 2 + num_unread):
                num_new += await self._read_window(now - back * WINDOW_S)
        self.num_headers_swept += num_new
        self._pace.swept(now, num_new)

    async def _read_window(self, time_s: float) -> int:
        """How many headers of the window at `time_s` are news."""
        entries = await self._transport.load(experience_key(self._swarm_id, self._shard(), time_s))
        return sum(self._inbox.take_entry(subkey, record) for subkey, record in entries.items())

    def _choose(self, being_pulled: Collection[Header]) -> list[Header]:
        """Candidates that announce as many groups as are missing, but no more at once than a line carries well."""
        chosen: list[Header] = []
        missing = READ_AHEAD_BATCHES * self._sharing.swarm_groups - self._pool.num_fresh()
        missing -= sum(len(header.groups) for header in being_pulled)
        under_way = [*being_pulled]
        while missing > 0 and len(under_way) < _MAX_PULLS_AT_ONCE and (header := self._inbox.pick(under_way)):
            chosen.append(header)
            under_way.append(header)
            missing -= len(header.groups)
        return chosen

    async def _pull(self, header: Header) -> None:
        """Fetch and admit one body."""
        body: bytes | None = None
        try:
            body = await self._fetcher.fetch(header)
            async with self._authors.turns.turn(header.author):
                groups = await asyncio.to_thread(self._admission.admit_body, header, body)
        except TryLater as error:
            logger.debug("put off a body of %s: %s", header.author, error)
            is_repeated = self._inbox.give_back(header, error.pause_s)
            if is_repeated:  # once is nothing to tell
                self._refused[error.reason.value] += 1
                self._authors.acquaintances.rejected(header.author)
            return
        except InvalidRecord as error:
            self._refused[error.reason.value] += 1
            if self._authors.refused(header.author, error.reason):
                await asyncio.to_thread(self._pool.drop_author, header.author)
            logger.debug("rejected a body of %s: %s", header.author, error)
            await asyncio.to_thread(self.on_refused, header, error, body)
            if error.reason is Rejection.STRANGERS_BUSY:
                self._inbox.give_back(header, UNREACHED_PAUSE_S)
            elif error.reason in (Rejection.UNAVAILABLE, Rejection.WRONG_HASH, Rejection.TOO_SLOW):
                self._inbox.leave_alone(header.author)
            return
        self.num_records_admitted += 1
        self._authors.admitted(header, groups)
        self.on_admitted(groups)
        useful = [group for group in groups if group.has_signal]
        if len(useful) < len(groups):
            self._refused[Rejection.NO_SIGNAL.value] += len(groups) - len(useful)
        self._bodies.put(header.body_hash, body, header.expires_at, header.author)
        self._authors.judged(useful, self._pool.success_level)
        # In a thread, as the disk may be slow and the compute thread may hold the pool for a moment.
        num_new = await asyncio.to_thread(
            self._pool.add, header.body_hash, header.expires_at, header.created_at, useful
        )
        self._authors.acquaintances.admitted(header, useful, num_new)
        self.num_groups_admitted += num_new  # not in one line: that would add to the number of before the wait
