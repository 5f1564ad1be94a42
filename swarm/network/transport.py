"""The contract between a node and its network: an expiring index, requests to one peer, and gossip.

There are three implementations: `hivemind.transport` (libp2p daemon with DHT and streams), `libp2p.transport` (all in
Python, for machines without the daemon) and `memory.transport` (in one process, with seeded faults). The code above
this contract works the same on all of them.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

RequestHandler = Callable[[str, bytes], Awaitable[bytes]]
"""(peer id of the caller, request) -> response. A handler that raises RequestRefused answers the caller with the
reason."""


class ValidationResult(Enum):
    """What a gossip handler decides about a message."""

    ACCEPT = "accept"
    """The message is valid and is forwarded."""
    IGNORE = "ignore"
    """The message is not useful, which is nobody's fault. It is not forwarded."""
    REJECT = "reject"
    """The message is invalid. It is not forwarded and counts against the peer that forwarded it to this node."""


GossipHandler = Callable[[str, bytes], ValidationResult]
"""(peer id of the forwarder, message) -> decision. It runs on the node's event loop before forwarding, so it must be
fast."""

MAX_GOSSIP_BYTES = 1024 + 64
"""Longest message of a topic: a signed header, and what sealing adds to it in a silo."""

Admits = Callable[[str, str], bool]
"""(peer id, what it asks for: a protocol, "index" or "gossip") -> whether the peer is answered at all."""


def everybody(peer_id: str, wanted: str) -> bool:
    """Answer every peer, as in a public swarm."""
    return True


@dataclass(frozen=True, slots=True)
class Contact:
    """How a peer can be reached, as it has signed it itself."""

    peer_id: str
    addresses: tuple[str, ...]
    """Multiaddresses without /p2p; empty for a peer that others cannot dial."""
    gossip_addresses: tuple[str, ...]
    hosts_index: bool


class Line(Protocol):
    """An open connection to one peer. Frames travel on it in both directions, in order, until one side closes it.

    The transport proves who the peer is when it connects, and encrypts what is sent: nobody else can read, change, repeat
    or reorder frames. One coroutine may receive at a time; several may send.
    """

    peer_id: str
    """The peer at the other end."""

    async def send(self, *frames: bytes) -> None:
        """Send frames together, and wait while the peer reads more slowly. Raises RequestError (cut)."""
        ...

    async def receive(self, max_bytes: int) -> bytes:
        """Return the next frame. Raises RequestError: cut, or oversize for a frame that announces more than `max_bytes`.

        Nothing of a longer frame is read, so the line is of no use after that but for sending.
        """
        ...

    def close(self) -> None:
        """Close the line, also for the peer. Idempotent."""
        ...


LineHandler = Callable[[Line], Awaitable[None]]
"""Serves a line that a peer has opened, which is closed when it returns. It may raise RequestError."""


class RequestRefused(Exception):
    """A handler refuses a request. The reason (short ASCII text) is sent to the caller."""


@dataclass(slots=True)
class TrafficCounter:
    """Bytes of payload in this node's calls and handlers. What the daemon adds to them is not counted."""

    bytes_sent: int = 0
    bytes_received: int = 0
    requests_served: int = 0
    requests_failed: int = 0
    gossip_messages_sent: int = 0
    """Copies of messages, and control messages, where they can be counted. Their bytes are part of those above."""
    gossip_messages_received: int = 0
    gossip_bytes_sent: int = 0
    gossip_bytes_received: int = 0


def by_place(**counters: Counter[str]) -> Counter[str]:
    """Merge counters by reason into one by `place/reason`."""
    return Counter({f"{place}/{reason}": n for place, counts in counters.items() for reason, n in counts.items()})


class Transport(Protocol):
    """Network access of one node. All methods run on the node's event loop."""

    peer_id: str
    """Peer id of this node (base58), derived from the public key of its identity."""
    traffic: TrafficCounter

    @property
    def refused(self) -> Counter[str]:
        """Messages, entries and requests of peers that were refused before any handler ran, by `place/reason`."""
        ...

    async def start(self) -> None:
        """Join the swarm. Raises NetworkError with the cause where the network cannot start."""
        ...

    async def stop(self) -> None:
        """Leave the swarm, close every stream and end every child process. Idempotent."""
        ...

    def now(self) -> float:
        """Return the swarm time in seconds since the epoch."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Return the multiaddresses, each ending in /p2p/PEER_ID, that others can use as initial peers."""
        ...

    def gossip_addresses(self) -> tuple[str, ...]:
        """Return the multiaddresses, without /p2p, at which the gossip service of this node accepts connections."""
        ...

    @property
    def hosts_index(self) -> bool:
        """Whether this node stores a part of the index and searches the index for nodes that cannot."""
        ...

    def advice(self) -> tuple[str, ...]:
        """Return lines on what this node lacks to exchange with others, and what a person can do."""
        ...

    def meet(self, contact: "Contact") -> None:
        """Remember how a peer can be reached, from a record that the peer has signed."""
        ...

    def seen_at(self, peer_id: str) -> tuple[str, ...]:
        """Return the multiaddresses, with port 0, of connections to a peer, which nobody can forge.

        The result is empty for a peer that was never connected.
        """
        ...

    async def connected_peers(self) -> tuple[str, ...]:
        """Return the peer ids with an open connection."""
        ...

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Store one entry of at most MAX_VALUE_BYTES in the index. Of two entries, the one that was signed later stays.

        `expires_at` may be earlier than the signed expiration, but not later. Returns whether at least one replica
        accepted the entry. Raises ValueError for an oversize key, subkey or value.
        """
        ...

    async def load(self, key: str) -> dict[str, bytes]:
        """Return all live entries under `key` as {subkey: value}; empty when there are none or nobody answers."""
        ...

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        """Answer the requests of one protocol. Call it before `start`."""
        ...

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        """Send a request and return the response, whose hash is checked.

        A response is refused as soon as its announced length exceeds `max_response_bytes`. Raises RequestError
        (unreachable, refused, oversize, damaged, deadline).
        """
        ...

    def serve_lines(self, protocol: str, handler: LineHandler) -> None:
        """Serve the lines that peers open under a protocol. Call it before `start`."""
        ...

    async def open_line(self, peer_id: str, protocol: str, *, deadline_s: float) -> Line:
        """Open a line, which the caller closes. Raises RequestError (unreachable, deadline)."""
        ...

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        """Join a topic, at any time. A second call replaces the handler."""
        ...

    def unsubscribe(self, topic: str) -> None:
        """Leave a topic. Does nothing if this node is not in it."""
        ...

    async def publish(self, topic: str, message: bytes) -> None:
        """Send a message of at most MAX_GOSSIP_BYTES to the subscribers of a topic, except this node.

        Delivery is not confirmed: a message may be lost, and is lost when nobody is connected. Raises ValueError for an
        oversize message.
        """
        ...
