"""Headers are judged once: what is invalid is held against who passed it on, what is merely of no use against nobody."""

import asyncio
import random
from dataclasses import replace

import pytest

from swarm.config import SharingSection
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.memory.virtual_clock import run, virtual_now
from swarm.network.transport import ValidationResult
from swarm.records.codec import decode_record, encode_body, encode_record
from swarm.records.identity import Identity
from swarm.sharing.inbox import Inbox
from swarm.sharing.index import Shard, experience_topic, shard_of, subkey
from swarm.types import Header
from tests.unit import experience_factory
from tests.unit.experience_factory import (
    ALICE,
    MALLORY,
    NOW,
    READER,
    SWARM_ID,
    Clock,
    group,
    header_of,
    signed,
)

EVERYBODY = Shard(0, 0)


def make_inbox(clock: Clock | None = None, **settings: object) -> tuple[Inbox, Clock]:
    clock = clock or Clock()
    return experience_factory.make_inbox(SharingSection.model_validate(settings), clock), clock


def make_header(sequence: int = 1, author: Identity = ALICE, **changes: object) -> Header:
    groups = [group(index=sequence, author=author.peer_id)]
    return header_of(groups, encode_body(groups), sequence=sequence, author=author.peer_id, **changes)


def test_a_valid_header_is_taken_once_and_passed_on_once() -> None:
    inbox, _ = make_inbox()
    header = make_header()
    assert inbox.take_gossip(EVERYBODY, signed(header)) is ValidationResult.ACCEPT
    assert inbox.arrived.is_set()
    assert inbox.take_gossip(EVERYBODY, signed(header)) is ValidationResult.IGNORE
    inbox.take_entry(subkey(ALICE.peer_id, 1), signed(header))
    assert (inbox.pick(), inbox.pick()) == (header, None)
    assert not inbox.totals.rejected


def under_name_of_alice(record: bytes) -> bytes:
    return encode_record(replace(decode_record(record), author=ALICE.peer_id))


def of_other_task() -> bytes:
    groups = [replace(group(), task=replace(group().task, source="elsewhere"))]
    return signed(header_of(groups, encode_body(groups)))


def held_out() -> bytes:
    groups = [replace(group(), task=replace(group().task, seed=1))]
    return signed(header_of(groups, encode_body(groups)))


@pytest.mark.parametrize(
    ("record", "verdict", "reason"),
    [
        (b"", ValidationResult.REJECT, "malformed"),
        (b"garbage", ValidationResult.REJECT, "malformed"),
        (signed(make_header())[:-1] + b"x", ValidationResult.REJECT, "bad_signature"),
        (under_name_of_alice(signed(make_header(), MALLORY)), ValidationResult.REJECT, "bad_signature"),
        (signed(make_header(swarm_id="cd" * 16)), ValidationResult.REJECT, "foreign_swarm"),
        (held_out(), ValidationResult.REJECT, "held_out_task"),
        (signed(make_header(author=READER), READER), ValidationResult.IGNORE, "own_record"),
        (signed(make_header(created_at=NOW - 900, expires_at=NOW - 1)), ValidationResult.IGNORE, "expired"),
        (signed(make_header(created_at=NOW + 60)), ValidationResult.IGNORE, "clock_skew"),
        (of_other_task(), ValidationResult.IGNORE, "unknown_task"),
    ],
)
def test_verdict_and_reason(record: bytes, verdict: ValidationResult, reason: str) -> None:
    inbox, _ = make_inbox()
    assert inbox.take_gossip(EVERYBODY, record) is verdict
    assert inbox.totals.rejected == {reason: 1}
    assert inbox.pick() is None and not inbox.arrived.is_set()


def test_the_same_body_announced_again_is_nobodys_fault() -> None:
    inbox, _ = make_inbox()
    first = make_header()
    assert inbox.take_gossip(EVERYBODY, signed(first)) is ValidationResult.ACCEPT
    assert inbox.take_gossip(EVERYBODY, signed(replace(first, sequence=2))) is ValidationResult.IGNORE
    assert inbox.totals.rejected == {"replay": 1}


def test_an_author_that_sends_too_much_is_the_author_s_fault_and_not_the_forwarder_s() -> None:
    inbox, _ = make_inbox(max_records_per_peer_per_minute=2)
    verdicts = [inbox.take_gossip(EVERYBODY, signed(make_header(number))) for number in range(4)]
    assert verdicts == [
        ValidationResult.ACCEPT,
        ValidationResult.ACCEPT,
        ValidationResult.IGNORE,
        ValidationResult.IGNORE,
    ]
    assert inbox.totals.rejected == {"rate": 2}


def test_a_header_in_a_shard_that_is_not_its_author_s_is_rejected() -> None:
    inbox, _ = make_inbox()
    right = shard_of(SWARM_ID, ALICE.peer_id, 3, NOW)
    wrong = Shard(3, right.number ^ 1)
    assert inbox.take_gossip(wrong, signed(make_header(1))) is ValidationResult.REJECT
    assert inbox.take_gossip(right, signed(make_header(2))) is ValidationResult.ACCEPT
    assert inbox.totals.rejected == {"wrong_slot": 1}


