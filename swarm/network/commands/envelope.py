"""The wire format of commands, and the question whether a peer that works on one is still alive.

A driver opens one line to each stage machine and sends all its commands on it:

    driver → stage   opening: signed record (`records.codec`) over [version, swarm id, pipeline, addressee, epoch]
    stage → driver   0, or 1 and the reason of a refusal
    driver → stage   number (u64) · kind  |  payload                     for each command, any number of them under way
    stage → driver   number (u64) · status (u8)  |  reply, or reason     as each is done

A bar separates two frames. Integers are big-endian. The line proves who is at its ends and keeps frames in order, so one
signature serves a whole line. Epoch and number only grow: a command of an earlier run of the driver, or one that was carried
out already and is sent again after a line broke, has no second effect.

A stage passes hidden states on to the next stage on a line of its own (`RELAY_PROTOCOL`), for a command whose route says so:

    stage → stage    epoch (u64) · number (u64) · kind  |  payload       no reply; the last stage replies to the driver
    stage → driver   0 (u64) · 1 (u8)  |  reason                         its line to the next stage has broken

The status of such a reply is greater by `PASSED_ON`: no machine of a pipeline can have another one answer what the driver has
asked that one itself.

While a command runs, its sender asks the peer's event loop every second whether it is alive:

    command ───────────────────────────────────────────▶ reply
    alive? ─▶ yes      alive? ─▶ yes      alive? ─▶ (nothing for `silence_s`) ─▶ lost

So a command may take long, and a machine that is frozen or cut off is noticed within seconds.
"""

import asyncio
import contextlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swarm.errors import RequestError
from swarm.network.transport import RequestRefused, Transport
from swarm.records.codec import MAX_PEER_ID_CHARS, check_signature, open_fields, sign_fields
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import Purpose, check_int, check_text

T = TypeVar("T")

COMMAND_PROTOCOL = "swarm/order/2"
"""Lines of a driver to a stage machine. The number is the version: machines of one pipeline must speak the same."""
RELAY_PROTOCOL = "swarm/order-relay/2"
OLD_PROTOCOL = "swarm/order/1"
"""Commands as one request each, in releases before 0.2."""
ALIVE_PROTOCOL = "swarm/order-alive/1"
MAX_NAME_CHARS = 64
COMMAND_HEAD = struct.Struct(">Q")
REPLY_HEAD = struct.Struct(">QB")
RELAY_HEAD = struct.Struct(">QQ")
DONE, REFUSED = 0, 1
"""Statuses of a reply."""
PASSED_ON = 2
"""Added to the status of a reply to a command that came from another machine."""
BROKEN_RELAY = 0
"""Number of a reply to no command: the line to the next stage broke."""
MAX_REASON_BYTES = 200
MAX_REFUSAL_BYTES = 4096
"""Longest reply of a stage that should have passed a command on."""
MAX_DROPPED_BYTES = 64 << 20
"""Longest reply to a passed-on command that the driver reads although it awaits none: the machine before may have caused it."""
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


def encode_opening(identity: Identity, channel: CommandChannel, addressee: str, epoch: int) -> bytes:
    """Return the first frame of a line to `addressee`. `epoch`: run of the driver; a later run has a greater one."""
    fields = [channel.pipeline, addressee, epoch]
    return sign_fields(identity, channel.swarm_id, fields, purpose=Purpose.COMMAND)


def decode_opening(frame: bytes, channel: CommandChannel, own: str) -> int:
    """Return the epoch of an opening that the driver of `channel` signed for this machine. Raises only InvalidRecord."""
    record, fields = open_fields(frame, channel.swarm_id, num_fields=3)
    pipeline, addressee = check_text(fields[0], MAX_NAME_CHARS), check_text(fields[1], MAX_PEER_ID_CHARS)
    epoch = check_int(fields[2], 1, 2**48)
    if (record.author, pipeline, addressee) != (channel.driver, channel.pipeline, own):
        raise InvalidRecord(Rejection.MALFORMED, "an opening from or for another peer")
    check_signature(record, channel.swarm_id, Purpose.COMMAND)
    return epoch


def serve_alive(transport: Transport, driver: str) -> None:
    """Answer the driver's question whether this node is alive, and refuse everybody else. Call it before `start`."""

    async def answer(peer_id: str, request: bytes) -> bytes:
        if peer_id != driver:
            raise RequestRefused("not the driver of this pipeline")
        return _YES

    transport.serve(ALIVE_PROTOCOL, answer, max_request_bytes=1)


async def watched(transport: Transport, peer_ids: Sequence[str], command: "asyncio.Task[T]", silence_s: float) -> T:
    """Return the result of `command`, on which these peers work.

    Cancels it and raises RequestError once one of them has given no sign of life for `silence_s`.
    """
    alive_at = dict.fromkeys(peer_ids, time.monotonic())

    async def ask(peer_id: str) -> None:
        if await _is_alive(transport, peer_id, silence_s):
            alive_at[peer_id] = time.monotonic()

    try:
        while True:
            await asyncio.wait([command], timeout=min(_ALIVE_INTERVAL_S, silence_s / 4))
            if command.done():
                return command.result()
            asking = asyncio.ensure_future(asyncio.gather(*map(ask, peer_ids)))
            try:
                await asyncio.wait([command, asking], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancelled(asking)
            silent = min(alive_at, key=alive_at.__getitem__)
            if not command.done() and time.monotonic() - alive_at[silent] >= silence_s:
                raise RequestError(f"command to {silent} failed: no sign of life for {silence_s:g} s", "deadline")
    finally:
        await _cancelled(command)


async def _is_alive(transport: Transport, peer_id: str, deadline_s: float) -> bool:
    try:
        await transport.request(peer_id, ALIVE_PROTOCOL, b"", max_response_bytes=1, deadline_s=deadline_s)
    except RequestError as error:
        return error.reason in ("busy", "refused")  # a refusal is a sign of life, too
    return True


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    if task.done():
        return
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, RequestError):
        await task
