"""What the index takes: limits and times that every transport enforces, when storing and when reading.

Whoever stores an entry in a DHT also claims when it expires, and nobody signs that claim. So the times of an entry, and
which of two entries under one subkey replaces the other, follow from the entry itself, as its author signed it: `Validity`.
The claim can only make the life of this copy shorter.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from swarm.limits.bounded_maps import BoundedMap
from swarm.limits.token_bucket import TokenBucket

MAX_VALUE_BYTES = 1024 + 192
"""A signed record; in a silo sealed, with its key. Over 4 MiB under one key a replica cannot build its reply and readers ban
it: entries are small, bodies elsewhere."""
MAX_KEY_BYTES = 128
MAX_SUBKEY_BYTES = 128
MAX_ENTRIES_PER_KEY = 2048
"""2048 x (1216 + 128 + 128 + some) bytes stay under those 4 MiB."""
MAX_LIFETIME_S = 3600.0
"""Furthest expiration ahead; hivemind itself has no cap, and an entry that never expires could never be replaced."""
CLOCK_SKEW_S = 10.0
"""Clocks of honest nodes differ by less."""
MAX_FALSE_ENTRIES = 64
"""So many entries of one peer may prove false, each at the cost of a signature, before no more of it are looked at ..."""
_FALSE_ENTRIES_PER_S = 0.1
"""... and one more in so many seconds. Honest hosts pass on what they have checked by the same rule."""
_MAX_REMEMBERED_GIVERS = 4096
CHECKING_SHARE = 0.25
"""Part of the time of the loop that checking entries may take, whoever sends them ..."""
CHECKING_BURST_S = 0.5
"""... beyond so many seconds at once: about 2,000 entries."""
_MIN_PAUSE_S = 0.01


def check_entry(key: str, subkey: str, value: bytes) -> None:
    """Raises ValueError for an entry that no node would take."""
    if not 0 < len(key.encode()) <= MAX_KEY_BYTES or "\0" in key:
        raise ValueError(f"an index key must have 1 to {MAX_KEY_BYTES} bytes and no NUL, got {key!r}")
    if not 0 < len(subkey.encode()) <= MAX_SUBKEY_BYTES:
        raise ValueError(f"an index subkey must have 1 to {MAX_SUBKEY_BYTES} bytes, got {subkey!r}")
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"an index value must be <= {MAX_VALUE_BYTES} bytes, got {len(value)}")


def is_live(expires_at: float, now: float) -> bool:
    """Whether an entry has not expired and does not claim too long a life. False for NaN."""
    return now < expires_at <= now + MAX_LIFETIME_S + CLOCK_SKEW_S


@dataclass(frozen=True, slots=True)
class Validity:
    """When an entry counts, and which of two under one subkey does. Times are swarm time in seconds."""

    begins_at: float
    expires_at: float
    order: tuple[float, int, bytes]
    """Of two entries the one with the higher order counts: when it was created, its sequence number, and its signature,
    so that all nodes choose the same one of two records that their author signed for one moment."""

    def supersedes(self, other: "Validity | None") -> bool:
        """Whether this entry replaces `other`: it is newer, or it is the same entry with a longer life."""
        return other is None or (self.order, self.expires_at) > (other.order, other.expires_at)


def age_rank(subkey: str, validity: Validity) -> tuple[bool, tuple[float, int, bytes]]:
    """By which the entry of an author is chosen that makes room for another one of it: the lowest goes.

    Headers, whose subkeys have a slot, are many and go before the few other entries.
    """
    return "/" not in subkey, validity.order


UNSIGNED = Validity(-inf, inf, (0.0, 0, b""))
"""Of entries that say nothing of their time: what is claimed of their expiration counts."""

IndexValidator = Callable[[str, str, bytes], Validity | None]
"""(key, subkey, value) -> what the entry itself says of its validity; None for one that nobody may store or believe.

