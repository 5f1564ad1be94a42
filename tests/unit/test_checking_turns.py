"""Authors whose answers are slow to check hold nobody else up; while there is time to spare they wait for nobody."""

import asyncio

from swarm.admission.checking_turns import BUSY, HALF_LIFE_S, CheckingTurns
from swarm.config import SharingSection
from swarm.records.codec import encode_body
from swarm.records.identity import Identity
from swarm.sharing.inbox import Inbox
from swarm.sharing.index import subkey
from swarm.sharing.peer_tracker import PeerTracker
from tests.unit.experience_factory import Clock, context_of, group, header_of, make_inbox, signed

SLOW, FAST, OTHER = Identity(b"s" * 32), Identity(b"f" * 32), Identity(b"o" * 32)


def make_turns(*strangers: str) -> tuple[CheckingTurns, Clock]:
    clock = Clock()
    return CheckingTurns(lambda author: author not in strangers, clock), clock


async def check(turns: CheckingTurns, clock: Clock, author: str, duration_s: float, done: list[str]) -> None:
    async with turns.turn(author):
        await asyncio.sleep(0)  # others come meanwhile
        clock.now += duration_s
        done.append(author)


def test_the_author_that_has_taken_least_time_comes_first() -> None:
    turns, clock = make_turns()
    done: list[str] = []

    async def main() -> None:
        await asyncio.gather(*(check(turns, clock, author, 20.0, done) for author in ("slow", "slow", "slow")))
        await asyncio.gather(
            *(check(turns, clock, "slow", 20.0, done) for _ in range(3)),
            *(check(turns, clock, author, 0.1, done) for author in ("fast", "fast", "fast")),
        )

    asyncio.run(main())
    assert done == ["slow"] * 3 + ["slow", "fast", "fast", "fast", "slow", "slow"]


def test_fresh_names_are_one_author() -> None:
    """Else every new name would come before all who have a past."""
    turns, clock = make_turns("name 1", "name 2", "name 3")
    done: list[str] = []

    async def main() -> None:
        await check(turns, clock, "known", 1.0, done)
        await asyncio.gather(
            *(check(turns, clock, author, 20.0, done) for author in ("name 1", "name 2", "name 3", "known"))
        )

    asyncio.run(main())
    assert done == ["known", "name 1", "known", "name 2", "name 3"]


def test_who_stops_waiting_leaves_the_turn_to_the_next() -> None:
    """Also where it is cancelled in the moment in which its turn comes."""
    turns, clock = make_turns()
    done: list[str] = []

    async def main() -> None:
        async with turns.turn("first"):
            leaves = asyncio.create_task(check(turns, clock, "leaves", 1.0, done))
            next_one = asyncio.create_task(check(turns, clock, "next", 1.0, done))
            also_leaves = asyncio.create_task(check(turns, clock, "also leaves", 1.0, done))
            await asyncio.sleep(0)
            also_leaves.cancel()
        leaves.cancel()  # its turn has come, and it has not run since
        await asyncio.wait_for(next_one, 5)
        await check(turns, clock, "last", 1.0, done)

    asyncio.run(main())
    assert done == ["next", "last"]


def filled_inbox(clock: Clock) -> tuple[Inbox, PeerTracker]:
    config = SharingSection()
    authors = PeerTracker(config, context_of(clock=clock))
    inbox = make_inbox(config, clock, tracker=authors)
    authors.turns = CheckingTurns(lambda author: True, clock)
    for sequence, author in enumerate((SLOW, SLOW, FAST, SLOW, OTHER, SLOW)):
        groups = [group(index=sequence, author=author.peer_id)]
        header = header_of(groups, encode_body(groups), sequence=sequence, author=author.peer_id)
        assert inbox.take_entry(subkey(author.peer_id, sequence), signed(header, author))
    return inbox, authors


async def take_time(turns: CheckingTurns, clock: Clock, author: str, total_s: float) -> None:
    for _ in range(10):
        await check(turns, clock, author, total_s / 10, [])


def picked(inbox: Inbox) -> list[str]:
    headers = [inbox.pick() for _ in range(6)]
    return [header.author for header in headers if header is not None]


def test_while_checking_takes_most_of_the_time_slow_authors_are_pulled_when_nobody_else_offers() -> None:
    clock = Clock()
    inbox, authors = filled_inbox(clock)
    asyncio.run(take_time(authors.turns, clock, SLOW.peer_id, 2 * HALF_LIFE_S))
    assert authors.turns.is_busy
    order = picked(inbox)
    assert sorted(order[:2]) == sorted((FAST.peer_id, OTHER.peer_id))
    assert order[2:] == [SLOW.peer_id] * 4


def test_while_there_is_time_to_spare_nobody_is_put_off() -> None:
    clock = Clock()
    inbox, authors = filled_inbox(clock)
    asyncio.run(take_time(authors.turns, clock, SLOW.peer_id, 0.6 * BUSY * HALF_LIFE_S))
    assert not authors.turns.is_busy
    headers = list(iter(lambda: inbox.pick(), None))
    assert authors.turns.first(headers) == headers and len(headers) == 6


def test_the_line_is_no_longer_busy_when_time_has_passed() -> None:
    turns, clock = make_turns()
    asyncio.run(take_time(turns, clock, "slow", 3 * HALF_LIFE_S))
    assert turns.is_busy
    clock.now += 2 * HALF_LIFE_S
    assert not turns.is_busy
