"""Where the pieces of a download wait for each other: in memory, or in a file where the blob is large."""

import asyncio
import hashlib
import os
import threading
from pathlib import Path
from typing import Protocol

from swarm.network.requests.blob_protocol import PIECE_BYTES


class PieceStore(Protocol):
    """Keeps pieces by index, in any order; a later piece replaces an earlier one of the same index."""

    async def put(self, index: int, piece: bytes) -> None: ...

    def sha256(self, num_bytes: int) -> bytes:
        """Over all pieces in order. Slow: for a thread."""
        ...


class MemoryPieces:
    """Grows with what arrives, not with what is announced."""

    def __init__(self) -> None:
        self._pieces: dict[int, bytes] = {}

    async def put(self, index: int, piece: bytes) -> None:
        self._pieces[index] = piece

    def sha256(self, num_bytes: int) -> bytes:
        digest = hashlib.sha256()
        for index in sorted(self._pieces):
            digest.update(self._pieces[index])
        return digest.digest()

    def blob(self) -> bytes:
        """All pieces, joined; in memory twice for a moment."""
        if len(self._pieces) == 1:
            return self._pieces[0]
        return b"".join(self._pieces[index] for index in sorted(self._pieces))


class FilePieces:
    """A new file, readable by the owner alone, that grows as pieces arrive."""

    def __init__(self, path: Path) -> None:
        """What is there is replaced. Raises OSError."""
        path.unlink(missing_ok=True)
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w+b")
        self._lock = threading.Lock()  # a cancelled download leaves a thread behind for a moment

    async def put(self, index: int, piece: bytes) -> None:
        await asyncio.to_thread(self._write, index * PIECE_BYTES, piece)

    def sha256(self, num_bytes: int) -> bytes:
        digest = hashlib.sha256()
        for start in range(0, num_bytes, PIECE_BYTES):
            with self._lock:
                if self._file.closed:
                    break
                self._file.seek(start)
                piece = self._file.read(min(PIECE_BYTES, num_bytes - start))
            digest.update(piece)
        return digest.digest()

    def close(self) -> None:
        """Raises OSError where what is left cannot be written."""
        with self._lock:
            self._file.close()

    def _write(self, offset: int, piece: bytes) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.seek(offset)
                self._file.write(piece)
