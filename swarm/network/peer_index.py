"""The index among connected peers, for as long as no peer that hosts the real one can be reached.

    store ─▶ own share, and `swarm/index/1` of connected peers ─▶ their shares
    load  ─▶ own share, and `swarm/index/1` of connected peers ─▶ merged as answers of several hosts are

A connection is enough, whoever opened it: presence and headers pass between peers none of which can be dialled, as
long as they are connected. An entry is checked as in the real index (`IndexRule`): its owner signed it for its place.
A peer answers from its own share alone and asks nobody, so a question never travels further than one hop.
"""

import asyncio
import bisect
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from swarm.errors import RequestError
from swarm.network.index_entry import MAX_ENTRIES_PER_KEY, Copy, IndexRule, Validity, age_rank
from swarm.network.index_gateway import (
    INDEX_PROTOCOL,
    load_request,
    read_loaded,
    read_stored,
    store_request,
)
from swarm.network.transport import Admits

logger = logging.getLogger(__name__)

MAX_ENTRIES_PER_AUTHOR = 1024
"""The author is the part of the subkey before the slash. An hour's entries, at 8 per window and shard, are 960."""
MAX_ENTRIES = 24_576
_SWEEP_INTERVAL_S = 30.0

Entry = tuple[bytes, Validity]
"""(value, its validity with the claimed end)."""
_Ranked = tuple[tuple[bool, tuple[float, int, bytes]], str, str]


