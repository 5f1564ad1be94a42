"""The contract between the node and a network: an expiring index, requests to one peer, gossip to all.

Implementations: `hivemind.transport` (libp2p daemon: DHT and streams), `libp2p.transport` (all of it in Python, for machines
without the daemon) and `memory.transport` (in-process, seeded faults). Everything above this line works the same on all.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

RequestHandler = Callable[[str, bytes], Awaitable[bytes]]
"""(peer id of the caller, request) -> response. Raising RequestRefused answers the caller with its reason."""


class ValidationResult(Enum):
    """What a gossip handler says of a message."""

    ACCEPT = "accept"
    """Valid: it was taken and is passed on."""
    IGNORE = "ignore"
    """Of no use, through nobody's fault: it is not passed on."""
    REJECT = "reject"
    """Invalid: it is not passed on, and held against the peer that passed it here."""


GossipHandler = Callable[[str, bytes], ValidationResult]
"""(peer id that passed it here, message) -> verdict. Runs on the node's loop before the message is passed on: quick."""

MAX_GOSSIP_BYTES = 1024 + 64
"""Longest message of a topic: a signed header, and what sealing it adds in a silo."""

Admits = Callable[[str, str], bool]
"""(peer id, what it asks for: a protocol, "index" or "gossip") -> whether it is answered at all."""


def everybody(peer_id: str, wanted: str) -> bool:
    """Of a public swarm."""
    return True


@dataclass(frozen=True, slots=True)
class Contact:
    """How a peer can be reached."""

    peer_id: str
    addresses: tuple[str, ...]
    """Multiaddresses without /p2p; empty for a peer that only calls others."""
    gossip_addresses: tuple[str, ...]
    hosts_index: bool


class RequestRefused(Exception):
    """A handler declines a request; the reason (short ASCII) travels to the caller."""


@dataclass(slots=True)
class TrafficCounter:
    """Bytes of payload through this node's own calls and handlers (the daemon's overhead is not visible from here)."""

    bytes_sent: int = 0
    bytes_received: int = 0
    requests_served: int = 0
    requests_failed: int = 0
    gossip_messages_sent: int = 0
    """Copies of messages and control messages, as far as visible from here; their bytes are part of those above."""
    gossip_messages_received: int = 0
    gossip_bytes_sent: int = 0
    gossip_bytes_received: int = 0


def by_place(**counters: Counter[str]) -> Counter[str]:
    """Counters by reason as one by `place/reason`."""
    return Counter({f"{place}/{reason}": n for place, counts in counters.items() for reason, n in counts.items()})


class Transport(Protocol):
    """Network access of one node. All methods run on the node's asyncio loop."""

    peer_id: str
    """Own peer id (base58), derived from the identity's public key."""
    traffic: TrafficCounter

    @property
    def refused(self) -> Counter[str]:
        """What peers sent or asked and was turned away before anybody looked at it, by `place/reason`."""
        ...

    async def start(self) -> None:
        """Join the swarm. Raises NetworkError with the cause when the network layer cannot come up."""
        ...

    async def stop(self) -> None:
        """Leave, close every stream and end every child process. Idempotent."""
        ...

    def now(self) -> float:
        """Swarm time in seconds since the epoch."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses, each ending in /p2p/PEER_ID, that others may use as initial peers."""
        ...

    def gossip_addresses(self) -> tuple[str, ...]:
        """Multiaddresses, without /p2p, at which the gossip of others may connect to that of this node."""
        ...

    @property
    def hosts_index(self) -> bool:
        """Whether this node holds a part of the index and looks into it for nodes that cannot."""
        ...

    def meet(self, contact: "Contact") -> None:
        """Learn how a peer can be reached, from what it has signed itself."""
        ...

    def seen_at(self, peer_id: str) -> tuple[str, ...]:
        """Multiaddresses at which a peer was seen on connections, with port 0; nobody can invent these.

        It is empty for a peer that was never connected.
        """
        ...

    async def connected_peers(self) -> tuple[str, ...]:
        """Peer ids with an open connection."""
        ...

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Put one entry of at most MAX_VALUE_BYTES into the index. Of two entries, the one that was signed later stays.

        `expires_at` may be earlier than the signed expiration, but not later. Returns whether at least one replica took
        the entry. Raises ValueError for an oversize value.
        """
        ...

    async def load(self, key: str) -> dict[str, bytes]:
        """All live entries under `key` as {subkey: value}; empty when there are none or nobody answers."""
        ...

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        """Answer requests of one protocol name. To be called before `start`."""
        ...

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        """Send a request and return the verified response.

        The response is refused as soon as its announced length exceeds `max_response_bytes`; its hash is checked.
        Raises RequestError (unreachable, refused, oversize, damaged, deadline).
        """
        ...

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        """Take part in a topic, at any time; a second call replaces the handler."""
        ...

    def unsubscribe(self, topic: str) -> None:
        """Leave a topic; nothing happens if this node is not in it."""
        ...

    async def publish(self, topic: str, message: bytes) -> None:
        """Spread a message of at most MAX_GOSSIP_BYTES among the subscribers of a topic, this node excepted.

        Nobody confirms: it may be lost, and is when nobody is connected. Raises ValueError for an oversize message.
        """
        ...
