"""A silo of light nodes in memory, on a virtual clock, with an ear on the wire and one above the seals."""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

from swarm.config import NetworkSection, SharingSection
from swarm.network.context import NodeContext
from swarm.network.memory.network import MemoryNetwork
from swarm.network.memory.transport import MemoryTransport
from swarm.network.memory.virtual_clock import virtual_now
from swarm.network.requests.framing import Response
from swarm.network.transport import GossipHandler, Line
from swarm.records.identity import Identity
from swarm.sharing.index import EntryValidator
from swarm.silo.bulletin import Bulletin
from swarm.silo.grant import decode_token
from swarm.silo.membership import Membership
from swarm.silo.owner import Owner
from swarm.silo.silo_files import SeenRolls, SiloFiles
from swarm.silo.silo_transport import SealedIndex, SiloTransport
from swarm.simulation.light_node import LightNode, LightRounds
from swarm.simulation.simulation import INTERNET
from tests.unit.silo_factory import OWNER, SILO_ID, folder_of

SHARING = SharingSection(swarm_groups=4)
NETWORK = NetworkSection(request_timeout_s=5.0)
ROUNDS = LightRounds(round_s=5.0, swarm_groups=4)


@dataclass
class Ears:
    """What was heard: all that crosses the network, and all that is handed to the sealing transport."""

    wire: list[bytes] = field(default_factory=list)
    plain: list[bytes] = field(default_factory=list)


class TappedLine:
    """Says to `ears` what is sent on a line."""

    def __init__(self, inner: Line, ears: Ears) -> None:
        self.peer_id = inner.peer_id
        self.receive, self.close = inner.receive, inner.close
        self._inner = inner
        self._ears = ears

    async def send(self, *frames: bytes) -> None:
        self._ears.wire += frames
        await self._inner.send(*frames)


class TappedTransport(MemoryTransport):
    """Says to `ears` what leaves and enters it."""

    ears: Ears

    async def _exchange(self, peer_id: str, protocol: str, request: bytes) -> Response:
        response = await super()._exchange(peer_id, protocol, request)
        self.ears.wire += [protocol.encode(), request, response.body]
        return response

    async def open_line(self, peer_id: str, protocol: str, *, deadline_s: float) -> Line:
        return TappedLine(await super().open_line(peer_id, protocol, deadline_s=deadline_s), self.ears)

    def take_line(self, protocol: str, line: Line) -> None:
        super().take_line(protocol, TappedLine(line, self.ears))

    async def _store_at(self, replica: MemoryTransport, entry: tuple[str, str, bytes], expires_at: float) -> bool:
        key, subkey, value = entry
        self.ears.wire += [key.encode(), subkey.encode(), value]
        return await super()._store_at(replica, entry, expires_at)

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        self.ears.wire.append(topic.encode())
        super().subscribe(topic, handler)

    async def publish(self, topic: str, message: bytes) -> None:
        self.ears.wire += [topic.encode(), message]
        await super().publish(topic, message)


class OverheardSilo(SiloTransport):
    """Says to `ears` what is said inside the silo."""

    ears: Ears

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        response = await super().request(
            peer_id, protocol, request, max_response_bytes=max_response_bytes, deadline_s=deadline_s
        )
        self.ears.plain += [request, response]
        return response

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        self.ears.plain += [key.encode(), value]
        return await super().store(key, subkey, value, expires_at)

    async def publish(self, topic: str, message: bytes) -> None:
        self.ears.plain += [topic.encode(), message]
        await super().publish(topic, message)


class SiloSwarm:
    """To be made and used inside `virtual_clock.run`; `stop` at the end."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self.network = MemoryNetwork(random.Random(seed), virtual_now, INTERNET)
        self.ears = Ears()
        self.nodes: dict[str, LightNode] = {}
        self.memberships: dict[str, Membership] = {}
        self._folder = folder

    def add(self, identity: Identity, owner: Owner | None, token: str | None = None, entrance: str = "") -> LightNode:
        """A member with the owner's roll in its folder, or a newcomer with a token. Not started."""
        folder = self.folder(identity)
        if owner is not None:
            folder_of(folder, owner)
        membership = Membership(SILO_ID, OWNER.peer_id, identity, virtual_now, SeenRolls(SILO_ID))
        if token is not None:
            opened = decode_token(token)
            membership.accept_own_grant(opened.grant.data, opened.wrapped)
        if owner is not None:
            membership.accept_roll(owner.data)
        validator = EntryValidator(SILO_ID)
        inner = TappedTransport(self.network, identity.peer_id, SealedIndex(membership, validator))
        inner.ears = self.ears
        rng = random.Random(identity.peer_id)
        files = SiloFiles(folder)
        bulletin = Bulletin(inner, membership, identity, files, [entrance] if entrance else [], rng)
        transport = OverheardSilo(inner, membership, bulletin, validator)
        transport.ears = self.ears
        node = LightNode(
            ROUNDS, NodeContext.of(identity, SILO_ID, transport), sharing=SHARING, network=NETWORK, rng=rng
        )
        self.nodes[identity.peer_id], self.memberships[identity.peer_id] = node, membership
        return node

    def folder(self, identity: Identity) -> Path:
        folder = self._folder / identity.peer_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    async def start(self) -> None:
        for node in self.nodes.values():
            await node.start()

    async def let(self, duration_s: float) -> None:
        """Let the swarm live; what is a bug in a node's work is raised."""
        await asyncio.sleep(duration_s)
        for node in self.nodes.values():
            node.raise_failure()

    async def stop(self) -> None:
        for node in self.nodes.values():
            await node.stop()
