"""Fetches bodies of other nodes and passes them through admission into the pool.

    poll:  wait for a header or the end of the interval ─ sweep the index where that is due, and pull
    pull:  while the pool holds fewer fresh groups than wanted: pick candidates ─ fetch ─ admit_body ─ pool.add

Pulls run side by side, so a peer that stays silent costs one place for a while and delays no other body. A node pulls what it is
going to train on, not everything on offer, so the cost per node stays the same as the swarm grows.

`BodyFetcher` asks the author for a body, then a few other peers that may have read it. `SweepPace` reads the index as seldom as
gossip allows:

gossip is silent, or there is none:  every poll; up to every MAX_LONELY_PAUSE_S where the index says nothing new either
gossip is alive:                     once per window; then every two, four and at last eight windows where that finds nothing
a sweep finds what gossip missed, or gossip falls silent:  back to the start
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable, Collection

from swarm.admission.admission import Admission
from swarm.config import NetworkSection, SharingSection
from swarm.errors import RequestError
from swarm.limits.peer_backoff import BUSY_PAUSE_S, UNREACHED_PAUSE_S
from swarm.network.context import NodeContext
from swarm.network.requests.blob_protocol import sha256
from swarm.network.requests.server import transfer_timeout_s
from swarm.network.transport import ValidationResult
from swarm.observability.tracing import traced
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.body_store import BODY_PROTOCOL
from swarm.sharing.inbox import Inbox
from swarm.sharing.index import WINDOW_S, experience_key, experience_topic
from swarm.sharing.parts import SharingParts
from swarm.sharing.usefulness import READ_AHEAD_BATCHES
from swarm.types import Header

logger = logging.getLogger(__name__)


_MAX_OTHER_HOLDERS = 2


class TryLater(InvalidRecord):
    """The author is busy, or cannot be reached yet."""

    def __init__(self, pause_s: float, detail: str) -> None:
        super().__init__(Rejection.UNAVAILABLE, detail)
        self.pause_s = pause_s


_PAUSES_S = {"busy": BUSY_PAUSE_S, "unreachable": UNREACHED_PAUSE_S}
"""Pause before another try, by the reason of the failure. After any other failure there is no second try."""


class BodyFetcher:
    """Fetches the bytes of bodies for one node. It runs on the node's loop."""

    def __init__(
        self, network: NetworkSection, context: NodeContext, rng: random.Random, *, answered: Callable[[str], None]
    ) -> None:
        """`answered`: called with every author that handed out a body of its own."""
        self._network = network
        self._transport = context.transport
        self._rng = rng
        self._answered = answered

    @traced("pull", lambda body, _, header: {"author": header.author, "bytes": len(body)})
    async def fetch(self, header: Header) -> bytes:
        """Fetch the body from its author, or else from a few other peers that may have read it. Raises as `_ask`."""
        try:
            body = await self._ask(header.author, header)
            self._answered(header.author)
            return body
        except InvalidRecord:
            for holder in await self._other_holders(header.author):
                with contextlib.suppress(InvalidRecord):
                    return await self._ask(holder, header)
            raise

    async def _ask(self, holder: str, header: Header) -> bytes:
        """Raises InvalidRecord with UNAVAILABLE or WRONG_HASH, and TryLater where another try may succeed."""
        try:
            # In one piece, as a body may not be longer than that: `transfer` has nothing to add.
            body = await self._transport.request(
                holder,
                BODY_PROTOCOL,
                header.body_hash,
                max_response_bytes=header.body_bytes,
                deadline_s=transfer_timeout_s(self._network.request_timeout_s, header.body_bytes),
            )
        except RequestError as error:
            if error.reason in _PAUSES_S:
                raise TryLater(_PAUSES_S[error.reason], f"at {holder}: {error}") from None
            raise InvalidRecord(Rejection.UNAVAILABLE, f"at {holder}: {error}") from None
        if await sha256(body) != header.body_hash:
            raise InvalidRecord(Rejection.WRONG_HASH, f"at {holder}")
        return body

    async def _other_holders(self, author: str) -> list[str]:
        own = self._transport.peer_id
        others = [peer_id for peer_id in await self._transport.connected_peers() if peer_id not in (author, own)]
        return self._rng.sample(others, min(len(others), _MAX_OTHER_HOLDERS))


