"""Publisher and reader over the in-memory network, with a judge that knows one task."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from swarm.config import NetworkSection, SharingSection
from swarm.errors import NetworkError, RequestError
from swarm.limits.peer_backoff import BUSY_PAUSE_S, UNREACHED_PAUSE_S
from swarm.network.context import NodeContext
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.transport import RequestRefused
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.codec import body_hash, encode_body
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord
from swarm.sharing.body_store import BODY_PROTOCOL
from swarm.sharing.index import SLOTS_PER_WINDOW, WINDOW_S, EntryValidator, Shard, experience_key, subkey
from swarm.sharing.parts import NoObserver
from swarm.sharing.publisher import Publisher
from swarm.sharing.reader import Reader
from swarm.types import Header, RolloutGroup
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
    long_group,
    sharing_parts,
    signed,
)

WHOLE_SWARM = Shard(0, 0)
POLL_S = 0.05
NETWORK = NetworkSection(request_timeout_s=5, poll_interval_s=POLL_S)


class Watcher(NoObserver):
    """Writes down what it is shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, object]] = []

    def admitted(self, groups: Sequence[RolloutGroup]) -> None:
        self.shown.append(("admitted", tuple(groups)))

    def refused(self, header: Header, error: InvalidRecord, body: bytes | None) -> None:
        self.shown.append((error.reason.value, body))


class Peer:
    """One member of an in-memory swarm: publisher and reader with their stores."""

    def __init__(self, network: MemoryNetwork, identity: Identity, **settings: object) -> None:
        config = SharingSection.model_validate(settings)
        self.validator = EntryValidator(SWARM_ID)
        self.transport = MemoryTransport(network, identity.peer_id, self.validator, request_timeout_s=5)
        context = NodeContext.of(identity, SWARM_ID, self.transport)
        self.pool = ExperiencePool(":memory:", config, network.clock)
        self.watcher = Watcher()
        parts = sharing_parts(config, context, observer=self.watcher)
        self.bodies, self.totals = parts.bodies, parts.totals
        self.publisher = Publisher(config, parts, self.pool, head_start_s=0.0)
        admits = admission(context, **settings)
        self.reader = Reader(config, NETWORK, parts, admission=admits, pool=self.pool, rng=random.Random(0))

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
    assert reader.totals.num_groups_admitted == 3


async def test_a_sweep_that_fails_loses_no_body_that_is_being_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    await alice.publish([group(index=0)])
    pulling = asyncio.Event()
    request, load = reader.transport.request, reader.transport.load

    async def never_answer(*arguments: object, **settings: object) -> bytes:
        pulling.set()
        return await asyncio.Event().wait() and b""

    async def load_once_more(key: str) -> dict[str, bytes]:
        entries = await load(key)
        if entries:  # the header is known by now
            await pulling.wait()
            raise NetworkError("the network is down")
        return entries

    monkeypatch.setattr(reader.transport, "request", never_answer)
    monkeypatch.setattr(reader.transport, "load", load_once_more)
    reader.reader._inbox.take_entry(*next(iter((await load(experience_key(SWARM_ID, WHOLE_SWARM, NOW))).items())))
    with pytest.raises(NetworkError):
        await asyncio.wait_for(reader.reader.poll(), 5)
    monkeypatch.setattr(reader.transport, "request", request)
    monkeypatch.setattr(reader.transport, "load", load)
    await asyncio.wait_for(reader.reader.poll(), 5)
    assert reader.totals.num_groups_admitted == 1


async def test_an_observer_is_shown_all_groups_of_admitted_bodies_and_the_bodies_that_were_refused() -> None:
    _, (alice, mallory, reader) = await peers(ALICE, MALLORY, READER)
    sent = [group(index=0)]
    await alice.publish(sent)
    body = encode_body([group()])
    await store(
        mallory,
        signed(header_of([replace(group(), author=MALLORY.peer_id)], body, author=MALLORY.peer_id), MALLORY),
        body,
    )
    await reader.reader.poll()
    assert sorted(reader.watcher.shown, key=str) == [("admitted", tuple(sent)), ("header_mismatch", body)]


async def test_a_round_counts_as_old_as_its_oldest_group() -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    await alice.publish([replace(group(index=i), policy_version=version) for i, version in enumerate((9, 4, 8))])
    await reader.reader.poll()
    assert {drawn.policy_version for drawn in reader.pool.draw(9, random.Random(0))} == {4}


async def test_groups_without_signal_are_not_published() -> None:
    _, (alice,) = await peers(ALICE)
    await alice.publish([group("wrong", "wrong")])
    assert alice.totals.num_published == 0


async def test_groups_without_signal_of_others_are_counted_and_left_out() -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    groups = [group("right", "right")]
    body = encode_body(groups)
    await store(alice, signed(header_of(groups, body)), body)
    await reader.reader.poll()
    assert reader.totals.rejected == {"no_signal": 1}
    assert reader.pool.num_fresh() == 0


