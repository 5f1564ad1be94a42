"""The bodies that this node can give to others: its own, and those it pulled, until they expire."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from swarm.network.transport import RequestRefused, Transport

BODY_PROTOCOL = "swarm/body/1"
"""The request is a 32-byte hash, the answer the body with that hash."""
NUM_LARGEST_BODIES = 12
"""Room for a dozen of the largest bodies, or hundreds of usual ones: those of the last minutes, which others ask for."""
_AUTHOR_SHARE = 8
_MAX_TAKERS = 64
"""Names cost nothing: more of them must not fill the list of peers that a person sees."""


@dataclass(frozen=True, slots=True)
class _Body:
    data: bytes
    expires_at: float


class BodyStore:
    """Keeps bodies by hash in memory, at most `max_bytes` together. It runs on the node's loop.

    An author gets an eighth of the room; beyond that its own oldest bodies are dropped. When the store is full, the author that
    holds most loses its oldest body. Own bodies give way to newer own bodies only, since nobody else may have them yet.
    """

    def __init__(self, clock: Callable[[], float], max_bytes: int) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_author_bytes = max_bytes // _AUTHOR_SHARE
        self._bodies: dict[str, OrderedDict[bytes, _Body]] = {}  # by author, oldest first
        self._authors: dict[bytes, str] = {}
        self._author_bytes: dict[str, int] = {}
        self.num_taken = 0
        """How often another node fetched an own body, ..."""
        self.last_taken_at: float | None = None
        """... when last, by the clock, ..."""
        self.last_taken_by: str | None = None
        """... and which, by its peer id."""
        self.taken_by: dict[str, tuple[int, float]] = {}
        """{peer id: (own bodies that it fetched, when last, by the clock)}; of more peers than it has room for, the one that took
        least is forgotten."""

    def serve_on(self, transport: Transport) -> None:
        """Give bodies to whoever asks for them. To be called before the transport starts."""
        transport.serve(BODY_PROTOCOL, self._answer, max_request_bytes=64)

    def put(self, body_hash: bytes, body: bytes, expires_at: float, author: str = "") -> None:
        """Keep a body of `author`; an empty name means this node."""
        self._remove(body_hash)
        if expires_at <= self._clock():
            return
        self._bodies.setdefault(author, OrderedDict())[body_hash] = _Body(body, expires_at)
        self._authors[body_hash] = author
        self._author_bytes[author] = self._author_bytes.get(author, 0) + len(body)
        while author and self._author_bytes.get(author, 0) > self._max_author_bytes:
            self._remove(next(iter(self._bodies[author])))
        if sum(self._author_bytes.values()) > self._max_bytes:
            self._remove_expired()
        while sum(self._author_bytes.values()) > self._max_bytes:
            # `bool(name)` comes first, so own bodies (the empty name) are dropped only where there are no others.
            largest = max(self._author_bytes, key=lambda name: (bool(name), self._author_bytes[name]))
            self._remove(next(iter(self._bodies[largest])))

    def get(self, body_hash: bytes) -> bytes | None:
        author = self._authors.get(body_hash)
        if author is None:
            return None
        body = self._bodies[author][body_hash]
        if body.expires_at <= self._clock():
            self._remove(body_hash)
            return None
        return body.data

    async def _answer(self, peer_id: str, request: bytes) -> bytes:
        body = self.get(request)
        if body is None:
            raise RequestRefused("unknown body")
        if not self._authors[request]:
            self.num_taken += 1
            self.last_taken_at, self.last_taken_by = self._clock(), peer_id
            if peer_id not in self.taken_by and len(self.taken_by) >= _MAX_TAKERS:
                del self.taken_by[min(self.taken_by, key=self.taken_by.__getitem__)]
            num_taken, _ = self.taken_by.get(peer_id, (0, 0.0))
            self.taken_by[peer_id] = num_taken + 1, self.last_taken_at
        return body

    def _remove_expired(self) -> None:
        now = self._clock()
        for bodies in list(self._bodies.values()):
            for body_hash in [body_hash for body_hash, body in bodies.items() if body.expires_at <= now]:
                self._remove(body_hash)

    def _remove(self, body_hash: bytes) -> None:
        author = self._authors.pop(body_hash, None)
        if author is None:
            return
        body = self._bodies[author].pop(body_hash)
        self._author_bytes[author] -= len(body.data)
        if not self._bodies[author]:
            del self._bodies[author], self._author_bytes[author]
