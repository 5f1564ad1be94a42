"""This node's share of the index, bounded in memory, however many keys and names an attacker makes up.

Imports hivemind: only `index_guard` may import this module.

An author (the part of the subkey before the slash) may hold so many bytes; what is over that is refused. Where all is
full, the author that holds most gives up its oldest entry for one that holds less. So nobody can push out an author
that holds less than themselves, and an attacker needs as many names as honest shares fit in here, all of them full.
Also mended here, each without cost for an attacker in hivemind 1.1.12:
- a copy of an entry with an earlier expiration made the entry disappear at that earlier time: refuse it;
- every repeated store left a mark in the heaps of expirations for up to an hour: compact them;
- a search of this node merged what strangers answered into the stored dictionary itself: hand out copies.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm.network.hivemind.parts import DHTID, DHTLocalStorage, DictionaryDHTValue, TimedStorage, ValueWithExpiration
from swarm.network.index_entry import MAX_ENTRIES_PER_KEY

MAX_INDEX_BYTES = 64 << 20
"""All entries of this node's share of the index, with what Python needs around them."""
MAX_AUTHOR_BYTES = 3 << 20
"""The entries of one author; those of an hour, at 8 per window and shard, need 2.7 MiB."""
ENTRY_OVERHEAD_BYTES = 2048
"""Objects around an entry's bytes (measured: 900 beside others under a key, 2,100 alone)."""
_HEAP_SLACK = 64


_Name = tuple[DHTID, str]


@dataclass(frozen=True, slots=True)
class _Entry:
    author: str
    num_bytes: int
    expires_at: float


