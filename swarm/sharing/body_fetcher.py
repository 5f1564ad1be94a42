"""The bytes of one body: from its author, else from a few others who may have read it."""

import contextlib
import random
from collections.abc import Callable

from swarm.config import NetworkSection
from swarm.errors import RequestError
from swarm.network.requests.blob_protocol import sha256
from swarm.network.requests.server import transfer_timeout_s
from swarm.network.transport import Transport
from swarm.observability.tracing import traced
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.absences import BUSY_PAUSE_S, UNREACHED_PAUSE_S
from swarm.sharing.body_store import BODY_PROTOCOL
from swarm.types import Header

_MAX_OTHER_HOLDERS = 2


class TryLater(InvalidRecord):
    """The author has no place now, or there is no way to it yet."""

    def __init__(self, pause_s: float, detail: str) -> None:
        super().__init__(Rejection.UNAVAILABLE, detail)
        self.pause_s = pause_s


_PAUSES_S = {"busy": BUSY_PAUSE_S, "unreachable": UNREACHED_PAUSE_S}
"""Before another try, by the reason of the failure. For any other reason there is none."""


class BodyFetcher:
    """Of one node. Runs on its loop."""

    def __init__(
        self, network: NetworkSection, transport: Transport, rng: random.Random, answered: Callable[[str], None]
    ) -> None:
        """`answered`: told of every author that handed out a body of its own."""
        self._network = network
        self._transport = transport
        self._rng = rng
        self._answered = answered

    @traced("pull", lambda body, _, header: {"author": header.author, "bytes": len(body)})
    async def fetch(self, header: Header) -> bytes:
        """The body from its author, else from a few other peers, who may have read it."""
        try:
            body = await self._ask(header.author, header)
            self._answered(header.author)
            return body
        except InvalidRecord:
            for holder in await self._other_holders(header.author):
                with contextlib.suppress(InvalidRecord):
                    return await self._ask(holder, header)
            raise

    async def _ask(self, holder: str, header: Header) -> bytes:
        """Raises InvalidRecord with UNAVAILABLE, TryLater where it may be had then, or WRONG_HASH."""
        try:
            # In one piece, as a body may not be longer than that: `transfer` has nothing to add.
            body = await self._transport.request(
                holder,
                BODY_PROTOCOL,
                header.body_hash,
                max_response_bytes=header.body_bytes,
                deadline_s=transfer_timeout_s(self._network.request_timeout_s, header.body_bytes),
            )
        except RequestError as error:
            if error.reason in _PAUSES_S:
                raise TryLater(_PAUSES_S[error.reason], f"at {holder}: {error}") from None
            raise InvalidRecord(Rejection.UNAVAILABLE, f"at {holder}: {error}") from None
        if await sha256(body) != header.body_hash:
            raise InvalidRecord(Rejection.WRONG_HASH, f"at {holder}")
        return body

    async def _other_holders(self, author: str) -> list[str]:
        own = self._transport.peer_id
        others = [peer_id for peer_id in await self._transport.connected_peers() if peer_id not in (author, own)]
        return self._rng.sample(others, min(len(others), _MAX_OTHER_HOLDERS))
