"""A search of the index finds what honest peers hold, whomever others name."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hivemind")

from hivemind.dht.routing import DHTID
from hivemind.utils.timed_storage import ValueWithExpiration

from swarm.network.hivemind.index_search import (
    MAX_ASKED,
    NUM_NEAREST,
    SEARCH_TIMEOUT_S,
    IndexSearch,
    KnownPlaces,
)
from swarm.network.hivemind.index_storage import IndexEntries
from swarm.network.index_entry import PLACES_S
from swarm.network.memory.virtual_clock import run
from swarm.sharing.directory import PRESENCE_INTERVAL_S

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KEY = DHTID.generate(source="key")
SILENCE_S = 3.0
Answer = Callable[[], tuple[dict[str, bytes], list[DHTID]]]


def near(number: int) -> DHTID:
    """Nearer to the key than any honest peer."""
    return DHTID(KEY ^ (number + 1))


def entries(values: dict[str, bytes]) -> Any:
    found = IndexEntries()
    for subkey, value in values.items():
        found.store(subkey, value, time.time() + 60)
    return ValueWithExpiration(found, time.time() + 60) if values else None


class Node:
    """The node of a search: its routing table, and what each peer answers; others are silent."""

    def __init__(self, table: list[DHTID], answers: dict[DHTID, Answer]) -> None:
        self.node_id = DHTID.generate(source="own")
        self.answers = answers
        self.asked: list[DHTID] = []
        nearest = sorted(table, key=lambda one: one.xor_distance(KEY))
        routing_table = SimpleNamespace(
            get_nearest_neighbors=lambda target, k, exclude: [(one, one) for one in nearest[:k]]
        )
        self.protocol = SimpleNamespace(routing_table=routing_table, storage=SimpleNamespace(get=lambda key: None))

    async def _call_find_with_blacklist(self, peer: DHTID, keys: list[DHTID]) -> dict[DHTID, Any] | None:
        self.asked.append(peer)
        if peer not in self.answers:
            await asyncio.sleep(SILENCE_S)
            return None
        await asyncio.sleep(0.05)
        held, named = self.answers[peer]()
        return {key: (entries(held), {one: one for one in named}) for key in keys}


def searched(node: Node) -> tuple[IndexSearch, float]:
    """The search, and how long it took."""

    async def main() -> tuple[IndexSearch, float]:
        start = asyncio.get_running_loop().time()
        search = IndexSearch(node, KEY)  # type: ignore[arg-type]
        await search.run()
        return search, asyncio.get_running_loop().time() - start

    return run(main())


def test_made_up_peers_near_a_key_hide_nothing_that_honest_ones_hold() -> None:
    honest = [DHTID.generate(source=f"honest {number}") for number in range(6)]
    holder, liar = honest[-1], near(1000)
    answers: dict[DHTID, Answer] = {one: lambda: ({}, [holder]) for one in honest[:5]}
    answers[holder] = lambda: ({"a": b"x"}, [])
    answers[liar] = lambda: ({}, [near(number) for number in range(60)])
    search, took_s = searched(Node([*honest[:5], liar], answers))
    assert {subkey: item.value for subkey, item in search.entries.data.items()} == {"a": b"x"}
    assert {one for one, _ in search.nearest} == {*honest, liar}
    assert search.nearest[0][0] == liar
    assert took_s <= SEARCH_TIMEOUT_S


def test_those_whom_a_liar_names_are_asked_after_those_whom_others_name() -> None:
    honest, liar = [DHTID.generate(source=f"honest {number}") for number in range(40)], near(1000)
    named = {one: [two] for one, two in zip(honest[:20], honest[20:], strict=True)}
    answers: dict[DHTID, Answer] = {one: lambda one=one: ({}, named.get(one, [])) for one in honest}
    answers[liar] = lambda: ({}, [near(number) for number in range(60)])
    node = Node([*honest[:8], liar], answers)
    searched(node)
    made_up = [number for number, one in enumerate(node.asked) if one not in answers]
    assert set(honest[20:28]) <= set(node.asked)
    assert len(made_up) <= 16, "eight at once, for two silences"


def test_peers_that_name_ever_nearer_ones_do_not_keep_a_search_going() -> None:
    node = Node([DHTID.generate(source="first")], {})

    class Endless(dict[DHTID, Answer]):
        def __contains__(self, one: object) -> bool:
            return True

        def __getitem__(self, one: DHTID) -> Answer:
            return lambda: ({}, [near(len(node.asked) * 64 + number) for number in range(64)])

    node.answers = Endless()
    search, took_s = searched(node)
    assert took_s <= SEARCH_TIMEOUT_S
    assert len(node.asked) <= MAX_ASKED
    assert len(search.nearest) == NUM_NEAREST


def test_a_search_ends_with_the_nearest_that_have_answered() -> None:
    peers = [DHTID.generate(source=f"peer {number}") for number in range(60)]
    answers: dict[DHTID, Answer] = {one: lambda: ({}, peers) for one in peers}
    search, took_s = searched(Node(peers[:3], answers))
    assert [one for one, _ in search.nearest] == sorted(peers, key=lambda one: one.xor_distance(KEY))[:NUM_NEAREST]
    assert took_s < 1.0 and search.is_complete


def test_nobody_to_ask_is_an_empty_search() -> None:
    search, _ = searched(Node([], {}))
    assert (search.nearest, search.entries.data) == ([], {})


def test_a_search_that_silent_peers_hold_up_is_not_complete() -> None:
    peers = [DHTID.generate(source=f"silent {number}") for number in range(NUM_NEAREST)]
    search, took_s = searched(Node(peers, {}))
    assert took_s == pytest.approx(SEARCH_TIMEOUT_S, abs=0.1) and not search.is_complete


def places(count: int) -> list[tuple[DHTID, Any]]:
    return [(near(number), near(number)) for number in range(count)]


def ended(count: int, *, is_complete: bool = True) -> Any:
    """A search that found so many peers."""
    return SimpleNamespace(nearest=places(count), is_complete=is_complete)


class Table:
    """A clock, a routing table, and the places that are known with them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.peers = {near(number) for number in range(3)}
        self.known = KnownPlaces(lambda: self.now, lambda: self.peers)


