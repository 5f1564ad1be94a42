"""The list of a final merge: nodes that have ended their training list themselves, and all read the list at the same moment.

    sign ─ listed under `<swarm id>/final/<lineage>/0.0` ─ boundary of the swarm's clock ─ list read ─ drawn order ─→ Assembly

The boundary is the next multiple of an interval that all share, unless that is so near that others would read before this node
is listed. An offer names it by its expiration. The order is drawn by a hash over the whole list, so nobody can choose its
neighbours without knowing everybody else's adapter; nodes that read different lists notice it by the merge's id.

The messages of two nodes in a final merge (`swarm/final/1`, msgpack both ways):

request   [0, merge, window, SHA-256, weight]   here I am, with this adapter    answer  [0, SHA-256, weight]  so am I
          [1, merge, window, SHA-256, weight]   I have yours of this hash               [1, reason]           declined

The connection proves who is speaking, so these messages are not signed.
"""

import asyncio
import hashlib
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from swarm.merging.exchange.proposal import Declined, is_current
from swarm.network.context import NodeContext
from swarm.network.requests.blob_protocol import DIGEST_BYTES
from swarm.records.adapter_offer import MAX_LIFETIME_S, AdapterOffer, sign_offer, verify_offer
from swarm.records.rejection import InvalidRecord
from swarm.records.signing import check_array, check_bytes, check_int, check_text, pack, unpack
from swarm.sharing.index import Shard, adapter_key
from swarm.types import Seats, Snapshot

FINAL_PROTOCOL = "swarm/final/1"
FINAL_ADAPTER_PROTOCOL = "swarm/final-adapter/1"
"""Pieces of an adapter, as `requests.blob_protocol` has them; to the other side of the exchange only."""
MAX_MESSAGE_BYTES = 128
MERGE_ID_BYTES = 16
MAX_WINDOW, MAX_WEIGHT = 64, 64
_MEET, _FETCHED = 0, 1
_YES, _NO = 0, 1


class NotNow(StrEnum):
    """Why there is no exchange."""

    RATE = "rate"
    INVALID = "invalid"
    IDLE = "idle"
    """The node has not read the list yet, is between two exchanges, or has ended."""
    LIST = "list"
    """The node read another list, so it is in another merge."""
    WAIT = "wait"
    """The node is still in an earlier window."""
    OVER = "over"
    """The node is in a later window already."""
    PLACE = "place"
    """The node meets another node in this window."""
    OTHER = "other"
    """The other side claims a mean of its own adapter alone that its signed offer does not name. This is never sent."""


PASSING = (NotNow.RATE, NotNow.IDLE, NotNow.WAIT)
"""Reasons that may no longer hold a moment later."""


@dataclass(frozen=True, slots=True)
class MeetRequest:
    merge_id: bytes
    window: int
    sha256: bytes
    """Hash of the sender's adapter."""
    weight: int

    def encode(self) -> bytes:
        return pack([_MEET, self.merge_id, self.window, self.sha256, self.weight])


@dataclass(frozen=True, slots=True)
class FetchAck:
    merge_id: bytes
    window: int
    sha256: bytes
    """Hash of the other side's adapter, which the sender has now."""

    def encode(self) -> bytes:
        return pack([_FETCHED, self.merge_id, self.window, self.sha256, 1])


@dataclass(frozen=True, slots=True)
class MeetReply:
    sha256: bytes
    weight: int

    def encode(self) -> bytes:
        return pack([_YES, self.sha256, self.weight])


def decode_request(data: bytes) -> MeetRequest | FetchAck:
    """Raises InvalidRecord."""
    kind, merge_id, window, sha256, weight = check_array(unpack(data, max_bytes=MAX_MESSAGE_BYTES), 5)
    place = check_bytes(merge_id, MERGE_ID_BYTES), check_int(window, 0, MAX_WINDOW), check_bytes(sha256, DIGEST_BYTES)
    weight = check_int(weight, 1, MAX_WEIGHT)
    return MeetRequest(*place, weight) if check_int(kind, _MEET, _FETCHED) == _MEET else FetchAck(*place)


def decode_answer(data: bytes) -> MeetReply | Declined:
    """Raises InvalidRecord."""
    fields = unpack(data, max_bytes=MAX_MESSAGE_BYTES)
    if isinstance(fields, list) and len(fields) == 2:
        kind, reason = fields
        check_int(kind, _NO, _NO)
        return Declined(check_text(reason, 32))
    kind, sha256, weight = check_array(fields, 3)
    check_int(kind, _YES, _YES)
    return MeetReply(check_bytes(sha256, DIGEST_BYTES), check_int(weight, 1, MAX_WEIGHT))


MAX_INTERVAL_S = MAX_LIFETIME_S / 3
"""An offer lives for up to one interval and a tenth until the boundary, and for one after it."""
MAX_MEMBERS = MAX_WEIGHT
"""Largest number of nodes in one merge. Longer lists are split by a hash, and each part merges within itself."""
_LEAD = 0.1
"""Part of the interval for which a node is listed, at least, before the list is read."""
_RETRY_S = 1.0
_READS = 3
_ALL = Shard(0, 0)


