"""What a node hands on for others is bounded per author, and its own bodies are the last to go."""

import pytest

from swarm.sharing import body_store
from swarm.sharing.body_store import BodyStore

HOUR = 3600.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def kept(store: BodyStore, *hashes: bytes) -> list[bool]:
    return [store.get(body_hash) is not None for body_hash in hashes]


def test_oldest_bodies_of_an_author_over_its_share_go() -> None:
    store = BodyStore(Clock(), max_bytes=800)
    for name in (b"1", b"2", b"3"):
        store.put(name, bytes(40), 5000.0, "alice")
    assert kept(store, b"1", b"2", b"3") == [False, True, True]
    store.put(b"huge", bytes(101), 5000.0, "alice")
    assert store.get(b"huge") is None


def test_flood_of_one_author_pushes_out_no_other() -> None:
    store = BodyStore(Clock(), max_bytes=800)
    store.put(b"own", bytes(300), 5000.0)
    store.put(b"bob", bytes(90), 5000.0, "bob")
    for number in range(100):
        store.put(bytes([number]), bytes(50), 5000.0, "mallory")
    assert kept(store, b"own", b"bob", bytes([99])) == [True, True, True]


def test_many_authors_push_out_the_largest_of_them_but_no_own_body() -> None:
    store = BodyStore(Clock(), max_bytes=800)
    store.put(b"own", bytes(400), 5000.0)
    store.put(b"small", bytes(10), 5000.0, "bob")
    for number in range(100):
        store.put(bytes([number]), bytes(50), 5000.0, f"sybil{number}")
    assert kept(store, b"own", b"small", bytes([99])) == [True, True, True]
    store.put(b"own2", bytes(790), 5000.0)
    assert kept(store, b"own", b"own2", b"small") == [False, True, False]


def test_expired_bodies_go_before_live_ones() -> None:
    clock = Clock()
    store = BodyStore(clock, max_bytes=800)
    for number in range(8):
        store.put(bytes([number]), bytes(90), 1010.0 if number == 7 else 5000.0, f"author{number}")
    clock.now = 1020.0
    store.put(b"new", bytes(100), 5000.0, "new")
    assert kept(store, *(bytes([number]) for number in range(8))) == [True] * 7 + [False]
    store.put(b"late", bytes(10), 1020.0, "new")
    assert store.get(b"late") is None


def test_same_body_again_counts_once() -> None:
    store = BodyStore(Clock(), max_bytes=800)
    for _ in range(50):
        store.put(b"1", bytes(60), 5000.0, "alice")
    store.put(b"2", bytes(40), 5000.0, "alice")
    assert kept(store, b"1", b"2") == [True, True]


async def test_who_fetched_own_bodies_is_counted_for_so_many_peers_and_names_push_out_no_busy_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_store, "_MAX_TAKERS", 3)
    store = BodyStore(Clock(), max_bytes=800)
    store.put(b"own", bytes(40), 5000.0)
    store.put(b"other", bytes(40), 5000.0, "alice")
    for peer in ("friend", "friend", "friend", *map(str, range(100))):
        await store._answer(peer, b"own")
        await store._answer(peer, b"other")
    assert len(store.taken_by) == 3 and store.taken_by["friend"] == (3, 1000.0) and store.num_taken == 103
