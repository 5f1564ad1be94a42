"""The network between the nodes of one process: who is there, who knows whom, and what happens to messages on the way.

    MemoryTransport ── post / carry ──> MemoryNetwork (loss, delay, duplication, partition, freeze) ──> MemoryTransport

What one node knows of others is bounded, as in a real swarm: a sample of MAX_KNOWN_PEERS, and those that its gossip
router found in a topic. Nothing here costs more than O(log N) per message. One timer of the event loop serves all
events: with thousands of nodes a hundred thousand messages are on their way, and a heap of tuples takes a tenth of the
time of that many asyncio timers.
"""

import asyncio
import bisect
import hashlib
import heapq
import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm.errors import NetworkError

if TYPE_CHECKING:
    from swarm.network.memory.lines import MemoryLine
    from swarm.network.memory.transport import MemoryTransport


_TICK_S = 1e-3
"""Events happen at multiples of this time, so in a large swarm many happen in one turn of the loop."""
_MAX_EVENTS_AT_ONCE = 1000
"""After this many events the loop's tasks get a turn, even if the clock may not move."""


class Calendar:
    """Runs actions at their time. Events of one time happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._events)

    def schedule(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule `action`, which must not raise. Events of one loop are dropped when another loop schedules."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._timer = loop, None
            self._events.clear()
        when = math.ceil((loop.time() + delay_s) / _TICK_S - 1e-6) * _TICK_S
        heapq.heappush(self._events, (when, next(self._numbers), action, arguments))
        if self._timer is None or when < self._timer.when():
            self._set_timer(loop)

    async def sleep(self, duration_s: float) -> None:
        """Sleep like `asyncio.sleep`, at the cost of one event."""
        future = asyncio.get_running_loop().create_future()
        self.schedule(duration_s, _wake, future)
        await future

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._events[0][0], self._happen, loop)

    def _happen(self, loop: asyncio.AbstractEventLoop) -> None:
        events, now, num_done = self._events, loop.time() + 1e-9, 0
        while events and events[0][0] <= now and num_done < _MAX_EVENTS_AT_ONCE:
            _, _, action, arguments = heapq.heappop(events)
            action(*arguments)
            num_done += 1
        self._timer = None
        if events:
            self._set_timer(loop)


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():  # otherwise the sleeper was cancelled
        future.set_result(None)


NUM_REPLICAS = 5
MAX_KNOWN_PEERS = 64
"""A node of a larger swarm knows a random sample of it, as with routing tables and connection limits."""
BUCKET_SIZE = 20
"""Peers in one answer of a lookup, as in hivemind's DHT: among so few no further hop is needed."""
LOOKUP_REQUEST_BYTES = 60
_NAME_BYTES = 60

Observer = Callable[[str, str, str, int], None]
"""(what, sender, recipient, bytes) of every message that arrives."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of messages between two nodes. A request is two messages, as is a question to a replica."""

    loss: float = 0.0
    """Probability that a message disappears. A lost request or response ends in RequestError at the deadline."""
    duplication: float = 0.0
    """Probability that a request, a stored entry or a gossip message arrives twice."""
    corruption: float = 0.0
    """Probability that a byte of a response, a returned index value or a gossip message is changed."""
    delay_s: tuple[float, float] = (0.0, 0.0)
    """Range of the time that a message takes, uniform."""


NO_FAULTS = Faults()


