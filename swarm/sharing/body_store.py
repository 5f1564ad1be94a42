"""Bodies this node can hand to others: its own, and those it pulled, until they expire."""

from collections import OrderedDict
from collections.abc import Callable


class BodyStore:
    """Bodies by hash, in memory, at most `max_bytes` in sum; the oldest go first."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = 64 << 20) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._bodies: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._num_bytes = 0

    def put(self, body_hash: bytes, body: bytes, expires_at: float) -> None:
        self._remove(body_hash)
        self._bodies[body_hash] = (body, expires_at)
        self._num_bytes += len(body)
        while self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._bodies)))

    def get(self, body_hash: bytes) -> bytes | None:
        body, expires_at = self._bodies.get(body_hash, (None, 0.0))
        if body is not None and expires_at <= self._clock():
            self._remove(body_hash)
            return None
        return body

    def _remove(self, body_hash: bytes) -> None:
        body, _ = self._bodies.pop(body_hash, (b"", 0.0))
        self._num_bytes -= len(body)
