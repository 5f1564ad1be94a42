"""Where headers, presence and offers to merge lie in the index, and which entries a node stores, passes on or believes.

    headers   key `<swarm id>/experience/<shard>/<window>`, subkey `<peer id>/<slot>`; topic `<swarm id>/experience/<shard>`
    presence  key `<swarm id>/presence/<shard>`,            subkey `<peer id>`
    adapters  key `<swarm id>/merge/<lineage>/<shard>` of those ready to merge, `<swarm id>/donors/…` of those that give
              theirs to newcomers, `<swarm id>/final/…` of those that wait for the final merge, subkey `<peer id>`

Each entry has its one place: the slot follows from the header's sequence number, the window from when the header was made,
shard and lineage from the author and what it signed. In any other place it is refused, and so it is before its window begins
and after its signed expiration; a later one of its author replaces it, whatever expirations others claim for either.

An author has SLOTS_PER_WINDOW entries per window, so that no key outgrows what a reader can fetch: 64 authors of a shard
times 8 slots times 1 KiB is half a MiB.

Which part of a swarm a node shares its experience with, so that a node's cost does not grow with the swarm.

A shard is a prefix of `level` bits of a hash over peer id and epoch: at level 0 everybody is in one shard, each level
halves it. A shard splits when it has more than SPLIT_ABOVE members and joins its twin again below MERGE_BELOW. Every
EPOCH_S all shards are drawn anew, so that experience mixes through the whole swarm, and nobody can choose a victim's
shard for longer than that. Anyone can compute the shard of anyone: a header in a wrong one is turned away.
"""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from typing import get_args

from swarm.admission.admission import MAX_TIME_TO_LIVE_S
from swarm.limits.bounded_maps import BoundedMap
from swarm.network.index_entry import Validity
from swarm.records.adapter_offer import AdapterList, verify_offer
from swarm.records.codec import decode_header, decode_record
from swarm.records.presence import MAX_SHARD_LEVEL, verify_presence
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import signature_is_valid
from swarm.types import SignedRecord

EPOCH_S = 600.0
SPLIT_ABOVE = 128
MERGE_BELOW = 16
MAX_LEVEL = MAX_SHARD_LEVEL
_NAME = re.compile(r"(0|[1-9][0-9]?)\.(0|[1-9a-f][0-9a-f]{0,3})")


