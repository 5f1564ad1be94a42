"""What an order looks like: a small signed head, and a payload that comes with it or is pulled by its address.

    request   head length (u16, big-endian) · head · payload, unless it is longer than MAX_INLINE_BYTES
    head      signed record (`records.codec`) over msgpack
              [version, swarm id, crew, addressee, epoch, number, kind, payload bytes, SHA-256 of the payload]

Epoch and number only grow: an order that was heard before, or is of an earlier run of its sender, is worth nothing.

Whether a peer that works on an order is still there: its loop is asked, while its thread works.

    order ─────────────────────────────────────────────▶ reply
    still there? ─▶ yes   still there? ─▶ yes   still there? ─▶ (nothing for `silence_s`) ─▶ lost

So an order may take as long as it takes, and a machine that is frozen or cut off is noticed in seconds.
"""

import asyncio
import contextlib
import hashlib
import struct
import time
from dataclasses import dataclass
from typing import TypeVar

from swarm.errors import RequestError
from swarm.network.requests.blob_protocol import MAX_BLOB_BYTES
from swarm.network.transport import RequestRefused, Transport
from swarm.records.codec import MAX_PEER_ID_CHARS, MAX_RECORD_BYTES, decode_record, encode_record
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import (
    PROTOCOL_VERSION,
    Purpose,
    check_bytes,
    check_int,
    check_text,
    check_versioned,
    pack,
    sign_record,
    signature_is_valid,
    unpack,
)

T = TypeVar("T")

ALIVE_PROTOCOL = "swarm/order-alive/1"
_YES = b"\x01"
_INTERVAL_S = 1.0
"""Between two questions, at most; orders that are done by then cost none."""


def serve_alive(transport: Transport, driver: str) -> None:
    """Answer the driver, and nobody else. To be called before the transport starts."""

    async def answer(peer_id: str, request: bytes) -> bytes:
        if peer_id != driver:
            raise RequestRefused("not the driver of this crew")
        return _YES

    transport.serve(ALIVE_PROTOCOL, answer, max_request_bytes=1)


async def watched(transport: Transport, peer_id: str, order: "asyncio.Task[T]", silence_s: float) -> T:
    """What `order` gives. Raises RequestError, and cancels it, once the peer has said nothing for `silence_s`."""
    heard_at = time.monotonic()
    try:
        while True:
            await asyncio.wait([order], timeout=min(_INTERVAL_S, silence_s / 4))
            if order.done():
                return order.result()
            asking = asyncio.create_task(_is_there(transport, peer_id, silence_s))
            try:
                await asyncio.wait([order, asking], return_when=asyncio.FIRST_COMPLETED)
                if asking.done() and asking.result():
                    heard_at = time.monotonic()
            finally:
                await _cancelled(asking)
            if not order.done() and time.monotonic() - heard_at >= silence_s:
                raise RequestError(f"order to {peer_id} failed: no sign of life for {silence_s:g} s", "deadline")
    finally:
        await _cancelled(order)


async def _is_there(transport: Transport, peer_id: str, deadline_s: float) -> bool:
    try:
        await transport.request(peer_id, ALIVE_PROTOCOL, b"", max_response_bytes=1, deadline_s=deadline_s)
    except RequestError as error:
        return error.reason in ("busy", "refused")  # somebody said so
    return True


async def _cancelled(task: "asyncio.Task[T]") -> None:
    if task.done():
        return
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, RequestError):
        await task


COMMAND_PROTOCOL = "swarm/order/1"
PAYLOAD_PROTOCOL = "swarm/order-payload/1"
"""Payloads under their SHA-256, as `requests.blob_protocol` hands them out."""
MAX_INLINE_BYTES = 1 << 20
"""So much anybody can make a node read before it is known who asks; longer payloads are pulled, from members only."""
_LENGTH = struct.Struct(">H")
MAX_COMMAND_BYTES = _LENGTH.size + MAX_RECORD_BYTES + MAX_INLINE_BYTES
_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class CommandHead:
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


def encode_command(identity: Identity, swarm_id: str, head: CommandHead, payload: bytes) -> bytes:
    """The request as it is sent; the payload is left out where it is to be pulled."""
    fields = [
        PROTOCOL_VERSION, bytes.fromhex(swarm_id), head.crew, head.addressee, head.epoch, head.number, head.kind,
        head.payload_bytes, head.payload_digest,
    ]  # fmt: skip
    record = encode_record(sign_record(identity, swarm_id, pack(fields), Purpose.ORDER))
    return _LENGTH.pack(len(record)) + record + (payload if head.is_inline else b"")


def decode_command(request: bytes, swarm_id: str) -> tuple[CommandHead, bytes]:
    """(head, payload or nothing), the signature checked, the payload not. Raises InvalidRecord and nothing else."""
    if len(request) < _LENGTH.size:
        raise InvalidRecord(Rejection.MALFORMED, "no head")
    (length,) = _LENGTH.unpack_from(request)
    record = decode_record(request[_LENGTH.size : _LENGTH.size + length])
    fields = check_versioned(unpack(record.payload), 9)
    named_swarm, crew, addressee, epoch, number, kind, payload_bytes, digest = fields
    if check_bytes(named_swarm, 16).hex() != swarm_id:
        raise InvalidRecord(Rejection.FOREIGN_SWARM)
    head = CommandHead(
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
