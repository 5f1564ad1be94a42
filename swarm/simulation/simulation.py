"""A swarm of light nodes on the in-memory network and a virtual clock; the same seed gives the same run.

async with Simulation(settings) as simulation: start ─ let(60) ─ faults … ─ let(60)      inside `virtual_clock.run`
"""

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, Self

from swarm.config import NetworkSection, SharingSection
from swarm.network.memory.transport import Faults, MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import virtual_now
from swarm.records.identity import Identity
from swarm.records.signing import verified_by
from swarm.sharing.index import EntryValidator, experience_topic
from swarm.simulation.light_node import LightNode, LightRounds
from swarm.simulation.signature_cache import SignatureCache
from swarm.simulation.spread_log import SpreadLog
from swarm.types import Header

SWARM_ID = "5e" * 16
INTERNET = Faults(delay_s=(0.02, 0.12))
"""One-way times between homes on one continent and the next."""

_GROWN_SHARD = 96
"""A grown swarm's shards have between half of this and this many members."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    num_nodes: int
    seed: int = 0
    faults: Faults = INTERNET
    rounds: LightRounds = field(default_factory=LightRounds)
    sharing: SharingSection = field(default_factory=lambda: SharingSection(swarm_groups=2))
    network: NetworkSection = field(default_factory=lambda: NetworkSection(request_timeout_s=5.0))
    join_over_s: float = 10.0
    """The nodes join one after the other within this time."""
    verify: Literal["real", "cached"] = "real"
    """cached: a signature is checked once for all nodes of the process. Above some 200 nodes real checks take minutes."""


class Simulation:
    """To be made and used inside `virtual_clock.run`. Leaving it as a context stops the nodes."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._settings = settings
        self._rng = random.Random(settings.seed)
        self._cache = SignatureCache() if settings.verify == "cached" else None
        self._undo = contextlib.ExitStack()
        self.network = MemoryNetwork(random.Random(self._rng.random()), virtual_now, settings.faults)
        self.spread = SpreadLog()
        self.nodes = [self.make_node(number) for number in range(settings.num_nodes)]

    async def __aenter__(self) -> Self:
        if self._cache is not None:
            self._undo.enter_context(verified_by(self._cache.verify))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for node in self.nodes:
            await node.stop()
        self._undo.close()

    def make_node(self, number: int) -> LightNode:
        """Node `number` of this seed, not started. Numbers beyond those of the settings are free for late joiners."""
        settings = self._settings
        seed = hashlib.sha256(f"light-node/{settings.seed}/{number}".encode()).digest()
        identity = Identity(seed)
        validator = EntryValidator(SWARM_ID)
        is_valid = self._cache.validator(validator) if self._cache else validator
        transport = MemoryTransport(
            self.network, identity.peer_id, is_valid, request_timeout_s=settings.network.request_timeout_s
        )
        return LightNode(
            settings.rounds,
            settings.sharing,
            settings.network,
            SWARM_ID,
            identity,
            transport,
            random.Random(seed),
            on_header=self._note,
        )

    async def start(self) -> None:
        """Let the nodes join one after the other, as strangers do."""
        pause_s = self._settings.join_over_s / max(1, len(self.nodes))
        for node in self.nodes:
            await node.start()
            await asyncio.sleep(pause_s)

    async def start_grown(self) -> None:
        """Begin as a swarm of this size that has found its shards: growing to thousands would take hours."""
        level = 0
        while len(self.nodes) >> level > _GROWN_SHARD:
            level += 1
        for node in self.nodes:
            await node.transport.start()
        for _ in range(2):  # once to be listed, once to see the others listed
            for node in self.nodes:
                node.directory.level = level
            await asyncio.gather(*(node.directory.turn() for node in self.nodes))
        for node in self.nodes:
            node.directory.level = level
            node.work()

    async def let(self, duration_s: float) -> None:
        """Let the swarm live so long. Raises what broke a node, if anything did."""
        await asyncio.sleep(duration_s)
        for node in self.nodes:
            node.raise_failure()

    def rejected(self) -> Counter[str]:
        """Records turned away by any node, by reason."""
        return sum((node.rejected for node in self.nodes), Counter())

    def _note(self, reader: LightNode, header: Header) -> None:
        topic = experience_topic(SWARM_ID, reader.directory.shard)
        num_readers = self.network.topic_size(topic) - 1  # the author is in it
        self.spread.note((header.author, header.body_hash), header.created_at, virtual_now(), num_readers)