The answer does not depend on the time: two calls with the same entry give the same answer."""


class IndexRule:
    """Decides whether an entry may be stored here or believed when it is read. Every transport asks it.

    A signature takes a quarter of a millisecond to check, and entries cost whoever makes them up less. So a peer whose
    entries prove false is soon not heard any more, and whoever takes many entries waits for its `turn` before.
    """

    def __init__(self, validator: IndexValidator | None, clock: Callable[[], float]) -> None:
        """`clock` gives swarm time. Without a `validator` every entry is taken, for as long as is claimed."""
        self._validator = validator
        self._clock = clock
        self._checking = TokenBucket(CHECKING_SHARE, CHECKING_BURST_S, perf_counter())
        self._false_entries: BoundedMap[str, TokenBucket] = BoundedMap(_MAX_REMEMBERED_GIVERS)
        """{peer that gave entries that are none: how many more it may give}"""
        self.refused: Counter[str] = Counter()
        """Entries of true authors that were refused, by reason: `expired`, `stretched` (a claim beyond the signed
        expiration) and `future`; and `unheard`, of peers that had given too many false ones."""

    def wait_s(self) -> float:
        """Seconds until the checks made so far have taken no more than their share of the time."""
        return self._checking.wait_s(perf_counter())

    async def turn(self) -> None:
        """Wait until entries may be checked again. Those of one message are checked after that in one go."""
        while True:
            if (wait_s := self.wait_s()) <= 0:
                return
            await asyncio.sleep(max(wait_s, _MIN_PAUSE_S))

    def judge(
        self, key: str, subkey: str, value: bytes, claimed_end: float | None = None, giver: str | None = None
    ) -> Validity | None:
        """The validity of an entry, its end as claimed; None where it does not count at this moment.

        `claimed_end`: swarm time at which this copy is said to expire; None where nobody claims anything.
        `giver`: the peer that sent it; None for an entry of this node.
        """
        now = self._clock()
        if claimed_end is not None and not is_live(claimed_end, now):
            return None  # before the signature, which takes longer to check
        started_at = perf_counter()
        known = None if giver is None else self._false_entries.get(giver)
        if known is not None and known.wait_s(started_at) > 0:
            self.refused["unheard"] += 1
            return None
        signed = UNSIGNED if self._validator is None else self._validator(key, subkey, value)
        self._checking.take(perf_counter() - started_at, started_at)
        if signed is None:
            self._blame(giver, started_at)
            return None
        if (reason := _time_fault(signed, claimed_end, now)) is not None:
            self.refused[reason] += 1
            return None
        return signed if claimed_end is None else replace(signed, expires_at=claimed_end)

    def _blame(self, giver: str | None, now: float) -> None:
        """Count an entry that nobody may store or believe against the peer that sent it."""
        if giver is not None:
            self._false_entries.get_or_add(
                giver, lambda: TokenBucket(_FALSE_ENTRIES_PER_S, MAX_FALSE_ENTRIES - 1, now)
            ).take(1, now)

    def newest(self, key: str, copies: Iterable[tuple[str | None, str, bytes, float | None]]) -> dict[str, bytes]:
        """Of what several hosts answered, (host, subkey, value, claimed end), the newest valid entry of each subkey."""
        found: dict[str, tuple[Validity, bytes]] = {}
        for host, subkey, value, claimed_end in copies:
            validity, known = self.judge(key, subkey, value, claimed_end=claimed_end, giver=host), found.get(subkey)
            if validity is not None and validity.supersedes(None if known is None else known[0]):
                found[subkey] = validity, value
        return {subkey: value for subkey, (_, value) in found.items()}


def _time_fault(signed: Validity, claimed_end: float | None, now: float) -> str | None:
    if signed.expires_at <= now:
        return "expired"
    if signed.begins_at > now + CLOCK_SKEW_S:
        return "future"
    return "stretched" if claimed_end is not None and claimed_end > signed.expires_at else None
