"""The transport inside one process, for tests and simulations: same contract, faults from a seed instead of from life.

    MemoryTransport ── message ──> MemoryNetwork (loss, delay, duplication, partition) ──> MemoryTransport

Every node keeps a share of the index, as in the real one: an entry goes to the nodes nearest to its key, each of which
runs its own validator, and a reader merges what those answer. Waiting is done by the running loop, so that a loop with
virtual time makes all of it virtual.
"""

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.errors import NetworkError, RequestError
from swarm.network.framing import Response, Status
from swarm.network.index_entry import MAX_ENTRIES_PER_KEY, MAX_LIFETIME_S, check_entry, is_live
from swarm.network.request_server import RequestServer
from swarm.network.transport import IndexValidator, RequestHandler, TrafficCounter

NUM_REPLICAS = 5


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens to messages between two nodes. A request is two messages, as is a question to a replica."""

    loss: float = 0.0
    """Probability that a message disappears; a lost request or response ends in RequestError at the deadline."""
    duplication: float = 0.0
    """Probability that a request or a stored entry arrives twice."""
    corruption: float = 0.0
    """Probability that a byte of a response or of a returned index value is changed."""
    delay_s: tuple[float, float] = (0.0, 0.0)
    """Range of the time a message takes, uniform."""


class MemoryNetwork:
    """The air between nodes. Deterministic for one seed, one loop and one order of calls."""

    def __init__(self, rng: random.Random, clock: Callable[[], float], faults: Faults | None = None) -> None:
        """`clock` gives swarm time in seconds since the epoch."""
        self.clock = clock
        self.faults = faults or Faults()
        """May be replaced at any time."""
        self._rng = rng
        self._members: dict[str, MemoryTransport] = {}
        self._partition: dict[str, int] = {}

    def partition(self, *sides: Iterable[str]) -> None:
        """Let peers reach only those of their own side; peers that are on no side form one more."""
        self._partition = {peer_id: number for number, side in enumerate(sides) for peer_id in side}

    def heal(self) -> None:
        self._partition = {}

    def connected(self, one: str, other: str) -> bool:
        """Whether both are up and no partition is between them."""
        both_up = one in self._members and other in self._members
        return both_up and self._partition.get(one, -1) == self._partition.get(other, -1)

    def members(self) -> tuple[str, ...]:
        return tuple(self._members)

    def enter(self, member: "MemoryTransport") -> None:
        """Raises NetworkError for a peer id that is in use."""
        if member.peer_id in self._members:
            raise NetworkError(f"a peer id must be used once, got {member.peer_id} again; use another identity")
        self._members[member.peer_id] = member

    def leave(self, member: "MemoryTransport") -> None:
        if self._members.get(member.peer_id) is member:
            del self._members[member.peer_id]

    def replicas(self, key: str, seen_by: str) -> "list[MemoryTransport]":
        """The nodes that hold `key`, nearest first, as far as `seen_by` can reach them."""
        target = _position(key)
        reachable = [member for peer_id, member in self._members.items() if self.connected(seen_by, peer_id)]
        return sorted(reachable, key=lambda member: member.position ^ target)[:NUM_REPLICAS]

    async def carry(self, sender: str, recipient: str) -> "MemoryTransport | None":
        """One message on its way: the recipient after the delay, or None where it does not arrive."""
        if sender != recipient:
            is_lost = self._rng.random() < self.faults.loss
            delay_s = self._rng.uniform(*self.faults.delay_s)
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            if is_lost or not self.connected(sender, recipient):
                return None
        return self._members.get(recipient)

    def num_copies(self) -> int:
        """How often the next message arrives, if it does."""
        return 2 if self._rng.random() < self.faults.duplication else 1

    def damage(self, data: bytes) -> bytes:
        """`data`, or with the probability of corruption the same with one byte changed."""
        if not data or self._rng.random() >= self.faults.corruption:
            return data
        position = self._rng.randrange(len(data))
        return data[:position] + bytes([data[position] ^ self._rng.randint(1, 255)]) + data[position + 1 :]


class MemoryTransport:
    """See `transport.Transport`."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer_id: str,
        validator: IndexValidator | None = None,
        *,
        max_connections_inbound: int = 64,
        request_timeout_s: float = 20.0,
    ) -> None:
        self.peer_id = peer_id
        self.traffic = TrafficCounter()
        self.position = _position(peer_id)
        self._network = network
        self._validator = validator
        self._entries: dict[str, dict[str, tuple[bytes, float]]] = {}
        self._tasks: set[asyncio.Task[Response]] = set()
        self._server = RequestServer(
            max_concurrent=max_connections_inbound, timeout_s=request_timeout_s, traffic=self.traffic
        )

    async def start(self) -> None:
        self._network.enter(self)

    async def stop(self) -> None:
        self._network.leave(self)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def now(self) -> float:
        return self._network.clock()

    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self.position}/p2p/{self.peer_id}",)

    async def connected_peers(self) -> tuple[str, ...]:
        others = (peer_id for peer_id in self._network.members() if peer_id != self.peer_id)
        return tuple(peer_id for peer_id in others if self._network.connected(self.peer_id, peer_id))

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        check_entry(key, subkey, value)
        self.traffic.bytes_sent += len(value)
        expires_at = min(expires_at, self.now() + MAX_LIFETIME_S)
        replicas = self._network.replicas(key, self.peer_id)
        return any(
            await asyncio.gather(*(self._store_at(replica, key, subkey, value, expires_at) for replica in replicas))
        )

    async def load(self, key: str) -> dict[str, bytes]:
        replicas = self._network.replicas(key, self.peer_id)
        newest: dict[str, tuple[bytes, float]] = {}
        for entries in await asyncio.gather(*(self._load_from(replica, key) for replica in replicas)):
            for subkey, (value, expires_at) in entries.items():
                is_newer = subkey not in newest or newest[subkey][1] < expires_at
                if is_newer and self._is_valid(key, subkey, value, expires_at):
                    newest[subkey] = value, expires_at
        self.traffic.bytes_received += sum(len(value) for value, _ in newest.values())
        return {subkey: value for subkey, (value, _) in newest.items()}

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        self._server.serve(protocol, handler, max_request_bytes=max_request_bytes)

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._exchange(peer_id, protocol, request)
        except TimeoutError:
            raise self._failure(peer_id, protocol, f"no answer within {deadline_s:g} s") from None
        body = self._network.damage(response.body)
        self.traffic.bytes_sent += len(request)
        if response.status != Status.OK:
            raise self._failure(peer_id, protocol, f"{response.status.name.lower()}: {response.reason}")
        if len(body) > max_response_bytes:
            raise self._failure(peer_id, protocol, f"a response must be <= {max_response_bytes} bytes, got {len(body)}")
        self.traffic.bytes_received += len(body)
        if body != response.body:
            raise self._failure(peer_id, protocol, f"a response of {len(body)} bytes was damaged: its hash differs")
        return body

    async def _exchange(self, peer_id: str, protocol: str, request: bytes) -> Response:
        if not self._network.connected(self.peer_id, peer_id):
            raise self._failure(peer_id, protocol, "not reachable")
        num_copies = self._network.num_copies()
        server = await self._network.carry(self.peer_id, peer_id)
        if server is not None:
            for _ in range(num_copies - 1):
                server.answer_in_background(self.peer_id, protocol, request)
            response = await server.answer(self.peer_id, protocol, request)
            if await self._network.carry(peer_id, self.peer_id) is not None:
                return response
        return await asyncio.get_running_loop().create_future()  # lost: silence until the deadline

    async def answer(self, caller: str, protocol: str, request: bytes) -> Response:
        """A request that arrived."""
        return await self._server.answer(caller, protocol, request)

    def answer_in_background(self, caller: str, protocol: str, request: bytes) -> None:
        """The second copy of a request, whose response nobody waits for."""
        task = asyncio.create_task(self.answer(caller, protocol, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """An entry that arrived for the own share of the index: whether it is valid and newer than what is there."""
        entries = self._entries.setdefault(key, {})
        for expired in [name for name, (_, end) in entries.items() if end <= self.now()]:
            del entries[expired]
        if not self._is_valid(key, subkey, value, expires_at):
            return False
        if subkey in entries and entries[subkey][1] >= expires_at:
            return False
        if subkey not in entries and len(entries) >= MAX_ENTRIES_PER_KEY:
            return False
        entries[subkey] = value, expires_at
        return True

    async def _store_at(
        self, replica: "MemoryTransport", key: str, subkey: str, value: bytes, expires_at: float
    ) -> bool:
        num_copies = self._network.num_copies()
        arrived = await self._network.carry(self.peer_id, replica.peer_id)
        if arrived is None:
            return False
        outcomes = [arrived.take(key, subkey, value, expires_at) for _ in range(num_copies)]
        return any(outcomes)

    async def _load_from(self, replica: "MemoryTransport", key: str) -> dict[str, tuple[bytes, float]]:
        arrived = await self._network.carry(self.peer_id, replica.peer_id)
        if arrived is None or await self._network.carry(replica.peer_id, self.peer_id) is None:
            return {}
        entries = arrived._entries.get(key, {})
        return {subkey: (self._network.damage(value), expires_at) for subkey, (value, expires_at) in entries.items()}

    def _is_valid(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        return is_live(expires_at, self.now()) and (self._validator is None or self._validator(key, subkey, value))

    def _failure(self, peer_id: str, protocol: str, reason: str) -> RequestError:
        self.traffic.requests_failed += 1
        return RequestError(f"request {protocol} to {peer_id} failed: {reason}")


def _position(name: str) -> int:
    return int.from_bytes(hashlib.sha1(name.encode(), usedforsecurity=False).digest(), "big")
