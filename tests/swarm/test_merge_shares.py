"""Names that always offer, against the share of merges that strangers and address groups have."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from swarm.experiments.merging.hostile_names import HostileDonor, HostilePartner
from swarm.merging.exchange.merge_exchange import MergeExchange
from swarm.merging.exchange.ready_list import ReadyList
from swarm.network.context import NodeContext
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.records.identity import Identity
from swarm.records.rejection import Rejection
from swarm.sharing.reputation import PROBATION_BODIES, AddressGroups, AuthorShares, Reputation
from swarm.types import Snapshot
from tests.swarm.merge_swarm import SMALL, TIMEOUTS, MergeNode, in_merge_swarm, network_of, tell
from tests.unit.experience_factory import LINEAGE, SWARM_ID

NUM_OFFERS = 8
HOSTILE_GROUP = "/ip4/192.0.2.7/tcp/1"


@contextlib.asynccontextmanager
async def courting(network: MemoryNetwork, nodes: list[MergeNode], count: int) -> AsyncIterator[list[HostilePartner]]:
    hostile = [HostilePartner(network, SWARM_ID, Identity(bytes([200 + number]) * 32)) for number in range(count)]
    for one in hostile:
        one.snapshot = Snapshot(LINEAGE.policy, "bf16", 0, 0, random.Random(one.peer_id).randbytes(SMALL))
        await one.transport.start()
    tasks = [asyncio.create_task(one.court()) for one in hostile]
    try:
        yield hostile
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in hostile:
            await one.transport.stop()


def trust(nodes: list[MergeNode], *, is_known: bool, has_addresses: bool, hostile: list[HostilePartner]) -> None:
    """What each node knows of the others, given to the exchange that it has made already."""
    for node in nodes:
        reputation, seen_at = Reputation(3600.0, virtual_now), dict[str, tuple[str, ...]]()
        for number, other in enumerate(nodes):
            for _ in range(int(PROBATION_BODIES) + 1 if is_known else 0):
                reputation.admitted(other.peer_id)
            if has_addresses:
                seen_at[other.peer_id] = (f"/ip4/198.51.{number}.1/tcp/1",)
        for one in hostile if has_addresses else ():
            seen_at[one.peer_id] = (HOSTILE_GROUP,)
        addresses = AddressGroups(lambda peer_id, seen_at=seen_at: seen_at.get(peer_id, ()))
        node.exchange._recent._shares = AuthorShares(reputation, 0.25, addresses)


def hostile_share(count: int, *, is_known: bool, has_addresses: bool) -> tuple[float, float]:
    """(part of all merges that hostile names get, part of offers that end in a merge)."""
    found: list[float] = []

    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        async with courting(network, nodes, count) as hostile:
            trust(nodes, is_known=is_known, has_addresses=has_addresses, hostile=hostile)
            for number in range(NUM_OFFERS):
                for one in hostile:
                    assert one.snapshot is not None
                    one.snapshot = Snapshot(LINEAGE.policy, "bf16", number, 0, one.snapshot.payload)
                await asyncio.gather(*(node.offer() for node in nodes))
            names = {one.peer_id for one in hostile}
            merges = sum(sum(node.partners.values()) for node in nodes)
            found.append(sum(node.partners[name] for node in nodes for name in names) / merges)
            found.append(tell(nodes)["merged"] / (NUM_OFFERS * len(nodes)))

    in_merge_swarm(6, scenario)
    return found[0], found[1]


@pytest.mark.parametrize("count", [3, 6])
def test_strangers_have_a_quarter_of_the_merges_of_known_ones(count: int) -> None:
    share, merged = hostile_share(count, is_known=True, has_addresses=False)
    assert share <= 0.26 and merged > 0.7, (share, merged)


@pytest.mark.parametrize("count", [3, 6])
def test_names_of_one_address_group_have_the_share_of_two(count: int) -> None:
    """Beside five others of groups of their own: two of seven, in whole merges of eight."""
    share, merged = hostile_share(count, is_known=False, has_addresses=True)
    assert share <= 2 / 7 + 0.05 and merged > 0.7, (share, merged)


def test_an_exchange_that_knows_nobody_treats_all_names_alike() -> None:
    """The measure of the two above: three names that always offer get most of the merges of six nodes."""
    share, _ = hostile_share(3, is_known=False, has_addresses=False)
    assert share > 0.5


def test_banned_peers_are_no_partners() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        async with courting(network, nodes, 1) as hostile:
            trust(nodes, is_known=False, has_addresses=False, hostile=hostile)
            shares = nodes[0].exchange._recent._shares
            assert shares is not None
            shares.reputation.refused(hostile[0].peer_id, Rejection.REWARD_MISMATCH)
            assert shares.reputation.is_banned(hostile[0].peer_id)
            for _ in range(3):
                await nodes[0].offer()
            assert not nodes[0].partners and nodes[0].exchange.declined["banned"] > 0

    in_merge_swarm(1, scenario)


def test_exchange_takes_what_is_known_of_peers_when_it_is_made() -> None:
    async def scenario(nodes: list[MergeNode], network: MemoryNetwork) -> None:
        reputation = Reputation(3600.0, virtual_now)
        shares = AuthorShares(reputation, 0.25, AddressGroups(lambda peer_id: ()))
        identity = Identity(b"k" * 32)
        transport = MemoryTransport(network, identity.peer_id)
        context = NodeContext.of(identity, SWARM_ID, transport)
        exchange = MergeExchange(TIMEOUTS, context, rng=random.Random(0), shares=shares)
        assert not exchange.is_known("someone")
        for _ in range(5):
            reputation.admitted("someone")
        assert exchange.is_known("someone")

    in_merge_swarm(1, scenario)


def test_hostile_donors_are_listed_where_newcomers_look_and_take_the_places_of_others() -> None:
    """Else the experiment with hostile names would measure newcomers that nobody attacks."""

    async def main() -> None:
        network = network_of()
        donors = [
            HostileDonor(network, SWARM_ID, Identity(bytes([220 + number]) * 32), snapshot)
            for number, snapshot in enumerate(
                Snapshot(LINEAGE.policy, "bf16", 0, 0, bytes([number]) * SMALL) for number in range(2)
            )
        ]
        for one in donors:
            await one.transport.start()
        for one in donors:
            await one.enlist()
        first, second = donors
        reader = ReadyList(NodeContext.of(first.identity, SWARM_ID, first.transport), random.Random(0), kind="donors")
        listed = {offer.peer_id for offer in await reader.widest(LINEAGE.policy)}
        assert listed == {second.identity.peer_id}, "all but the reader itself"
        before = second.transport.traffic.bytes_sent
        await first.take_places({first.identity.peer_id})
        assert second.transport.traffic.bytes_sent - before >= SMALL
        for one in donors:
            await one.transport.stop()

    run(main())
