"""The transport within one process, for tests and simulations: the same contract, with seeded faults.

    MemoryTransport ── message ──> MemoryNetwork (loss, delay, duplication, partition) ──> MemoryTransport

Every node holds a share of the index, as in the real one: an entry goes to the nodes nearest to its key, each of which
runs its own validator, and a reader merges their answers. Finding those nodes costs the hops of Kademlia, and then a
question to everybody near the key. All waiting uses the running loop, so a loop with virtual time makes all of it virtual.

As in the real one, a node that has found the nodes of a key stores and reads entries there for a while without another
search, and in a small swarm whoever has searched once knows everybody.

A share (`peer_index.IndexShare`) has the limits of the real index (`hivemind/index_storage`), in entries instead of
bytes.
"""

import asyncio
from collections import Counter

from swarm.errors import RequestError, RequestFailure
from swarm.limits.bounded_maps import ExpiringKeys
from swarm.network.index_entry import (
    MAX_LIFETIME_S,
    NUM_HOSTS_READ,
    PLACES_S,
    IndexRule,
    IndexValidator,
    check_entry,
    is_enough,
)
from swarm.network.memory.gossip import GossipRouter
from swarm.network.memory.lines import MemoryLine
from swarm.network.memory.network import (
    BUCKET_SIZE,
    LOOKUP_REQUEST_BYTES,
    NO_FAULTS,
    NUM_REPLICAS,
    Faults,
    MemoryNetwork,
    position_of,
)
from swarm.network.peer_index import IndexShare
from swarm.network.requests.framing import Response, Status
from swarm.network.requests.server import RequestServer
from swarm.network.transport import Contact, GossipHandler, Line, LineHandler, RequestHandler, TrafficCounter, by_place

__all__ = ["NO_FAULTS", "Faults", "MemoryNetwork", "MemoryTransport"]

_MAX_KNOWN_KEYS = 256
_Copies = dict[str, tuple[bytes, float]]
"""{subkey: (value, claimed end)}, from one replica."""


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
        self._found = ExpiringKeys[str](self.now, _MAX_KNOWN_KEYS)
        """What searches have found a short time ago, as the network names it."""
        self._rule = IndexRule(validator, self.now)
        self.index_share = IndexShare(self.now)
        self._tasks: set[asyncio.Task[Response]] = set()
        self._lines: set[asyncio.Task[None]] = set()  # each serves a line that a peer opened
        self._server = RequestServer(
            max_concurrent=max_concurrent_requests, timeout_s=request_timeout_s, traffic=self.traffic
        )

    async def start(self) -> None:
        self._network.enter(self)
        self.gossip.start()

    async def stop(self) -> None:
        self._network.leave(self)
        tasks = [*self._tasks, *self._lines]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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

    def advice(self) -> tuple[str, ...]:
        return ()

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
        if not self._is_found(key):
            await self._search(key)
        replicas = self._network.nearest(key, self.peer_id, NUM_REPLICAS)
        return any(
            await asyncio.gather(*(self._store_at(replica, (key, subkey, value), expires_at) for replica in replicas))
        )

    async def load(self, key: str) -> dict[str, bytes]:
        replicas = self._network.nearest(key, self.peer_id, NUM_REPLICAS)
        if self._is_found(key):
            hosts = self._network.rng.sample(replicas, len(replicas))
            hosts.sort(key=lambda host: host is not self)
            answers = await self._load_from(hosts[:NUM_HOSTS_READ], key)
            entries = self._newest(key, answers)
            if is_enough([copies if copies is None else len(copies) for copies in answers], len(entries)):
                return entries
        _, answers = await asyncio.gather(self._search(key), self._load_from(replicas, key))
        return self._newest(key, answers)

    def _newest(self, key: str, answers: "list[_Copies | None]") -> dict[str, bytes]:
        return self._rule.newest_at_once(
            key, ((None, sub, *copy) for copies in answers if copies for sub, copy in copies.items())
        )

    def _is_found(self, key: str) -> bool:
        return self._network.search_name(key) in self._found

    async def _search(self, key: str) -> None:
        """Wait as long as a search for the nodes near a key takes, and count its bytes."""
        for member in self._network.lookup_path(self.peer_id):
            await self._ask_for_names(member)
        near = self._network.nearest(key, self.peer_id, BUCKET_SIZE)
        await asyncio.gather(*(self._ask_for_names(member) for member in near if member is not self))
        self._found.add(self._network.search_name(key), self.now() + PLACES_S)

    async def _ask_for_names(self, member: "MemoryTransport") -> None:
        self.traffic.bytes_sent += LOOKUP_REQUEST_BYTES
        if await self._network.carry(self.peer_id, member.peer_id, LOOKUP_REQUEST_BYTES) is None:
            return  # the search continues with another peer
        num_bytes = self._network.lookup_response_bytes
        member.traffic.bytes_received += LOOKUP_REQUEST_BYTES
        member.traffic.bytes_sent += num_bytes
        if await self._network.carry(member.peer_id, self.peer_id, num_bytes) is not None:
            self.traffic.bytes_received += num_bytes

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        self._server.serve(protocol, handler, max_request_bytes=max_request_bytes)

    def serve_lines(self, protocol: str, handler: LineHandler) -> None:
        self._server.serve_lines(protocol, handler)

    async def open_line(self, peer_id: str, protocol: str, *, deadline_s: float) -> Line:
        target = f"{protocol} to {peer_id}"
        try:
            async with asyncio.timeout(deadline_s):
                answerer = None
                while answerer is None:
                    if not self._network.connected(self.peer_id, peer_id):
                        raise self._failure(target, "unreachable", "not reachable")
                    answerer = await self._network.carry(self.peer_id, peer_id)
                    if answerer is None:  # the first packet was lost
                        await self._network.calendar.sleep(1.0)
        except TimeoutError:
            raise self._failure(target, "deadline", f"no answer within {deadline_s:g} s") from None
        if protocol not in answerer._server.protocols:
            raise self._failure(target, "unreachable", "this protocol is not served there")
        near, far = MemoryLine.pair(self._network, self.peer_id, peer_id, (self.traffic, answerer.traffic))
        answerer.take_line(protocol, far)
        self._network.hold(near)
        return near

    def take_line(self, protocol: str, line: Line) -> None:
        """Serve a line that a peer has opened."""
        task = asyncio.create_task(self._server.answer_line(protocol, line))
        self._lines.add(task)
        task.add_done_callback(self._lines.discard)

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

    async def _load_from(self, replicas: "list[MemoryTransport]", key: str) -> "list[_Copies | None]":
        return await asyncio.gather(*(self._load_copies(replica, key) for replica in replicas))

    async def _load_copies(self, replica: "MemoryTransport", key: str) -> "_Copies | None":
        """Return what a replica holds; None where no answer comes."""
        arrived = await self._network.carry(self.peer_id, replica.peer_id, len(key))
        if arrived is None:
            return None
        entries = arrived.index_share.get(key)
        num_bytes = sum(len(subkey) + len(value) for subkey, (value, _) in entries.items())
        if arrived is not self:
            arrived.traffic.bytes_sent += num_bytes
        if await self._network.carry(replica.peer_id, self.peer_id, num_bytes) is None:
            return None
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
