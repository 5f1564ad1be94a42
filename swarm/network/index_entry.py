"""The limits and times that every transport enforces on entries of the index, when it stores and when it reads them.

Whoever stores an entry in a DHT also claims when it expires, and nobody signs that claim. So the times of an entry, and
which of two entries under one subkey is the newer one, come from the entry as its author signed it: `Validity`. The
claim can only shorten the life of this copy.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from swarm.limits.bounded_maps import BoundedMap
from swarm.limits.token_bucket import TokenBucket

MAX_VALUE_BYTES = 1024 + 192
"""Room for a signed record, sealed together with its key in a silo.

A replica that holds over 4 MiB under one key cannot send its reply and is banned by readers. So entries are small, and
bodies are stored elsewhere."""
MAX_KEY_BYTES = 128
MAX_SUBKEY_BYTES = 128
MAX_ENTRIES_PER_KEY = 2048
"""2048 x (1216 + 128 + 128 + overhead) bytes stay below 4 MiB."""
MAX_LIFETIME_S = 3600.0
"""Longest life of an entry. hivemind has no limit, and an entry that never expires could never be replaced."""
PLACES_S = 90.0
"""How long a node that has found the hosts of a key stores and reads entries there without another search. It lists itself three
times in that time under the same keys."""
NUM_HOSTS_READ = 3
"""Hosts of a key that are read where they are known: the reader itself if it is one of them, the others at random."""
CLOCK_SKEW_S = 10.0
"""The clocks of honest nodes differ by less."""
MAX_FALSE_ENTRIES = 64
"""Number of invalid entries, each of which costs a signature check, after which a peer's entries are ignored."""
_FALSE_ENTRIES_PER_S = 0.1
"""Rate at which more invalid entries are tolerated. An honest peer checks by the same rule what it forwards."""
_MAX_REMEMBERED_GIVERS = 4096
CHECKING_SHARE = 0.25
"""Largest share of the event loop's time that checking entries may take, whoever sends them."""
CHECKING_BURST_S = 0.5
"""Seconds of checking that may exceed that share at once: about 2,000 entries."""
_MIN_PAUSE_S = 0.01
_ENTRIES_PER_TURN = 128
"""Entries of several hosts that are checked in one piece."""


def check_entry(key: str, subkey: str, value: bytes) -> None:
    """Raise ValueError for an entry that no node would accept."""
    if not 0 < len(key.encode()) <= MAX_KEY_BYTES or "\0" in key:
        raise ValueError(f"an index key must have 1 to {MAX_KEY_BYTES} bytes and no NUL, got {key!r}")
    if not 0 < len(subkey.encode()) <= MAX_SUBKEY_BYTES:
        raise ValueError(f"an index subkey must have 1 to {MAX_SUBKEY_BYTES} bytes, got {subkey!r}")
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"an index value must be <= {MAX_VALUE_BYTES} bytes, got {len(value)}")


def is_live(expires_at: float, now: float) -> bool:
    """Return whether an entry has not expired and does not claim too long a life. False for NaN."""
    return now < expires_at <= now + MAX_LIFETIME_S + CLOCK_SKEW_S


def is_enough(nums_held: Sequence[int | None], num_together: int) -> bool:
    """Return whether what some hosts of a key hold may stand for all of them, by their numbers of entries.

    Otherwise everybody near the key is asked: where one did not answer (None), where nobody has anything, and where one has less
    than half of what they have together, since it may be new there, or lie.
    """
    return num_together > 0 and all(num is not None and 2 * num >= num_together for num in nums_held)


@dataclass(frozen=True, slots=True)
class Validity:
    """When an entry is valid, and which of two entries under one subkey is newer. Times are swarm time in seconds."""

    begins_at: float
    expires_at: float
    order: tuple[float, int, bytes]
    """Time of creation, sequence number and signature. Of two entries the one with the higher order stays.

    The signature makes all nodes choose the same one of two records that their author signed for one moment."""

    def supersedes(self, other: "Validity | None") -> bool:
        """Return whether this entry replaces `other`: it is newer, or it is the same entry with a longer life."""
        return other is None or (self.order, self.expires_at) > (other.order, other.expires_at)


def age_rank(subkey: str, validity: Validity) -> tuple[bool, tuple[float, int, bytes]]:
    """Rank an entry among those of its author. The lowest one is dropped to make room for a newer one.

    Headers, whose subkeys have a slot, are many, and are dropped before the few other entries.
    """
    return "/" not in subkey, validity.order


UNSIGNED = Validity(-inf, inf, (0.0, 0, b""))
"""Validity of entries that carry no times. Their expiration is the claimed one."""

IndexValidator = Callable[[str, str, bytes], Validity | None]
"""(key, subkey, value) -> the validity that the entry itself states, or None for an invalid entry.

The answer does not depend on the time: two calls with the same entry give the same answer."""
Copy = tuple[str | None, str, bytes, float | None]
"""(host, subkey, value, claimed end) of one entry. The host is None for this node, the claimed end where nobody claims one."""


