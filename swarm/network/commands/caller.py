"""The ordering side: signs, numbers, sends, repeats what the line lost, and hands long payloads out to those it ordered.

Repeating is safe: an order is carried out once however often it is heard, and every copy gets the same answer.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection

from swarm.errors import RequestError
from swarm.network.commands.envelope import (
    COMMAND_PROTOCOL,
    MAX_INLINE_BYTES,
    PAYLOAD_PROTOCOL,
    CommandHead,
    digest_of,
    encode_command,
    watched,
)
from swarm.network.requests.blob_protocol import BLOB_REQUEST_BYTES, serve_blobs
from swarm.network.transport import RequestRefused, Transport
from swarm.records.identity import Identity

_REPEATED = {"busy", "cut", "damaged"}
"""Failures after which the same order may well arrive. Not so `unreachable`: dialling the dead takes most of a second."""
MAX_FAILURES = 3
"""In a row, but for `busy`, which is repeated until the deadline."""
_PAUSE_S = 0.1


class CommandCaller:
    """Gives orders to the members of one crew; one epoch per object."""

    def __init__(
        self,
        identity: Identity,
        swarm_id: str,
        crew: str,
        members: Collection[str],
        transport: Transport,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: seconds since the epoch, behind which no earlier run of this node may be. Before the transport starts."""
        self._identity = identity
        self._swarm_id = swarm_id
        self._crew = crew
        self._members = frozenset(members)
        self._transport = transport
        self._epoch = int(clock() * 1000)
        self._numbers = itertools.count(1)
        self._payloads: dict[bytes, bytes] = {}
        self._users: Counter[bytes] = Counter()
        self._blobs = serve_blobs(self._payloads.get)
        transport.serve(PAYLOAD_PROTOCOL, self._hand_out, max_request_bytes=BLOB_REQUEST_BYTES)

    async def give(
        self,
        peer_id: str,
        kind: str,
        payload: bytes,
        *,
        max_reply_bytes: int,
        deadline_s: float,
        silence_s: float | None = None,
    ) -> bytes:
        """The reply. Raises RequestError: unreachable, refused, over `max_reply_bytes`, or not there by the deadline.

        With `silence_s` also once the peer gives no sign of life for as long, see `watch`.
        """
        sending = self._give(peer_id, kind, payload, max_reply_bytes, deadline_s)
        if silence_s is None:
            return await sending
        return await watched(self._transport, peer_id, asyncio.create_task(sending), silence_s)

    async def _give(self, peer_id: str, kind: str, payload: bytes, max_reply_bytes: int, deadline_s: float) -> bytes:
        digest = await asyncio.to_thread(digest_of, payload) if len(payload) > MAX_INLINE_BYTES else digest_of(payload)
        head = CommandHead(
            self._identity.peer_id, self._crew, peer_id, self._epoch, next(self._numbers), kind, len(payload), digest
        )
        request = encode_command(self._identity, self._swarm_id, head, payload)
        if head.is_inline:
            return await self._send(peer_id, request, max_reply_bytes, deadline_s)
        self._payloads[digest] = payload
        self._users[digest] += 1
        try:
            return await self._send(peer_id, request, max_reply_bytes, deadline_s)
        finally:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._payloads[digest], self._users[digest]

    async def _send(self, peer_id: str, request: bytes, max_reply_bytes: int, deadline_s: float) -> bytes:
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
            raise RequestError(f"order to {peer_id} failed: no answer within {deadline_s:g} s", "deadline") from None

    async def _hand_out(self, peer_id: str, request: bytes) -> bytes:
        if peer_id not in self._members:
            raise RequestRefused("not of this crew")
        return await self._blobs(peer_id, request)
