"""A hostile member of a simulated swarm, and the bad deeds it knows."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import zstandard

from swarm.network.memory.gossip import GossipRouter
from swarm.network.memory.mesh import GossipMessage
from swarm.network.memory.transport import MemoryTransport
from swarm.network.memory.virtual_clock import virtual_now
from swarm.network.transport import MAX_GOSSIP_BYTES
from swarm.records.adapter_offer import AdapterOffer, sign_offer
from swarm.records.codec import MAX_UNPACKED_BODY_BYTES, body_hash, encode_body, encode_header, encode_record
from swarm.records.identity import Identity
from swarm.records.signing import sign_record
from swarm.sharing.body_store import BODY_PROTOCOL
from swarm.sharing.index import Shard, adapter_key, experience_topic
from swarm.simulation.light_node import LINEAGE, light_group
from swarm.simulation.simulation import SWARM_ID, Simulation
from swarm.types import GroupSummary, Header, RolloutGroup

EVERYBODY = Shard(0, 0)
TOPIC = experience_topic(SWARM_ID, EVERYBODY)
TIME_TO_LIVE_S = 600.0


class Mallory:
    """A member with a key of its own that may say anything, in gossip, to the index and as a body server."""

    def __init__(self, simulation: Simulation, number: int = 0) -> None:
        """`number`: which of several."""
        self.identity = Identity(b"m" * 31 + bytes([number]))
        self.network = simulation.network
        self.rng = simulation.network.rng
        self.transport = MemoryTransport(simulation.network, self.identity.peer_id)
        self.victims = [node.peer_id for node in simulation.nodes]
        self.bodies: dict[bytes, bytes] = {}
        self.is_silent = False
        self._sequence = 0
        self.transport.serve(BODY_PROTOCOL, self._serve, max_request_bytes=64)

    async def _serve(self, peer_id: str, request: bytes) -> bytes:
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        return self.bodies.get(request, b"")

    def group(self) -> RolloutGroup:
        self._sequence += 1
        return light_group(self.identity.peer_id, self._sequence, 4, self.rng)

    def honest(self, group: RolloutGroup | None = None) -> tuple[Header, bytes]:
        """A header and its body, both in order."""
        group = group or self.group()
        body, now = encode_body([group]), virtual_now()
        summary = GroupSummary(group.task, len(group.rollouts), group.mean_reward)
        header = Header(
            SWARM_ID, self.identity.peer_id, self._sequence, body_hash(body), len(body), (summary,), LINEAGE, 0,
            now, now + TIME_TO_LIVE_S,
        )  # fmt: skip
        return header, body

    def signed(self, header: Header) -> bytes:
        return encode_record(sign_record(self.identity, SWARM_ID, encode_header(header)))

    async def announce(self, header: Header, body: bytes) -> None:
        self.bodies[header.body_hash] = body
        await self.transport.publish(TOPIC, self.signed(header))

    async def announce_as_is(self, body: bytes) -> None:
        """A header that tells the truth about the bytes of `body`, whatever they are."""
        header, _ = self.honest()
        await self.announce(replace(header, body_hash=body_hash(body), body_bytes=len(body)), body)


@contextlib.asynccontextmanager
async def mallory_in(simulation: Simulation, number: int = 0) -> AsyncIterator[Mallory]:
    mallory = Mallory(simulation, number)
    await mallory.transport.start()
    yield mallory
    await mallory.transport.stop()


Deed = Callable[[Mallory], Awaitable[None]]


async def garbage(mallory: Mallory) -> None:
    await mallory.transport.publish(TOPIC, mallory.rng.randbytes(300))


async def oversize_message(mallory: Mallory) -> None:
    """Past the own end's check, straight onto the wire."""
    message = GossipMessage.of(TOPIC, mallory.rng.randbytes(64 * MAX_GOSSIP_BYTES))
    for victim in mallory.victims:
        mallory.network.post(mallory.transport.peer_id, victim, message.num_bytes, GossipRouter.on_message, message, 1)


async def forgery(mallory: Mallory) -> None:
    header, _ = mallory.honest()
    record = mallory.signed(header)
    await mallory.transport.publish(TOPIC, record[:-1] + bytes([record[-1] ^ 1]))


async def future(mallory: Mallory) -> None:
    header, body = mallory.honest()
    ahead_s = 3600.0
    await mallory.announce(
        replace(header, created_at=header.created_at + ahead_s, expires_at=header.expires_at + ahead_s), body
    )


async def compression_bomb(mallory: Mallory) -> None:
    """A small frame that unpacks to more than is allowed."""
    bomb = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(MAX_UNPACKED_BODY_BYTES + 1))
    await mallory.announce_as_is(bomb + mallory.rng.randbytes(4))


async def garbage_body(mallory: Mallory) -> None:
    await mallory.announce_as_is(mallory.rng.randbytes(500))


async def wrong_hash(mallory: Mallory) -> None:
    header, body = mallory.honest()
    await mallory.announce(header, body[:-1] + bytes([body[-1] ^ 1]))


async def oversize_body(mallory: Mallory) -> None:
    header, body = mallory.honest()
    await mallory.announce(header, body + bytes(100_000))


async def silence(mallory: Mallory) -> None:
    """Announce what is never handed out, and never refused."""
    mallory.is_silent = True
    await mallory.announce(*mallory.honest())


async def false_reward(mallory: Mallory) -> None:
    group = mallory.group()
    group = replace(group, rollouts=tuple(replace(r, reward=1.0 - r.reward) for r in group.rollouts))
    await mallory.announce(*mallory.honest(group))


async def index_flood(mallory: Mallory) -> None:
    """Two hundred entries of half a minute that are in order: offers of adapters of lineages that nobody has."""
    peer_id, now = mallory.transport.peer_id, virtual_now()

    async def store() -> None:
        lineage = mallory.rng.randbytes(16).hex()
        offer = AdapterOffer(peer_id, lineage, 1, 0, "bf16", 100, b"h" * 32, 0, now, now + 30)
        key = adapter_key(SWARM_ID, "merge", lineage, EVERYBODY)
        await mallory.transport.store(key, peer_id, sign_offer(mallory.identity, SWARM_ID, offer), now + 30)

    await asyncio.gather(*(store() for _ in range(200)))
