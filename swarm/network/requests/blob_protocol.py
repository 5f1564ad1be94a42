"""How a peer asks for a piece of a blob and how it is served; `transfer` is the asking side.

request   SHA-256 of the blob (32 bytes) · offset (u64) · length (u32), big-endian
response  that range of the blob; for length 0 its manifest: the SHA-256 of each piece of 1 MiB, one after the other
"""

import asyncio
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from swarm.limits.bounded_maps import BoundedMap
from swarm.network.transport import RequestHandler, RequestRefused

PIECE_BYTES = 1 << 20
"""Longest range of one request."""
DIGEST_BYTES = 32
MAX_BLOB_BYTES = 4 << 30
BLOB_REQUEST_BYTES = DIGEST_BYTES + 12
"""Length of every request: the `max_request_bytes` with which blobs are served."""
MAX_INLINE_HASH_BYTES = 256 * 1024
"""This much is hashed on the event loop, in a fraction of a millisecond. More is hashed in a thread."""
_MAX_MANIFESTS = 64
_REQUEST = struct.Struct(f">{DIGEST_BYTES}sQI")

BlobLookup = Callable[[bytes], bytes | None]
"""SHA-256 -> the blob, or None where this node does not have it."""


@dataclass(frozen=True, slots=True)
class BlobRequest:
    """A range of a blob, or its manifest where the length is 0."""

    digest: bytes
    offset: int = 0
    length: int = 0

    def encode(self) -> bytes:
        return _REQUEST.pack(self.digest, self.offset, self.length)

    @classmethod
    def decode(cls, request: bytes) -> Self:
        """Raises RequestRefused for malformed bytes."""
        if len(request) != BLOB_REQUEST_BYTES:
            raise RequestRefused(f"a request must have {BLOB_REQUEST_BYTES} bytes, got {len(request)}")
        return cls(*_REQUEST.unpack(request))

    def answer_bytes(self, blob_bytes: int) -> int:
        """Length of the answer, where the blob has `blob_bytes`."""
        return self.length or DIGEST_BYTES * num_pieces(blob_bytes)


def num_pieces(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_BYTES)


def piece_length(index: int, num_bytes: int) -> int:
    """Return PIECE_BYTES, or what remains for the last piece."""
    return min(PIECE_BYTES, num_bytes - index * PIECE_BYTES)


def manifest_of(blob: bytes) -> bytes:
    """Return the SHA-256 of each piece. [num_pieces x 32 bytes]"""
    view = memoryview(blob)
    starts = range(0, len(blob), PIECE_BYTES)
    return b"".join(hashlib.sha256(view[start : start + PIECE_BYTES]).digest() for start in starts)


async def sha256(data: bytes) -> bytes:
    """Hash without blocking the event loop."""
    if len(data) <= MAX_INLINE_HASH_BYTES:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


def serve_blobs(lookup: BlobLookup) -> RequestHandler:
    """Return a request handler that serves the blobs that `lookup` finds, piece by piece.

    It refuses unknown blobs, and ranges that are longer than a piece or reach past the end.
    """
    return _BlobServer(lookup).answer


class _BlobServer:
    def __init__(self, lookup: BlobLookup) -> None:
        self._lookup = lookup
        self._manifests: BoundedMap[bytes, bytes] = BoundedMap(_MAX_MANIFESTS)
        self._hashing = asyncio.Lock()  # one at a time: a small request can ask for the hash of every blob

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        wanted = BlobRequest.decode(request)
        blob = self._lookup(wanted.digest)
        if blob is None:
            raise RequestRefused("unknown blob")
        if wanted.length == 0 and wanted.offset == 0:
            return await self._manifest(wanted.digest, blob)
        if not 0 < wanted.length <= PIECE_BYTES:
            raise RequestRefused(f"a piece must have 1 to {PIECE_BYTES} bytes, got {wanted.length}")
        if wanted.offset + wanted.length > len(blob):
            raise RequestRefused(f"a piece must end within {len(blob)} bytes, got {wanted.offset + wanted.length}")
        is_all = wanted.length == len(blob)
        return blob if is_all else blob[wanted.offset : wanted.offset + wanted.length]

    async def _manifest(self, digest: bytes, blob: bytes) -> bytes:
        async with self._hashing:
            if digest not in self._manifests:
                self._manifests[digest] = await asyncio.to_thread(manifest_of, blob)
            return self._manifests[digest]
