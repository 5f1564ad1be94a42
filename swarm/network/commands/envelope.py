"""The wire format of commands, and the question whether a peer that works on one is still alive.

    request   head length (u16, big-endian) · head · payload, unless it is longer than MAX_INLINE_BYTES
    head      signed record (`records.codec`) over msgpack
              [version, swarm id, pipeline, addressee, epoch, number, kind, payload bytes, SHA-256 of the payload]

A longer payload is pulled by its SHA-256. Epoch and number only grow, so a replayed command, or one of an earlier run of
its sender, has no effect.

While a command runs, its sender asks the peer's event loop every second whether it is alive:

    command ───────────────────────────────────────────▶ reply
    alive? ─▶ yes      alive? ─▶ yes      alive? ─▶ (nothing for `silence_s`) ─▶ lost

So a command may take long, and a machine that is frozen or cut off is noticed within seconds.
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
from swarm.records.codec import MAX_PEER_ID_CHARS, MAX_RECORD_BYTES, check_signature, open_fields, sign_fields
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import Purpose, check_bytes, check_int, check_text

T = TypeVar("T")

COMMAND_PROTOCOL = "swarm/order/1"
PAYLOAD_PROTOCOL = "swarm/order-payload/1"
"""Serves payloads by their SHA-256, as `requests.blob_protocol` does."""
ALIVE_PROTOCOL = "swarm/order-alive/1"
MAX_INLINE_BYTES = 1 << 20
"""Anybody can make a node read this much before it knows who asks. Longer payloads are pulled, from the driver only."""
_LENGTH = struct.Struct(">H")
MAX_COMMAND_BYTES = _LENGTH.size + MAX_RECORD_BYTES + MAX_INLINE_BYTES
_MAX_NAME_CHARS = 64
_YES = b"\x01"
_ALIVE_INTERVAL_S = 1.0
"""Longest time between two questions. A command that is done by then costs none."""


@dataclass(frozen=True, slots=True)
class CommandChannel:
    """The peers between which the commands of one pipeline travel."""

    swarm_id: str
    pipeline: str
    """Name of the pipeline, which every command carries."""
    driver: str
    """Peer id of the one node that sends commands."""
    members: tuple[str, ...]
    """Peer ids of the machines that carry them out."""


@dataclass(frozen=True, slots=True)
class CommandHead:
    """The signed part of a command: who is to do what, and with which payload."""

    author: str
    pipeline: str
    addressee: str
    epoch: int
    """Run of the sender; a later run has a greater epoch."""
    number: int
    """Grows within an epoch."""
    kind: str
    payload_bytes: int
    payload_digest: bytes
    """SHA-256, 32 bytes."""

    @property
    def is_inline(self) -> bool:
        """Whether the payload is part of the request."""
        return self.payload_bytes <= MAX_INLINE_BYTES


def digest_of(payload: bytes) -> bytes:
    """Return the SHA-256 by which a payload is pulled."""
    return hashlib.sha256(payload).digest()


def encode_command(identity: Identity, swarm_id: str, head: CommandHead, payload: bytes) -> bytes:
    """Return the request as it is sent. It leaves out a payload that is to be pulled."""
    fields = [
        head.pipeline, head.addressee, head.epoch, head.number, head.kind, head.payload_bytes, head.payload_digest
    ]  # fmt: skip
    record = sign_fields(identity, swarm_id, fields, purpose=Purpose.COMMAND)
    return _LENGTH.pack(len(record)) + record + (payload if head.is_inline else b"")


def decode_command(request: bytes, swarm_id: str) -> tuple[CommandHead, bytes]:
    """Return the head, whose signature is checked, and the inline payload, which is not. Raises only InvalidRecord."""
    if len(request) < _LENGTH.size:
        raise InvalidRecord(Rejection.MALFORMED, "no head")
    (length,) = _LENGTH.unpack_from(request)
    record, fields = open_fields(request[_LENGTH.size : _LENGTH.size + length], swarm_id, num_fields=7)
    pipeline, addressee, epoch, number, kind, payload_bytes, digest = fields
    head = CommandHead(
        author=record.author,
        pipeline=check_text(pipeline, _MAX_NAME_CHARS),
        addressee=check_text(addressee, MAX_PEER_ID_CHARS),
        epoch=check_int(epoch, 0, 2**48),
        number=check_int(number, 0, 2**48),
        kind=check_text(kind, _MAX_NAME_CHARS),
        payload_bytes=check_int(payload_bytes, 0, MAX_BLOB_BYTES),
        payload_digest=check_bytes(digest, 32),
    )
    check_signature(record, swarm_id, Purpose.COMMAND)
    payload = request[_LENGTH.size + length :]
    if len(payload) != (head.payload_bytes if head.is_inline else 0):
        raise InvalidRecord(Rejection.MALFORMED, "a payload of another length than announced")
    return head, payload


def serve_alive(transport: Transport, driver: str) -> None:
    """Answer the driver's question whether this node is alive, and refuse everybody else. Call it before `start`."""

    async def answer(peer_id: str, request: bytes) -> bytes:
        if peer_id != driver:
            raise RequestRefused("not the driver of this pipeline")
        return _YES

    transport.serve(ALIVE_PROTOCOL, answer, max_request_bytes=1)


async def watched(transport: Transport, peer_id: str, command: "asyncio.Task[T]", silence_s: float) -> T:
    """Return the result of `command`. Cancels it and raises RequestError after `silence_s` without a sign of life."""
    alive_at = time.monotonic()
    try:
        while True:
            await asyncio.wait([command], timeout=min(_ALIVE_INTERVAL_S, silence_s / 4))
            if command.done():
                return command.result()
            asking = asyncio.create_task(_is_alive(transport, peer_id, silence_s))
            try:
                await asyncio.wait([command, asking], return_when=asyncio.FIRST_COMPLETED)
                if asking.done() and asking.result():
                    alive_at = time.monotonic()
            finally:
                await _cancelled(asking)
            if not command.done() and time.monotonic() - alive_at >= silence_s:
                raise RequestError(f"command to {peer_id} failed: no sign of life for {silence_s:g} s", "deadline")
    finally:
        await _cancelled(command)


async def _is_alive(transport: Transport, peer_id: str, deadline_s: float) -> bool:
    try:
        await transport.request(peer_id, ALIVE_PROTOCOL, b"", max_response_bytes=1, deadline_s=deadline_s)
    except RequestError as error:
        return error.reason in ("busy", "refused")  # a refusal is a sign of life, too
    return True


async def _cancelled(task: "asyncio.Task[T]") -> None:
    if task.done():
        return
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, RequestError):
        await task
