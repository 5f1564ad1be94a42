"""The share of the index that a node keeps: bounded in sum and per author, and nobody loses an entry to another."""

import time
from collections.abc import Callable

import pytest

pytest.importorskip("hivemind")

from hivemind.dht.routing import DHTID

from swarm.network.hivemind.index_storage import ENTRY_OVERHEAD_BYTES, IndexStorage
from swarm.network.index_entry import MAX_ENTRIES_PER_KEY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KEY = DHTID.generate(source="key")


class Clock:
    def __init__(self) -> None:
        self.now = time.time()  # hivemind reads the real one as well

    def __call__(self) -> float:
        return self.now


def entries(storage: IndexStorage, key: DHTID = KEY) -> dict[str, bytes]:
    found = storage.get(key)
    return {} if found is None else {subkey: item.value for subkey, item in found.value.data.items()}


def fill(storage: IndexStorage, author: str, end: float, count: int, size: int = 0) -> int:
    """Store under many keys; how many were taken."""
    keys: Callable[[int], DHTID] = lambda number: DHTID.generate(source=f"{author}{number}")  # noqa: E731
    return sum(storage.store_subkey(keys(number), f"{author}/0", bytes(size), end) for number in range(count))


def test_entry_is_kept_replaced_by_a_newer_one_and_gone_when_it_expires() -> None:
    clock = Clock()
    storage = IndexStorage(clock)
    assert storage.store(KEY, b"1", clock.now + 60, subkey="a/0")
    assert storage.store(KEY, b"2", clock.now + 61, subkey="a/0")
    assert storage.store_subkey(KEY, "b/0", b"3", clock.now + 90)
    assert entries(storage) == {"a/0": b"2", "b/0": b"3"}
    assert storage.num_bytes == 2 * (ENTRY_OVERHEAD_BYTES + 4)
    clock.now += 62
    assert entries(storage) == {"b/0": b"3"}
    clock.now += 30
    assert entries(storage) == {}
    assert (storage.num_bytes, len(storage.data), storage._author_bytes) == (0, 0, {})


def test_copy_with_an_earlier_end_does_not_shorten_a_life() -> None:
    clock = Clock()
    storage = IndexStorage(clock)
    assert storage.store_subkey(KEY, "a/0", b"1", clock.now + 3000)
    for end in (1.0, 2999.0, 3000.0):
        assert not storage.store_subkey(KEY, "a/0", b"1", clock.now + end)
    clock.now += 2000
    assert entries(storage) == {"a/0": b"1"}
    assert storage.refused == {"not_newer": 3}


def test_value_without_subkey_does_not_replace_a_key() -> None:
    clock = Clock()
    storage = IndexStorage(clock)
    storage.store_subkey(KEY, "a/0", b"1", clock.now + 60)
    assert not storage.store(KEY, b"plain", clock.now + 3600)
    assert entries(storage) == {"a/0": b"1"}


def test_full_key_takes_replacements_but_nothing_new() -> None:
    clock = Clock()
    storage = IndexStorage(clock)
    for number in range(MAX_ENTRIES_PER_KEY):
        assert storage.store_subkey(KEY, f"{number}/0", b"x", clock.now + 60)
    assert storage.store_subkey(KEY, "7/0", b"y", clock.now + 61)
    assert not storage.store_subkey(KEY, "new/0", b"x", clock.now + 60)
    assert storage.refused == {"key_full": 1}


def test_author_has_a_share_and_what_is_over_it_is_refused() -> None:
    clock = Clock()
    storage = IndexStorage(clock, max_author_bytes=100_000)
    taken = fill(storage, "flood", clock.now + 3000, 100)
    assert 40 < taken <= 100_000 / ENTRY_OVERHEAD_BYTES
    assert storage.refused == {"author_full": 100 - taken}
    assert fill(storage, "other", clock.now + 60, 5) == 5
    clock.now += 3001
    assert fill(storage, "flood", clock.now + 60, 100) == taken


def test_flood_of_one_author_evicts_nobody_but_itself() -> None:
    clock = Clock()
    storage = IndexStorage(clock, max_bytes=200_000, max_author_bytes=10**9)
    assert fill(storage, "honest", clock.now + 60, 10) == 10
    assert fill(storage, "flood", clock.now + 3000, 500) < 90
    assert fill(storage, "late", clock.now + 60, 10) == 10  # at the expense of the flood
    assert storage.num_bytes <= 200_000
    assert (len(storage._authors["honest"]), len(storage._authors["late"])) == (10, 10)
    assert storage.refused["evicted"] > 0


def test_many_names_of_one_attacker_cannot_shut_out_an_author_that_holds_less() -> None:
    clock = Clock()
    storage = IndexStorage(clock, max_bytes=4 << 20)
    fill(storage, "early", clock.now + 60, 10, size=1000)
    for name in range(150):
        fill(storage, f"sybil{name}", clock.now + 3000, 60, size=1000)
    assert storage.num_bytes <= 4 << 20
    assert fill(storage, "late", clock.now + 60, 10, size=1000) == 10
    assert (len(storage._authors["early"]), len(storage._authors["late"])) == (10, 10)
    assert len(storage._largest) <= 2 * len(storage._authors) + 65


def test_renewing_without_end_does_not_grow_the_heaps() -> None:
    clock = Clock()
    storage = IndexStorage(clock)
    for number in range(2000):
        assert storage.store_subkey(KEY, "a/0", b"x", clock.now + 60 + number / 1000)
    dictionary = storage.data[KEY].value
    assert max(len(storage._ends), len(storage.expiration_heap), len(dictionary.expiration_heap)) < 100
    assert entries(storage) == {"a/0": b"x"}


def test_what_a_search_merges_into_its_result_does_not_get_stored() -> None:
    clock = Clock()
    storage = IndexStorage(clock)
    storage.store_subkey(KEY, "a/0", b"1", clock.now + 60)
    found = storage.get(KEY)
    assert found is not None
    found.value.store("stranger/0", b"2", clock.now + 60)
    assert entries(storage) == {"a/0": b"1"}