class IndexShare:
    """One node's share of an index: entries by key and subkey, until they expire. They are already validated.

    An author's oldest entry makes room for its newer one. When all is full, the author that holds most gives up its
    oldest entry for an author that holds less.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        max_entries: int = MAX_ENTRIES,
        max_entries_per_author: int = MAX_ENTRIES_PER_AUTHOR,
    ) -> None:
        """`clock` gives swarm time."""
        self.refused: Counter[str] = Counter()
        """Entries that were refused, and those `evicted`, by reason: not_newer, key_full, author_full, full."""
        self._clock = clock
        self._max_entries = max_entries
        self._max_entries_per_author = max_entries_per_author
        self._entries: dict[str, dict[str, Entry]] = {}
        self._authors: dict[str, list[_Ranked]] = {}  # oldest first
        self._num_entries = 0
        self._swept_at = 0.0

    def __len__(self) -> int:
        """Return the number of entries, including expired ones that were not removed yet."""
        return self._num_entries

    def get(self, key: str) -> dict[str, Entry]:
        """Return a copy of the entries under `key`, which may have expired."""
        return dict(self._entries.get(key, {}))

    def take(self, key: str, subkey: str, value: bytes, validity: Validity) -> bool:
        """Store an entry. Returns whether it is newer than the one it replaces, and there was room."""
        self._sweep()
        entries, author = self._entries.get(key, {}), subkey.partition("/")[0]
        if subkey in entries:
            if not validity.supersedes(entries[subkey][1]):
                return self._refuse("not_newer")
        elif len(entries) >= MAX_ENTRIES_PER_KEY:
            return self._refuse("key_full")
        elif self._is_author_full(author) and not self._drop_older(subkey, validity):
            return self._refuse("author_full")
        elif self._num_entries >= self._max_entries and not self._drop_of_largest(author):
            return self._refuse("full")
        ranks = self._authors.setdefault(author, [])
        if subkey in entries:
            ranks.remove((age_rank(subkey, entries[subkey][1]), key, subkey))
        else:
            self._num_entries += 1
        bisect.insort(ranks, (age_rank(subkey, validity), key, subkey))
        self._entries.setdefault(key, entries)[subkey] = value, validity
        return True

    def _is_author_full(self, author: str) -> bool:
        return len(self._authors.get(author, ())) >= self._max_entries_per_author

    def _drop_older(self, subkey: str, validity: Validity) -> bool:
        """Drop the oldest entry of an author. Returns False where the new one is not newer than that."""
        author = subkey.partition("/")[0]
        if age_rank(subkey, validity) <= self._authors[author][0][0]:
            return False
        self._drop_oldest(author)
        return True

    def _drop_of_largest(self, author: str) -> bool:
        """Drop an entry of the author that holds most. Returns False where nobody holds more than `author` would."""
        largest = max(self._authors, key=lambda one: len(self._authors[one]))
        if len(self._authors[largest]) <= len(self._authors.get(author, ())) + 1:
            return False
        self._drop_oldest(largest)
        return True

    def _drop_oldest(self, author: str) -> None:
        _, key, oldest = self._authors[author].pop(0)
        del self._entries[key][oldest]
        self._num_entries -= 1
        self._refuse("evicted")

    def _sweep(self) -> None:
        """Remove expired entries at fixed intervals, which a stranger cannot influence."""
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


NUM_ASKED = 8
"""Connected peers that are asked at a time."""
SHARE_ENTRIES = 4096
"""At most 10 MB."""
SHARE_ENTRIES_PER_AUTHOR = 256
"""A quarter of an hour at 8 headers per window."""

AskIndex = Callable[[str, bytes], Awaitable[bytes]]
"""(peer id, request) -> response of its `swarm/index/1`. Raises RequestError."""


class PeerIndex:
    """One node's part in the index among connected peers. It runs on the node's event loop."""

    def __init__(self, rule: IndexRule, clock: Callable[[], float], ask: AskIndex, admits: Admits) -> None:
        """`clock` gives swarm time. Only peers that `admits` answers are asked, too."""
        self._rule = rule
        self._clock = clock
        self._ask = ask
        self._admits = admits
        self.share = IndexShare(clock, SHARE_ENTRIES, SHARE_ENTRIES_PER_AUTHOR)

    async def store(self, key: str, subkey: str, value: bytes, *, expires_at: float, peers: Sequence[str]) -> bool:
        """Store an entry here and at the first NUM_ASKED of `peers`. Returns whether any of them accepted it."""
        self.take(key, subkey, value, expires_at=expires_at)
        is_stored = False
        for answer in (await self._answers(store_request(key, subkey, value, expires_at=expires_at), peers)).values():
            with contextlib.suppress(RequestError):  # this peer is broken; the others count
                is_stored = read_stored(answer) or is_stored
        return is_stored

    async def load(self, key: str, *, peers: Sequence[str]) -> dict[str, bytes]:
        """Return the newest valid entries under `key`, of the own share and of the first NUM_ASKED of `peers`."""
        answers: list[list[Copy]] = [[(None, subkey, value, None) for subkey, value in self.own(key).items()]]
        for peer_id, answer in (await self._answers(load_request(key), peers)).items():
            with contextlib.suppress(RequestError):  # this peer is broken; the others count
                answers.append([(peer_id, subkey, value, None) for subkey, value in read_loaded(answer).items()])
        return await self._rule.newest(key, answers)

    def take(self, key: str, subkey: str, value: bytes, *, expires_at: float) -> bool:
        """Store an entry in the own share. Returns whether it was valid, newer, and there was room."""
        validity = self._rule.judge(key, subkey, value, claimed_end=expires_at)
        return validity is not None and self.share.take(key, subkey, value, validity)

    def own(self, key: str) -> dict[str, bytes]:
        """Return the live entries of the own share under `key`."""
        now = self._clock()
        return {sub: value for sub, (value, validity) in self.share.get(key).items() if validity.expires_at > now}

    async def _answers(self, request: bytes, peers: Sequence[str]) -> dict[str, bytes]:
        asked = [peer_id for peer_id in peers if self._admits(peer_id, INDEX_PROTOCOL)][:NUM_ASKED]
        answers = await asyncio.gather(*(self._answer_of(peer_id, request) for peer_id in asked))
        return {peer_id: answer for peer_id, answer in zip(asked, answers, strict=True) if answer is not None}

    async def _answer_of(self, peer_id: str, request: bytes) -> bytes | None:
        try:
            return await self._ask(peer_id, request)
        except RequestError as error:
            logger.debug("peer %s does not share its index: %s", peer_id, error)
            return None


class ServedShare:
    """What a light node answers to those that ask it as a host of the index: its own share, and nothing else.

    A peer that asks on behalf of others could be asked by those in turn, without end.
    """

    def __init__(self, index: PeerIndex) -> None:
        self._index = index

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        return self._index.take(key, subkey, value, expires_at=expires_at)

    async def load(self, key: str) -> dict[str, bytes]:
        return self._index.own(key)
