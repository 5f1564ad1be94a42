"""This node's share of the index, bounded in memory however many keys and identities an attacker makes up.

An author (the part of the subkey before the slash) may hold a limited number of bytes. Beyond that its oldest entry
makes room for a newer one; otherwise strangers could fill its share with copies of what it signed earlier. When all
memory is used, the author that holds most gives up its oldest entry for one that holds less. So nobody can displace an
author that holds less than they do, and an attacker needs as many identities as honest shares fit in here, all of them
full.

It also fixes these attacks on hivemind 1.1.12, which cost an attacker nothing:

- of two entries under one subkey the one with the later claimed expiration stayed, and anybody may store any signed
  entry with any claim: `Validity` decides which one stays;
- a copy of an entry with an earlier expiration made the entry disappear at that earlier time: it is refused;
- every repeated store left a mark in the heaps of expirations for up to an hour: the heaps are compacted;
- a search of this node merged what strangers answered into the stored dictionary: it gets a copy.

Only modules of this package may import this one, since it imports hivemind.
"""

import bisect
import heapq
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from swarm.network.hivemind.parts import (
    DHTID,
    DHTLocalStorage,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    HeapEntry,
    TimedStorage,
    ValueWithExpiration,
)
from swarm.network.index_entry import MAX_ENTRIES_PER_KEY, UNSIGNED, Validity, age_rank

MAX_INDEX_BYTES = 64 << 20
"""All entries of this node's share of the index, including the Python objects around them."""
MAX_AUTHOR_BYTES = 3 << 20
"""The entries of one author. Those of an hour, at 8 per window and shard, need 2.7 MiB."""
ENTRY_OVERHEAD_BYTES = 2048
"""Python objects around an entry's bytes (measured: 900 beside others under a key, 2,100 alone)."""
_HEAP_SLACK = 64


_Name = tuple[DHTID, str]
_Ranked = tuple[tuple[bool, tuple[float, int, bytes]], _Name]

Judge = Callable[[DHTRecord], Validity | None]
"""Returns the validity of a record, ending as its sender claims; None for one that is not valid now."""


def as_claimed(record: DHTRecord) -> Validity:
    """Judge records in an index without signatures."""
    return replace(UNSIGNED, expires_at=record.expiration_time)


class ValidatedValue(bytes):
    """The bytes of an entry with their validity, which travels through hivemind's own functions this way."""

    validity: Validity

    @classmethod
    def of(cls, value: bytes, validity: Validity) -> "ValidatedValue":
        judged = cls(value)
        judged.validity = validity
        return judged


class IndexEntries(DictionaryDHTValue):
    """The entries under one key. Of two under one subkey the newer one stays, whatever expirations are claimed."""

    def store(self, key: str, value: bytes, expiration_time: float) -> bool:
        """Store an entry, and return whether it is newer than the one it replaces."""
        known = self.data.get(key)
        if known is not None and not _validity(value, expiration_time).supersedes(_validity(*known)):
            return False
        if expiration_time < time.time() and not self.frozen:
            return False
        self.data[key] = ValueWithExpiration(value, expiration_time)
        self.key_to_heap[key] = HeapEntry(expiration_time, key)
        heapq.heappush(self.expiration_heap, self.key_to_heap[key])
        self.latest_expiration_time = max(self.latest_expiration_time, expiration_time)
        return True


def _validity(value: bytes, claimed_end: float) -> Validity:
    return value.validity if isinstance(value, ValidatedValue) else replace(UNSIGNED, expires_at=claimed_end)


@dataclass(frozen=True, slots=True)
class _Entry:
    author: str
    num_bytes: int
    validity: Validity