class IndexStorage(DHTLocalStorage):
    """Entries by key and subkey, until they expire."""

    def __init__(
        self,
        now: Callable[[], float],
        max_bytes: int = MAX_INDEX_BYTES,
        max_author_bytes: int = MAX_AUTHOR_BYTES,
    ) -> None:
        """`now` gives swarm time."""
        super().__init__()
        self._now = now
        self._max_bytes = max_bytes
        self._max_author_bytes = max_author_bytes
        self._entries: dict[_Name, _Entry] = {}
        self._ends: list[tuple[float, DHTID, str]] = []  # heap; an entry that was renewed is in it twice for a while
        self._authors: dict[str, dict[_Name, None]] = {}  # oldest first
        self._author_bytes: Counter[str] = Counter()
        self._largest: list[tuple[int, str]] = []  # heap of (-bytes, author), outdated ones among them
        self.num_bytes = 0
        """Estimate of the memory in use."""
        self.refused: Counter[str] = Counter()
        """Entries that were not taken, and those `evicted`, by reason: not_newer, key_full, author_full, full, plain."""

    def store(self, key: DHTID, value: object, expiration_time: float, subkey: object | None = None) -> bool:
        """Values without a subkey are refused: one of them would replace all subkeys of its key."""
        if not isinstance(subkey, str) or not isinstance(value, bytes):
            return self._refuse("plain")
        return self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Whether the entry was taken: it is newer than the one it replaces, and there is room."""
        self._remove_expired()
        earlier = self._entries.get((key, subkey))
        if earlier is not None and expiration_time <= earlier.expires_at:
            return self._refuse("not_newer")
        known = self._dictionary(key)
        if earlier is None and known is not None and len(known.data) >= MAX_ENTRIES_PER_KEY:
            return self._refuse("key_full")
        author = subkey.partition("/")[0]
        num_bytes = ENTRY_OVERHEAD_BYTES + len(value) + len(subkey)
        growth = num_bytes - (earlier.num_bytes if earlier is not None else 0)
        if self._author_bytes[author] + growth > min(self._max_author_bytes, self._max_bytes):
            return self._refuse("author_full")
        if not self._make_room(author, growth):
            return self._refuse("full")
        if not self._put(key, subkey, value, expiration_time):
            return self._refuse("not_newer")
        self._entries[key, subkey] = _Entry(author, num_bytes, expiration_time)
        self._authors.setdefault(author, {})[key, subkey] = None
        self._account(author, growth)
        heapq.heappush(self._ends, (expiration_time, key, subkey))
        self._compact(key)
        return True

    def get(self, key: DHTID) -> Any:
        """A ValueWithExpiration of a DictionaryDHTValue of the caller's own, or None."""
        self._remove_expired()
        known = self._dictionary(key)
        return None if known is None else ValueWithExpiration(_copy(known), self.data[key].expiration_time)

    def _dictionary(self, key: DHTID) -> Any:
        """The DictionaryDHTValue under `key` itself, or None."""
        found = self.data.get(key)
        if found is None:
            return None
        assert isinstance(found.value, DictionaryDHTValue), "nothing else is stored here"
        return found.value

    def _put(self, key: DHTID, subkey: str, value: bytes, expires_at: float) -> bool:
        known = self._dictionary(key)
        if known is None or expires_at > self.data[key].expiration_time:
            known = DictionaryDHTValue() if known is None else known
            if not TimedStorage.store(self, key, known, expires_at):
                return False  # the clock passed its end meanwhile
        return known.store(subkey, value, expires_at)

    def _make_room(self, author: str, growth: int) -> bool:
        """Whether there is room, at the expense of authors that hold more."""
        while self.num_bytes + growth > self._max_bytes:
            while self._author_bytes[self._largest[0][1]] != -self._largest[0][0]:
                heapq.heappop(self._largest)
            num_bytes, largest = -self._largest[0][0], self._largest[0][1]
            if num_bytes <= self._author_bytes[author] + growth:
                return False
            key, subkey = next(iter(self._authors[largest]))
            self._remove(key, subkey, self._entries[key, subkey])
            self.refused["evicted"] += 1
        return True

    def _remove_expired(self) -> None:
        now = self._now()
        while self._ends and self._ends[0][0] <= now:
            expires_at, key, subkey = heapq.heappop(self._ends)
            entry = self._entries.get((key, subkey))
            if entry is not None and entry.expires_at == expires_at:
                self._remove(key, subkey, entry)

    def _remove(self, key: DHTID, subkey: str, entry: _Entry) -> None:
        del self._entries[key, subkey], self._authors[entry.author][key, subkey]
        self._account(entry.author, -entry.num_bytes)
        known = self._dictionary(key)
        if known is not None:  # else hivemind came by first
            del known[subkey]
            if not known.data:
                del self[key]

    def _account(self, author: str, growth: int) -> None:
        self.num_bytes += growth
        self._author_bytes[author] += growth
        if not self._authors[author]:
            del self._author_bytes[author], self._authors[author]
        else:
            heapq.heappush(self._largest, (-self._author_bytes[author], author))
        if len(self._largest) > 2 * len(self._authors) + _HEAP_SLACK:
            self._largest = [(-num_bytes, name) for name, num_bytes in self._author_bytes.items()]
            heapq.heapify(self._largest)

    def _compact(self, key: DHTID) -> None:
        if len(self._ends) > 2 * len(self._entries) + _HEAP_SLACK:
            self._ends = [(entry.expires_at, *name) for name, entry in self._entries.items()]
            heapq.heapify(self._ends)
        for storage in (self, self._dictionary(key)):
            if storage is not None and len(storage.expiration_heap) > 2 * len(storage.data) + _HEAP_SLACK:
                storage.expiration_heap = list(storage.key_to_heap.values())
                heapq.heapify(storage.expiration_heap)

    def _refuse(self, reason: str) -> bool:
        self.refused[reason] += 1
        return False


def _copy(entries: DictionaryDHTValue) -> DictionaryDHTValue:
    copy = DictionaryDHTValue()
    copy.data, copy.key_to_heap = dict(entries.data), dict(entries.key_to_heap)
    copy.expiration_heap = list(entries.expiration_heap)
    copy.latest_expiration_time = entries.latest_expiration_time
    return copy
