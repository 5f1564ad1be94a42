"""What the two gossip services have in common: their contract, the peers they connect to, and when they ban a peer.

There are two implementations: `libp2p.gossip` (py-libp2p, validates a message before it forwards it) and
`hivemind.daemon_gossip` (the Go daemon's pubsub: faster, but it forwards without validation, for swarms whose members
trust each other).
"""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from swarm.limits.bounded_maps import BoundedMap, BoundedPeers
from swarm.limits.token_bucket import TokenBucket
from swarm.network.peers.dialling import Dialling
from swarm.network.transport import MAX_GOSSIP_BYTES, Admits, GossipHandler, ValidationResult, everybody

logger = logging.getLogger(__name__)

Addresses = tuple[str, ...]
"""Multiaddresses of one peer, without /p2p."""

MAX_KNOWN_PEERS = 256


class Degree(NamedTuple):
    """Number of neighbours in the mesh of a topic. Below `low` or above `high` it is changed to `wanted`."""

    low: int
    wanted: int
    high: int


NODE_DEGREE = Degree(3, 4, 8)
HEARTBEAT_S = 1
HISTORY_HEARTBEATS = 5
"""How long a message can be asked for."""
WINDOW_HEARTBEATS = 3
"""Ids are announced once in so many heartbeats, together, and so each of them once. GossipSub announces each at three heartbeats:
in a swarm of 16 that was more messages than all else, to tell of what neighbours had."""
SEEN_S = 120.0
MAX_SEEN = 65_536
MAX_RECENT = 4096
MAX_IDS = 500
"""Message ids of one call that are processed."""
ID_BYTES = 16


def message_id(topic: str, data: bytes) -> bytes:
    """Return the id of a message on the wire: ID_BYTES of a hash of topic and data."""
    return hashlib.sha256(topic.encode() + b"\0" + data).digest()[:ID_BYTES]


class Gossip(Protocol):
    """One gossip service of one node. All methods run on the node's event loop."""

    @property
    def rejected(self) -> Counter[str]:
        """Messages that were not forwarded, by reason."""
        ...

    @property
    def addresses(self) -> Addresses:
        """Addresses at which this service accepts connections; empty where it has none of its own."""
        ...

    async def start(self) -> None:
        """Raises NetworkError."""
        ...

    async def stop(self) -> None: ...

    def peers(self) -> tuple[str, ...]:
        """Peer ids with a connection to this service."""
        ...

    def meet(self, peer_id: str, addresses: Addresses) -> None:
        """Remember a peer that the service may connect to."""
        ...

    def subscribe(self, topic: str, handler: GossipHandler) -> None: ...

    def unsubscribe(self, topic: str) -> None: ...

    async def publish(self, topic: str, message: bytes) -> None: ...


class GossipAddressBook:
    """The peers that a gossip service may connect to. It is bounded; peers that were connected stay longer than
    strangers.
    """

    def __init__(self, own_peer_id: str, rng: random.Random, dialling: Dialling) -> None:
        self._own_peer_id = own_peer_id
        self._rng = rng
        self._dialling = dialling
        self._known: BoundedPeers[Addresses] = BoundedPeers(MAX_KNOWN_PEERS)

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def meet(self, peer_id: str, addresses: Addresses) -> None:
        """Store those of the addresses that a peer announces which this node may dial."""
        addresses = self._dialling.believed(peer_id, addresses)
        if addresses and peer_id != self._own_peer_id:
            self._known.put(peer_id, addresses)

    def met(self, peer_id: str) -> None:
        """Note that a peer is connected."""
        self._known.met(peer_id, self._dialling.network_of(peer_id))

    def forget(self, peer_id: str) -> None:
        self._known.forget(peer_id)

    def choose(self, count: int, avoided: Collection[str]) -> dict[str, Addresses]:
        """Choose up to `count` random known peers to dial now, each with the addresses to try next."""
        others = sorted(set(self._known) - set(avoided))
        self._rng.shuffle(others)
        chosen: dict[str, Addresses] = {}
        for peer_id in others:
            if len(chosen) >= count:
                break
            if addresses := self._dialling.take(peer_id, self._known.get(peer_id) or ()):
                chosen[peer_id] = addresses
        return chosen


@dataclass(slots=True)
class _Forwarder:
    messages: TokenBucket
    own_share: TokenBucket
    faults: TokenBucket
    banned_until: float = 0.0


