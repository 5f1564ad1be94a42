"""The peers of one node in one gossip topic: those that it knows there, and the few to which it forwards messages."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from swarm.network.gossip import NODE_DEGREE, message_id
from swarm.network.memory.network import LOOKUP_REQUEST_BYTES, MemoryNetwork
from swarm.network.transport import TrafficCounter

FRAME_BYTES = 8
"""Bytes around every message and control message, about as many as in libp2p's protobuf."""


@dataclass(frozen=True, slots=True, eq=False)
class GossipMessage:
    topic: str
    data: bytes
    id: bytes
    """Hash of topic and data."""

    @classmethod
    def of(cls, topic: str, data: bytes) -> "GossipMessage":
        return cls(topic, data, message_id(topic, data))

    @property
    def num_bytes(self) -> int:
        return FRAME_BYTES + len(self.topic) + len(self.data)


MAX_TOPIC_PEERS = 64
BACKOFF_S = 10.0
"""How long after a prune neither side grafts the other."""
NUM_DISCOVERED = 16
DISCOVERY_INTERVAL_S = 5.0


class Control(Enum):
    """The control messages of a topic."""

    JOIN = "join"
    """The sender is in the topic."""
    LEAVE = "leave"
    """The sender is not in the topic any more."""
    GRAFT = "graft"
    """The sender wants both sides to forward all messages to each other."""
    PRUNE = "prune"
    """The sender ends that."""


class TopicMesh:
    """The mesh of one topic. It uses dicts as sets, since sets of text have another order in every process."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer_id: str,
        topic: str,
        traffic: TrafficCounter,
        send_control: Callable[[str, Control], None],
        is_trusted: Callable[[str], bool],
    ) -> None:
        """`send_control` sends a control message to a peer; `is_trusted` returns whether a peer may be in the mesh."""
        self.members: dict[str, None] = {}
        self.peers: dict[str, None] = {}
        """Peers known to be in the topic, including the members of the mesh."""
        self._network = network
        self._peer_id = peer_id
        self._topic = topic
        self._traffic = traffic
        self._send_control = send_control
        self._is_trusted = is_trusted
        self._backoff_until: dict[str, float] = {}
        self._discovered_at = -DISCOVERY_INTERVAL_S

    def __len__(self) -> int:
        """Return the number of items remembered."""
        return len(self.members) + len(self.peers) + len(self._backoff_until)

    def join(self) -> None:
        self._network.join_topic(self._topic, self._peer_id)
        self._discover(self._network.clock())
        for peer_id in list(self.peers)[: NODE_DEGREE.wanted]:
            self._graft(peer_id)

    def leave(self) -> None:
        self._network.leave_topic(self._topic, self._peer_id)
        for peer_id in self.peers:
            self._send_control(peer_id, Control.LEAVE)
        self.forget_all()

    def forget_all(self) -> None:
        self.members.clear()
        self.peers.clear()
        self._backoff_until.clear()

    def handle(self, sender: str, control: Control) -> None:
        if control is Control.JOIN:
            self._meet(sender)
        elif control is Control.LEAVE:
            self.peers.pop(sender, None)
            self.members.pop(sender, None)
        elif control is Control.PRUNE and sender in self.members:
            self._drop(sender)
        elif control is Control.GRAFT:
            self._accept_graft(sender)

    def audience(self) -> list[str]:
        """Return the peers to which an own message is sent first: the mesh, and others while it is small."""
        spare = (
            self.outsiders()[: NODE_DEGREE.wanted - len(self.members)] if len(self.members) < NODE_DEGREE.low else []
        )
        return [*self.members, *spare]

    def outsiders(self) -> list[str]:
        return [peer_id for peer_id in self.peers if peer_id not in self.members]

    def expel(self, peer_id: str) -> None:
        """Remove a peer from the mesh, with a back-off."""
        if peer_id in self.members:
            self._drop(peer_id)
            self._send_control(peer_id, Control.PRUNE)

    def run_heartbeat(self) -> None:
        """Run a heartbeat: drop members whose connection broke, add members where few are left, remove some of many."""
        now, rng = self._network.clock(), self._network.rng
        for peer_id in [p for p in self.members if not self._network.connected(self._peer_id, p)]:
            del self.members[peer_id]
        if self._backoff_until:
            self._backoff_until = {p: until for p, until in self._backoff_until.items() if until > now}
        if len(self.members) < NODE_DEGREE.low:
            num_wanted = NODE_DEGREE.wanted - len(self.members)
            candidates = self._candidates()
            if len(candidates) < num_wanted and now - self._discovered_at >= DISCOVERY_INTERVAL_S:
                self._discover(now)
                candidates = self._candidates()
            for peer_id in rng.sample(candidates, min(len(candidates), num_wanted)):
                self._graft(peer_id)
        elif len(self.members) > NODE_DEGREE.high:
            for peer_id in rng.sample(list(self.members), len(self.members) - NODE_DEGREE.wanted):
                self.expel(peer_id)

    def _discover(self, now: float) -> None:
        self._discovered_at = now
        for peer_id in find_in_topic(self._network, self._topic, self._peer_id, traffic=self._traffic):
            if peer_id not in self.peers and self._meet(peer_id):
                self._send_control(peer_id, Control.JOIN)

    def _meet(self, peer_id: str) -> bool:
        """Add a peer, where there is room after forgetting peers that left. Returns whether it is known now."""
        if len(self.peers) >= MAX_TOPIC_PEERS:
            self.peers = {other: None for other in self.peers if other in self._network}
        if len(self.peers) >= MAX_TOPIC_PEERS:
            return False
        self.peers[peer_id] = None
        return True

    def _candidates(self) -> list[str]:
        self.peers = {peer_id: None for peer_id in self.peers if peer_id in self._network}
        return [
            peer_id
            for peer_id in self.outsiders()
            if self._is_trusted(peer_id)
            and peer_id not in self._backoff_until
            and self._network.connected(self._peer_id, peer_id)
        ]

    def _graft(self, peer_id: str) -> None:
        self.members[peer_id] = None
        self._send_control(peer_id, Control.GRAFT)

    def _accept_graft(self, sender: str) -> None:
        is_welcome = self._is_trusted(sender) and sender not in self._backoff_until
        is_room = sender in self.members or len(self.members) < NODE_DEGREE.high
        if is_welcome and is_room and self._meet(sender):
            self.members[sender] = None
        else:
            self._send_control(sender, Control.PRUNE)

    def _drop(self, peer_id: str) -> None:
        self.members.pop(peer_id, None)
        self._backoff_until[peer_id] = self._network.clock() + BACKOFF_S


def find_in_topic(network: MemoryNetwork, topic: str, peer_id: str, traffic: TrafficCounter) -> list[str]:
    """Return some members of a topic, at the cost of one lookup in the index for all nodes on the way."""
    for member in network.lookup_path(peer_id):
        member.traffic.bytes_received += LOOKUP_REQUEST_BYTES
        member.traffic.bytes_sent += network.lookup_response_bytes
        traffic.bytes_sent += LOOKUP_REQUEST_BYTES
        traffic.bytes_received += network.lookup_response_bytes
    return network.find_in_topic(topic, peer_id, NUM_DISCOVERED)