async def test_a_large_round_is_split_into_several_records() -> None:
    _, (alice, reader) = await peers(ALICE, READER, swarm_groups=20)
    await alice.publish([group(index=i) for i in range(30)])
    await reader.reader.poll()
    assert alice.totals.num_published >= 3
    assert len(reader.pool.draw(99, random.Random(0))) == 30


async def test_a_group_of_long_answers_reaches_a_reader_that_accepts_them() -> None:
    _, (alice, reader, third) = await peers(ALICE, READER, Identity(b"s" * 32), max_answer_tokens=16_384)
    await alice.publish([long_group(16_384, 65_536)])
    await reader.reader.poll()
    (drawn,) = reader.pool.draw(9, random.Random(0))
    assert [(len(one.token_ids), len(one.text)) for one in drawn.rollouts[:-1]] == [(16_384, 65_536)] * 8
    await alice.transport.stop()
    await third.reader.poll()
    assert third.totals.num_groups_admitted == 1, "the reader gives a long body to others, too"


@pytest.mark.parametrize(("num_tokens", "num_chars"), [(5001, 1), (1, 8 * 5000 + 1)])
async def test_a_longer_answer_is_neither_published_nor_fetched(
    num_tokens: int, num_chars: int, caplog: pytest.LogCaptureFixture
) -> None:
    network, (alice, reader) = await peers(ALICE, READER, max_answer_tokens=5000)
    await alice.publish([long_group(num_tokens, num_chars, num_long=2)])
    assert alice.totals.num_published == 0
    assert "as for answers of 5001 tokens; this node reads and shares up to 5000. Raise sharing.max" in caplog.text
    other = Peer(network, MALLORY, max_answer_tokens=6000)
    await other.transport.start()
    await other.publish([long_group(num_tokens, num_chars, num_long=2, author=MALLORY.peer_id)])
    assert other.totals.num_published == 1
    await reader.reader.poll()
    assert reader.totals.rejected == {"too_long": 1}
    assert reader.transport.traffic.bytes_received < 4096, "the body is not fetched"
    assert reader.watcher.shown == [], "nor is it held against its author"


async def test_longer_answers_than_a_header_announces_are_a_false_claim() -> None:
    _, (alice, reader) = await peers(ALICE, READER, max_answer_tokens=5000)
    groups = [long_group(8, 32_769, num_long=2)]
    body = encode_body(groups)
    await store(alice, signed(header_of(groups, body, lineage=groups[0].lineage)), body)
    await reader.reader.poll()
    assert reader.totals.rejected == {"oversize": 1}


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
    assert reader.totals.num_records_admitted == 1
    assert not +reader.totals.rejected


async def test_body_comes_from_another_holder_when_the_author_is_gone() -> None:
    _, (alice, first, second) = await peers(ALICE, READER, Identity(b"s" * 32))
    await alice.publish([group()])
    await first.reader.poll()
    await alice.transport.stop()
    await second.reader.poll()
    assert second.totals.num_groups_admitted == 1


async def test_withheld_body_is_counted_as_unavailable() -> None:
    clock = Clock()
    _, (alice, reader) = await peers(ALICE, READER, clock=clock)
    await alice.publish([group()])
    await alice.transport.stop()
    for _ in range(3):
        await reader.reader.poll()
        clock.now += 4 * UNREACHED_PAUSE_S
    assert reader.totals.rejected == {"unavailable": 2}, "that it was not there once is nothing to tell"


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
    assert reader.totals.rejected == {"header_mismatch": 1}
    await store(alice, signed(header_of(groups, body)), body)
    clock.now += 1
    await reader.reader.poll()
    assert reader.totals.num_groups_admitted == 1
    again = header_of(copied, body, author=MALLORY.peer_id, sequence=4)
    await store(mallory, signed(again, MALLORY), body, slot=4)
    clock.now += 1
    await reader.reader.poll()
    assert reader.totals.rejected == {"header_mismatch": 1, "replay": 1}
    assert reader.totals.num_groups_admitted == 1


async def test_other_bytes_under_the_announced_hash_are_rejected() -> None:
    _, (alice, reader) = await peers(ALICE, READER)
    groups = [group()]
    body = encode_body(groups)
    await store(alice, signed(header_of(groups, body)), body)
    alice.bodies.put(body_hash(body), body[:-1] + b"x", NOW + 600)
    await reader.reader.poll()
    assert reader.totals.rejected == {"wrong_hash": 1}


