"""Tasks that follow from a name and a record of another: what can be told of them, and what cannot."""

import random
from dataclasses import replace

import pytest

from swarm.config import TaskSourceSection, TasksSection
from swarm.records.codec import decode_header, encode_header
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord
from swarm.sharing.beacons import EPOCH_S, MAX_AGE_S, MAX_AHEAD, Beacons, Evidence, beacon_of
from swarm.sharing.reputation import Reputation
from swarm.tasks.task_cursor import TaskCursor, beacon_index
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import INDEX_SPAN
from swarm.types import GroupSummary, Header, TaskRef
from tests.unit.experience_factory import ALICE, MALLORY, READER, Clock, context_of, group, header_of

AUTHOR, OTHER = ALICE.peer_id, "other"
KNOWN = {OTHER}


def beacons(clock: Clock, own: Identity = READER, known: set[str] = KNOWN) -> Beacons:
    return Beacons(context_of(own, clock), is_known=known.__contains__, has_known=lambda: bool(known))


def from_other(body: bytes = b"sampled", author: str = OTHER) -> Header:
    return header_of([group()], body, author=author)


def header_by(beacon: bytes, *indices: int, author: str = AUTHOR, **changes: object) -> Header:
    summaries = tuple(GroupSummary(TaskRef("spelling", "cd" * 8, 99, index), 4, 0.5) for index in indices)
    return replace(header_of([group()], b"body", author=author), groups=summaries, beacon=beacon, **changes)


def test_tasks_that_follow_hold_and_others_do_not() -> None:
    clock = Clock()
    judge, heard = beacons(clock), from_other()
    judge.note(heard)
    beacon = beacon_of(heard)
    start = beacon_index(AUTHOR, beacon, "spelling")
    follows = [(start + step) % INDEX_SPAN for step in (0, 1, 5, MAX_AHEAD - 1)]
    assert judge.judge(header_by(beacon, *follows, created_at=clock.now)) is Evidence.HOLDS
    assert judge.judge(header_by(beacon, *follows, start - 9, created_at=clock.now)) is Evidence.HOLDS, "one had waited"
    chosen = [(start + MAX_AHEAD + step) % INDEX_SPAN for step in range(4)]
    assert judge.judge(header_by(beacon, *chosen, created_at=clock.now)) is Evidence.BROKEN
    assert judge.judge(header_by(beacon, *follows, author=MALLORY.peer_id, created_at=clock.now)) is Evidence.BROKEN
    assert judge.judge(header_by(b"", *follows)) is Evidence.MISSING
    assert judge.judge(header_by(bytes(16), *follows)) is Evidence.UNKNOWN


def test_old_beacons_are_broken_as_tasks_could_be_solved_ahead() -> None:
    clock = Clock()
    judge, heard = beacons(clock), from_other()
    judge.note(heard)
    start = beacon_index(AUTHOR, beacon_of(heard), "spelling")
    header = header_by(beacon_of(heard), start, created_at=clock.now + MAX_AGE_S - 1)
    assert judge.judge(header) is Evidence.HOLDS
    assert judge.judge(replace(header, created_at=clock.now + MAX_AGE_S + 1)) is Evidence.BROKEN


@pytest.mark.parametrize("author", [AUTHOR, MALLORY.peer_id], ids=["own record", "a stranger's"])
def test_a_record_that_its_user_could_have_made_says_nothing(author: str) -> None:
    judge, made = beacons(Clock()), from_other(author=author)
    judge.note(made)
    assert (
        judge.judge(header_by(beacon_of(made), beacon_index(AUTHOR, beacon_of(made), "spelling"))) is Evidence.UNKNOWN
    )
    assert judge.current() == b"", "nor is it followed"


def test_where_nobody_is_known_yet_anybodys_record_counts() -> None:
    reputation = Reputation(3600.0, Clock())
    judge = Beacons(context_of(), is_known=reputation.is_known, has_known=reputation.has_known)
    judge.note(from_other(author=MALLORY.peer_id))
    assert judge.current() == beacon_of(from_other(author=MALLORY.peer_id))
    for _ in range(9):
        reputation.admitted(OTHER)
    assert reputation.has_known()


