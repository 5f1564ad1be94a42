"""What two nodes say to each other before they exchange adapters: `swarm/merge/1`, msgpack both ways.

request   [0, signed offer]   propose: my adapter for yours       answer   [0, signed offer]   taken: fetch it
          [1, SHA-256]        your adapter of this hash is here            [1, reason]         declined
"""

from dataclasses import dataclass
from enum import StrEnum

from swarm.network.index_entry import CLOCK_SKEW_S
from swarm.network.requests.blob_protocol import DIGEST_BYTES
from swarm.records.adapter_offer import AdapterOffer
from swarm.records.codec import MAX_RECORD_BYTES
from swarm.records.fields import check_array, check_bytes, check_int, check_text, pack, unpack
from swarm.records.rejection import InvalidRecord, Rejection

MERGE_PROTOCOL = "swarm/merge/1"
ADAPTER_PROTOCOL = "swarm/adapter/1"
"""Pieces of an adapter, as `requests.blob_protocol` has them; to its partner only."""
MAX_MESSAGE_BYTES = MAX_RECORD_BYTES + 8
MAX_LAG_ROUNDS = 4
"""Adapters further apart in outer rounds are not merged."""
_PROPOSE, _FETCHED = 0, 1
_TAKEN, _DECLINED = 0, 1


class Decline(StrEnum):
    """Why a proposal was not taken."""

    RATE = "rate"
    """Too many proposals of this peer, or of all."""
    INVALID = "invalid"
    """Not the proposer's own signed offer to this swarm, or none at this time."""
    IDLE = "idle"
    """No adapter to merge at this moment."""
    LINEAGE = "lineage"
    PRECISION = "precision"
    LENGTH = "length"
    """Not as many bytes as an adapter of this lineage and precision has."""
    ROUND = "round"
    """More than MAX_LAG_ROUNDS apart."""
    FAILED = "failed"
    """Took a proposal of late and gave no adapter, or one of no use."""
    BANNED = "banned"
    """Has made false claims about its experience."""
    SHARE = "share"
    """Strangers, or those of its address group, have had their share of merges; it is the turn of others."""
    RECENT = "recent"
    """Was the partner a short while ago; it is the turn of others."""
    BUSY = "busy"
    """Is proposing to another at this moment."""
    PAIRED = "paired"
    """Has a partner for this adapter."""


PASSING = (Decline.RATE, Decline.SHARE, Decline.RECENT, Decline.BUSY)
"""Reasons that may be gone a moment later; the others hold for as long as the adapter is offered."""


@dataclass(frozen=True, slots=True)
class Proposal:
    record: bytes
    """A signed offer, not looked at yet."""

    def encode(self) -> bytes:
        return pack([_PROPOSE, self.record])


@dataclass(frozen=True, slots=True)
class Fetched:
    """Thanks: the adapter with this hash need not be kept for me any longer."""

    sha256: bytes

    def encode(self) -> bytes:
        return pack([_FETCHED, self.sha256])


@dataclass(frozen=True, slots=True)
class Taken:
    record: bytes
    """The signed offer of whoever takes the proposal; empty where there is nothing to say."""

    def encode(self) -> bytes:
        return pack([_TAKEN, self.record])


@dataclass(frozen=True, slots=True)
class Declined:
    reason: str

    def encode(self) -> bytes:
        return pack([_DECLINED, self.reason])


def decode_request(data: bytes) -> Proposal | Fetched:
    """Raises InvalidRecord."""
    kind, content = check_array(unpack(_bounded(data)), 2)
    if check_int(kind, _PROPOSE, _FETCHED) == _PROPOSE:
        return Proposal(check_bytes(content))
    return Fetched(check_bytes(content, DIGEST_BYTES))


def decode_answer(data: bytes) -> Taken | Declined:
    """Raises InvalidRecord."""
    kind, content = check_array(unpack(_bounded(data)), 2)
    if check_int(kind, _TAKEN, _DECLINED) == _TAKEN:
        return Taken(check_bytes(content))
    return Declined(check_text(content, 32))


def check_terms(own: AdapterOffer, theirs: AdapterOffer) -> Decline | None:
    """Why two adapters cannot be merged; None where they can."""
    if theirs.lineage != own.lineage:
        return Decline.LINEAGE
    if theirs.precision != own.precision:
        return Decline.PRECISION
    if theirs.num_bytes != own.num_bytes:
        return Decline.LENGTH
    return Decline.ROUND if abs(theirs.outer_round - own.outer_round) > MAX_LAG_ROUNDS else None


def is_current(offer: AdapterOffer, now: float) -> bool:
    """Whether an offer is of this time, as far as clocks agree."""
    return offer.created_at <= now + CLOCK_SKEW_S and now < offer.expires_at


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRecord(Rejection.OVERSIZE, f"{len(data)} bytes > {MAX_MESSAGE_BYTES}")
    return data
