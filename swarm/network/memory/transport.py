"""The transport within one process, for tests and simulations: the same contract, with seeded faults.

    MemoryTransport ── message ──> MemoryNetwork (loss, delay, duplication, partition) ──> MemoryTransport

Every node holds a share of the index, as in the real one: an entry goes to the nodes nearest to its key, each of which
runs its own validator, and a reader merges their answers. Finding those nodes costs the hops of Kademlia. All waiting
uses the running loop, so a loop with virtual time makes all of it virtual.

A share has the limits of the real index (`hivemind/index_storage`), in entries instead of bytes. An author's oldest
entry makes room for its newer one. When the share is full, it refuses new entries; the real one takes room from the
author that holds most.
"""

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable

from swarm.errors import RequestError, RequestFailure
from swarm.network.index_entry import (
    MAX_ENTRIES_PER_KEY,
    MAX_LIFETIME_S,
    IndexRule,
    IndexValidator,
    Validity,
    age_rank,
    check_entry,
)
from swarm.network.memory.gossip import GossipRouter
from swarm.network.memory.network import (
    LOOKUP_REQUEST_BYTES,
    LOOKUP_RESPONSE_BYTES,
    NO_FAULTS,
    Faults,
    MemoryNetwork,
    position_of,
)
from swarm.network.requests.framing import Response, Status
from swarm.network.requests.server import RequestServer
from swarm.network.transport import Contact, GossipHandler, RequestHandler, TrafficCounter, by_place

MAX_ENTRIES_PER_AUTHOR = 1024
"""The author is the part of the subkey before the slash. An hour's entries, at 8 per window and shard, are 960."""
MAX_ENTRIES = 24_576
_SWEEP_INTERVAL_S = 30.0

Entry = tuple[bytes, Validity]
"""(value, its validity with the claimed end)."""
_Ranked = tuple[tuple[bool, tuple[float, int, bytes]], str, str]