@dataclass(frozen=True, slots=True)
class Assembly:
    """The nodes that take part in a final merge, as far as this node knows."""

    merge_id: bytes
    """16 bytes that are the same for all nodes that read the same list."""
    begins_at: float
    """Swarm time."""
    offers: tuple[AdapterOffer, ...]
    """The offers in the order of places."""
    own_place: int

    @property
    def seats(self) -> Seats:
        return Seats(tuple(offer.peer_id for offer in self.offers), self.own_place)


def next_boundary(now: float, interval_s: float) -> float:
    """Swarm time of the next final merge for which a node may still list itself."""
    return math.ceil(now / interval_s + _LEAD) * interval_s


class FinalList:
    """The list of final merges, as one node sees it. It runs on the node's loop."""

    def __init__(self, context: NodeContext, interval_s: float) -> None:
        """Raises ValueError for an interval that is longer than MAX_INTERVAL_S."""
        if not 0 < interval_s <= MAX_INTERVAL_S:
            raise ValueError(f"final merges must be at most {MAX_INTERVAL_S:.0f} s apart, got {interval_s:g} s")
        self._context = context
        self._transport = context.transport
        self._interval_s = interval_s

    async def assemble(self, snapshot: Snapshot, sha256: bytes) -> Assembly:
        """List the own adapter, wait for the boundary and read the list. Takes at most 1.1 intervals and the time to read."""
        now = self._transport.now()
        begins_at = next_boundary(now, self._interval_s)
        own = AdapterOffer.of(
            snapshot,
            peer_id=self._context.peer_id,
            sha256=sha256,
            level=0,
            created_at=now,
            expires_at=begins_at + self._interval_s,
        )
        await self._enlist(own, begins_at)
        members = [own, *self._fitting(own, await self._read(own), begins_at)]
        merge_id = _merge_id(self._context.swarm_id, begins_at, members)
        members.sort(key=lambda offer: _hash(merge_id, offer.peer_id))
        return Assembly(merge_id, begins_at, tuple(members), members.index(own))

    async def _enlist(self, own: AdapterOffer, begins_at: float) -> None:
        """List the own offer and wait for the boundary; a store that failed is tried again until then."""
        record = sign_offer(self._context.identity, self._context.swarm_id, own, "final")
        key, is_listed = self._key(own), False
        while (left_s := begins_at - self._transport.now()) > 0:
            if is_listed:
                await asyncio.sleep(left_s)
            else:
                is_listed = await self._transport.store(key, own.peer_id, record, own.expires_at)
                await asyncio.sleep(0 if is_listed else min(_RETRY_S, left_s))

    async def _read(self, own: AdapterOffer) -> dict[str, bytes]:
        """Read the list, again where the own entry is missing: then entries of others are likely to be missing, too."""
        listed: dict[str, bytes] = {}
        for attempt in range(_READS):
            if attempt:
                await asyncio.sleep(_RETRY_S)
            listed |= await self._transport.load(self._key(own))
            if own.peer_id in listed:
                break
        return listed

    def _fitting(self, own: AdapterOffer, listed: dict[str, bytes], begins_at: float) -> list[AdapterOffer]:
        """The other nodes in the own part of the list whose adapters can be averaged with the own one at this boundary."""
        salt = struct.pack(">d", begins_at)
        names = sorted(listed.keys() | {own.peer_id}, key=lambda name: _hash(salt, name))
        first = names.index(own.peer_id) // MAX_MEMBERS * MAX_MEMBERS
        fitting: list[AdapterOffer] = []
        for name in names[first : first + MAX_MEMBERS]:
            if name == own.peer_id:
                continue
            try:
                offer = verify_offer(listed[name], self._context.swarm_id, "final")
            except InvalidRecord:
                continue
            if offer.peer_id == name and _terms(offer) == _terms(own) and is_current(offer, self._transport.now()):
                fitting.append(offer)
        return fitting

    def _key(self, own: AdapterOffer) -> str:
        return adapter_key(self._context.swarm_id, "final", own.lineage, _ALL)


def _terms(offer: AdapterOffer) -> tuple[str, str, int, float]:
    return offer.lineage, offer.precision, offer.num_bytes, offer.expires_at


def _merge_id(swarm_id: str, begins_at: float, members: Iterable[AdapterOffer]) -> bytes:
    digest = hashlib.sha256(b"swarm/final/1\0" + bytes.fromhex(swarm_id) + struct.pack(">d", begins_at))
    for offer in sorted(members, key=lambda offer: offer.peer_id):
        digest.update(offer.peer_id.encode() + b"\0" + offer.sha256)
    return digest.digest()[:MERGE_ID_BYTES]


def _hash(salt: bytes, name: str) -> bytes:
    return hashlib.sha256(salt + name.encode()).digest()
