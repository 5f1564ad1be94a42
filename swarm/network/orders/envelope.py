"""What an order looks like: a small signed head, and a payload that comes with it or is pulled by its address.

    request   head length (u16, big-endian) · head · payload, unless it is longer than MAX_INLINE_BYTES
    head      signed record (`records.codec`) over msgpack
              [version, swarm id, crew, addressee, epoch, number, kind, payload bytes, SHA-256 of the payload]

Epoch and number only grow: an order that was heard before, or is of an earlier run of its sender, is worth nothing.
"""

import hashlib
import struct
from dataclasses import dataclass

from swarm.network.requests.blob_protocol import MAX_BLOB_BYTES
from swarm.records.codec import MAX_PEER_ID_CHARS, MAX_RECORD_BYTES, decode_record, encode_record
from swarm.records.fields import (
    PROTOCOL_VERSION,
    check_bytes,
    check_int,
    check_text,
    check_versioned,
    pack,
    unpack,
)
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import Purpose, sign_record, signature_is_valid

ORDER_PROTOCOL = "swarm/order/1"
PAYLOAD_PROTOCOL = "swarm/order-payload/1"
"""Payloads under their SHA-256, as `requests.blob_protocol` hands them out."""
MAX_INLINE_BYTES = 1 << 20
"""So much anybody can make a node read before it is known who asks; longer payloads are pulled, from members only."""
_LENGTH = struct.Struct(">H")
MAX_ORDER_BYTES = _LENGTH.size + MAX_RECORD_BYTES + MAX_INLINE_BYTES
_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class OrderHead:
    """Who is to do what, and what with."""

    author: str
    crew: str
    addressee: str
    epoch: int
    """Of the sender's run; a later run has a greater one."""
    number: int
    """Grows within an epoch."""
    kind: str
    payload_bytes: int
    payload_digest: bytes
    """SHA-256, 32 bytes."""

    @property
    def is_inline(self) -> bool:
        """Whether the payload comes along."""
        return self.payload_bytes <= MAX_INLINE_BYTES


def digest_of(payload: bytes) -> bytes:
    """Address of a payload."""
    return hashlib.sha256(payload).digest()


def encode_order(identity: Identity, swarm_id: str, head: OrderHead, payload: bytes) -> bytes:
    """The request as it is sent; the payload is left out where it is to be pulled."""
    fields = [
        PROTOCOL_VERSION, bytes.fromhex(swarm_id), head.crew, head.addressee, head.epoch, head.number, head.kind,
        head.payload_bytes, head.payload_digest,
    ]  # fmt: skip
    record = encode_record(sign_record(identity, swarm_id, pack(fields), Purpose.ORDER))
    return _LENGTH.pack(len(record)) + record + (payload if head.is_inline else b"")


def decode_order(request: bytes, swarm_id: str) -> tuple[OrderHead, bytes]:
    """(head, payload or nothing), the signature checked, the payload not. Raises InvalidRecord and nothing else."""
    if len(request) < _LENGTH.size:
        raise InvalidRecord(Rejection.MALFORMED, "no head")
    (length,) = _LENGTH.unpack_from(request)
    record = decode_record(request[_LENGTH.size : _LENGTH.size + length])
    fields = check_versioned(unpack(record.payload), 9)
    named_swarm, crew, addressee, epoch, number, kind, payload_bytes, digest = fields
    if check_bytes(named_swarm, 16).hex() != swarm_id:
        raise InvalidRecord(Rejection.FOREIGN_SWARM)
    head = OrderHead(
        record.author,
        check_text(crew, _MAX_NAME_CHARS),
        check_text(addressee, MAX_PEER_ID_CHARS),
        check_int(epoch, 0, 2**48),
        check_int(number, 0, 2**48),
        check_text(kind, _MAX_NAME_CHARS),
        check_int(payload_bytes, 0, MAX_BLOB_BYTES),
        check_bytes(digest, 32),
    )
    if not signature_is_valid(record, swarm_id, Purpose.ORDER):
        raise InvalidRecord(Rejection.BAD_SIGNATURE)
    payload = request[_LENGTH.size + length :]
    if len(payload) != (head.payload_bytes if head.is_inline else 0):
        raise InvalidRecord(Rejection.MALFORMED, "a payload of another length than announced")
    return head, payload