@dataclass(frozen=True, slots=True)
class Shard:
    """`level` bits of the hash: 2**level shards, this one being number `number`."""

    level: int
    number: int

    @property
    def name(self) -> str:
        """As in index keys and topics: `3.5` is number 5 of the 8 shards of level 3."""
        return f"{self.level}.{self.number:x}"

    @classmethod
    def parse(cls, name: str) -> "Shard | None":
        """None for a text that is the name of no shard."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        level, number = int(match[1]), int(match[2], 16)
        return cls(level, number) if level <= MAX_LEVEL and number < 1 << level else None


def shard_of(swarm_id: str, peer_id: str, level: int, now: float) -> Shard:
    """The shard that a peer belongs to at swarm time `now`, if shards have this level."""
    return Shard(level, _hash(f"shard:{swarm_id}:{peer_id}:{int(now // EPOCH_S)}") >> (256 - level))


def thinning_depth(swarm_id: str, peer_id: str) -> int:
    """k with probability 2**-(k+1): a peer lists itself in the directory k levels above its shard, too."""
    return 256 - _hash(f"depth:{swarm_id}:{peer_id}").bit_length()


def next_level(level: int, num_members: int, num_authors: int) -> int:
    """The level that a node should be at, from the members that its shard's directory lists and the authors heard.

    To split takes both: listing oneself costs a stranger nothing, and made-up members must not scatter the real ones.
    """
    if num_members > SPLIT_ABOVE and num_authors > SPLIT_ABOVE // 2:
        return min(level + 1, MAX_LEVEL)
    return level - 1 if level and num_members < MERGE_BELOW else level


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


WINDOW_S = 30.0
SLOTS_PER_WINDOW = 8
MAX_ENTRY_DELAY_S = 2 * WINDOW_S
"""A header lies in the window in which it was made, or in one that begins no later than this after that."""
MAX_CHECKED = 16_384
"""Entries whose check is remembered, in about 6 MB: four full lists."""
_TIE_BREAK_BYTES = 8
_WINDOW = re.compile(r"(.{3,8})/([0-9]{1,10})")


def experience_key(swarm_id: str, shard: Shard, now: float) -> str:
    return f"{swarm_id}/experience/{shard.name}/{int(now // WINDOW_S)}"


def experience_topic(swarm_id: str, shard: Shard) -> str:
    return f"{swarm_id}/experience/{shard.name}"


def presence_key(swarm_id: str, shard: Shard) -> str:
    return f"{swarm_id}/presence/{shard.name}"


def adapter_key(swarm_id: str, kind: AdapterList, lineage: str, shard: Shard) -> str:
    return f"{swarm_id}/{kind}/{lineage}/{shard.name}"


def entry_time(created_at: float, now: float) -> float:
    """The time whose window a header is entered in: now, or as near to it as a header of that age may lie."""
    return min(max(now, created_at), created_at + MAX_ENTRY_DELAY_S)


def subkey(peer_id: str, sequence: int) -> str:
    return f"{peer_id}/{sequence % SLOTS_PER_WINDOW}"


class EntryValidator:
    """An entry is stored here, or believed when read, only if the owner of its subkey signed it for this place in this swarm.

    As a function (`network.index_entry.IndexValidator`) it says when the entry counts.
    """

    def __init__(self, swarm_id: str) -> None:
        self._swarm_id = swarm_id
        self._checked: BoundedMap[bytes, Validity | None] = BoundedMap(MAX_CHECKED)
        """{hash of an entry: what it says}, the one asked for last is last."""
        self.rejected: Counter[str] = Counter()
        """Entries turned away, by reason."""

    def __call__(self, key: str, subkey: str, value: bytes) -> Validity | None:
        """Each entry is checked once: several hosts give the same ones at every reading, and a signature takes time."""
        name = hashlib.sha256(f"{len(key)} {len(subkey)} {key}{subkey}".encode() + value).digest()
        validity = self._checked.get(name) if name in self._checked else self._checked_now(key, subkey, value)
        self._checked[name] = validity
        return validity

    def _checked_now(self, key: str, subkey: str, value: bytes) -> Validity | None:
        try:
            return self._check(key, subkey, value)
        except InvalidRecord as error:
            self.rejected[error.reason.value] += 1
            return None

    def _check(self, key: str, subkey: str, value: bytes) -> Validity:
        swarm_id, _, place = key.partition("/")
        kind, _, rest = place.partition("/")
        if swarm_id != self._swarm_id:
            raise InvalidRecord(Rejection.FOREIGN_SWARM)
        for list_name in get_args(AdapterList):
            if kind == list_name:
                return self._check_offer(list_name, rest, subkey, value)
        if kind == "experience":
            return self._check_header(rest, subkey, value)
        if kind == "presence":
            return self._check_presence(rest, subkey, value)
        raise InvalidRecord(Rejection.WRONG_SLOT)

    def _check_header(self, rest: str, name: str, value: bytes) -> Validity:
        place = _WINDOW.fullmatch(rest)
        record = decode_record(value)
        header = decode_header(record.payload, record.author)
        if header.swarm_id != self._swarm_id:
            raise InvalidRecord(Rejection.FOREIGN_SWARM)
        shard = Shard.parse(place[1]) if place else None
        if place is None or shard is None or name != subkey(header.author, header.sequence):
            raise InvalidRecord(Rejection.WRONG_SLOT)
        window, latest = int(place[2]), header.created_at + MAX_ENTRY_DELAY_S
        if not header.created_at // WINDOW_S <= window <= latest // WINDOW_S:
            raise InvalidRecord(Rejection.WRONG_SLOT, "of another window")
        if shard_of(self._swarm_id, header.author, shard.level, window * WINDOW_S) != shard:
            raise InvalidRecord(Rejection.WRONG_SLOT)
        if header.expires_at - header.created_at > MAX_TIME_TO_LIVE_S:
            raise InvalidRecord(Rejection.CLOCK_SKEW, f"lives longer than {MAX_TIME_TO_LIVE_S:.0f} s")
        if not signature_is_valid(record, self._swarm_id):
            raise InvalidRecord(Rejection.BAD_SIGNATURE)
        begins_at = max(header.created_at, window * WINDOW_S)
        return Validity(begins_at, header.expires_at, _order(record, header.created_at, header.sequence))

    def _check_presence(self, rest: str, subkey: str, value: bytes) -> Validity:
        presence = verify_presence(value, self._swarm_id)
        if presence.peer_id != subkey:
            raise InvalidRecord(Rejection.WRONG_SLOT)
        self._check_listed(Shard.parse(rest), subkey, presence.level, presence.created_at)
        order = _order(decode_record(value), presence.created_at)
        return Validity(presence.created_at, presence.expires_at, order)

    def _check_offer(self, kind: AdapterList, rest: str, subkey: str, value: bytes) -> Validity:
        lineage, _, place = rest.partition("/")
        offer = verify_offer(value, self._swarm_id, kind)
        if offer.peer_id != subkey or offer.lineage != lineage:
            raise InvalidRecord(Rejection.WRONG_SLOT)
        self._check_listed(Shard.parse(place), subkey, offer.level, offer.created_at)
        return Validity(offer.created_at, offer.expires_at, _order(decode_record(value), offer.created_at))

    def _check_listed(self, shard: Shard | None, peer_id: str, level: int, created_at: float) -> None:
        """A peer is listed in its own shard, and as far above it as its thinning depth says."""
        if shard is None or shard_of(self._swarm_id, peer_id, shard.level, created_at) != shard:
            raise InvalidRecord(Rejection.WRONG_SLOT)
        if not 0 <= level - shard.level <= thinning_depth(self._swarm_id, peer_id):
            raise InvalidRecord(Rejection.WRONG_SLOT, "too far from the own shard")


def _order(record: SignedRecord, created_at: float, sequence: int = 0) -> tuple[float, int, bytes]:
    return created_at, sequence, record.signature[:_TIE_BREAK_BYTES]