def test_a_node_follows_one_beacon_an_epoch_and_finds_it_again_for_groups_that_waited() -> None:
    clock = Clock()
    mine = beacons(clock, own=ALICE)
    first, second, third = (from_other(bytes([number])) for number in range(3))
    mine.note(first)
    clock.now += EPOCH_S
    mine.note(second)
    assert mine.current() == beacon_of(first)
    clock.now += 1
    mine.note(third)
    assert mine.current() == beacon_of(third)
    waited = TaskRef("spelling", "cd" * 8, 99, beacon_index(AUTHOR, beacon_of(first), "spelling"))
    assert mine.of([waited]) == beacon_of(first)
    assert mine.of([replace(waited, index=(waited.index - 1) % INDEX_SPAN)]) == b""


def test_a_record_that_is_announced_again_is_no_new_beacon() -> None:
    """Else one known name could send all nodes back to the same tasks, and each would hold all others for cheats."""
    clock = Clock()
    follower, reader = beacons(clock, own=ALICE), beacons(clock)
    old, new = from_other(), from_other(b"sampled later")
    for one in (follower, reader):
        one.note(old)
    clock.now += MAX_AGE_S + 1
    for header in (replace(old, created_at=clock.now, sequence=1), new):
        for one in (follower, reader):
            one.note(header)
    assert follower.current() == beacon_of(new)
    index = beacon_index(AUTHOR, follower.current(), "spelling")
    named = follower.of([TaskRef("spelling", "cd" * 8, 99, index)])
    assert reader.judge(header_by(named, index, created_at=clock.now)) is Evidence.HOLDS


def test_a_slow_node_names_no_beacon_that_readers_would_take_for_old() -> None:
    clock = Clock()
    mine, reader, heard = beacons(clock, own=ALICE), beacons(clock), from_other()
    mine.note(heard)
    reader.note(heard)
    index = beacon_index(AUTHOR, mine.current(), "spelling")
    task = TaskRef("spelling", "cd" * 8, 99, index)
    for age_s, evidence in ((MAX_AGE_S / 2, Evidence.HOLDS), (2 * MAX_AGE_S, Evidence.MISSING)):
        clock.now = heard.created_at + age_s
        named = header_by(mine.of([task]), index, created_at=clock.now)
        assert reader.judge(named) is evidence, "never broken, however long a round takes"


def test_a_flood_of_headers_is_forgotten_first_come_first() -> None:
    judge = beacons(Clock())
    for number in range(10_000):
        judge.note(from_other(number.to_bytes(4, "big")))
    assert len(judge._received) == 8192


def test_the_cursor_goes_on_from_a_beacon_once_and_a_checkpoint_remembers_it() -> None:
    mixture = TaskMixture(TasksSection(sources=(TaskSourceSection(name="gcd"),), held_out_share=0))
    cursor = TaskCursor(mixture, 99, random.Random(0))
    cursor.follow(AUTHOR, b"")
    assert [task.ref.index for task in cursor.draw(2)] == [0, 1]
    beacon = beacon_of(from_other())
    start = beacon_index(AUTHOR, beacon, "gcd")
    cursor.follow(AUTHOR, beacon)
    assert cursor.draw(1)[0].ref.index == start
    again = TaskCursor(mixture, 99, random.Random(0))
    again.restore(cursor.state())
    again.follow(AUTHOR, beacon)
    assert again.draw(1)[0].ref.index == (start + 1) % INDEX_SPAN


def test_headers_carry_a_beacon_or_none_and_no_other_length() -> None:
    for beacon in (b"", bytes(range(16))):
        header = header_by(beacon, 1)
        assert decode_header(encode_header(header), header.author) == header
    for spoiled in (bytes(15), bytes(17)):
        with pytest.raises(InvalidRecord):
            decode_header(encode_header(header_by(spoiled, 1)), AUTHOR)