GOSSIP_IS_ALIVE_FOR_S = 30.0
"""Gossip counts as alive this long after a gossiped header."""
MAX_LONELY_PAUSE_S = 5.0
"""Longest pause between two sweeps without gossip: an idle swarm then costs next to nothing."""
MAX_DOUBLINGS = 3
_FRUITLESS_BEFORE_LONGER = 2


class SweepPace:
    """Decides when one reader sweeps the index. It runs on the node's loop."""

    def __init__(self, poll_interval_s: float, clock: Callable[[], float]) -> None:
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self._lonely_pause_s = poll_interval_s
        self._num_fruitless = 0  # sweeps in a row, while gossip was alive
        self._gossip_at = -math.inf
        self.swept_at = -math.inf

    @property
    def gossip_is_alive(self) -> bool:
        return self._clock() - self._gossip_at < GOSSIP_IS_ALIVE_FOR_S

    @property
    def interval_s(self) -> float:
        if not self.gossip_is_alive:
            return self._lonely_pause_s
        return WINDOW_S * 2.0 ** min(max(0, self._num_fruitless + 1 - _FRUITLESS_BEFORE_LONGER), MAX_DOUBLINGS)

    @property
    def is_due(self) -> bool:
        return self._clock() - self.swept_at >= self.interval_s

    def heard(self) -> None:
        """Note that a header came by gossip."""
        if not self.gossip_is_alive:
            self._num_fruitless = 0
        self._gossip_at = self._clock()

    def swept(self, at: float, num_new: int) -> None:
        """Note that a sweep which began `at` brought `num_new` headers that gossip had not."""
        self.swept_at = at
        self._num_fruitless = 0 if num_new or not self.gossip_is_alive else self._num_fruitless + 1
        longer_s = min(2 * self._lonely_pause_s, max(MAX_LONELY_PAUSE_S, self._poll_interval_s))
        self._lonely_pause_s = self._poll_interval_s if num_new else longer_s

    def settle(self, swept_at: float) -> None:
        """Begin as after an hour in which gossip brought everything, the last sweep at `swept_at`."""
        self._gossip_at, self.swept_at = self._clock(), swept_at
        self._num_fruitless = _FRUITLESS_BEFORE_LONGER + MAX_DOUBLINGS

    def start_anew(self) -> None:
        """Sweep at once: the node has moved to another shard."""
        self.swept_at = -math.inf
        self._num_fruitless = 0


_MAX_PULLS_AT_ONCE = 4
_MAX_WINDOWS_BACK = 8
"""Further windows that a sweep reads where the last two show that gossip lost something since the sweep before."""


