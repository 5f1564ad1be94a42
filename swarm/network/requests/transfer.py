"""Content-addressed download: a blob of any size, in pieces, from any of several untrusted peers.

    holders ─ manifest ─> missing pieces ─ window of requests ─> stored pieces ─ SHA-256 of the whole ─> blob

The address of a blob is the SHA-256 of its bytes, which is enough for a blob of a single piece. For a longer one the
first holder also sends a manifest, the SHA-256 of every piece. So a bad piece is noticed when it arrives, and only that
piece is fetched again. A manifest may itself be false: then the whole does not match although every piece did. Its
sender is dropped, and only the pieces that differ in the next holder's manifest are fetched. So a liar costs at most
the pieces it lied about, an interrupted transfer continues where it stopped, and in the end it is known who sent wrong
bytes.
"""

import asyncio
import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.errors import RequestError, RequestFailure
from swarm.network.requests.blob_protocol import (
    DIGEST_BYTES,
    MAX_BLOB_BYTES,
    PIECE_BYTES,
    BlobRequest,
    num_pieces,
    piece_length,
    sha256,
)
from swarm.network.requests.server import transfer_timeout_s
from swarm.network.transport import Transport

Blame = Callable[[str], None]
"""Receives each peer that certainly sent wrong bytes, once per download."""


def _blame_nobody(peer_id: str) -> None:
    """Ignore which peer sent wrong bytes."""


MAX_STRIKES = 6
"""A holder with this many strikes in a row is dropped."""
_STRIKES = {"busy": 1, "cut": 1, "damaged": 2, "deadline": 3}
"""Strikes by reason of the failure. Any other reason drops the holder at once."""
_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Download:
    """What to fetch, and how long to wait."""

    digest: bytes
    """SHA-256 of the blob: 32 bytes."""
    num_bytes: int
    protocol: str
    """Protocol under which the holders `serve_blobs`."""
    base_timeout_s: float = 20.0
    """Longest wait for an empty piece. Pieces and the whole get more time by size."""
    window: int = 2
    """Number of pieces that are requested at the same time."""
    manifest_digest: bytes | None = None
    """SHA-256 of the manifest, where the author of the blob has signed it, too. Then no manifest can be false."""


async def fetch(
    transport: Transport, holders: Sequence[str], download: Download, rng: random.Random, blame: Blame = _blame_nobody
) -> bytes:
    """Return the blob, from `holders` in this order of preference. Memory: twice its size for a moment at the end.

    Raises RequestError with the reason of the last failure; "damaged" where only wrong bytes were received.
    """
    transfer = _Transfer(transport, holders, download, rng=rng, blame=blame)
    await transfer.run()
    return transfer.blob()


class _Contradiction(Exception):
    """All holders that agree with the manifest are gone, and some that contradict it are left."""


