"""Nodes list themselves and find each other; what others list is believed only from its owner, at its place and time."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby, pairwise

import pytest

from swarm.network.context import NodeContext
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.transport import Contact
from swarm.records.identity import Identity
from swarm.records.presence import Presence, sign_presence
from swarm.sharing.directory import (
    ALONE_INTERVAL_S,
    FIRST_INTERVALS_S,
    LONG_LIST,
    PRESENCE_INTERVAL_S,
    PRESENCE_LIFETIME_S,
    PROOF_S,
    SETTLE_S,
    TURNS_PER_LONG_LIST,
    Directory,
)
from swarm.sharing.index import (
    EPOCH_S,
    MERGE_BELOW,
    SPLIT_ABOVE,
    EntryValidator,
    Shard,
    presence_key,
    shard_of,
    thinning_depth,
)
from swarm.sharing.totals import SharingTotals
from tests.unit.experience_factory import ALICE, MALLORY, NOW, READER, SWARM_ID, Clock

EVERYBODY = Shard(0, 0)
SETTLED = NOW + SETTLE_S


class FixedTotals(SharingTotals):
    """It always hears of so many authors, and reads nothing unless a test says so."""

    def __init__(
        self, clock: Callable[[], float], num_authors: int = 0, *, reads: bool = False, publishes: bool = False
    ) -> None:
        super().__init__(clock, publishes=publishes, reads=reads)
        self.num_authors = num_authors

    def num_authors_heard(self) -> int:
        return self.num_authors


class Node(MemoryTransport):
    """A node that writes down whom it meets."""

    def __init__(self, network: MemoryNetwork, identity: Identity, *, num_authors: int = 0) -> None:
        self.validator = EntryValidator(SWARM_ID)
        super().__init__(network, identity.peer_id, self.validator)
        self.met: dict[str, Contact] = {}
        self.totals = FixedTotals(network.clock, num_authors)
        self.directory = Directory(NodeContext.of(identity, SWARM_ID, self), self.totals)

    def meet(self, contact: Contact) -> None:
        self.met[contact.peer_id] = contact


async def nodes(
    identities: Iterable[Identity], *, now: float = SETTLED, num_authors: int = 0
) -> tuple[Clock, list[Node]]:
    clock = Clock(now)
    network = MemoryNetwork(random.Random(0), clock)
    members = [Node(network, identity, num_authors=num_authors) for identity in identities]
    for member in members:
        await member.start()
    return clock, members


def crowd(count: int, start: int = 0) -> list[Identity]:
    return [Identity(number.to_bytes(32, "big")) for number in range(start + 1, start + count + 1)]


def said_by(identity: Identity, now: float, **changes: object) -> Presence:
    said = Presence(identity.peer_id, ("/ip4/192.0.2.1/tcp/1",), ("/ip4/192.0.2.1/tcp/2",), True, 0, now, now + 120)
    return replace(said, **changes)  # type: ignore[arg-type]


async def list_at(node: Node, identity: Identity, level: int, now: float) -> None:
    """As that peer would list itself in the list of its shard, and those above."""
    record = sign_presence(identity, SWARM_ID, said_by(identity, now, level=level))
    for step in range(max(0, level - thinning_depth(SWARM_ID, identity.peer_id)), level + 1):
        key = presence_key(SWARM_ID, shard_of(SWARM_ID, identity.peer_id, step, now))
        assert await node.store(key, identity.peer_id, record, now + 120)


def in_shard(shard: Shard, identities: Iterable[Identity], now: float = SETTLED) -> list[Identity]:
    return [one for one in identities if shard_of(SWARM_ID, one.peer_id, shard.level, now) == shard]


async def test_nodes_find_each_other_and_count_each_other() -> None:
    _, (alice, reader, third) = await nodes([ALICE, READER, MALLORY])
    for node in (alice, reader, third, alice):
        await node.directory.turn()
    assert alice.met.keys() == {READER.peer_id, MALLORY.peer_id}
    assert third.met.keys() == {ALICE.peer_id, READER.peer_id}
    assert alice.directory.num_members == 3
    contact = alice.met[READER.peer_id]
    assert contact == Contact(READER.peer_id, (f"/memory/{reader.position}",), (), hosts_index=True)


async def test_a_node_that_has_just_started_or_finds_nobody_looks_more_often() -> None:
    _, (alice, reader) = await nodes([ALICE, READER])
    intervals = [await alice.directory.turn() for _ in range(len(FIRST_INTERVALS_S) + 1)]
    assert intervals == [*FIRST_INTERVALS_S, ALONE_INTERVAL_S]
    await reader.directory.turn()
    assert await alice.directory.turn() == PRESENCE_INTERVAL_S


async def test_made_up_names_at_another_level_keep_a_newcomer_for_a_while_only() -> None:
    """Names cost nothing, and are thinned out by a hash over them that anybody can compute before it makes them."""
    clock, (alice,) = await nodes([ALICE])
    totals = FixedTotals(clock, reads=True)
    directory = Directory(NodeContext.of(ALICE, SWARM_ID, alice), totals)
    honest = crowd(20)
    made_up = [one for one in crowd(200, start=1000) if thinning_depth(SWARM_ID, one.peer_id) >= 1][:80]

    async def later(seconds: float) -> int:
        clock.now += seconds
        for identity in honest:
            await list_at(alice, identity, 0, clock.now)
        for identity in made_up:
            await list_at(alice, identity, 1, clock.now)
        for _ in range(TURNS_PER_LONG_LIST):
            await directory.turn()
        return directory.level

    assert await later(0) == 1, "where most names are"
    assert await later(PROOF_S / 2) == 1
    assert await later(PROOF_S) == 0, "nobody there has shown anything true"
    for _ in range(3):
        totals.num_records_admitted += 1
        assert await later(PROOF_S) == 0, "and here somebody has"


class Sharer(Node):
    """It publishes a body every `round_s`, which all nodes of its shard admit."""

    def __init__(self, network: MemoryNetwork, identity: Identity, first_at: float) -> None:
        super().__init__(network, identity)
        self.due_at = first_at
        self.totals = FixedTotals(network.clock, reads=True, publishes=True)
        self.directory = Directory(NodeContext.of(identity, SWARM_ID, self), self.totals)

    def share_with(self, others: Iterable["Sharer"], round_s: float) -> None:
        self.due_at += round_s
        self.totals.num_published += 1
        for other in others:
            other.totals.num_records_admitted += other is not self and other.directory.shard == self.directory.shard


async def test_one_made_up_name_does_not_scatter_a_swarm_whose_rounds_are_long() -> None:
    """Nothing is heard for longer than PROOF_S, and one name, made until its hash suits, stands for another level."""
    clock, round_s = Clock(SETTLED), 1.5 * PROOF_S
    network = MemoryNetwork(random.Random(0), clock)
    sharers = [Sharer(network, identity, clock.now + round_s * (1 + i / 2)) for i, identity in enumerate(crowd(2))]
    made_up = next(one for one in crowd(1000, start=1000) if thinning_depth(SWARM_ID, one.peer_id) >= 5)
    for sharer in sharers:
        await sharer.start()
    while clock.now < SETTLED + 8 * round_s:
        await list_at(sharers[0], made_up, 5, clock.now)
        for sharer in sharers:
            await sharer.directory.turn()
            if sharer.due_at <= clock.now:
                sharer.share_with(sharers, round_s)
        clock.now += 0.8 * PRESENCE_LIFETIME_S
    heard = sum(sharer.totals.num_records_admitted for sharer in sharers)
    assert heard >= 0.9 * sum(sharer.totals.num_published for sharer in sharers)


async def test_a_level_where_bodies_were_admitted_is_left_for_a_look_elsewhere_which_takes_longer_to_come_each_time() -> (
    None
):
    clock, (alice,) = await nodes([ALICE])
    totals = FixedTotals(clock, reads=True)
    totals.num_records_admitted = 1
    directory = Directory(NodeContext.of(ALICE, SWARM_ID, alice), totals)
    made_up = [one for one in crowd(200, start=1000) if thinning_depth(SWARM_ID, one.peer_id) >= 1][:3]
    levels = []
    for _ in range(30):
        for identity in made_up:
            await list_at(alice, identity, 1, clock.now)
        for identity in crowd(4):
            await list_at(alice, identity, 0, clock.now)
        await directory.turn()
        levels.append(directory.level)
        clock.now += PROOF_S / 2
    stays = [len(list(stay)) / 2 for level, stay in groupby(levels) if level == 0]
    looks = [len(list(look)) / 2 for level, look in groupby(levels) if level == 1]
    assert stays[:4] == [1, 2, 3, 3] and set(looks) == {1}, "in PROOF_S"


async def test_a_level_is_kept_where_nobody_is_listed_elsewhere() -> None:
    clock, (alice,) = await nodes([ALICE])
    directory = Directory(NodeContext.of(ALICE, SWARM_ID, alice), FixedTotals(clock, reads=True))
    for _ in range(3):
        for identity in crowd(3):
            await list_at(alice, identity, 0, clock.now)
        await directory.turn()
        assert directory.level == 0
        clock.now += 2 * PROOF_S


async def test_a_node_that_is_gone_drops_out_of_the_list() -> None:
    clock, (alice, reader) = await nodes([ALICE, READER])
    await reader.directory.turn()
    await alice.directory.turn()
    assert alice.directory.num_members == 2
    clock.now += PRESENCE_LIFETIME_S
    await alice.directory.turn()
    assert alice.directory.num_members == 1


async def test_what_others_say_of_a_peer_is_not_stored() -> None:
    _, (alice, reader) = await nodes([ALICE, READER])
    key, now = presence_key(SWARM_ID, EVERYBODY), SETTLED
    true = sign_presence(MALLORY, SWARM_ID, said_by(MALLORY, now))
    assert not await alice.store(key, READER.peer_id, true, now + 120)  # under another name
    forged = sign_presence(MALLORY, "cd" * 16, said_by(MALLORY, now))
    assert not await alice.store(key, MALLORY.peer_id, forged, now + 120)  # of another swarm
    assert not await alice.store(key, MALLORY.peer_id, true[:-1] + b"x", now + 120)  # damaged
    assert await alice.store(key, MALLORY.peer_id, true, now + 120)
    assert reader.validator.rejected.keys() == {"wrong_slot", "foreign_swarm", "bad_signature"}


async def test_a_peer_can_list_itself_in_no_shard_but_its_own_and_a_few_above() -> None:
    _, (alice, _) = await nodes([ALICE, READER])
    now = SETTLED
    depth = thinning_depth(SWARM_ID, MALLORY.peer_id)
    record = sign_presence(MALLORY, SWARM_ID, said_by(MALLORY, now, level=5))

    async def store(level: int, at: float = now) -> bool:
        shard = shard_of(SWARM_ID, MALLORY.peer_id, level, at)
        return await alice.store(presence_key(SWARM_ID, shard), MALLORY.peer_id, record, now + 120)

    assert [await store(level) for level in range(8)] == [5 - depth <= level <= 5 for level in range(8)]
    own = shard_of(SWARM_ID, MALLORY.peer_id, 5, now)
    other = presence_key(SWARM_ID, Shard(5, own.number ^ 1))
    assert not await alice.store(other, MALLORY.peer_id, record, now + 120)


@pytest.mark.parametrize("created_at", [SETTLED + 60, SETTLED - 300])
async def test_what_a_peer_says_of_another_time_is_not_believed(created_at: float) -> None:
    _, (alice,) = await nodes([ALICE])
    record = sign_presence(MALLORY, SWARM_ID, said_by(MALLORY, created_at))
    assert not await alice.store(presence_key(SWARM_ID, EVERYBODY), MALLORY.peer_id, record, SETTLED + 120)
    await alice.directory.turn()
    assert alice.met == {} and alice.directory.num_members == 1


async def test_a_shard_splits_when_it_is_large_and_its_members_are_heard() -> None:
    _, (alice,) = await nodes([ALICE])
    for identity in crowd(SPLIT_ABOVE):
        await list_at(alice, identity, 0, SETTLED)
    await alice.directory.turn()
    assert (alice.directory.num_members, alice.directory.level) == (
        SPLIT_ABOVE + 1,
        0,
    )  # made-up members, for all it knows
    alice.totals.num_authors = SPLIT_ABOVE // 2 + 1
    for _ in range(TURNS_PER_LONG_LIST):
        await alice.directory.turn()
    assert alice.directory.level == 1
    own = shard_of(SWARM_ID, ALICE.peer_id, 1, SETTLED)
    assert alice.directory.shard == own
    assert ALICE.peer_id in await alice.load(presence_key(SWARM_ID, own))  # it is listed there at once


@pytest.mark.parametrize(("num_others", "readings"), [(LONG_LIST - 2, 7), (LONG_LIST - 1, 3)])
async def test_a_long_list_is_read_every_third_turn_and_written_in_each(num_others: int, readings: int) -> None:
    clock, (alice,) = await nodes([ALICE])
    alice.directory._num_turns = len(FIRST_INTERVALS_S)
    for identity in crowd(num_others):
        await list_at(alice, identity, 0, SETTLED)
    own_key, loaded = presence_key(SWARM_ID, EVERYBODY), 0
    load = alice.load

    async def counted(key: str) -> dict[str, bytes]:
        nonlocal loaded
        loaded += key == own_key
        return await load(key)

    alice.load = counted  # type: ignore[method-assign]
    for _ in range(7):
        await alice.directory.turn()
        entry = alice.index_share.get(own_key)[ALICE.peer_id]
        assert entry[1].begins_at == clock.now  # its own presence is as new as can be
        clock.now += 1.0
    assert loaded == readings
    assert alice.directory.num_members == num_others + 1


async def test_the_list_of_a_new_shard_is_read_at_once() -> None:
    clock, (alice,) = await nodes([ALICE])
    alice.directory.level, alice.directory._num_turns = 2, len(FIRST_INTERVALS_S)
    met: list[set[str]] = []
    shards: list[Shard] = []
    for clock.now in (SETTLED + number * EPOCH_S for number in range(4)):
        shards.append(alice.directory.shard)
        for identity in in_shard(alice.directory.shard, crowd(400), clock.now)[: LONG_LIST + 8]:
            await list_at(alice, identity, 2, clock.now)
        await alice.directory.turn()
        met.append(set(alice.met))
    assert len(met[0]) == LONG_LIST + 8
    assert all(len(later - earlier) > LONG_LIST / 2 for earlier, later in pairwise(met))
    assert any(earlier == later for earlier, later in pairwise(shards)), (
        "also where it has the number of the one before"
    )


async def test_a_shard_that_became_small_joins_its_twin() -> None:
    _, (alice,) = await nodes([ALICE])
    alice.directory.level = 2
    alice.directory._num_turns = 1  # it has a level already
    own = shard_of(SWARM_ID, ALICE.peer_id, 2, SETTLED)
    neighbors = in_shard(own, crowd(200))[: MERGE_BELOW - 2]
    for identity in neighbors:
        await list_at(alice, identity, 2, SETTLED)
    await alice.directory.turn()
    assert (alice.directory.num_members, alice.directory.level) == (MERGE_BELOW - 1, 1)


async def test_a_newcomer_goes_to_the_level_of_the_others() -> None:
    _, (alice,) = await nodes([ALICE])
    for identity in crowd(400):
        await list_at(alice, identity, 2, SETTLED)
    widest = await alice.load(presence_key(SWARM_ID, EVERYBODY))
    assert 60 < len(widest) < 140  # a quarter of them: no list grows with the swarm
    await alice.directory.turn()
    assert alice.directory.level == 2
    assert alice.directory.num_members << alice.directory.level == pytest.approx(400, rel=0.3)
    assert set(alice.met) <= {identity.peer_id for identity in crowd(400)}


async def test_no_node_changes_its_level_because_all_shards_are_drawn_anew() -> None:
    """In a new epoch a list starts with those few that stay, and fills within one interval."""
    clock, members = await nodes(crowd(48), now=NOW + EPOCH_S - PRESENCE_INTERVAL_S)
    for member in members:
        member.directory.level = 1
        await member.directory._announce()
        member.directory._num_turns = 99
    sizes = []
    for _ in range(4):  # one interval before the epoch begins, three after
        for member in members:
            clock.now += PRESENCE_INTERVAL_S / len(members)
            await member.directory.turn()
            sizes.append(member.directory.num_members)
    assert min(sizes) < MERGE_BELOW < max(sizes) < 32  # those that turned first saw too few, nobody saw both draws
    assert {member.directory.level for member in members} == {1}


async def test_a_node_of_a_narrow_shard_looks_for_carriers_in_the_widest_list_now_and_then() -> None:
    own, other = in_shard(Shard(2, 1), crowd(200)), in_shard(Shard(2, 2), crowd(200))
    _, (node, carrier) = await nodes([own[0], other[0]])
    for identity in own[1 : MERGE_BELOW + 2]:
        await list_at(node, identity, 2, SETTLED)
    node.directory.level = 2
    node.directory._num_turns = 1  # it has found its level long ago
    carrier.directory._stays_widest = True
    await carrier.directory.turn()
    for _ in range(9):
        await node.directory.turn()
    assert node.directory.level == 2 and carrier.peer_id not in node.met
    await node.directory.turn()
    assert node.met[carrier.peer_id].gossip_addresses == carrier.gossip_addresses()


async def test_a_second_process_with_the_key_of_a_node_is_told_once_an_epoch(caplog: pytest.LogCaptureFixture) -> None:
    clock, (node, other) = await nodes([ALICE, READER])

    async def list_alice(made_at: float) -> None:
        twin = Presence(
            ALICE.peer_id, ("/ip4/192.0.2.7/tcp/4001",), (), False, 0, made_at, made_at + PRESENCE_LIFETIME_S
        )
        key = presence_key(SWARM_ID, shard_of(SWARM_ID, ALICE.peer_id, 0, clock()))
        await other.store(key, ALICE.peer_id, sign_presence(ALICE, SWARM_ID, twin), twin.expires_at)

    def told() -> list[str]:
        return [line for line in caplog.messages if "identity of this node" in line]

    await list_alice(clock() - 1.0)  # of its last run
    await node.directory.turn()
    clock.now += PRESENCE_INTERVAL_S
    await node.directory.turn()  # meets its own entry
    await node.directory.turn()
    assert not told()
    for _ in range(2):
        clock.now += PRESENCE_INTERVAL_S
        await node.directory.turn()
        await list_alice(clock() + 1.0)
        await node.directory.turn()
    assert len(told()) == 1
    assert "/ip4/192.0.2.7/tcp/4001" in told()[0]