class MemoryNetwork:
    """The network of all nodes. It is deterministic for one seed, one loop and one order of calls."""

    def __init__(self, rng: random.Random, clock: Callable[[], float], faults: Faults = NO_FAULTS) -> None:
        """`clock` gives swarm time in seconds since the epoch."""
        self.clock = clock
        self.rng = rng
        self.faults = faults
        """May be replaced at any time."""
        self.observer: Observer | None = None
        self.calendar = Calendar()
        self._members: dict[str, MemoryTransport] = {}
        self._ring: list[tuple[int, str]] = []  # (position, peer id) of all members, sorted
        self._topics: dict[str, dict[str, None]] = {}
        self._known: dict[str, list[str]] = {}
        self._lines: weakref.WeakSet[MemoryLine] = weakref.WeakSet()  # the opener's ends
        self._partition: dict[str, int] = {}
        self._frozen: set[str] = set()
        self._clock_offset_s: dict[str, float] = {}
        self._uplink_bytes_per_s: dict[str, float] = {}
        self._uplink_free_at: dict[str, float] = {}

    # ---- faults caused by a test or a simulation

    def partition(self, *sides: Iterable[str]) -> None:
        """Let peers reach only those of their own side. Peers on no side form one more side."""
        self._partition = {peer_id: number for number, side in enumerate(sides) for peer_id in side}

    def heal(self) -> None:
        self._partition = {}

    def crash(self, peer_id: str) -> None:
        """End a peer as `kill -9` does: its connections break without a message. Its own calls reach nobody."""
        if peer_id in self._members:
            self.leave(self._members[peer_id])

    def freeze(self, peer_id: str) -> None:
        """Make a peer silent while it still looks connected. Its messages, in and out, are lost until `thaw`."""
        self._frozen.add(peer_id)

    def thaw(self, peer_id: str) -> None:
        self._frozen.discard(peer_id)

    def skew_clock(self, peer_id: str, offset_s: float) -> None:
        """Set a peer's clock ahead, or behind where `offset_s` is negative."""
        self._clock_offset_s[peer_id] = offset_s

    def limit_uplink(self, peer_id: str, bytes_per_s: float) -> None:
        """Let a peer send no faster than this; its messages queue up."""
        self._uplink_bytes_per_s[peer_id] = bytes_per_s

    # ---- membership

    def enter(self, member: "MemoryTransport") -> None:
        """Raises NetworkError for a peer id that is in use."""
        if member.peer_id in self._members:
            raise NetworkError(f"a peer id must be used once, got {member.peer_id} again; use another identity")
        self._members[member.peer_id] = member
        bisect.insort(self._ring, (member.position, member.peer_id))

    def leave(self, member: "MemoryTransport") -> None:
        if self._members.get(member.peer_id) is not member:
            return
        del self._members[member.peer_id]
        del self._ring[bisect.bisect_left(self._ring, (member.position, member.peer_id))]
        for topic in member.gossip.topics():
            self.leave_topic(topic, member.peer_id)
        for line in list(self._lines):
            if member.peer_id in line.ends:
                line.cut()
        member.gossip.stop()

    def hold(self, line: "MemoryLine") -> None:
        """Cut this line when one of its ends leaves."""
        self._lines.add(line)

    def members(self) -> tuple[str, ...]:
        return tuple(self._members)

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._members

    def __len__(self) -> int:
        return len(self._members)

    def address_of(self, peer_id: str) -> tuple[str, ...]:
        """Return where others see a member. Each member has an address of its own."""
        member = self._members.get(peer_id)
        return () if member is None else (f"/memory/{member.position}",)

    def now_of(self, peer_id: str) -> float:
        """Return the swarm time by this peer's clock."""
        return self.clock() + self._clock_offset_s.get(peer_id, 0.0)

    def connected(self, one: str, other: str) -> bool:
        """Return whether both peers are up and on one side of a partition."""
        both_up = one in self._members and other in self._members
        return both_up and (not self._partition or self._partition.get(one, -1) == self._partition.get(other, -1))

    def known_peers(self, peer_id: str) -> list[str]:
        """Return the peers that this one knows: all of a small swarm, else a sample that is renewed as they leave."""
        if len(self._members) <= MAX_KNOWN_PEERS + 1:
            return [other for other in self._members if other != peer_id]
        known = [other for other in self._known.get(peer_id, ()) if other in self._members]
        if len(known) <= MAX_KNOWN_PEERS // 2:
            drawn = (other for _, other in self.rng.sample(self._ring, MAX_KNOWN_PEERS))
            known = [other for other in drawn if other != peer_id]
            self._known[peer_id] = known
        return known

    # ---- the index: where keys are stored, and what finding them costs

    def nearest(self, key: str, seen_by: str, count: int) -> "list[MemoryTransport]":
        """Return those nodes nearest to `key` that `seen_by` can reach, nearest first. The first NUM_REPLICAS hold it."""
        nearest = self._by_distance(position_of(key), 0, len(self._ring), 0, 160)
        reachable = (self._members[peer_id] for peer_id in nearest if self.connected(seen_by, peer_id))
        return list(itertools.islice(reachable, count))

    def search_name(self, key: str) -> str:
        """Return the name of what a search for `key` finds: in a small swarm, everybody, whatever the key is."""
        return key if len(self._ring) > BUCKET_SIZE else ""

    @property
    def lookup_response_bytes(self) -> int:
        return _NAME_BYTES * min(BUCKET_SIZE, len(self._ring))

    def _by_distance(self, target: int, start: int, end: int, prefix: int, num_bits: int) -> Iterator[str]:
        """Yield members of ring[start:end], which share all but `num_bits` bits with `prefix`, by XOR distance to
        `target`.
        """
        if end - start <= 1:
            yield from (peer_id for _, peer_id in self._ring[start:end])
            return
        bit = 1 << (num_bits - 1)
        middle = bisect.bisect_left(self._ring, (prefix | bit, ""), start, end)
        zeros = self._by_distance(target, start, middle, prefix, num_bits - 1)
        ones = self._by_distance(target, middle, end, prefix | bit, num_bits - 1)
        yield from itertools.chain(ones, zeros) if target & bit else itertools.chain(zeros, ones)

    def lookup_path(self, peer_id: str) -> "list[MemoryTransport]":
        """Return the nodes that a lookup asks one after the other: about log2(N / bucket size).

        Kademlia would ask the nodes on the way. The cost is the same for any nodes, so these are random.
        """
        num_hops = max(0, math.ceil(math.log2(max(1, len(self._ring)) / BUCKET_SIZE)))
        drawn = (self._members[self.rng.choice(self._ring)[1]] for _ in range(num_hops))
        return [member for member in drawn if self.connected(peer_id, member.peer_id)]

    # ---- topics

    def join_topic(self, topic: str, peer_id: str) -> None:
        self._topics.setdefault(topic, {})[peer_id] = None

    def leave_topic(self, topic: str, peer_id: str) -> None:
        members = self._topics.get(topic, {})
        members.pop(peer_id, None)
        if not members:
            self._topics.pop(topic, None)

    def topic_size(self, topic: str) -> int:
        return len(self._topics.get(topic, ()))

    def find_in_topic(self, topic: str, seen_by: str, count: int) -> list[str]:
        """Return a random sample, of at most `count`, of a topic's members that `seen_by` can reach."""
        members = list(self._topics.get(topic, ()))
        sample = self.rng.sample(members, min(len(members), count + 1))
        return [peer_id for peer_id in sample if peer_id != seen_by and self.connected(seen_by, peer_id)][:count]

    # ---- messages

    async def carry(self, sender: str, recipient: str, num_bytes: int = 0) -> "MemoryTransport | None":
        """Carry one message. Returns the recipient after the delay, or None where the message does not arrive."""
        if sender == recipient:
            return self._members.get(recipient)
        is_lost = self.rng.random() < self.faults.loss
        delay_s = self._delay_s(sender, num_bytes)
        if delay_s > 0:
            await self.calendar.sleep(delay_s)
        if is_lost or not self._passes(sender, recipient):
            return None
        if self.observer is not None:
            self.observer("carry", sender, recipient, num_bytes)
        return self._members.get(recipient)

    def post(
        self,
        sender: str,
        recipient: str,
        num_bytes: int,
        action: Callable[..., None],
        *arguments: Any,
        is_lossless: bool = False,
    ) -> None:
        """Send without waiting: calls `action(recipient's gossip router, sender, *arguments)` where and when it
        arrives.
        """
        if not is_lossless and self.faults.loss and self.rng.random() < self.faults.loss:
            return
        for _ in range(1 if is_lossless else self.num_copies()):
            delay_s = self._delay_s(sender, num_bytes)
            self.calendar.schedule(delay_s, self._arrive, sender, recipient, num_bytes, action, arguments)

    def _arrive(
        self, sender: str, recipient: str, num_bytes: int, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if self._passes(sender, recipient):
            if self.observer is not None:
                self.observer(action.__name__, sender, recipient, num_bytes)
            action(self._members[recipient].gossip, sender, *arguments)

    def _passes(self, sender: str, recipient: str) -> bool:
        is_silent = bool(self._frozen) and (sender in self._frozen or recipient in self._frozen)
        return not is_silent and self.connected(sender, recipient)

    def _delay_s(self, sender: str, num_bytes: int) -> float:
        least, most = self.faults.delay_s
        delay_s = least + (most - least) * self.rng.random() if most else 0.0
        bytes_per_s = self._uplink_bytes_per_s.get(sender) if self._uplink_bytes_per_s else None
        if bytes_per_s is None:
            return delay_s
        now = self.clock()
        self._uplink_free_at[sender] = max(now, self._uplink_free_at.get(sender, now)) + num_bytes / bytes_per_s
        return delay_s + self._uplink_free_at[sender] - now

    def num_copies(self) -> int:
        """Draw how often the next message arrives, if it does."""
        return 2 if self.faults.duplication and self.rng.random() < self.faults.duplication else 1

    def damage(self, data: bytes) -> bytes:
        """Return `data`, with one byte changed at the probability of corruption."""
        if not data or not self.faults.corruption or self.rng.random() >= self.faults.corruption:
            return data
        position = self.rng.randrange(len(data))
        return data[:position] + bytes([data[position] ^ self.rng.randint(1, 255)]) + data[position + 1 :]


def position_of(name: str) -> int:
    """Return the place of a peer or a key in the 160-bit space of the index."""
    return int.from_bytes(hashlib.sha1(name.encode(), usedforsecurity=False).digest(), "big")