class _Transfer:
    """One download. `_holders` are the peers that may still be asked; the first one is asked next."""

    def __init__(
        self,
        transport: Transport,
        holders: Sequence[str],
        download: Download,
        *,
        rng: random.Random,
        blame: Blame,
    ) -> None:
        if len(download.digest) != DIGEST_BYTES or not 0 < download.num_bytes <= MAX_BLOB_BYTES:
            raise ValueError(f"a blob must have a SHA-256 and 1 to {MAX_BLOB_BYTES} bytes, got {download}")
        self._transport = transport
        self._download = download
        self._rng = rng
        self._pieces: dict[int, bytes] = {}  # it grows with what arrives, not with what is announced
        self._holders = deque(dict.fromkeys(holders))
        self._blame = blame
        self._blamed: set[str] = set()
        self._num_pieces = num_pieces(download.num_bytes)
        self._is_bound = self._num_pieces == 1 or download.manifest_digest is not None
        self._manifest_sender = ""
        self._manifest: list[bytes] = []  # [num_pieces]
        self._claims: list[tuple[str, list[bytes]]] = []  # all manifests so far, with their senders
        self._arrived: dict[int, tuple[bytes, str]] = {}  # stored pieces: index -> digest, sender
        self._evidence: list[tuple[str, int, bytes]] = []  # discarded pieces: sender, index, digest
        self._suspects: list[str] = []  # peers that contradict the manifest, rightly or not
        self._strikes: dict[str, int] = {}
        self._num_failures: Counter[str] = Counter()  # counted failures by holder
        self._last_error = RequestError("a download needs a holder, got none")

    async def run(self) -> None:
        base_s, num_bytes = self._download.base_timeout_s, self._download.num_bytes
        # Each holder may be silent for as long as a piece may take.
        silence_s = len(self._holders) * transfer_timeout_s(base_s, min(PIECE_BYTES, num_bytes))
        timeout_s = transfer_timeout_s(base_s, num_bytes) + silence_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._run()
        except TimeoutError:
            raise self._error(f"not whole within {timeout_s:.0f} s", "deadline") from None

    def blob(self) -> bytes:
        """Return all pieces joined. They are in memory twice for a moment."""
        if len(self._pieces) == 1:
            return self._pieces[0]
        return b"".join(self._pieces[index] for index in sorted(self._pieces))

    def _sha256(self) -> bytes:
        """Hash all pieces in order. Slow: call it in a thread."""
        digest = hashlib.sha256()
        for index in sorted(self._pieces):
            digest.update(self._pieces[index])
        return digest.digest()

    async def _run(self) -> None:
        while True:
            try:
                await self._learn_manifest()
                await self._fetch_missing()
            except _Contradiction:
                self._holders, self._suspects = deque(self._suspects), []
                continue
            if await asyncio.to_thread(self._sha256) == self._download.digest:
                self._settle()
                return
            if self._is_bound:
                raise self._error("its manifest is not that of its address: the announcement is false", "damaged")
            self._condemn(self._manifest_sender, "its manifest is false")
            self._holders.extend(self._suspects)
            self._suspects = []

    async def _learn_manifest(self) -> None:
        """Fetch a manifest, and keep those of the stored pieces that match it."""
        if self._num_pieces == 1:
            self._manifest = [self._download.digest]
            return
        length = self._num_pieces * DIGEST_BYTES
        while True:
            self._manifest_sender, manifest = await self._ask(BlobRequest(self._download.digest), length)
            expected = self._download.manifest_digest
            if len(manifest) == length and (expected is None or await sha256(manifest) == expected):
                break
            self._condemn(self._manifest_sender, "its manifest is not the announced one")
        self._manifest = [manifest[start : start + DIGEST_BYTES] for start in range(0, length, DIGEST_BYTES)]
        self._claims.append((self._manifest_sender, self._manifest))
        for index, (digest, sender) in list(self._arrived.items()):
            if digest != self._manifest[index]:
                self._evidence.append((sender, index, digest))
                del self._arrived[index]

    async def _fetch_missing(self) -> None:
        missing = deque(index for index in range(self._num_pieces) if index not in self._arrived)
        workers = [asyncio.create_task(self._fetch_some(missing)) for _ in range(self._download.window)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _fetch_some(self, missing: deque[int]) -> None:
        while missing:
            index = missing.popleft()
            while index not in self._arrived:
                length = piece_length(index, self._download.num_bytes)
                request = BlobRequest(self._download.digest, index * PIECE_BYTES, length)
                sender, piece = await self._ask(request, length)
                digest = await sha256(piece)
                if digest == self._manifest[index]:
                    self._pieces[index] = piece
                    self._arrived[index] = digest, sender
                elif self._is_bound or sender == self._manifest_sender or len(piece) != length:
                    self._condemn(sender, f"piece {index} is not the one of the manifest")
                else:
                    self._evidence.append((sender, index, digest))
                    self._drop(sender)
                    self._suspects.append(sender)

    async def _ask(self, request: BlobRequest, max_bytes: int) -> tuple[str, bytes]:
        """Ask one holder after the other until one answers. Returns (holder, answer)."""
        while self._holders:
            holder = self._holders[0]
            num_failures = self._num_failures[holder]
            try:
                answer = await self._transport.request(
                    holder,
                    self._download.protocol,
                    request.encode(),
                    max_response_bytes=max_bytes,
                    deadline_s=transfer_timeout_s(self._download.base_timeout_s, max_bytes),
                )
            except RequestError as error:
                # A lost connection cuts all requests on it, which counts as one failure.
                is_news = error.reason != "cut" or num_failures == self._num_failures[holder]
                await self._strike(holder, error, is_news=is_news)
                continue
            self._strikes.pop(holder, None)
            return holder, answer
        if self._suspects and not self._is_bound:
            raise _Contradiction
        raise self._last_error

    async def _strike(self, holder: str, error: RequestError, *, is_news: bool) -> None:
        """Drop the holder, or ask the next one first. Pause where there is no other."""
        self._last_error = error
        if is_news:
            self._num_failures[holder] += 1
            self._strikes[holder] = self._strikes.get(holder, 0) + _STRIKES.get(error.reason, MAX_STRIKES)
        strikes = self._strikes.get(holder, 1)
        if strikes >= MAX_STRIKES:
            self._drop(holder)
        elif self._holders and self._holders[0] == holder:
            self._holders.rotate(-1)
            if len(self._holders) == 1:
                await asyncio.sleep(min(_MAX_PAUSE_S, _PAUSE_S * 2**strikes) * self._rng.uniform(0.5, 1.0))

    def _condemn(self, peer_id: str, what: str) -> None:
        """Drop and report a peer that certainly sent wrong bytes."""
        self._last_error = self._error(f"{peer_id} sent wrong bytes: {what}", "damaged")
        self._drop(peer_id)
        if peer_id not in self._blamed:
            self._blamed.add(peer_id)
            self._blame(peer_id)

    def _drop(self, holder: str) -> None:
        if holder in self._holders:
            self._holders.remove(holder)

    def _settle(self) -> None:
        """The manifest is proven true, so every peer that contradicted it lied."""
        liars = {sender for sender, index, digest in self._evidence if digest != self._manifest[index]}
        liars |= {sender for sender, manifest in self._claims if manifest != self._manifest}
        for peer_id in sorted(liars):
            self._condemn(peer_id, "the whole proves it")

    def _error(self, what: str, reason: RequestFailure) -> RequestError:
        return RequestError(f"download of {self._download.digest.hex()[:16]} failed: {what}", reason)
