"""The state of one adapter that this node offers: whom it is promised to, and who may fetch it.

    free ── propose(X) ──> proposing to X ── X accepts ───────────> paired with X
     │  <── withdraw ──────┘     └── X proposes meanwhile (crossing) ──┘   │
     └── take(X): X proposes and nothing speaks against it ────────────────┘  for good: an offer has one partner

Nothing here waits, and only the end of the offer ends *paired*, so no two nodes can wait for each other. `AdapterServer` gives
the adapter, piece by piece, to the one peer that it is promised to.
"""

import asyncio
from collections.abc import Callable

from swarm.network.requests.blob_protocol import PIECE_BYTES, BlobRequest, serve_blobs
from swarm.network.transport import RequestRefused
from swarm.records.adapter_offer import AdapterOffer

_FETCHES = 2
"""How often an adapter may be fetched, counted in bytes: once, and again what is lost on the way."""


class OfferedAdapter:
    """An adapter on offer, from its announcement until nobody needs it. It belongs to the node's loop."""

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
        """Whether recent partners are accepted: once the node has waited long enough for others."""
        self.takes_strangers = False
        """Whether strangers are accepted: once known peers had time to come and the node has seen who is ready."""
        self._proposed_to = ""
        self._is_proposing = False
        self._bytes_left = 0

    @property
    def is_free(self) -> bool:
        return self.partner is None and not self._is_proposing

    def propose(self, peer_id: str) -> bool:
        """Note a proposal to a peer. Returns False where there is a partner already, or another proposal is under way."""
        if not self.is_free:
            return False
        self._is_proposing = True
        if peer_id != self._proposed_to:
            self._proposed_to, self._bytes_left = peer_id, self._allowance
        return True

    def withdraw(self) -> None:
        """End a proposal that was not accepted. That peer may still fetch, as its answer may have been lost."""
        self._is_proposing = False

    def take(self, theirs: AdapterOffer) -> bool:
        """Pair with a peer, by its proposal or because it accepted this node's. Returns whether it is the partner now."""
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
        """Whether this peer may fetch `num_bytes`, which then count as fetched."""
        if peer_id != self._proposed_to or digest != self.offer.sha256 or num_bytes > self._bytes_left:
            return False
        self._bytes_left -= num_bytes
        return True

    @property
    def _allowance(self) -> int:
        return _FETCHES * (len(self.payload) + PIECE_BYTES)


class AdapterServer:
    """Serves an adapter to the peer that it is promised to. Others are told that it is unknown, so strangers use no bandwidth."""

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