async def test_wrong_bytes_of_the_author_leave_a_true_holder_to_ask() -> None:
    _, (alice, first, second) = await peers(ALICE, READER, Identity(b"s" * 32))
    body = encode_body([group()])
    await store(alice, signed(header_of([group()], body)), body)
    await first.reader.poll()
    alice.bodies.put(body_hash(body), body[:-1] + b"x", NOW + 600)
    await second.reader.poll()
    assert second.totals.num_groups_admitted == 1


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
        while reader.totals.num_groups_admitted < 3:
            assert not poll.done(), "the silent author is still waited for"
            await asyncio.sleep(0.01)  # nobody tells
    is_over.set()
    await poll
    assert reader.totals.rejected == {"unavailable": 1}


@pytest.mark.parametrize("word", ["busy", "rate"])
async def test_a_body_whose_author_is_busy_is_asked_for_again(word: str) -> None:
    clock = Clock()
    _, (alice, reader) = await peers(ALICE, READER, clock=clock)
    serve_with(alice, lambda request: RequestRefused(word))
    await alice.publish([group()])
    await reader.reader.poll()
    assert reader.totals.num_groups_admitted == 0 and not reader.totals.rejected
    serve_with(alice, alice.bodies.get)
    clock.now += BUSY_PAUSE_S
    await reader.reader.poll()
    assert reader.totals.num_groups_admitted == 1 and not reader.totals.rejected


async def test_an_author_that_was_out_of_reach_is_asked_again() -> None:
    clock = Clock()
    network, (alice, reader) = await peers(ALICE, READER, clock=clock)
    await alice.publish([group()])
    await asyncio.sleep(0)  # gossip arrives
    network.partition([ALICE.peer_id])
    await reader.reader.poll()
    network.heal()
    clock.now += UNREACHED_PAUSE_S
    await reader.reader.poll()
    assert reader.totals.num_groups_admitted == 1 and not +reader.totals.rejected


async def test_a_body_that_stays_out_of_reach_too_long_is_given_up() -> None:
    clock = Clock()
    _, (alice, reader) = await peers(ALICE, READER, clock=clock, max_age_s=5)
    serve_with(alice, lambda request: RequestRefused("busy"))
    await alice.publish([group()])
    await reader.reader.poll()
    serve_with(alice, alice.bodies.get)
    clock.now += 5
    await reader.reader.poll()
    assert reader.totals.num_groups_admitted == 0


def serve_with(peer: Peer, answer: Callable[[bytes], bytes | Exception | None]) -> None:
    async def handle(peer_id: str, request: bytes) -> bytes:
        answered = answer(request)
        if isinstance(answered, bytes):
            return answered
        raise answered or RequestRefused("unknown body")

    peer.transport._server._services.clear()
    peer.transport.serve(BODY_PROTOCOL, handle, max_request_bytes=64)


async def test_silent_authors_hold_the_places_for_pulling_for_less_and_less_of_the_time() -> None:
    clock = Clock()
    silent = [Identity(bytes([number]) * 32) for number in range(1, 5)]
    _, (reader, honest, *authors) = await peers(READER, ALICE, *silent, clock=clock, swarm_groups=1000)
    for author in authors:
        serve_with(author, lambda request: None)
    for number in range(180):  # every 5 s a header of each
        for identity in silent:
            one = group(index=number, author=identity.peer_id)
            header = header_of(
                [one], encode_body([one]), author=identity.peer_id, sequence=number, created_at=clock.now,
                expires_at=clock.now + 600,
            )  # fmt: skip
            reader.reader._inbox.take_gossip(WHOLE_SWARM, signed(header, identity))
        await honest.publish([group(index=number)])  # without an answer of anybody no pause would grow
        await reader.reader.poll()
        clock.now += 5
    assert reader.totals.num_groups_admitted >= 178, "a busy machine may lose one of the honest author, too"
    assert 4 * 4 <= reader.totals.rejected["unavailable"] <= 4 * 10, "with an even pause it would be 4 * 45"


async def test_news_in_the_index_are_looked_for_in_the_windows_that_were_not_read() -> None:
    clock = Clock()
    _, (alice, reader) = await peers(ALICE, READER, clock=clock)
    pace = reader.reader.pace
    for _ in range(6):  # gossip seems to bring everything
        pace.heard()
        await reader.reader._sweep()
        for _ in range(int(pace.interval_s / 10)):
            clock.now += 10
            pace.heard()
    assert pace.interval_s == 8 * WINDOW_S
    for back in range(7, -1, -1):  # and then loses a header in every window
        index, at = 1000 + back, clock.now - back * WINDOW_S
        missed = [group(index=index)]
        header = header_of(missed, encode_body(missed), sequence=back, created_at=at, expires_at=at + 600)
        key = experience_key(SWARM_ID, WHOLE_SWARM, at)
        assert await alice.transport.store(key, subkey(ALICE.peer_id, back), signed(header), at + 600)
    await reader.reader._sweep()
    assert reader.totals.num_headers_swept == 8
    assert pace.interval_s == WINDOW_S


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
