"""One node's share of the in-memory index: entries by key and subkey, until they expire, bounded by author and in all.

The bounds are those of the real index (`hivemind/index_storage`) in entries instead of bytes; where all is full, this one
refuses new entries instead of taking room from the author that holds most.
"""

from collections import Counter
from collections.abc import Callable

from swarm.network.index_entry import MAX_ENTRIES_PER_KEY

MAX_ENTRIES_PER_AUTHOR = 1024
"""The author is the part of the subkey before the slash; an hour's entries, at 8 per window and shard, are 960."""
MAX_ENTRIES = 24_576
_SWEEP_INTERVAL_S = 30.0

Entry = tuple[bytes, float]
"""(value, expires at)."""


class IndexShare:
    """What arrives here has been validated."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.refused: Counter[str] = Counter()
        """Entries that were not taken, by reason: not_newer, key_full, author_full, full."""
        self._clock = clock
        self._entries: dict[str, dict[str, Entry]] = {}
        self._num_by_author: Counter[str] = Counter()
        self._num_entries = 0
        self._swept_at = 0.0

    def __len__(self) -> int:
        """Entries held, those among them that have expired but were not swept away yet."""
        return self._num_entries

    def get(self, key: str) -> dict[str, Entry]:
        """A copy of what lies under `key`; may have expired."""
        return dict(self._entries.get(key, {}))

    def take(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Whether the entry is newer than what is there, and there is room."""
        self._sweep()
        entries, author = self._entries.get(key, {}), subkey.partition("/")[0]
        if subkey in entries:
            if entries[subkey][1] >= expires_at:
                return self._refuse("not_newer")
        elif len(entries) >= MAX_ENTRIES_PER_KEY:
            return self._refuse("key_full")
        elif self._num_by_author[author] >= MAX_ENTRIES_PER_AUTHOR:
            return self._refuse("author_full")
        elif self._num_entries >= MAX_ENTRIES:
            return self._refuse("full")
        else:
            self._num_by_author[author] += 1
            self._num_entries += 1
        self._entries.setdefault(key, entries)[subkey] = value, expires_at
        return True

    def _sweep(self) -> None:
        """Forget what has expired, now and then: a stranger must not decide how often."""
        now = self._clock()
        if now - self._swept_at < _SWEEP_INTERVAL_S:
            return
        self._swept_at = now
        live = {k: {s: entry for s, entry in v.items() if entry[1] > now} for k, v in self._entries.items()}
        self._entries = {key: entries for key, entries in live.items() if entries}
        self._num_by_author = Counter(s.partition("/")[0] for entries in self._entries.values() for s in entries)
        self._num_entries = self._num_by_author.total()

    def _refuse(self, reason: str) -> bool:
        self.refused[reason] += 1
        return False