class IndexRule:
    """Decides whether an entry may be stored by this node, or believed when it is read. Every transport uses it.

    Checking a signature takes a quarter of a millisecond, and making up an entry costs less. So a peer that sends many
    invalid entries is soon ignored, and batches of entries wait for their `turn`, one after the other.
    """

    def __init__(self, validator: IndexValidator | None, clock: Callable[[], float]) -> None:
        """`clock` gives swarm time. Without a `validator` every entry is accepted, for as long as its sender claims."""
        self._validator = validator
        self._clock = clock
        self._checking = TokenBucket(CHECKING_SHARE, CHECKING_BURST_S, perf_counter())
        self._line = asyncio.Lock()  # of those that wait for their turn
        self._false_entries: BoundedMap[str, TokenBucket] = BoundedMap(_MAX_REMEMBERED_GIVERS)
        """{peer that sent invalid entries: how many more are tolerated}"""
        self.refused: Counter[str] = Counter()
        """Entries of their true authors that were refused, by reason: `expired`, `future` and `stretched` (the sender
        claims a later expiration than the signed one). `unheard` counts entries of peers that are ignored."""

    def wait_s(self) -> float:
        """Return the seconds until the checks made so far have taken no more than their share of the time."""
        return self._checking.wait_s(perf_counter())

    async def turn(self) -> None:
        """Wait until entries may be checked again, and all that came earlier had their turn.

        The entries of one message are then checked together, before anything else is awaited.
        """
        async with self._line:
            while True:
                if (wait_s := self.wait_s()) <= 0:
                    return
                await asyncio.sleep(max(wait_s, _MIN_PAUSE_S))

    def judge(
        self, key: str, subkey: str, value: bytes, claimed_end: float | None = None, sender: str | None = None
    ) -> Validity | None:
        """Return the validity of an entry, ending when the sender claims; None where the entry is not valid now.

        `claimed_end` is the swarm time at which the sender says that this copy expires; None where nobody claims
        anything. `sender` is the peer that sent it; None for an entry of this node.
        """
        now = self._clock()
        if claimed_end is not None and not is_live(claimed_end, now):
            return None  # the signature check takes longer
        started_at = perf_counter()
        known = None if sender is None else self._false_entries.get(sender)
        if known is not None and known.wait_s(started_at) > 0:
            self.refused["unheard"] += 1
            return None
        signed = UNSIGNED if self._validator is None else self._validator(key, subkey, value)
        self._checking.take(perf_counter() - started_at, started_at)
        if signed is None:
            self._blame(sender, started_at)
            return None
        if (reason := _time_fault(signed, claimed_end, now)) is not None:
            self.refused[reason] += 1
            return None
        return signed if claimed_end is None else replace(signed, expires_at=claimed_end)

    def _blame(self, sender: str | None, now: float) -> None:
        """Count an invalid entry against the peer that sent it."""
        if sender is not None:
            self._false_entries.get_or_add(
                sender, lambda: TokenBucket(_FALSE_ENTRIES_PER_S, MAX_FALSE_ENTRIES - 1, now)
            ).take(1, now)

    async def newest(self, key: str, answers: Iterable[Iterable[Copy]]) -> dict[str, bytes]:
        """Return the newest valid entry of each subkey, from the answers of several hosts.

        At most MAX_ENTRIES_PER_KEY are checked, the first of each host before the second of any, and with a pause after every
        few: whoever answers with many must neither hold the event loop nor keep out what others have.
        """
        found: dict[str, tuple[Validity, bytes]] = {}
        num_checked = 0
        for copy in (copy for nth in itertools.zip_longest(*answers) for copy in nth if copy is not None):
            if _is_known(found, copy):
                continue
            if num_checked == MAX_ENTRIES_PER_KEY:
                break
            if num_checked % _ENTRIES_PER_TURN == 0:
                await asyncio.sleep(0)
                await self.turn()
            num_checked += 1
            self._keep_newer(found, key, copy)
        return {subkey: value for subkey, (_, value) in found.items()}

    def newest_at_once(self, key: str, copies: Iterable[Copy]) -> dict[str, bytes]:
        """Return the same without limits and pauses, for a network within one process."""
        found: dict[str, tuple[Validity, bytes]] = {}
        for copy in copies:
            if not _is_known(found, copy):
                self._keep_newer(found, key, copy)
        return {subkey: value for subkey, (_, value) in found.items()}

    def _keep_newer(self, found: dict[str, tuple[Validity, bytes]], key: str, copy: Copy) -> None:
        host, subkey, value, claimed_end = copy
        validity, known = self.judge(key, subkey, value, claimed_end=claimed_end, sender=host), found.get(subkey)
        if validity is not None and validity.supersedes(None if known is None else known[0]):
            found[subkey] = validity, value


def _is_known(found: dict[str, tuple[Validity, bytes]], copy: Copy) -> bool:
    """Whether this is an entry of which another copy is valid, as several hosts hold the same ones."""
    _, subkey, value, _ = copy
    return subkey in found and found[subkey][1] == value


def _time_fault(signed: Validity, claimed_end: float | None, now: float) -> str | None:
    if signed.expires_at <= now:
        return "expired"
    if signed.begins_at > now + CLOCK_SKEW_S:
        return "future"
    return "stretched" if claimed_end is not None and claimed_end > signed.expires_at else None