class Reader:
    """Keeps the pool supplied with fresh groups of other nodes."""

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
        context, tracker = parts.context, parts.tracker
        self._sharing = sharing
        self._network = network
        self._parts = parts
        self._swarm_id = context.swarm_id
        self._transport = context.transport
        self._tracker = tracker
        self._totals = parts.totals
        self._admission = admission
        self._pool = pool
        self._topic: str | None = None
        self._being_checked: set[Header] = set()
        """Headers whose bodies are there; their checks go on in a thread, whatever becomes of the task that waits for them."""
        self.pace = SweepPace(network.poll_interval_s, context.clock)
        self._inbox = Inbox(sharing, context, parts.totals, admission=admission, pool=pool, tracker=tracker, rng=rng)
        self._fetcher = BodyFetcher(network, context, rng, answered=self._inbox.answered)

    async def poll(self) -> None:
        """Wait for something to do, at most one poll interval, and do it."""
        self._follow_shard()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._network.poll_interval_s):
                await self._inbox.arrived.wait()
        await self._sweep_and_pull()

    def _follow_shard(self) -> None:
        """Listen in the topic of the own shard, which changes from epoch to epoch."""
        shard = self._parts.directory.shard
        topic = experience_topic(self._swarm_id, shard)
        if topic == self._topic:
            return
        if self._topic is not None:
            self._transport.unsubscribe(self._topic)
        self._topic = topic
        self.pace.start_anew()

        def take(forwarder: str, record: bytes) -> ValidationResult:
            result = self._inbox.take_gossip(shard, record)
            if result is ValidationResult.ACCEPT:
                self._totals.num_headers_gossiped += 1
                self.pace.heard()
            return result

        self._transport.subscribe(topic, take)

    async def _sweep_and_pull(self) -> None:
        """Sweep and pull side by side until the pool has enough, or nothing is on offer and nothing is under way."""
        pulls: dict[asyncio.Task[None], Header] = {}
        sweep: asyncio.Task[None] | None = None
        try:
            while True:
                self._inbox.arrived.clear()
                if sweep is None and self.pace.is_due:
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
            # an error elsewhere may have ended this: the next round pulls what was not being checked yet
            for task, header in pulls.items():
                if not task.done() and header not in self._being_checked:
                    self._inbox.take_back(header)
            left = [*pulls] if sweep is None else [*pulls, sweep]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _first_news(self, under_way: Collection[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Return the tasks that ended. The set is empty if a header came in first, or nothing happened for a poll interval."""
        arrival = asyncio.create_task(self._inbox.arrived.wait())
        try:
            done, _ = await asyncio.wait(
                [*under_way, arrival], timeout=self._network.poll_interval_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            arrival.cancel()
        return {task for task in under_way if task in done}

    async def _sweep(self) -> None:
        """Read the current window of the own shard and the one before. Where these have news, read all since the last sweep."""
        now, before = self._transport.now(), self.pace.swept_at
        self.pace.swept_at = now  # also where the sweep fails
        num_new = await self._read_window(now) + await self._read_window(now - WINDOW_S)
        if num_new and not math.isinf(before):
            num_unread = min(int(now // WINDOW_S) - int(before // WINDOW_S) - 1, _MAX_WINDOWS_BACK)
            for back in range(2, 2 + num_unread):
                num_new += await self._read_window(now - back * WINDOW_S)
        self._totals.num_headers_swept += num_new
        self.pace.swept(now, num_new)

    async def _read_window(self, time_s: float) -> int:
        """Read the window at `time_s` and return how many of its headers are new."""
        entries = await self._transport.load(experience_key(self._swarm_id, self._parts.directory.shard, time_s))
        return sum(self._inbox.take_entry(subkey, record) for subkey, record in entries.items())

    def _choose(self, being_pulled: Collection[Header]) -> list[Header]:
        """Choose candidates that announce as many groups as the pool lacks, within the bound on pulls at once."""
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
        try:
            await self._fetch_and_admit(header)
        finally:
            self._being_checked.discard(header)

    async def _fetch_and_admit(self, header: Header) -> None:
        body: bytes | None = None
        try:
            body = await self._fetcher.fetch(header)
            self._being_checked.add(header)
            async with self._tracker.turns.turn(header.author):
                groups = await asyncio.to_thread(self._admission.admit_body, header, body)
        except TryLater as error:
            logger.debug("a body of %s is tried again later: %s", header.author, error)
            is_repeated = self._inbox.give_back(header, error.pause_s)
            if is_repeated:  # a single failure is not reported
                self._totals.rejected[error.reason.value] += 1
                self._tracker.stats.rejected(header.author)
            return
        except InvalidRecord as error:
            self._totals.rejected[error.reason.value] += 1
            if self._tracker.refused(header.author, error.reason):
                await asyncio.to_thread(self._pool.drop_author, header.author)
            logger.debug("rejected a body of %s: %s", header.author, error)
            await asyncio.to_thread(self._parts.observer.refused, header, error, body)
            if error.reason is Rejection.STRANGERS_BUSY:
                self._inbox.give_back(header, UNREACHED_PAUSE_S)
            elif error.reason in (Rejection.UNAVAILABLE, Rejection.WRONG_HASH, Rejection.TOO_SLOW):
                self._inbox.leave_alone(header.author)
            return
        self._totals.num_records_admitted += 1
        self._tracker.admitted(header, groups)
        self._parts.observer.admitted(groups)
        useful = [group for group in groups if self._tracker.common.is_worth_sharing(group)]
        if len(useful) < len(groups):
            self._totals.rejected[Rejection.NO_SIGNAL.value] += len(groups) - len(useful)
        self._parts.bodies.put(header.body_hash, body, header.expires_at, header.author)
        self._tracker.judged(useful, self._pool.success_level)
        # In a thread, as the disk may be slow and the compute thread may hold the pool for a moment.
        num_new = await asyncio.to_thread(
            self._pool.add, header.body_hash, header.expires_at, header.created_at, useful
        )
        self._tracker.stats.admitted(header, useful, num_new)
        self._totals.num_groups_admitted += (
            num_new  # a separate line, as `+=` around the await would use the number from before it
        )