def test_a_search_that_found_everybody_counts_for_every_key_for_a_while() -> None:
    table = Table()
    table.known.note(KEY, ended(NUM_NEAREST - 1), least=5)
    assert table.known.near(near(7)) == places(NUM_NEAREST - 1)
    table.now += PLACES_S
    assert table.known.near(KEY) == table.known.near(near(7)) == []


def test_whoever_has_met_another_peer_does_not_know_everybody_any_more() -> None:
    table = Table()
    table.known.note(KEY, ended(NUM_NEAREST - 1), least=5)
    table.peers.add(near(100))
    assert table.known.near(KEY) == table.known.near(near(7)) == []
    table.peers.clear()
    assert table.known.near(KEY) == [], "the swarm has grown, even if that peer has left again"


def test_a_search_in_a_large_swarm_counts_for_its_key_alone_and_one_that_found_too_few_for_none() -> None:
    table = Table()
    known = table.known
    known.note(KEY, ended(4), least=5)
    assert known.near(KEY) == []
    known.note(KEY, ended(NUM_NEAREST), least=5)
    table.peers.add(near(100))
    assert known.near(KEY) == places(NUM_NEAREST) and known.near(near(7)) == []
    table.now += 2 * PRESENCE_INTERVAL_S + 1  # whoever lists itself under this key has two more turns without a search
    assert known.near(KEY) == places(NUM_NEAREST)
    table.now += PRESENCE_INTERVAL_S
    assert known.near(KEY) == []
    known.note(KEY, ended(NUM_NEAREST), least=5)
    known.forget()
    assert known.near(KEY) == []


def test_a_search_that_slow_peers_ended_counts_for_no_key() -> None:
    table = Table()
    for count in (NUM_NEAREST - 1, NUM_NEAREST):
        table.known.note(KEY, ended(count), least=5)
        assert table.known.near(KEY) == places(count)
        table.known.note(KEY, ended(count, is_complete=False), least=5)
        assert table.known.near(KEY) == [], "what an earlier one found may be gone"


FULL = {name: name.encode() for name in "abcdef"}


@pytest.mark.parametrize(
    ("held", "is_enough"),
    [
        ([FULL, FULL, FULL], True),
        ([{"a": b"a"}, {"a": b"a", "b": b"b"}], True),
        ([FULL, FULL, {"a": b"a", "b": b"b"}], False),
        ([FULL, {}], False),
        ([{}, {}], False),
        ([FULL, None], False),
    ],
    ids=["agree", "one is half of all", "one has less", "one has nothing", "nobody has anything", "one is silent"],
)
def test_known_hosts_are_believed_where_each_has_half_of_what_they_have_together(
    held: list[dict[str, bytes] | None], is_enough: bool
) -> None:
    hosts = [near(number) for number in range(len(held))]
    answers: dict[DHTID, Answer] = {
        host: lambda own=own: (own, []) for host, own in zip(hosts, held, strict=True) if own is not None
    }
    node = Node([], answers)
    search = IndexSearch(node, KEY)  # type: ignore[arg-type]
    assert run(search.read([(one, one) for one in hosts])) is is_enough
    together = {subkey: value for own in held if own for subkey, value in own.items()}
    assert {subkey: item.value for subkey, item in search.entries.data.items()} == together, "also where more are asked"
    assert sorted(node.asked) == sorted(hosts)


def test_this_node_reads_its_own_share_without_a_question() -> None:
    node = Node([], {near(0): lambda: (FULL, [])})
    node.protocol.storage.get = lambda key: entries(FULL)
    search = IndexSearch(node, KEY)  # type: ignore[arg-type]
    assert run(search.read([(node.node_id, node.node_id), (near(0), near(0))]))
    assert set(search.entries.data) == set(FULL)
    assert node.asked == [near(0)]