class IndexStorage(DHTLocalStorage):
    """Entries by key and subkey, until they expire."""

    def __init__(
        self,
        now: Callable[[], float],
        max_bytes: int = MAX_INDEX_BYTES,
        max_author_bytes: int = MAX_AUTHOR_BYTES,
        judge: Judge = as_claimed,
    ) -> None:
        """`now` gives swarm time. `judge` is called for every entry without a validity."""
        super().__init__()
        self._now = now
        self._judge = judge
        self._max_bytes = max_bytes
        self._max_author_bytes = max_author_bytes
        self._entries: dict[_Name, _Entry] = {}
        self._ends: list[tuple[float, DHTID, str]] = []  # heap; a renewed entry is in it twice for a while
        self._authors: dict[str, list[_Ranked]] = {}  # oldest first
        self._author_bytes: Counter[str] = Counter()
        self._largest: list[tuple[int, str]] = []  # heap of (-bytes, author), with outdated ones among them
        self.num_bytes = 0
        """Estimated memory use."""
        self.refused: Counter[str] = Counter()
        """Entries that were refused, and those `evicted`, by reason: invalid, not_newer, key_full, author_full, full,
        plain."""

    def store(self, key: DHTID, value: object, expiration_time: float, subkey: object | None = None) -> bool:
        """Refuse values without a subkey: one of them would replace all subkeys of its key."""
        if not isinstance(subkey, str) or not isinstance(value, bytes):
            return self._refuse("plain")
        return self.store_subkey(key, subkey, value, expiration_time=expiration_time)

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Store an entry, and return whether it was valid, newer than the one it replaces, and there was room."""
        self._remove_expired()
        judged = self._judged(key, subkey, value, expires_at=expiration_time)
        if judged is None:
            return self._refuse("invalid")
        earlier = self._entries.get((key, subkey))
        if earlier is not None and not judged.validity.supersedes(earlier.validity):
            return self._refuse("not_newer")
        known = self._dictionary(key)
        if earlier is None and known is not None and len(known.data) >= MAX_ENTRIES_PER_KEY:
            return self._refuse("key_full")
        author = subkey.partition("/")[0]
        num_bytes = ENTRY_OVERHEAD_BYTES + len(value) + len(subkey)
        growth = num_bytes - (earlier.num_bytes if earlier is not None else 0)
        if not self._make_room_in_share(author, growth, (key, subkey), validity=judged.validity):
            return self._refuse("author_full")
        if not self._make_room(author, growth):
            return self._refuse("full")
        if not self._put(key, subkey, judged, expires_at=expiration_time):
            return self._refuse("not_newer")
        if earlier is not None:
            self._authors[author].remove(_ranked((key, subkey), earlier.validity))
        self._entries[key, subkey] = _Entry(author, num_bytes, judged.validity)
        bisect.insort(self._authors.setdefault(author, []), _ranked((key, subkey), judged.validity))
        self._account(author, growth)
        heapq.heappush(self._ends, (expiration_time, key, subkey))
        self._compact(key)
        return True

    def get(self, key: DHTID) -> Any:
        """Return a ValueWithExpiration with a copy of the DictionaryDHTValue, or None."""
        self._remove_expired()
        known = self._dictionary(key)
        return None if known is None else ValueWithExpiration(_copy(known), self.data[key].expiration_time)

    def _dictionary(self, key: DHTID) -> Any:
        """Return the DictionaryDHTValue under `key` itself, or None."""
        found = self.data.get(key)
        if found is None:
            return None
        assert isinstance(found.value, DictionaryDHTValue), "nothing else is stored here"
        return found.value

    def _judged(self, key: DHTID, subkey: str, value: bytes, expires_at: float) -> ValidatedValue | None:
        if isinstance(value, ValidatedValue):
            return value
        validity = self._judge(DHTRecord(key.to_bytes(), DHTProtocol.serializer.dumps(subkey), value, expires_at))
        return None if validity is None else ValidatedValue.of(value, validity)

    def _put(self, key: DHTID, subkey: str, value: ValidatedValue, expires_at: float) -> bool:
        known = self._dictionary(key)
        if known is None or expires_at > self.data[key].expiration_time:
            known = IndexEntries() if known is None else known
            if not TimedStorage.store(self, key, known, expires_at):
                return False  # the entry has just expired
        return known.store(subkey, value, expires_at)

    def _make_room_in_share(self, author: str, growth: int, name: _Name, validity: Validity) -> bool:
        """Make room in the share of an author by dropping its own older entries. Returns whether there is room."""
        rank = age_rank(name[1], validity)
        while self._author_bytes[author] + growth > min(self._max_author_bytes, self._max_bytes):
            oldest = next((ranked for ranked in self._authors.get(author, []) if ranked[1] != name), None)
            if oldest is None or rank <= oldest[0]:
                return False
            self._evict(oldest[1])
        return True

    def _evict(self, name: _Name) -> None:
        self._remove(*name, self._entries[name])
        self.refused["evicted"] += 1

    def _make_room(self, author: str, growth: int) -> bool:
        """Make room by dropping entries of authors that hold more. Returns whether there is room."""
        while self.num_bytes + growth > self._max_bytes:
            while self._author_bytes[self._largest[0][1]] != -self._largest[0][0]:
                heapq.heappop(self._largest)
            num_bytes, largest = -self._largest[0][0], self._largest[0][1]
            if num_bytes <= self._author_bytes[author] + growth:
                return False
            self._evict(self._authors[largest][0][1])
        return True

    def _remove_expired(self) -> None:
        now = self._now()
        while self._ends and self._ends[0][0] <= now:
            expires_at, key, subkey = heapq.heappop(self._ends)
            entry = self._entries.get((key, subkey))
            if entry is not None and entry.validity.expires_at == expires_at:
                self._remove(key, subkey, entry)

    def _remove(self, key: DHTID, subkey: str, entry: _Entry) -> None:
        del self._entries[key, subkey]
        self._authors[entry.author].remove(_ranked((key, subkey), entry.validity))
        self._account(entry.author, -entry.num_bytes)
        known = self._dictionary(key)
        if known is not None:  # otherwise hivemind has dropped it already
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
            self._ends = [(entry.validity.expires_at, *name) for name, entry in self._entries.items()]
            heapq.heapify(self._ends)
        for storage in (self, self._dictionary(key)):
            if storage is not None and len(storage.expiration_heap) > 2 * len(storage.data) + _HEAP_SLACK:
                storage.expiration_heap = list(storage.key_to_heap.values())
                heapq.heapify(storage.expiration_heap)

    def _refuse(self, reason: str) -> bool:
        self.refused[reason] += 1
        return False


def _ranked(name: _Name, validity: Validity) -> _Ranked:
    return age_rank(name[1], validity), name


def _copy(entries: DictionaryDHTValue) -> IndexEntries:
    copy = IndexEntries()
    copy.data, copy.key_to_heap = dict(entries.data), dict(entries.key_to_heap)
    copy.expiration_heap = list(entries.expiration_heap)
    copy.latest_expiration_time = entries.latest_expiration_time
    return copy


_DICTIONARY_CODE = 0x50


class FlatSerializer:
    """The part of hivemind's serializer that the index needs, safe for bytes of strangers: no nested lists."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        """Encode a value. hivemind's own serializer refuses subclasses, such as `IndexEntries` and the values in it."""
        if not isinstance(value, DictionaryDHTValue):
            return DHTProtocol.serializer.dumps(value)
        rows = [[subkey, item.value, item.expiration_time] for subkey, item in value.items()]
        packed: Any = msgpack.packb([value.maxsize, value.latest_expiration_time, rows])
        whole: Any = msgpack.packb(msgpack.ExtType(_DICTIONARY_CODE, packed))
        return whole

    @staticmethod
    def loads(data: bytes) -> object:
        """Return a scalar or IndexEntries, not validated yet. Raises ValueError (as msgpack does) for anything else."""
        value = msgpack.unpackb(data, raw=False, max_array_len=0, max_map_len=0)
        if not isinstance(value, msgpack.ExtType):
            return value
        if value.code != _DICTIONARY_CODE:
            raise ValueError(f"an index value must be a dictionary or a scalar, got type {value.code}")
        return _dictionary(value.data)


def _dictionary(data: bytes) -> IndexEntries:
    """Decode [size limit, latest expiration, [[subkey, value, expiration], ...]]. The first two are ignored."""
    unpacker = msgpack.Unpacker(raw=False, max_array_len=0, max_map_len=0, max_buffer_size=len(data) or 1)
    unpacker.feed(data)
    try:
        if unpacker.read_array_header() != 3:
            raise ValueError("a dictionary must have 3 parts")
        unpacker.skip()
        unpacker.skip()
        num_entries = unpacker.read_array_header()
        if num_entries > MAX_ENTRIES_PER_KEY:
            raise ValueError(f"a key must have at most {MAX_ENTRIES_PER_KEY} entries, got {num_entries}")
        with IndexEntries().freeze() as entries:
            for _ in range(num_entries):
                if unpacker.read_array_header() != 3:
                    raise ValueError("an entry must have 3 parts")
                subkey, value, expires_at = unpacker.unpack(), unpacker.unpack(), unpacker.unpack()
                is_valid = isinstance(subkey, str) and isinstance(value, bytes) and isinstance(expires_at, float)
                if is_valid and math.isfinite(expires_at):
                    entries.store(subkey, value, expires_at)
            return entries
    except msgpack.UnpackException as error:  # OutOfData: it ended early
        raise ValueError(f"a dictionary must be complete msgpack, got {type(error).__name__}") from None
