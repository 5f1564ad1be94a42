"""What two nodes of a final merge say to each other: `swarm/final/1`, msgpack both ways.

request   [0, merge, window, SHA-256, weight]   here I am, with this adapter    answer  [0, SHA-256, weight]  so am I
          [1, merge, window, SHA-256, weight]   I have yours of this hash               [1, reason]           declined

Who speaks is known from the connection, so nothing is signed here.
"""

from dataclasses import dataclass
from enum import StrEnum

from swarm.network.requests.blob_protocol import DIGEST_BYTES
from swarm.pairing.proposal import Declined
from swarm.records.fields import check_array, check_bytes, check_int, check_text, pack, unpack
from swarm.records.rejection import InvalidRecord, Rejection

FINAL_PROTOCOL = "swarm/final/1"
FINAL_ADAPTER_PROTOCOL = "swarm/final-adapter/1"
"""Pieces of an adapter, as `requests.blob_protocol` has them; to the other side of the exchange only."""
MAX_MESSAGE_BYTES = 128
MERGE_ID_BYTES = 16
MAX_WINDOW, MAX_WEIGHT = 64, 64
_HERE, _THANKS = 0, 1
_YES, _NO = 0, 1


class NotNow(StrEnum):
    """Why there is no exchange."""

    RATE = "rate"
    INVALID = "invalid"
    IDLE = "idle"
    """Has not read the list yet, is between two exchanges, or has ended."""
    LIST = "list"
    """Read another list, so it is in another merge."""
    WAIT = "wait"
    """Is still in an earlier window."""
    OVER = "over"
    """Is in a later window already."""
    PLACE = "place"
    """Meets another node in this window."""
    OTHER = "other"
    """Says that its own adapter alone is in what it has, which is not the one that its signed offer names. Nobody sends this."""


PASSING = (NotNow.RATE, NotNow.IDLE, NotNow.WAIT)
"""Reasons that may be gone a moment later."""


@dataclass(frozen=True, slots=True)
class Here:
    merge_id: bytes
    window: int
    sha256: bytes
    """Of the own adapter."""
    weight: int

    def encode(self) -> bytes:
        return pack([_HERE, self.merge_id, self.window, self.sha256, self.weight])


@dataclass(frozen=True, slots=True)
class Thanks:
    merge_id: bytes
    window: int
    sha256: bytes
    """Of the other side's adapter, which is here now."""

    def encode(self) -> bytes:
        return pack([_THANKS, self.merge_id, self.window, self.sha256, 1])


@dataclass(frozen=True, slots=True)
class Mine:
    sha256: bytes
    weight: int

    def encode(self) -> bytes:
        return pack([_YES, self.sha256, self.weight])


def decode_request(data: bytes) -> Here | Thanks:
    """Raises InvalidRecord."""
    kind, merge_id, window, sha256, weight = check_array(unpack(_bounded(data)), 5)
    place = check_bytes(merge_id, MERGE_ID_BYTES), check_int(window, 0, MAX_WINDOW), check_bytes(sha256, DIGEST_BYTES)
    weight = check_int(weight, 1, MAX_WEIGHT)
    return Here(*place, weight) if check_int(kind, _HERE, _THANKS) == _HERE else Thanks(*place)


def decode_answer(data: bytes) -> Mine | Declined:
    """Raises InvalidRecord."""
    fields = unpack(_bounded(data))
    if isinstance(fields, list) and len(fields) == 2:
        kind, reason = fields
        check_int(kind, _NO, _NO)
        return Declined(check_text(reason, 32))
    kind, sha256, weight = check_array(fields, 3)
    check_int(kind, _YES, _YES)
    return Mine(check_bytes(sha256, DIGEST_BYTES), check_int(weight, 1, MAX_WEIGHT))


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRecord(Rejection.OVERSIZE, f"{len(data)} bytes > {MAX_MESSAGE_BYTES}")
    return data
