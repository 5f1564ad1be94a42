"""Nodes that merge, without tensors: the real exchange of adapters over the in-memory network, on a virtual clock."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from swarm.merging.exchange.merge_exchange import MergeExchange
from swarm.merging.exchange.recent_partners import MergeTimeouts
from swarm.network.context import NodeContext
from swarm.network.memory.transport import Faults, MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.records.identity import Identity
from swarm.records.signing import verified_by
from swarm.sharing.index import EntryValidator
from swarm.simulation.signature_cache import SignatureCache
from swarm.simulation.simulation import INTERNET
from swarm.types import Outcome, Partner, Snapshot
from tests.unit.experience_factory import LINEAGE, SWARM_ID

TIMEOUTS = MergeTimeouts(search_s=20.0, request_timeout_s=3.0)
SMALL = 1000
PIECES = (2 << 20) + 4321
"""Bytes of an adapter that takes a manifest and three pieces."""


class MergeNode:
    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        cache: SignatureCache,
        *,
        timeouts: MergeTimeouts = TIMEOUTS,
        make_transport: Callable[..., MemoryTransport] = MemoryTransport,
    ) -> None:
        self.number = number
        self.identity = Identity(number.to_bytes(32, "big"))
        is_valid = cache.validator(EntryValidator(SWARM_ID))
        self.transport = make_transport(network, self.identity.peer_id, is_valid, request_timeout_s=5.0)
        rng = random.Random(network.rng.random())
        self.exchange = MergeExchange(timeouts, NodeContext.of(self.identity, SWARM_ID, self.transport), rng=rng)
        self.partners: Counter[str] = Counter()
        self.outer_round = 0
        self._work: asyncio.Task[None] | None = None

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    def payload(self, num_bytes: int = SMALL) -> bytes:
        return random.Random(self.number).randbytes(32) * (num_bytes // 32) + bytes(num_bytes % 32)

    async def start(self) -> None:
        await self.transport.start()
        self._work = asyncio.create_task(self.exchange.work())
        await asyncio.sleep(0)

    async def stop(self) -> None:
        assert self._work is not None
        self._work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._work  # raises what broke it
        await self.transport.stop()

    async def offer(self, num_bytes: int = SMALL, **changes: Any) -> Outcome:
        fields = {"lineage": LINEAGE.policy, "precision": "bf16", "outer_round": self.outer_round, "policy_version": 0}
        snapshot = Snapshot(**(fields | changes), payload=self.payload(num_bytes))  # type: ignore[arg-type]
        self.outer_round += 1
        outcome = await asyncio.wrap_future(self.exchange.offer(snapshot))
        if isinstance(outcome, Partner):
            self.partners[outcome.peer_id] += 1
        return outcome


@contextlib.asynccontextmanager
async def merge_nodes(network: MemoryNetwork, count: int, **settings: Any) -> AsyncIterator[list[MergeNode]]:
    cache = SignatureCache()
    nodes = [MergeNode(network, number, cache, **settings) for number in range(count)]
    with verified_by(cache.verify):
        for node in nodes:
            await node.start()
        try:
            yield nodes
        finally:
            for node in nodes:
                await node.stop()


def network_of(seed: int = 0, faults: Faults = INTERNET) -> MemoryNetwork:
    return MemoryNetwork(random.Random(seed), virtual_now, faults)


def in_merge_swarm(
    count: int,
    scenario: Callable[[list[MergeNode], MemoryNetwork], Coroutine[Any, Any, None]],
    *,
    seed: int = 0,
    faults: Faults = INTERNET,
    **settings: Any,
) -> None:
    async def main() -> None:
        network = network_of(seed, faults)
        async with merge_nodes(network, count, **settings) as nodes:
            await scenario(nodes, network)

    run(main())


def tell(nodes: Sequence[MergeNode]) -> Counter[str]:
    """Outcomes of all offers of these nodes, by reason."""
    return sum((node.exchange.outcomes for node in nodes), Counter())


def named(nodes: Sequence[MergeNode], peer_id: str) -> MergeNode:
    (found,) = [node for node in nodes if node.peer_id == peer_id]
    return found