class ForwarderGuard:
    """Decides, before a message is processed, whether messages of its forwarder are still accepted.

    A token bucket per forwarder, and one for all together, limit the cost of a flood. Each REJECT is a fault, and too
    many faults ban the forwarder for a while. Faults fade, so an honest peer that sometimes forwards something stale is
    never banned.
    """

    RATE_PER_S = 200.0
    """Messages per second of one forwarder: more than a full shard of honest nodes sends through all its neighbours."""
    SHARED_PER_S = 120.0
    """Messages per second of all forwarders together.

    What this node forwards must stay below what its neighbours accept from it. Otherwise many strangers, each below its
    own limit, could have this node banned by its neighbours."""
    OWN_SHARE_PER_S = 0.5
    """Messages per second that one forwarder may always send, even when the shared rate is used up."""
    MAX_FAULTS = 20.0
    FAULTS_FADE_PER_S = 0.1
    BAN_S = 300.0
    MAX_FORWARDERS = 1024

    def __init__(self, clock: Callable[[], float], admits: Admits = everybody) -> None:
        """`clock` gives seconds that never go back. `admits` decides which peers are accepted at all."""
        self._clock = clock
        self._admits = admits
        self._forwarders: BoundedMap[str, _Forwarder] = BoundedMap(self.MAX_FORWARDERS)
        self._shared = TokenBucket(self.SHARED_PER_S, 2 * self.SHARED_PER_S, clock())
        self.rejected: Counter[str] = Counter()

    def judge(
        self,
        peer_id: str,
        message: bytes,
        handler: GossipHandler | None,
        mark_seen: Callable[[], None] = lambda: None,
    ) -> ValidationResult:
        """Return the handler's decision, or IGNORE or REJECT where the message does not reach the handler.

        `mark_seen` is called for a message that there is no time to process. The message must then count as seen:
        asking neighbours for it again would use up their rate.
        """
        if not self._admits(peer_id, "gossip"):
            self.rejected["stranger"] += 1
            return ValidationResult.IGNORE
        now, state = self._clock(), self._state(peer_id)
        if now < state.banned_until:
            self.rejected["shut_out"] += 1
            return ValidationResult.IGNORE
        if not self._spend(state, now, 1):
            return ValidationResult.IGNORE
        if handler is None:
            return ValidationResult.IGNORE
        if not (self._shared.try_take(1, now) or state.own_share.try_take(1, now)):
            self.rejected["crowded"] += 1  # nobody's fault; the index has the record
            mark_seen()
            return ValidationResult.IGNORE
        decision = self._ask(handler, peer_id, message) if len(message) <= MAX_GOSSIP_BYTES else ValidationResult.REJECT
        if decision is ValidationResult.REJECT:
            self.rejected["invalid"] += 1
            self._blame(state, now, 1.0)
        return decision

    def admit(self, peer_id: str, count: int) -> bool:
        """Return whether a peer may cause `count` other operations, such as subscriptions. They use the same rate."""
        now, state = self._clock(), self._state(peer_id)
        return now >= state.banned_until and self._spend(state, now, count)

    def is_banned(self, peer_id: str) -> bool:
        if not self._admits(peer_id, "gossip"):
            return True
        state = self._forwarders.get(peer_id)
        return state is not None and self._clock() < state.banned_until

    def blame(self, peer_id: str) -> None:
        """Count a fault outside of messages, such as bytes that cannot be decoded."""
        self._blame(self._state(peer_id), self._clock(), 1.0)

    def _spend(self, state: _Forwarder, now: float, count: int) -> bool:
        if state.messages.try_take(count, now):
            return True
        self.rejected["flood"] += 1
        self._blame(state, now, 0.2)
        return False

    @staticmethod
    def _ask(handler: GossipHandler, peer_id: str, message: bytes) -> ValidationResult:
        try:
            return handler(peer_id, message)
        except Exception:  # a failing handler costs its message, never the service
            logger.warning("a gossip handler failed on a message of %s", peer_id, exc_info=True)
            return ValidationResult.IGNORE

    def _blame(self, state: _Forwarder, now: float, faults: float) -> None:
        if state.faults.take(faults, now) > 0:
            state.faults = TokenBucket(self.FAULTS_FADE_PER_S, self.MAX_FAULTS, now)
            state.banned_until = now + self.BAN_S

    def _state(self, peer_id: str) -> _Forwarder:
        return self._forwarders.get_or_add(peer_id, self._new_state)

    def _new_state(self) -> _Forwarder:
        now = self._clock()
        return _Forwarder(
            messages=TokenBucket(self.RATE_PER_S, 2 * self.RATE_PER_S, now),
            own_share=TokenBucket(self.OWN_SHARE_PER_S, 2.0, now),
            faults=TokenBucket(self.FAULTS_FADE_PER_S, self.MAX_FAULTS, now),
        )


class GossipSlot:
    """The gossip service of a transport, or none. Topics may be joined before it starts, or where there is none."""

    def __init__(self, make: Callable[[], Gossip] | None) -> None:
        """`make` is called at `start`, because it imports what only a running node needs."""
        self._make = make
        self._service: Gossip | None = None
        self._handlers: dict[str, GossipHandler] = {}

    async def start(self) -> None:
        """Raises NetworkError."""
        if self._make is None:
            return
        self._service = self._make()
        for topic, handler in self._handlers.items():
            self._service.subscribe(topic, handler)
        await self._service.start()

    async def stop(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            await service.stop()

    @property
    def addresses(self) -> Addresses:
        return () if self._service is None else self._service.addresses

    @property
    def rejected(self) -> Counter[str]:
        return Counter() if self._service is None else self._service.rejected

    def peers(self) -> tuple[str, ...]:
        return () if self._service is None else self._service.peers()

    def meet(self, peer_id: str, addresses: Addresses) -> None:
        if self._service is not None:
            self._service.meet(peer_id, addresses)

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        self._handlers[topic] = handler
        if self._service is not None:
            self._service.subscribe(topic, handler)

    def unsubscribe(self, topic: str) -> None:
        self._handlers.pop(topic, None)
        if self._service is not None:
            self._service.unsubscribe(topic)

    async def publish(self, topic: str, message: bytes) -> None:
        if len(message) > MAX_GOSSIP_BYTES:
            raise ValueError(f"a gossip message must be <= {MAX_GOSSIP_BYTES} bytes, got {len(message)}")
        if self._service is not None:
            await self._service.publish(topic, message)
