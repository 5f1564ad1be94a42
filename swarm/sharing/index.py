"""Where headers, presence and offers to merge lie in the index, and which entries a node stores, passes on or believes.

    headers   key `<swarm id>/experience/<shard>/<window>`, subkey `<peer id>/<slot>`; topic `<swarm id>/experience/<shard>`
    presence  key `<swarm id>/presence/<shard>`,            subkey `<peer id>`
    adapters  key `<swarm id>/merge/<lineage>/<shard>` of those ready to merge, `<swarm id>/donors/…` of those that give
              theirs to newcomers, `<swarm id>/final/…` of those that wait for the final merge, subkey `<peer id>`

An author has SLOTS_PER_WINDOW entries per window, so that no key outgrows what a reader can fetch: 64 authors of a shard
times 8 slots times 1 KiB is half a MiB.
"""

import re
from collections import Counter
from typing import Literal, get_args

from swarm.records.adapter_offer import verify_offer
from swarm.records.codec import decode_record
from swarm.records.presence import verify_presence
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import signature_is_valid
from swarm.sharing.shard import Shard, shard_of, thinning_depth

AdapterList = Literal["merge", "donors", "final"]
"""Lists of signed offers: of those that are ready to merge, of those that give their adapter to newcomers, and of those
that have ended their training and wait for the final merge."""

WINDOW_S = 30.0
SLOTS_PER_WINDOW = 8
_PEER = r"[1-9A-HJ-NP-Za-km-z]{40,64}"
_SLOT = re.compile(rf"({_PEER})/([0-{SLOTS_PER_WINDOW - 1}])")
_WINDOW = re.compile(r"(.{3,8})/([0-9]{1,10})")


def experience_key(swarm_id: str, shard: Shard, now: float) -> str:
    return f"{swarm_id}/experience/{shard.name}/{int(now // WINDOW_S)}"


def experience_topic(swarm_id: str, shard: Shard) -> str:
    return f"{swarm_id}/experience/{shard.name}"


def presence_key(swarm_id: str, shard: Shard) -> str:
    return f"{swarm_id}/presence/{shard.name}"


def adapter_key(swarm_id: str, kind: AdapterList, lineage: str, shard: Shard) -> str:
    return f"{swarm_id}/{kind}/{lineage}/{shard.name}"


def subkey(peer_id: str, sequence: int) -> str:
    return f"{peer_id}/{sequence % SLOTS_PER_WINDOW}"


class EntryValidator:
    """An entry is stored here, or believed when read, only if the owner of its subkey signed it for this swarm."""

    def __init__(self, swarm_id: str) -> None:
        self._swarm_id = swarm_id
        self.rejected: Counter[str] = Counter()
        """Entries turned away, by reason."""

    def __call__(self, key: str, subkey: str, value: bytes) -> bool:
        try:
            self._check(key, subkey, value)
        except InvalidRecord as error:
            self.rejected[error.reason.value] += 1
            return False
        return True

    def _check(self, key: str, subkey: str, value: bytes) -> None:
        swarm_id, _, place = key.partition("/")
        kind, _, rest = place.partition("/")
        if swarm_id != self._swarm_id:
            raise InvalidRecord(Rejection.FOREIGN_SWARM)
        if kind == "experience":
            self._check_header(rest, subkey, value)
        elif kind == "presence":
            self._check_presence(rest, subkey, value)
        elif kind in get_args(AdapterList):
            self._check_offer(rest, subkey, value)
        else:
            raise InvalidRecord(Rejection.WRONG_SLOT)

    def _check_header(self, rest: str, subkey: str, value: bytes) -> None:
        place, slot = _WINDOW.fullmatch(rest), _SLOT.fullmatch(subkey)
        record = decode_record(value)
        shard = Shard.parse(place[1]) if place else None
        if place is None or shard is None or slot is None or record.author != slot[1]:
            raise InvalidRecord(Rejection.WRONG_SLOT)
        if shard_of(self._swarm_id, record.author, shard.level, int(place[2]) * WINDOW_S) != shard:
            raise InvalidRecord(Rejection.WRONG_SLOT)
        if not signature_is_valid(record, self._swarm_id):
            raise InvalidRecord(Rejection.BAD_SIGNATURE)

    def _check_presence(self, rest: str, subkey: str, value: bytes) -> None:
        presence = verify_presence(value, self._swarm_id)
        if presence.peer_id != subkey:
            raise InvalidRecord(Rejection.WRONG_SLOT)
        self._check_listed(Shard.parse(rest), subkey, presence.level, presence.created_at)

    def _check_offer(self, rest: str, subkey: str, value: bytes) -> None:
        lineage, _, place = rest.partition("/")
        offer = verify_offer(value, self._swarm_id)
        if offer.peer_id != subkey or offer.lineage != lineage:
            raise InvalidRecord(Rejection.WRONG_SLOT)
        self._check_listed(Shard.parse(place), subkey, offer.level, offer.created_at)

    def _check_listed(self, shard: Shard | None, peer_id: str, level: int, created_at: float) -> None:
        """A peer is listed in its own shard, and as far above it as its thinning depth says."""
        if shard is None or shard_of(self._swarm_id, peer_id, shard.level, created_at) != shard:
            raise InvalidRecord(Rejection.WRONG_SLOT)
        if not 0 <= level - shard.level <= thinning_depth(self._swarm_id, peer_id):
            raise InvalidRecord(Rejection.WRONG_SLOT, "too far from the own shard")
