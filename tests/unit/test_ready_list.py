"""Who is ready is read from the index as a random sample, of what its owners signed, in lists that stay short."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from swarm.merging.exchange.proposal import MAX_LAG_ROUNDS
from swarm.merging.exchange.ready_list import MAX_READ, ReadyList
from swarm.network.context import NodeContext
from swarm.network.index_entry import UNSIGNED, IndexRule
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.records.adapter_offer import AdapterOffer, sign_offer
from swarm.records.identity import Identity
from swarm.records.signing import verified_by
from swarm.sharing.index import MERGE_BELOW, SPLIT_ABOVE, EntryValidator, Shard, adapter_key, shard_of, thinning_depth
from swarm.simulation.signature_cache import SignatureCache
from tests.unit.experience_factory import LINEAGE, NOW, READER, SWARM_ID, Clock

EVERYBODY = Shard(0, 0)


def crowd(count: int) -> list[Identity]:
    return [Identity(number.to_bytes(32, "big")) for number in range(1, count + 1)]


def offer_of(identity: Identity, **changes: object) -> AdapterOffer:
    offer = AdapterOffer(identity.peer_id, LINEAGE.policy, 10, 0, "bf16", 100, b"h" * 32, 0, NOW, NOW + 60)
    return replace(offer, **changes)  # type: ignore[arg-type]


class Index:
    """An index of one node, whose owner reads the list."""

    def __init__(self, max_level: int = 0, seed: int = 0) -> None:
        self.clock = Clock(NOW)
        network = MemoryNetwork(random.Random(0), self.clock)
        self.transport = MemoryTransport(network, READER.peer_id, EntryValidator(SWARM_ID))
        self.max_level = max_level
        self.context = NodeContext.of(READER, SWARM_ID, self.transport)
        self.ready = ReadyList(self.context, random.Random(seed), max_level=lambda: self.max_level)

    async def start(self) -> "Index":
        await self.transport.start()
        return self

    async def enlist(self, identity: Identity, **changes: object) -> None:
        offer = offer_of(identity, **changes)
        others = ReadyList(self.context, random.Random(0))
        await others.enlist(offer, sign_offer(identity, SWARM_ID, offer), NOW + 60)

    async def names(self, own: AdapterOffer | None = None) -> list[str]:
        return [one.peer_id for one in await self.ready.candidates(own or offer_of(READER))]


@pytest.fixture
def alice() -> Identity:
    return crowd(1)[0]


@pytest.mark.parametrize(
    ("changes", "is_candidate"),
    [
        ({}, True),
        ({"outer_round": 10 + MAX_LAG_ROUNDS}, True),
        ({"outer_round": 10 + MAX_LAG_ROUNDS + 1}, False),
        ({"precision": "int8"}, False),
        ({"num_bytes": 101}, False),
        ({"lineage": "33" * 16}, False),
        ({"expires_at": NOW + 1}, False),
        ({"created_at": NOW + 60, "expires_at": NOW + 90}, False),
    ],
)
async def test_candidates_are_those_that_can_be_merged_now(
    alice: Identity, changes: dict[str, object], is_candidate: bool
) -> None:
    index = await Index().start()
    await index.enlist(alice, **changes)
    await index.enlist(READER)
    index.clock.now = NOW + 2
    assert await index.names() == [alice.peer_id] * is_candidate


async def test_listing_ends_with_the_search() -> None:
    index = await Index().start()
    own = offer_of(READER, expires_at=NOW + 3000)
    await index.ready.enlist(own, sign_offer(READER, SWARM_ID, own), NOW + 20)
    key = adapter_key(SWARM_ID, "merge", LINEAGE.policy, EVERYBODY)
    assert set(await index.transport.load(key)) == {READER.peer_id}
    index.clock.now = NOW + 21
    assert await index.transport.load(key) == {}


async def test_a_bounded_random_sample_of_a_long_list_is_looked_at() -> None:
    others, drawn = crowd(2 * MAX_READ), Counter[str]()
    index = await Index().start()
    for identity in others:
        await index.enlist(identity)
    with verified_by(SignatureCache().verify):
        for _ in range(20):
            names = await index.names()
            assert len(names) == len(set(names)) == MAX_READ
            drawn.update(names)
    assert drawn.keys() == {one.peer_id for one in others}
    assert min(drawn.values()) > 1 and max(drawn.values()) < 19  # half of the draws, 10, on average


async def test_long_lists_split_no_further_than_the_directory_and_short_ones_join() -> None:
    index = await Index(max_level=1).start()
    lineage, own = LINEAGE.policy, offer_of(READER)
    for identity in crowd(SPLIT_ABOVE):
        await index.enlist(identity)
    assert await index.ready.level(lineage) == 0
    await index.names(own)
    assert await index.ready.level(lineage) == 1
    await index.names(own)
    assert await index.ready.level(lineage) == 1
    index.max_level = 0  # the directory's shards have joined
    assert await index.ready.level(lineage) == 0
    index.max_level = 1
    await index.names(own)
    assert await index.ready.level(lineage) == 1
    index.clock.now = NOW + 120
    assert await index.names(own) == []
    assert MERGE_BELOW > 0 and await index.ready.level(lineage) == 0


async def test_newcomer_goes_to_the_level_of_the_others_and_looks_wider_where_nobody_is_there() -> None:
    index = await Index(max_level=9).start()
    own_shard = shard_of(SWARM_ID, READER.peer_id, 2, NOW)
    elsewhere = [
        one
        for one in crowd(400)
        if shard_of(SWARM_ID, one.peer_id, 2, NOW) != own_shard and thinning_depth(SWARM_ID, one.peer_id) >= 2
    ][:3]
    for identity in elsewhere:
        await index.enlist(identity, level=2)
    assert await index.ready.level(LINEAGE.policy) == 2
    assert sorted(await index.names(offer_of(READER, level=2))) == sorted(one.peer_id for one in elsewhere)


async def test_entries_that_their_owner_did_not_sign_are_passed_over(alice: Identity) -> None:
    index = await Index().start()
    index.transport._rule = IndexRule(None, index.clock)  # an index that lets everything through
    key, record = (
        adapter_key(SWARM_ID, "merge", LINEAGE.policy, EVERYBODY),
        sign_offer(alice, SWARM_ID, offer_of(alice)),
    )
    for name, value in [(alice.peer_id, record[:-1] + b"x"), (crowd(2)[1].peer_id, record), ("x", b"junk")]:
        index.transport.index_share.take(key, name, value, replace(UNSIGNED, expires_at=NOW + 60))
    assert await index.names() == []
