"""Publisher and reader over the in-memory network, with a judge that knows one task."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm.config import NetworkSection, SharingSection
from swarm.errors import RequestError
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.transport import RequestRefused
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.codec import body_hash, encode_body
from swarm.records.identity import Identity
from swarm.sharing.body_store import BODY_PROTOCOL, BodyStore
from swarm.sharing.index import SLOTS_PER_WINDOW, EntryValidator, experience_key, subkey
from swarm.sharing.publisher import Publisher
from swarm.sharing.reader import Reader
from swarm.sharing.shard import Shard
from swarm.types import RolloutGroup
from tests.unit.experience_factory import (
    ALICE,
    MALLORY,
    NOW,
    READER,
    SWARM_ID,
    Clock,
    admission,
    group,
    header_of,
    signed,
)

WHOLE_SWARM = Shard(0, 0)
POLL_S = NetworkSection().poll_interval_s


class Peer:
    """One member of an in-memory swarm: publisher and reader with their stores."""

    def __init__(self, network: MemoryNetwork, identity: Identity, **settings: object) -> None:
        config = SharingSection.model_validate(settings)
        self.validator = EntryValidator(SWARM_ID)
        self.transport = MemoryTransport(network, identity.peer_id, self.validator, request_timeout_s=0.2)
        self.pool = ExperiencePool(":memory:", config, network.clock)
        self.bodies = BodyStore(network.clock)
        numbers = iter(range(1_000_000))
        self.publisher = Publisher(
            config, SWARM_ID, identity, self.transport, self.bodies, lambda: next(numbers), lambda: WHOLE_SWARM,
            head_start_s=0.0,
        )  # fmt: skip
        door = admission(network.clock, **settings)  # type: ignore[arg-type]
        door._own_peer_id = identity.peer_id
        self.reader = Reader(
            config, NetworkSection(request_timeout_s=0.2), SWARM_ID, self.transport, door, self.pool, self.bodies,
            random.Random(0), lambda: WHOLE_SWARM,
        )  # fmt: skip
        self.bodies.serve_on(self.transport)

    async def publish(self, groups: Sequence[RolloutGroup]) -> None:
        """By gossip, and in the index."""
        await self.publisher.publish(groups)
        while not self.publisher._gossiped.empty():
            await self.publisher.enter_next()


async def peers(
    *identities: Identity, clock: Clock | None = None, **settings: object
) -> tuple[MemoryNetwork, list[Peer]]:
    network = MemoryNetwork(random.Random(0), clock or Clock())
    members = [Peer(network, identity, **settings) for identity in identities]
    for member in members:
        await member.transport.start()
    return network, members


async def test_published_groups_reach_the_pool_of_a_reader() -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    sent = [group(index=i) for i in range(3)]
    await alice.publish(sent)
    await reader.reader.poll()
    drawn = reader.pool.draw(9, random.Random(0))
    assert sorted(drawn, key=lambda g: g.task.index) == sent
    assert reader.reader.num_groups_admitted == 3


async def test_groups_without_signal_are_not_published() -> None:
    _, (alice,) = await peers(ALICE)
    await alice.publish([group("wrong", "wrong")])
    assert alice.publisher.num_published == 0


async def test_groups_without_signal_of_others_are_counted_and_left_out() -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    groups = [group("right", "right")]
    body = encode_body(groups)
    await store(alice, signed(header_of(groups, body)), body)
    await reader.reader.poll()
    assert reader.reader.rejected == {"no_signal": 1}
    assert reader.pool.num_fresh() == 0


async def test_a_large_round_is_split_into_several_records() -> None:
    _, (alice, reader) = await peers(ALICE, READER, swarm_groups=20)
    await alice.publish([group(index=i) for i in range(30)])
    await reader.reader.poll()
    assert alice.publisher.num_published >= 3
    assert len(reader.pool.draw(99, random.Random(0))) == 30


async def test_reader_stops_pulling_when_it_has_enough() -> None:
    _, (alice, reader) = await peers(ALICE, READER, swarm_groups=1)
    for number in range(8):
        await alice.publish([group(index=number)])
    await reader.reader.poll()
    assert reader.pool.num_fresh() == 3
    await reader.reader.poll()
    assert reader.pool.num_fresh() == 3


async def test_polling_again_admits_nothing_twice_and_counts_no_rejection() -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    await alice.publish([group()])
    for _ in range(3):
        await reader.reader.poll()
    assert reader.reader.num_records_admitted == 1
    assert not +reader.reader.rejected


async def test_body_comes_from_another_holder_when_the_author_is_gone() -> None:
    _, (alice, first, second) = await peers(ALICE, READER, Identity(b"s" * 32))
    await alice.publish([group()])
    await first.reader.poll()
    await alice.transport.stop()
    await second.reader.poll()
    assert second.reader.num_groups_admitted == 1


async def test_withheld_body_is_counted_as_unavailable() -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    await alice.publish([group()])
    await alice.transport.stop()
    await reader.reader.poll()
    assert reader.reader.rejected == {"unavailable": 1}


async def test_entry_under_another_authors_slot_is_not_stored() -> None:
    _, (alice,) = await peers(ALICE)
    groups = [group(author=MALLORY.peer_id)]
    body = encode_body(groups)
    forged = signed(header_of(groups, body, author=MALLORY.peer_id), MALLORY)
    key = experience_key(SWARM_ID, WHOLE_SWARM, NOW)
    assert not alice.validator(key, subkey(ALICE.peer_id, 3), forged)
    assert not alice.validator(key, f"{MALLORY.peer_id}/{SLOTS_PER_WINDOW}", forged)
    assert not alice.validator("other/experience/0.0/1", subkey(MALLORY.peer_id, 3), forged)
    assert alice.validator(key, subkey(MALLORY.peer_id, 3), forged)
    assert alice.validator.rejected == {"wrong_slot": 2, "foreign_swarm": 1}


async def test_copy_of_a_body_under_another_name_is_turned_away() -> None:
    clock = Clock()
    _, (alice, mallory, reader) = await peers(ALICE, MALLORY, READER, clock=clock)
    groups = [group()]
    body = encode_body(groups)
    copied = [replace(groups[0], author=MALLORY.peer_id)]
    await store(mallory, signed(header_of(copied, body, author=MALLORY.peer_id), MALLORY), body)
    await reader.reader.poll()
    assert reader.reader.rejected == {"header_mismatch": 1}
    await store(alice, signed(header_of(groups, body)), body)
    clock.now += POLL_S
    await reader.reader.poll()
    assert reader.reader.num_groups_admitted == 1
    again = header_of(copied, body, author=MALLORY.peer_id, sequence=9)
    await store(mallory, signed(again, MALLORY), body, slot=4)
    clock.now += POLL_S
    await reader.reader.poll()
    assert reader.reader.rejected == {"header_mismatch": 1, "replay": 1}
    assert reader.reader.num_groups_admitted == 1


async def test_other_bytes_under_the_announced_hash_are_rejected() -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    groups = [group()]
    body = encode_body(groups)
    await store(alice, signed(header_of(groups, body)), body)
    alice.bodies.put(body_hash(body), body[:-1] + b"x", NOW + 600)
    await reader.reader.poll()
    assert reader.reader.rejected == {"wrong_hash": 1}


async def test_wrong_bytes_of_the_author_leave_a_true_holder_to_ask() -> None:
    _, (alice, first, second) = await peers(ALICE, READER, Identity(b"s" * 32))
    body = encode_body([group()])
    await store(alice, signed(header_of([group()], body)), body)
    await first.reader.poll()
    alice.bodies.put(body_hash(body), body[:-1] + b"x", NOW + 600)
    await second.reader.poll()
    assert second.reader.num_groups_admitted == 1


async def test_a_silent_author_holds_up_nobody_elses_body() -> None:
    _, (alice, mallory, reader) = await peers(ALICE, MALLORY, READER)
    is_over, is_asked = asyncio.Event(), asyncio.Event()

    async def stay_silent(peer_id: str, request: bytes) -> bytes:
        is_asked.set()
        await is_over.wait()
        raise RequestRefused("too late")

    mallory.bodies._answer = stay_silent  # type: ignore[method-assign]
    mallory.transport._server._services.clear()
    mallory.bodies.serve_on(mallory.transport)
    groups = [group(index=9, author=MALLORY.peer_id)]
    body = encode_body(groups)
    await store(mallory, signed(header_of(groups, body, author=MALLORY.peer_id), MALLORY), body)
    poll = asyncio.create_task(reader.reader.poll())
    async with asyncio.timeout(5):
        await is_asked.wait()
        for index in range(3):
            await alice.publish([group(index=index)])
        while reader.reader.num_groups_admitted < 3:
            assert not poll.done(), "the silent author is still waited for"
            await asyncio.sleep(0.01)  # nobody tells
    is_over.set()
    await poll
    assert reader.reader.rejected == {"unavailable": 1}


async def test_bodies_of_one_author_leave_room_for_those_of_others() -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    await alice.publish([group()])
    await reader.reader.poll()
    assert set(reader.bodies._authors.values()) == {ALICE.peer_id}


async def test_unknown_body_is_refused() -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    for request in (b"", b"x" * 32, b"y" * 64):
        with pytest.raises(RequestError) as caught:
            await reader.transport.request(
                alice.transport.peer_id, BODY_PROTOCOL, request, max_response_bytes=64, deadline_s=1
            )
        assert caught.value.reason == "refused"


async def store(peer: Peer, record: bytes, body: bytes, slot: int = 3) -> None:
    peer.bodies.put(body_hash(body), body, NOW + 600)
    key = experience_key(SWARM_ID, WHOLE_SWARM, NOW)
    assert await peer.transport.store(key, subkey(peer.transport.peer_id, slot), record, NOW + 600)
