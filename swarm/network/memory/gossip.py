"""A small model of GossipSub (libp2p's pubsub v1.1) for the in-memory network.

    publish ─→ mesh of a few peers per topic ─→ each: seen before? → handler's decision → its own mesh
    every heartbeat: mesh kept within NODE_DEGREE
    every third one: ids of recent messages (IHAVE) to peers outside the mesh, which ask for those they lack (IWANT):
                     so a lost message still arrives

As in the original: validation before forwarding, a cache of seen messages, grafts and prunes with back-off, fan-out to
a topic that the node is not in, a score that invalid messages lower until the forwarder is pruned and then ignored, and
a limit on what one peer may send between two heartbeats. Simplified: the network object names the peers in a topic (at
the cost of one index lookup), control messages of the mesh are never lost, and scores count invalid messages only.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarm.limits.bounded_maps import BoundedMap
from swarm.network.gossip import (
    HEARTBEAT_S,
    HISTORY_HEARTBEATS,
    ID_BYTES,
    MAX_IDS,
    MAX_RECENT,
    MAX_SEEN,
    NODE_DEGREE,
    SEEN_S,
    WINDOW_HEARTBEATS,
)
from swarm.network.memory.mesh import FRAME_BYTES, Control, GossipMessage, TopicMesh, find_in_topic
from swarm.network.memory.network import MemoryNetwork
from swarm.network.transport import MAX_GOSSIP_BYTES, GossipHandler, TrafficCounter, ValidationResult

logger = logging.getLogger(__name__)

D_LAZY = 6
"""Peers outside the mesh that are sent the ids of recent messages at once."""
MAX_FANOUT_TOPICS = 64
FANOUT_S = 60.0
MAX_NEW_PER_HEARTBEAT = 500
"""New messages of one peer that are processed between two heartbeats; the rest is dropped."""
INVALID_PENALTY, PRUNE_SCORE, IGNORE_SCORE, SCORE_DECAY = -1.0, -2.5, -9.5, 0.97
"""Three invalid messages within seconds cost a peer its place in the mesh; after ten it is ignored."""
OnAccept = Callable[[str, GossipMessage, int], None]
"""(peer id, message, links that it crossed), for every node that accepts a message; 0 links at its author."""


@dataclass(slots=True)
class _Topic:
    handler: GossipHandler
    mesh: TopicMesh
    recent: list[list[bytes]] = field(default_factory=lambda: [[]])  # ids by heartbeat, newest first


class GossipRouter:
    """The gossip of one node. Handlers run on the event loop; an exception in one costs the message, never the node."""

    def __init__(self, network: MemoryNetwork, peer_id: str, traffic: TrafficCounter) -> None:
        self.num_dropped = 0
        """Messages above the rate of one peer."""
        self.num_rejected = 0
        self.on_accept: OnAccept | None = None
        self._network = network
        self._peer_id = peer_id
        self._traffic = traffic
        self._is_running = False
        self._topics: dict[str, _Topic] = {}
        self._seen: BoundedMap[bytes, float] = BoundedMap(MAX_SEEN)  # id -> when
        self._cache: BoundedMap[bytes, tuple[GossipMessage, int, float]] = BoundedMap(
            MAX_RECENT
        )  # id -> message, hops, until
        self._fanout: BoundedMap[str, tuple[list[str], float]] = BoundedMap(MAX_FANOUT_TOPICS)  # topic -> peers, until
        self._scores: dict[str, float] = {}
        self._num_new: dict[str, int] = {}  # by peer, since the last heartbeat
        self._asked: set[bytes] = set()
        self._num_heartbeats = 0

    # ---- for the node

    def start(self) -> None:
        self._is_running = True
        for topic in self._topics.values():
            topic.mesh.join()
        self._network.calendar.schedule(self._network.rng.random() * HEARTBEAT_S, self._heartbeat)

    def stop(self) -> None:
        self._is_running = False
        for topic in self._topics.values():
            topic.mesh.forget_all()

    def topics(self) -> tuple[str, ...]:
        return tuple(self._topics)

    def mesh(self, topic: str) -> tuple[str, ...]:
        return tuple(self._topics[topic].mesh.members)

    def score(self, peer_id: str) -> float:
        """Return the score of a peer: 0 without faults, else negative."""
        return self._scores.get(peer_id, 0.0)

    def num_remembered(self) -> int:
        """Return the number of items remembered of peers and messages. It is bounded, whatever peers do."""
        in_topics = sum(len(topic.mesh) + sum(map(len, topic.recent)) for topic in self._topics.values())
        stores = (self._seen, self._cache, self._fanout, self._scores, self._num_new, self._asked)
        return in_topics + sum(map(len, stores))

    def subscribe(self, name: str, handler: GossipHandler) -> None:
        if name in self._topics:
            self._topics[name].handler = handler
            return
        mesh = TopicMesh(
            self._network,
            self._peer_id,
            name,
            traffic=self._traffic,
            send_control=functools.partial(self._send_control, name),
            is_trusted=self._is_trusted,
        )
        self._topics[name] = _Topic(handler, mesh)
        if self._is_running:
            mesh.join()

    def unsubscribe(self, name: str) -> None:
        topic = self._topics.pop(name, None)
        if topic is not None and self._is_running:
            topic.mesh.leave()

    def publish(self, name: str, data: bytes) -> None:
        """Raises ValueError for an oversize message."""
        if len(data) > MAX_GOSSIP_BYTES:
            raise ValueError(f"a gossip message must be <= {MAX_GOSSIP_BYTES} bytes, got {len(data)}")
        message = GossipMessage.of(name, data)
        if not self._is_running or message.id in self._seen:
            return
        self._accept(message, 0)
        for peer_id in self._audience(name):
            self._send(peer_id, message, 1)

    # ---- what arrives from peers, hostile ones included

    def on_message(self, sender: str, message: GossipMessage, hops: int) -> None:
        self._count_in(message.num_bytes)
        topic = self._topics.get(message.topic)
        if message.id in self._seen or topic is None or self.score(sender) <= IGNORE_SCORE:
            return
        num_new = self._num_new[sender] = self._num_new.get(sender, 0) + 1
        if num_new > MAX_NEW_PER_HEARTBEAT:
            self.num_dropped += 1
            return
        decision = self._decide(topic.handler, sender, message.data)
        if decision is ValidationResult.ACCEPT:
            self._accept(message, hops)
            for peer_id in topic.mesh.members:
                if peer_id != sender:
                    self._send(peer_id, message, hops + 1)
            return
        self._remember(message.id)
        if decision is ValidationResult.REJECT:
            self._add_fault(sender)

    def on_have(self, sender: str, name: str, ids: tuple[bytes, ...]) -> None:
        self._count_in(FRAME_BYTES + len(name) + ID_BYTES * len(ids))
        if name not in self._topics or not self._is_trusted(sender):
            return
        wanted = tuple(i for i in ids[:MAX_IDS] if i not in self._seen and i not in self._asked)
        if wanted and len(self._asked) < MAX_RECENT:
            self._asked.update(wanted)
            self._post(sender, FRAME_BYTES + ID_BYTES * len(wanted), GossipRouter.on_want, wanted)

    def on_want(self, sender: str, ids: tuple[bytes, ...]) -> None:
        self._count_in(FRAME_BYTES + ID_BYTES * len(ids))
        for message_id in ids[:MAX_IDS]:
            if message_id in self._cache and self._is_trusted(sender):
                message, hops, _ = self._cache[message_id]
                self._send(sender, message, hops + 1)

    def on_control(self, sender: str, name: str, control: Control) -> None:
        self._count_in(FRAME_BYTES + len(name))
        topic = self._topics.get(name)
        if topic is not None:
            topic.mesh.handle(sender, control)
        elif control is Control.GRAFT:
            self._send_control(name, sender, Control.LEAVE)

    # ---- once per second

    def _heartbeat(self) -> None:
        if not self._is_running:
            return
        now = self._network.clock()
        self._num_heartbeats += 1
        self._num_new.clear()
        self._asked.clear()
        self._scores = {peer: s * SCORE_DECAY for peer, s in self._scores.items() if s < -0.1}
        _forget(self._seen, lambda seen_at: seen_at < now - SEEN_S)
        _forget(self._cache, lambda entry: entry[2] < now)
        _forget(self._fanout, lambda entry: entry[1] < now)
        for name, topic in self._topics.items():
            topic.mesh.run_heartbeat()
            self._announce_ids(name, topic)
        self._network.calendar.schedule(HEARTBEAT_S, self._heartbeat)

    def _announce_ids(self, name: str, topic: _Topic) -> None:
        ids = tuple(itertools.chain.from_iterable(topic.recent[:WINDOW_HEARTBEATS]))[:MAX_IDS]
        topic.recent = [[], *topic.recent[: WINDOW_HEARTBEATS - 1]]
        if not ids or self._num_heartbeats % WINDOW_HEARTBEATS:
            return
        others = topic.mesh.outsiders()
        for peer_id in self._network.rng.sample(others, min(len(others), D_LAZY)):
            self._post(peer_id, FRAME_BYTES + len(name) + ID_BYTES * len(ids), GossipRouter.on_have, name, ids)

    # ---- parts

    def _audience(self, name: str) -> Iterable[str]:
        """Return the peers to which an own message is sent first."""
        topic = self._topics.get(name)
        if topic is not None:
            return topic.mesh.audience()
        peers, _ = self._fanout.pop(name, ([], 0.0))
        peers = [p for p in peers if self._network.connected(self._peer_id, p)]
        if len(peers) < NODE_DEGREE.low:
            peers = find_in_topic(self._network, name, self._peer_id, traffic=self._traffic)[: NODE_DEGREE.wanted]
        self._fanout[name] = peers, self._network.clock() + FANOUT_S
        return peers

    def _add_fault(self, sender: str) -> None:
        self.num_rejected += 1
        self._scores[sender] = self.score(sender) + INVALID_PENALTY
        if not self._is_trusted(sender):
            for topic in self._topics.values():
                topic.mesh.expel(sender)

    def _is_trusted(self, peer_id: str) -> bool:
        return self.score(peer_id) >= PRUNE_SCORE

    def _accept(self, message: GossipMessage, hops: int) -> None:
        self._remember(message.id)
        until = self._network.clock() + HISTORY_HEARTBEATS * HEARTBEAT_S
        self._cache[message.id] = message, hops, until
        topic = self._topics.get(message.topic)
        if topic is not None and len(topic.recent[0]) < MAX_IDS:
            topic.recent[0].append(message.id)
        if self.on_accept is not None:
            self.on_accept(self._peer_id, message, hops)

    def _remember(self, message_id: bytes) -> None:
        self._seen[message_id] = self._network.clock()

    def _decide(self, handler: GossipHandler, sender: str, data: bytes) -> ValidationResult:
        if len(data) > MAX_GOSSIP_BYTES:
            return ValidationResult.REJECT
        try:
            return handler(sender, data)
        except Exception:  # a failing handler costs its message, never the node
            logger.warning("a gossip handler failed on a message of %s", sender, exc_info=True)
            return ValidationResult.IGNORE

    def _send(self, recipient: str, message: GossipMessage, hops: int) -> None:
        damaged = self._network.damage(message.data)
        if damaged is not message.data:
            message = GossipMessage.of(message.topic, damaged)
        self._post(recipient, message.num_bytes, GossipRouter.on_message, message, hops)

    def _send_control(self, name: str, recipient: str, control: Control) -> None:
        """Send a control message of the mesh. It is never lost: a real connection repeats it until it arrives or
        breaks.
        """
        num_bytes = FRAME_BYTES + len(name)
        self._post(recipient, num_bytes, GossipRouter.on_control, name, control, is_lossless=True)

    def _post(
        self,
        recipient: str,
        num_bytes: int,
        action: Callable[..., None],
        *arguments: object,
        is_lossless: bool = False,
    ) -> None:
        traffic = self._traffic
        traffic.gossip_messages_sent += 1
        traffic.gossip_bytes_sent += num_bytes
        traffic.bytes_sent += num_bytes
        self._network.post(self._peer_id, recipient, num_bytes, action, *arguments, is_lossless=is_lossless)

    def _count_in(self, num_bytes: int) -> None:
        self._traffic.gossip_messages_received += 1
        self._traffic.gossip_bytes_received += num_bytes
        self._traffic.bytes_received += num_bytes


def _forget(stored: BoundedMap, is_old: Callable[..., bool]) -> None:
    """Drop items from the front while they are old."""
    while stored and is_old(next(iter(stored.values()))):
        stored.popitem(last=False)
