"""The driver's side of commands: it signs, numbers and sends them, repeats lost ones, and serves long payloads.

Repeating is safe: a peer carries out a command once, however often it arrives, and gives every copy the same reply.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

from swarm.errors import RequestError
from swarm.network.commands.envelope import (
    COMMAND_PROTOCOL,
    MAX_INLINE_BYTES,
    PAYLOAD_PROTOCOL,
    CommandChannel,
    CommandHead,
    digest_of,
    encode_command,
    watched,
)
from swarm.network.requests.blob_protocol import BLOB_REQUEST_BYTES, serve_blobs
from swarm.network.transport import RequestRefused, Transport
from swarm.records.identity import Identity

_REPEATED = {"busy", "cut", "damaged"}
"""Failures after which the same command may well arrive. `unreachable` is none: dialling a dead peer takes up to a second."""
MAX_FAILURES = 3
"""Failures in a row after which a command fails. `busy` does not count; it is repeated until the deadline."""
_PAUSE_S = 0.1


class CommandCaller:
    """Sends commands to the members of one pipeline. Each object has one epoch. It runs on the node's event loop."""

    def __init__(
        self, channel: CommandChannel, identity: Identity, transport: Transport, clock: Callable[[], float]
    ) -> None:
        """Make it before the transport starts. `clock` gives seconds since the epoch and must be ahead of earlier runs."""
        self._channel = channel
        self._identity = identity
        self._transport = transport
        self._epoch = int(clock() * 1000)
        self._numbers = itertools.count(1)
        self._payloads: dict[bytes, bytes] = {}
        self._num_users: Counter[bytes] = Counter()
        self._serve_payload = serve_blobs(self._payloads.get)
        transport.serve(PAYLOAD_PROTOCOL, self._answer_payload, max_request_bytes=BLOB_REQUEST_BYTES)

    async def send(
        self,
        peer_id: str,
        kind: str,
        payload: bytes,
        *,
        max_reply_bytes: int,
        deadline_s: float,
        silence_s: float | None = None,
    ) -> bytes:
        """Return the reply. Raises RequestError: unreachable, refused, longer than `max_reply_bytes`, or too late.

        With `silence_s` it also fails once the peer has given no sign of life for so long, see `watched`.
        """
        sending = self._sign_and_send(peer_id, kind, payload, max_reply_bytes=max_reply_bytes, deadline_s=deadline_s)
        if silence_s is None:
            return await sending
        return await watched(self._transport, peer_id, asyncio.create_task(sending), silence_s=silence_s)

    async def _sign_and_send(
        self, peer_id: str, kind: str, payload: bytes, *, max_reply_bytes: int, deadline_s: float
    ) -> bytes:
        digest = await asyncio.to_thread(digest_of, payload) if len(payload) > MAX_INLINE_BYTES else digest_of(payload)
        head = CommandHead(
            author=self._identity.peer_id,
            pipeline=self._channel.pipeline,
            addressee=peer_id,
            epoch=self._epoch,
            number=next(self._numbers),
            kind=kind,
            payload_bytes=len(payload),
            payload_digest=digest,
        )
        request = encode_command(self._identity, self._channel.swarm_id, head, payload=payload)
        if head.is_inline:
            return await self._send(peer_id, request, max_reply_bytes=max_reply_bytes, deadline_s=deadline_s)
        self._payloads[digest] = payload
        self._num_users[digest] += 1
        try:
            return await self._send(peer_id, request, max_reply_bytes=max_reply_bytes, deadline_s=deadline_s)
        finally:
            self._num_users[digest] -= 1
            if not self._num_users[digest]:
                del self._payloads[digest], self._num_users[digest]

    async def _send(self, peer_id: str, request: bytes, *, max_reply_bytes: int, deadline_s: float) -> bytes:
        num_failures = 0
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        return await self._transport.request(
                            peer_id,
                            COMMAND_PROTOCOL,
                            request,
                            max_response_bytes=max_reply_bytes,
                            deadline_s=deadline_s,
                        )
                    except RequestError as error:
                        num_failures += error.reason != "busy"
                        if error.reason not in _REPEATED or num_failures >= MAX_FAILURES:
                            raise
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise RequestError(f"command to {peer_id} failed: no answer within {deadline_s:g} s", "deadline") from None

    async def _answer_payload(self, peer_id: str, request: bytes) -> bytes:
        if peer_id not in self._channel.members:
            raise RequestRefused("not a member of this pipeline")
        return await self._serve_payload(peer_id, request)
