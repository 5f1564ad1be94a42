"""Short requests as one message each way, over the connection to the daemon that is open anyway.

A stream takes two new sockets and three round trips between four processes, for 8 KiB 1.9 ms of their time; this 0.7.

Imports hivemind: only `session` may import this module.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from swarm.errors import NetworkError
from swarm.network.hivemind.call_repairs import forget_when_cancelled
from swarm.network.hivemind.parts import P2PDaemonError, P2PHandlerError, PeerID
from swarm.network.requests.framing import Response, response_frame

CallHandler = Callable[[str, str, bytes], Awaitable[Response]]
"""(peer id, protocol, request) -> response; raises nothing."""

_SUFFIX = "/call"
"""After the protocol's name: a node that serves only streams does not know these."""


class ShortCalls:
    """Calls of one session. A deadline is the caller's business."""

    def __init__(self, client: Any) -> None:
        """`client`: hivemind's, of the daemon."""
        self._client = client

    async def serve(self, protocol: str, handler: CallHandler) -> None:
        """Raises P2PDaemonError."""

        async def answer(request: bytes, peer_id: PeerID) -> bytes:
            forget_when_cancelled(self._client.control)
            return response_frame(await handler(peer_id.to_base58(), protocol, request))

        await self._client.add_unary_handler(protocol + _SUFFIX, answer)

    async def ask(self, peer_id: str, protocol: str, request: bytes) -> bytes:
        """The frame of the response. Raises NetworkError: no such peer, not reachable, or it serves only streams."""
        try:
            return await self._client.call_unary_handler(PeerID.from_base58(peer_id), protocol + _SUFFIX, request)
        except (P2PDaemonError, P2PHandlerError) as error:
            raise NetworkError(str(error)) from None
