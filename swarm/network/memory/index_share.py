"""One node's share of the in-memory index: entries by key and subkey, until they expire, bounded by author and in all.

The bounds are those of the real index (`hivemind/index_storage`) in entries instead of bytes. As there, an author's oldest
entry makes room for its newer one; where all is full, this one refuses new entries instead of taking room from the author
that holds most.
"""

import bisect
from collections import Counter
from collections.abc import Callable

from swarm.network.index_entry import MAX_ENTRIES_PER_KEY, Validity, age_rank

MAX_ENTRIES_PER_AUTHOR = 1024
"""The author is the part of the subkey before the slash; an hour's entries, at 8 per window and shard, are 960."""
MAX_ENTRIES = 24_576
_SWEEP_INTERVAL_S = 30.0

Entry = tuple[bytes, Validity]
"""(value, its validity with the end that was claimed)."""
_Ranked = tuple[tuple[bool, tuple[float, int, bytes]], str, str]


class IndexShare:
    """What arrives here has been validated."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.refused: Counter[str] = Counter()
        """Entries that were not taken, and those `evicted`, by reason: not_newer, key_full, author_full, full."""
        self._clock = clock
        self._entries: dict[str, dict[str, Entry]] = {}
        self._authors: dict[str, list[_Ranked]] = {}  # oldest first
        self._num_entries = 0
        self._swept_at = 0.0

    def __len__(self) -> int:
        """Entries held, those among them that have expired but were not swept away yet."""
        return self._num_entries

    def get(self, key: str) -> dict[str, Entry]:
        """A copy of what lies under `key`; may have expired."""
        return dict(self._entries.get(key, {}))

    def take(self, key: str, subkey: str, value: bytes, validity: Validity) -> bool:
        """Whether the entry is newer than what is there, and there is room."""
        self._sweep()
        entries, author = self._entries.get(key, {}), subkey.partition("/")[0]
        if subkey in entries:
            if not validity.supersedes(entries[subkey][1]):
                return self._refuse("not_newer")
        elif len(entries) >= MAX_ENTRIES_PER_KEY:
            return self._refuse("key_full")
        elif len(self._authors.get(author, ())) >= MAX_ENTRIES_PER_AUTHOR and not self._drop_older(subkey, validity):
            return self._refuse("author_full")
        elif self._num_entries >= MAX_ENTRIES:
            return self._refuse("full")
        ranks = self._authors.setdefault(author, [])
        if subkey in entries:
            ranks.remove((age_rank(subkey, entries[subkey][1]), key, subkey))
        else:
            self._num_entries += 1
        bisect.insort(ranks, (age_rank(subkey, validity), key, subkey))
        self._entries.setdefault(key, entries)[subkey] = value, validity
        return True

    def _drop_older(self, subkey: str, validity: Validity) -> bool:
        """Drop the oldest entry of an author; False where the new one is not newer than that."""
        rank, key, oldest = self._authors[subkey.partition("/")[0]][0]
        if age_rank(subkey, validity) <= rank:
            return False
        del self._authors[subkey.partition("/")[0]][0], self._entries[key][oldest]
        self._num_entries -= 1
        self._refuse("evicted")
        return True

    def _sweep(self) -> None:
        """Forget what has expired, now and then: a stranger must not decide how often."""
        now = self._clock()
        if now - self._swept_at < _SWEEP_INTERVAL_S:
            return
        self._swept_at = now
        live = {k: {s: entry for s, entry in v.items() if entry[1].expires_at > now} for k, v in self._entries.items()}
        self._entries = {key: entries for key, entries in live.items() if entries}
        self._authors = {
            author: alive
            for author, ranks in self._authors.items()
            if (alive := [ranked for ranked in ranks if ranked[2] in self._entries.get(ranked[1], ())])
        }
        self._num_entries = sum(map(len, self._authors.values()))

    def _refuse(self, reason: str) -> bool:
        self.refused[reason] += 1
        return False
