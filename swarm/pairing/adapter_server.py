"""Hands the own adapter out, piece by piece, to the one peer that it is promised to."""

from collections.abc import Callable

from swarm.network.requests.blob_protocol import DIGEST_BYTES, BlobRequest, num_pieces, serve_blobs
from swarm.network.transport import RequestRefused
from swarm.pairing.offered_adapter import OfferedAdapter


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
        num_bytes = wanted.length or DIGEST_BYTES * num_pieces(own.offer.num_bytes)  # 0 asks for the manifest
        if not own.may_fetch(peer_id, wanted.digest, num_bytes):
            raise RequestRefused("unknown adapter")
        return await self._answer(peer_id, request)

    def _find(self, digest: bytes) -> bytes | None:
        own = self._current()
        return own.payload if own is not None and own.offer.sha256 == digest else None