class IndexShare:
    """One node's share of the index: entries by key and subkey, until they expire. They are already validated."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.refused: Counter[str] = Counter()
        """Entries that were refused, and those `evicted`, by reason: not_newer, key_full, author_full, full."""
        self._clock = clock
        self._entries: dict[str, dict[str, Entry]] = {}
        self._authors: dict[str, list[_Ranked]] = {}  # oldest first
        self._num_entries = 0
        self._swept_at = 0.0

    def __len__(self) -> int:
        """Return the number of entries, including expired ones that were not removed yet."""
        return self._num_entries

    def get(self, key: str) -> dict[str, Entry]:
        """Return a copy of the entries under `key`, which may have expired."""
        return dict(self._entries.get(key, {}))

    def take(self, key: str, subkey: str, value: bytes, validity: Validity) -> bool:
        """Store an entry. Returns whether it is newer than the one it replaces, and there was room."""
        self._sweep()
        entries, author = self._entries.get(key, {}), subkey.partition("/")[0]
        if subkey in entries:
            if not validity.supersedes(entries[subkey][1]):
                return self._refuse("not_newer")
        elif len(entries) >= MAX_ENTRIES_PER_KEY:
            return self._refuse("key_full")
        elif len(self._authors.get(author, ())) >= MAX_ENTRIES_PER_AUTHOR and not self._drop_older(subkey, validity):
            return self._refuse("author_full")
        elif self._num_entries >= MAX_ENTRIES:
            return self._refuse("full")
        ranks = self._authors.setdefault(author, [])
        if subkey in entries:
            ranks.remove((age_rank(subkey, entries[subkey][1]), key, subkey))
        else:
            self._num_entries += 1
        bisect.insort(ranks, (age_rank(subkey, validity), key, subkey))
        self._entries.setdefault(key, entries)[subkey] = value, validity
        return True

    def _drop_older(self, subkey: str, validity: Validity) -> bool:
        """Drop the oldest entry of an author. Returns False where the new one is not newer than that."""
        rank, key, oldest = self._authors[subkey.partition("/")[0]][0]
        if age_rank(subkey, validity) <= rank:
            return False
        del self._authors[subkey.partition("/")[0]][0], self._entries[key][oldest]
        self._num_entries -= 1
        self._refuse("evicted")
        return True

    def _sweep(self) -> None:
        """Remove expired entries at fixed intervals, which a stranger cannot influence."""
        now = self._clock()
        if now - self._swept_at < _SWEEP_INTERVAL_S:
            return
        self._swept_at = now
        live = {k: {s: entry for s, entry in v.items() if entry[1].expires_at > now} for k, v in self._entries.items()}
        self._entries = {key: entries for key, entries in live.items() if entries}
        self._authors = {
            author: alive
            for author, ranks in self._authors.items()
            if (alive := [ranked for ranked in ranks if ranked[2] in self._entries.get(ranked[1], ())])
        }
        self._num_entries = sum(map(len, self._authors.values()))

    def _refuse(self, reason: str) -> bool:
        self.refused[reason] += 1
        return False


__all__ = ["NO_FAULTS", "Faults", "MemoryNetwork", "MemoryTransport"]


class MemoryTransport:
    """See `transport.Transport`."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer_id: str,
        validator: IndexValidator | None = None,
        *,
        max_concurrent_requests: int = 64,
        request_timeout_s: float = 20.0,
    ) -> None:
        self.peer_id = peer_id
        self.traffic = TrafficCounter()
        self.position = position_of(peer_id)
        self.gossip = GossipRouter(network, peer_id, self.traffic)
        self._network = network
        self._rule = IndexRule(validator, self.now)
        self.index_share = IndexShare(self.now)
        self._tasks: set[asyncio.Task[Response]] = set()
        self._server = RequestServer(
            max_concurrent=max_concurrent_requests, timeout_s=request_timeout_s, traffic=self.traffic
        )

    async def start(self) -> None:
        self._network.enter(self)
        self.gossip.start()

    async def stop(self) -> None:
        self._network.leave(self)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def refused(self) -> Counter[str]:
        return by_place(requests=self._server.refused)

    def now(self) -> float:
        return self._network.now_of(self.peer_id)

    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self.position}/p2p/{self.peer_id}",)

    def gossip_addresses(self) -> tuple[str, ...]:
        return ()

    @property
    def hosts_index(self) -> bool:
        return True

    def meet(self, contact: Contact) -> None:
        """Do nothing: within one process a peer id is enough to reach a peer."""

    def seen_at(self, peer_id: str) -> tuple[str, ...]:
        return self._network.address_of(peer_id)

    async def connected_peers(self) -> tuple[str, ...]:
        known = self._network.known_peers(self.peer_id)
        return tuple(peer_id for peer_id in known if self._network.connected(self.peer_id, peer_id))

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        check_entry(key, subkey, value)
        expires_at = min(expires_at, self.now() + MAX_LIFETIME_S)
        replicas = await self._find_replicas(key)
        return any(
            await asyncio.gather(*(self._store_at(replica, (key, subkey, value), expires_at) for replica in replicas))
        )

    async def load(self, key: str) -> dict[str, bytes]:
        replicas = await self._find_replicas(key)
        answers = await asyncio.gather(*(self._load_from(replica, key) for replica in replicas))
        return self._rule.newest(key, ((None, sub, *copy) for copies in answers for sub, copy in copies.items()))

    async def _find_replicas(self, key: str) -> "list[MemoryTransport]":
        """Return the nodes that hold a key, after as many hops, there and back, as a lookup takes."""
        for member in self._network.lookup_path(self.peer_id):
            self.traffic.bytes_sent += LOOKUP_REQUEST_BYTES
            if await self._network.carry(self.peer_id, member.peer_id, LOOKUP_REQUEST_BYTES) is None:
                continue  # the search continues with another peer
            member.traffic.bytes_received += LOOKUP_REQUEST_BYTES
            member.traffic.bytes_sent += LOOKUP_RESPONSE_BYTES
            if await self._network.carry(member.peer_id, self.peer_id, LOOKUP_RESPONSE_BYTES) is not None:
                self.traffic.bytes_received += LOOKUP_RESPONSE_BYTES
        return self._network.replicas(key, self.peer_id)

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        self._server.serve(protocol, handler, max_request_bytes=max_request_bytes)

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        target = f"{protocol} to {peer_id}"
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._exchange(peer_id, protocol, request)
        except TimeoutError:
            raise self._failure(target, "deadline", f"no answer within {deadline_s:g} s") from None
        body = self._network.damage(response.body)
        self.traffic.bytes_sent += len(request)
        if response.status != Status.OK:
            what = f"{response.status.name.lower()}: {response.reason}"
            raise self._failure(target, response.failure, what)
        if len(body) > max_response_bytes:
            what = f"a response must be <= {max_response_bytes} bytes, got {len(body)}"
            raise self._failure(target, "oversize", what)
        self.traffic.bytes_received += len(body)
        if body != response.body:
            what = f"a response of {len(body)} bytes was damaged: its hash differs"
            raise self._failure(target, "damaged", what)
        return body

    async def _exchange(self, peer_id: str, protocol: str, request: bytes) -> Response:
        if not self._network.connected(self.peer_id, peer_id):
            raise self._failure(f"{protocol} to {peer_id}", "unreachable", "not reachable")
        num_copies = self._network.num_copies()
        server = await self._network.carry(self.peer_id, peer_id, len(request))
        if server is not None:
            for _ in range(num_copies - 1):
                server.answer_in_background(self.peer_id, protocol, request)
            response = await server.answer(self.peer_id, protocol, request)
            if await self._network.carry(peer_id, self.peer_id, len(response.body)) is not None:
                return response
        return await asyncio.get_running_loop().create_future()  # lost: nothing comes until the deadline

    async def answer(self, caller: str, protocol: str, request: bytes) -> Response:
        """Answer a request that has arrived."""
        return await self._server.answer(caller, protocol, request)

    def answer_in_background(self, caller: str, protocol: str, request: bytes) -> None:
        """Answer the second copy of a request, whose response nobody waits for."""
        task = asyncio.create_task(self.answer(caller, protocol, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Store an entry that has arrived. Returns whether it was valid and accepted."""
        validity = self._rule.judge(key, subkey, value, claimed_end=expires_at)
        return validity is not None and self.index_share.take(key, subkey, value, validity=validity)

    async def _store_at(self, replica: "MemoryTransport", entry: tuple[str, str, bytes], expires_at: float) -> bool:
        (key, subkey, value), num_copies = entry, self._network.num_copies()
        if replica is not self:
            self.traffic.bytes_sent += len(value)
        arrived = await self._network.carry(self.peer_id, replica.peer_id, len(value))
        if arrived is None:
            return False
        if arrived is not self:
            arrived.traffic.bytes_received += len(value)
        outcomes = [arrived.take(key, subkey, value, expires_at=expires_at) for _ in range(num_copies)]
        return any(outcomes)

    async def _load_from(self, replica: "MemoryTransport", key: str) -> dict[str, tuple[bytes, float]]:
        arrived = await self._network.carry(self.peer_id, replica.peer_id, len(key))
        if arrived is None:
            return {}
        entries = arrived.index_share.get(key)
        num_bytes = sum(len(subkey) + len(value) for subkey, (value, _) in entries.items())
        if arrived is not self:
            arrived.traffic.bytes_sent += num_bytes
        if await self._network.carry(replica.peer_id, self.peer_id, num_bytes) is None:
            return {}
        if arrived is not self:
            self.traffic.bytes_received += num_bytes
        return {sub: (self._network.damage(value), validity.expires_at) for sub, (value, validity) in entries.items()}

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        self.gossip.subscribe(topic, handler)

    def unsubscribe(self, topic: str) -> None:
        self.gossip.unsubscribe(topic)

    async def publish(self, topic: str, message: bytes) -> None:
        self.gossip.publish(topic, message)

    def _failure(self, target: str, reason: RequestFailure, detail: str) -> RequestError:
        self.traffic.requests_failed += 1
        return RequestError(f"request {target} failed: {detail}", reason)