def test_an_entry_under_another_s_subkey_is_not_taken() -> None:
    inbox, _ = make_inbox()
    inbox.take_entry(subkey(MALLORY.peer_id, 1), signed(make_header()))
    inbox.take_entry(subkey(READER.peer_id, 1), b"what the index holds under the own name is not looked at")
    assert inbox.pick() is None
    assert inbox.totals.rejected == {"wrong_slot": 1}


def test_every_author_has_the_same_chance_and_of_one_the_newest_comes_first() -> None:
    inbox, _ = make_inbox(max_records_per_peer_per_minute=60)
    for author in (ALICE, MALLORY):  # of those of whom nothing is known, the first to come are taken every other time
        inbox._tracker.reputation.admitted(author.peer_id)
    for number in range(50):
        inbox.take_gossip(EVERYBODY, signed(make_header(number)))
    for number in range(5):
        header = make_header(number, MALLORY, created_at=NOW - 10 + number)
        inbox.take_gossip(EVERYBODY, signed(header, MALLORY))
    picked = [inbox.pick() for _ in range(16)]
    by_mallory = [header.sequence for header in picked if header and header.author == MALLORY.peer_id]
    assert by_mallory == [4, 3, 2, 1, 0]  # every other pick, until there are no more


def test_an_author_that_does_not_answer_is_left_alone_for_a_while() -> None:
    inbox, clock = make_inbox()
    inbox.take_gossip(EVERYBODY, signed(make_header()))
    inbox.leave_alone(ALICE.peer_id)
    assert inbox.pick() is None
    clock.now += 21
    assert inbox.pick() is not None


def test_what_expired_or_is_too_old_is_not_offered() -> None:
    inbox, clock = make_inbox(max_age_s=100)
    inbox.take_gossip(EVERYBODY, signed(make_header(1, created_at=NOW - 50)))
    clock.now += 51
    assert inbox.pick() is None
    inbox.take_gossip(EVERYBODY, signed(make_header(2, created_at=NOW, expires_at=NOW + 60)))
    clock.now += 10
    assert inbox.pick() is None


def test_authors_heard_of_late_are_counted_once_each_and_forgotten() -> None:
    inbox, clock = make_inbox()
    for number in range(3):
        inbox.take_gossip(EVERYBODY, signed(make_header(number)))
    inbox.take_gossip(EVERYBODY, signed(make_header(9, MALLORY), MALLORY))
    inbox.take_gossip(EVERYBODY, b"garbage")
    assert inbox.totals.num_authors_heard() == 2
    clock.now += 60
    inbox.take_gossip(EVERYBODY, signed(make_header(10)))
    clock.now += 61
    assert inbox.totals.num_authors_heard() == 1


def test_a_flood_of_garbage_and_of_headers_leaves_bounded_tables() -> None:
    inbox, _ = make_inbox(max_records_per_peer_per_minute=600)
    for number in range(20_000):
        inbox.take_gossip(EVERYBODY, number.to_bytes(4, "big"))
    for number in range(1_100):
        author = Identity((number // 200).to_bytes(32, "big"))
        inbox.take_gossip(EVERYBODY, signed(make_header(number, author), author))
    assert len(inbox._validator._seen) <= 16_384 and len(inbox._candidates) <= 1024 and len(inbox.totals._heard) <= 1024


def test_over_a_network_garbage_dies_at_the_first_honest_node_and_its_sender_is_ignored() -> None:
    topic = experience_topic(SWARM_ID, EVERYBODY)

    async def main() -> None:
        network = MemoryNetwork(random.Random(0), virtual_now)
        mallory = MemoryTransport(network, MALLORY.peer_id)
        mallory.subscribe(topic, lambda peer_id, record: ValidationResult.ACCEPT)
        honest = [Identity(bytes([number]) * 32) for number in range(12)]
        inboxes = []
        for identity in honest:
            clock = Clock()
            inbox = make_inbox(clock)[0]
            node = MemoryTransport(network, identity.peer_id)
            node.subscribe(topic, lambda peer_id, record, inbox=inbox: inbox.take_gossip(EVERYBODY, record))
            inboxes.append((node, inbox))
        for node in (mallory, *(node for node, _ in inboxes)):
            await node.start()
        await asyncio.sleep(5)
        for number in range(30):
            await mallory.publish(topic, b"garbage %d" % number)
            await asyncio.sleep(0.01)
        await inboxes[0][0].publish(topic, signed(make_header()))
        await asyncio.sleep(2)
        garbage = [sum(inbox.totals.rejected.values()) for _, inbox in inboxes]
        assert 0 < sum(count > 0 for count in garbage) <= 12 and max(garbage) < 30  # stopped listening before the end
        assert all(inbox.pick() is not None for _, inbox in inboxes[1:])
        for node in (mallory, *(node for node, _ in inboxes)):
            await node.stop()

    run(main())
