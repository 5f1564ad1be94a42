"""What the index takes: limits and times that every transport enforces, when storing and when reading.

Whoever stores an entry in a DHT also claims when it expires, and nobody signs that claim. So the times of an entry, and
which of two entries under one subkey replaces the other, follow from the entry itself, as its author signed it: `Validity`.
The claim can only make the life of this copy shorter.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

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
    """Decides whether an entry may be stored here or believed when it is read. Every transport asks it."""

    def __init__(self, validator: IndexValidator | None, clock: Callable[[], float]) -> None:
        """`clock` gives swarm time. Without a `validator` every entry is taken, for as long as is claimed."""
        self._validator = validator
        self._clock = clock
        self.refused: Counter[str] = Counter()
        """Entries of true authors that were refused, by reason: `expired`, `stretched` (a claim beyond the signed
        expiration) and `future`."""

    def judge(self, key: str, subkey: str, value: bytes, claimed_end: float | None = None) -> Validity | None:
        """The validity of an entry, its end as claimed; None where it does not count at this moment.

        `claimed_end`: swarm time at which this copy is said to expire; None where nobody claims anything.
        """
        now = self._clock()
        if claimed_end is not None and not is_live(claimed_end, now):
            return None  # before the signature, which takes longer to check
        signed = UNSIGNED if self._validator is None else self._validator(key, subkey, value)
        if signed is None:
            return None
        if (reason := _time_fault(signed, claimed_end, now)) is not None:
            self.refused[reason] += 1
            return None
        return signed if claimed_end is None else replace(signed, expires_at=claimed_end)

    def newest(self, key: str, copies: Iterable[tuple[str, bytes, float | None]]) -> dict[str, bytes]:
        """Of what several hosts answered, (subkey, value, claimed end), the newest valid entry of each subkey."""
        found: dict[str, tuple[Validity, bytes]] = {}
        for subkey, value, claimed_end in copies:
            validity, known = self.judge(key, subkey, value, claimed_end), found.get(subkey)
            if validity is not None and validity.supersedes(None if known is None else known[0]):
                found[subkey] = validity, value
        return {subkey: value for subkey, (_, value) in found.items()}


def _time_fault(signed: Validity, claimed_end: float | None, now: float) -> str | None:
    if signed.expires_at <= now:
        return "expired"
    if signed.begins_at > now + CLOCK_SKEW_S:
        return "future"
    return "stretched" if claimed_end is not None and claimed_end > signed.expires_at else None
