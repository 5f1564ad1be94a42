"""Runs a swarm of light nodes on the in-memory network and a virtual clock. The same seed gives the same run.

async with Simulation(settings) as simulation: start ─ let(60) ─ faults … ─ let(60)      inside `virtual_clock.run`

`SpreadLog` records when headers arrived at their readers.
"""

import asyncio
import contextlib
import hashlib
import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from swarm.config import NetworkSection, SharingSection
from swarm.network.context import NodeContext
from swarm.network.memory.transport import Faults, MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import virtual_now
from swarm.records.identity import Identity
from swarm.records.signing import verified_by
from swarm.sharing.index import WINDOW_S, EntryValidator, experience_topic
from swarm.sharing.reader import MAX_DOUBLINGS
from swarm.simulation.light_node import LightNode, LightRounds
from swarm.simulation.signature_cache import SignatureCache
from swarm.types import Header


@dataclass(slots=True)
class _Spread:
    created_at: float
    num_readers: int
    delays_s: list[float] = field(default_factory=list)


class SpreadLog:
    """Times from the making of a header to its admission, by reader."""

    def __init__(self) -> None:
        self._since = -math.inf
        self._spreads: dict[Hashable, _Spread] = {}

    def note(self, header: Hashable, created_at: float, now: float, num_readers: int) -> None:
        """One reader admitted `header` (any name of it that is its own).

        `num_readers`: how many should get it in the end, as known when the first one does.
        """
        if created_at < self._since:
            return
        if header not in self._spreads:
            self._spreads[header] = _Spread(created_at, num_readers)
        self._spreads[header].delays_s.append(now - created_at)

    def begin(self, now: float) -> None:
        """Forget what was, as when a swarm has settled: headers made from now on count."""
        self._since = now
        self._spreads.clear()

    def __len__(self) -> int:
        return len(self._spreads)

    def num_arrivals(self) -> int:
        return sum(len(spread.delays_s) for spread in self._spreads.values())

    def times_s(self, share: float, created_before: float) -> list[float]:
        """For each header that old: seconds until `share` of its readers had it; infinite where they never did."""
        return [
            _time_to(sorted(spread.delays_s), math.ceil(share * spread.num_readers))
            for spread in self._spreads.values()
            if spread.created_at < created_before and spread.num_readers > 0
        ]

    def coverage(self, created_before: float) -> float:
        """Mean share of the readers that got a header."""
        shares = [
            min(1.0, len(spread.delays_s) / spread.num_readers)
            for spread in self._spreads.values()
            if spread.created_at < created_before and spread.num_readers > 0
        ]
        return sum(shares) / len(shares) if shares else math.nan


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed; NaN for none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def _time_to(delays_s: list[float], count: int) -> float:
    return delays_s[count - 1] if 0 < count <= len(delays_s) else math.inf


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
            NodeContext.of(identity, SWARM_ID, transport),
            sharing=settings.sharing,
            network=settings.network,
            rng=random.Random(seed),
            on_header=self._note,
        )

    async def start(self) -> None:
        """Let the nodes join one after the other, as strangers do."""
        pause_s = self._settings.join_over_s / max(1, len(self.nodes))
        for node in self.nodes:
            await node.start()
            await asyncio.sleep(pause_s)

    async def start_grown(self) -> None:
        """Begin as a swarm of this size that has found its shards and trusts gossip: growing to thousands would take hours."""
        level = 0
        while len(self.nodes) >> level > _GROWN_SHARD:
            level += 1
        for node in self.nodes:
            await node.transport.start()
        for _ in range(2):  # once to be listed, once to see the others listed
            for node in self.nodes:
                node.directory.level = level
            await asyncio.gather(*(node.directory.turn() for node in self.nodes))
        longest_s = WINDOW_S * 2**MAX_DOUBLINGS
        for node in self.nodes:
            node.directory.level = level
            node.reader.pace.settle(virtual_now() - self._rng.uniform(0, longest_s))
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
