"""One adapter that this node offers: whom it is promised to, and who may fetch it.

    free ── propose(X) ──> proposing to X ── X takes it ───────────> paired with X
     │  <── withdraw ──────┘     └── X proposes meanwhile (crossing) ──┘   │
     └── take(X): X proposes and nothing speaks against it ────────────────┘  for good: an offer has one partner

Nothing here waits, and nothing but the end of the offer ends *paired*: so no two nodes can wait for each other.

Hands the own adapter out, piece by piece, to the one peer that it is promised to.
"""

import asyncio
from collections.abc import Callable

from swarm.network.requests.blob_protocol import PIECE_BYTES, BlobRequest, serve_blobs
from swarm.network.transport import RequestRefused
from swarm.records.adapter_offer import AdapterOffer

_FETCHES = 2
"""An adapter is handed out so often, counted in bytes: once, and again what gets lost on the way."""


class OfferedAdapter:
    """From its announcement until nobody needs it any longer."""

    def __init__(self, offer: AdapterOffer, record: bytes, payload: bytes) -> None:
        """`record`: the offer as it was signed."""
        self.offer = offer
        self.record = record
        self.payload = payload
        self.partner: AdapterOffer | None = None
        self.paired = asyncio.Event()
        """Set when there is a partner."""
        self.fetched = asyncio.Event()
        """Set when the partner has all of the adapter."""
        self.takes_anybody = False
        """Whether recent partners will do: when others were waited for long enough."""
        self.takes_strangers = False
        """Whether peers that nobody has proven will do: when known ones had time to come, and it was seen who is there."""
        self._proposed_to = ""
        self._is_proposing = False
        self._bytes_left = 0

    @property
    def is_free(self) -> bool:
        return self.partner is None and not self._is_proposing

    def propose(self, peer_id: str) -> bool:
        """Whether a proposal may go out: not where a partner has come meanwhile."""
        if not self.is_free:
            return False
        self._is_proposing = True
        if peer_id != self._proposed_to:
            self._proposed_to, self._bytes_left = peer_id, self._allowance
        return True

    def withdraw(self) -> None:
        """The proposal came to nothing. Who was asked last may still fetch: its answer may have been lost."""
        self._is_proposing = False

    def take(self, theirs: AdapterOffer) -> bool:
        """Whether `theirs` is the partner now: by its proposal, or because it took the one of this node."""
        if self.partner is not None:
            return self.partner.peer_id == theirs.peer_id and self.partner.sha256 == theirs.sha256
        if self._is_proposing and self._proposed_to != theirs.peer_id:
            return False
        if self._proposed_to != theirs.peer_id:
            self._proposed_to, self._bytes_left = theirs.peer_id, self._allowance
        self.partner, self._is_proposing = theirs, False
        self.paired.set()
        return True

    def may_fetch(self, peer_id: str, digest: bytes, num_bytes: int) -> bool:
        """Whether a range may go out; it counts as handed out then."""
        if peer_id != self._proposed_to or digest != self.offer.sha256 or num_bytes > self._bytes_left:
            return False
        self._bytes_left -= num_bytes
        return True

    @property
    def _allowance(self) -> int:
        return _FETCHES * (len(self.payload) + PIECE_BYTES)


class AdapterServer:
    """Answers `swarm/adapter/1`. To anybody else there is no such adapter, so nobody's line is used up by strangers."""

    def __init__(self, current: Callable[[], OfferedAdapter | None]) -> None:
        self._current = current
        self._answer = serve_blobs(self._find)

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        """A request handler. Raises RequestRefused."""
        wanted, own = BlobRequest.decode(request), self._current()
        if own is None:
            raise RequestRefused("unknown adapter")
        if not own.may_fetch(peer_id, wanted.digest, wanted.answer_bytes(own.offer.num_bytes)):
            raise RequestRefused("unknown adapter")
        return await self._answer(peer_id, request)

    def _find(self, digest: bytes) -> bytes | None:
        own = self._current()
        return own.payload if own is not None and own.offer.sha256 == digest else None
