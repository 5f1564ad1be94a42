"""py-libp2p's GossipSub router with limits: it manages the meshes, and bounds what a stranger can make it do or
remember.

It differs from py-libp2p's own: messages are known by the hash that is their id on the wire, not by author and number,
which anybody can claim; messages carry no signed address record, which each receiver would verify; peers recommended by
strangers are not dialled; and there are no scores, since ForwarderGuard decides. Its tables of seen and recent messages
are bounded and need no threads.
"""

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from swarm.network.gossip import (
    HEARTBEAT_S,
    HISTORY_HEARTBEATS,
    MAX_IDS,
    MAX_RECENT,
    MAX_SEEN,
    NODE_DEGREE,
    SEEN_S,
    WINDOW_HEARTBEATS,
    Degree,
)
from swarm.network.libp2p.parts import ID, PROTOCOL_ID_V11, GossipSub, Pubsub, rpc_pb2

MAX_WINDOW_IDS = 200
"""Ids of one topic that are announced. A peer that joins is sent all of them at once, which must not look like a flood.
"""

MAX_GIVEN = 3
"""How often a peer is given a message that it asks for, as in GossipSub v1.1: asking takes a few bytes."""


class SeenMessages:
    """Ids of the messages of the last SEEN_S, at most MAX_SEEN."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_at: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen_at)

    def has(self, message_id: bytes) -> bool:
        return message_id in self._seen_at

    def add(self, message_id: bytes) -> None:
        now = self._clock()
        self._seen_at.setdefault(message_id, now)
        while self._seen_at and (len(self._seen_at) > MAX_SEEN or next(iter(self._seen_at.values())) < now - SEEN_S):
            self._seen_at.popitem(last=False)


class RecentMessages:
    """The messages of the last HISTORY_HEARTBEATS. It replaces py-libp2p's MessageCache."""

    def __init__(self) -> None:
        self._messages: OrderedDict[bytes, Any] = OrderedDict()
        self._holders: dict[bytes, set[ID]] = {}
        self._num_given: dict[bytes, Counter[ID]] = {}
        self._history: list[list[tuple[str, bytes]]] = [[]]  # (topic, id) by heartbeat, newest first

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, topic: str, message_id: bytes, message: Any) -> None:
        if message_id in self._messages or len(self._messages) >= MAX_RECENT:
            return
        self._messages[message_id] = message
        self._history[0].append((topic, message_id))

    def note_holder(self, message_id: bytes, peer_id: ID) -> None:
        """Note that a peer has sent this message, too."""
        if message_id in self._messages:
            self._holders.setdefault(message_id, set()).add(peer_id)

    def is_held_by(self, message_id: bytes, peer_id: ID) -> bool:
        """Return whether a peer has sent this message, and so has no use for it."""
        return peer_id in self._holders.get(message_id, ())

    def get(self, mid: bytes) -> Any:
        """Return a message, or None where it is not stored."""
        return self._messages.get(mid)

    def give(self, message_id: bytes, peer_id: ID) -> Any:
        """Return a message for a peer that asks for it; None where it is not stored, or this peer asked MAX_GIVEN times."""
        message = self._messages.get(message_id)
        if message is None or (given := self._num_given.setdefault(message_id, Counter()))[peer_id] >= MAX_GIVEN:
            return None
        given[peer_id] += 1
        return message

    def window(self, topic: str) -> list[bytes]:
        """Return the ids of the last WINDOW_HEARTBEATS in a topic, newest heartbeat first, at most MAX_WINDOW_IDS."""
        recent = (entry for entries in self._history[:WINDOW_HEARTBEATS] for entry in entries)
        return [name for place, name in recent if place == topic][:MAX_WINDOW_IDS]

    def shift(self) -> None:
        """Begin the next heartbeat."""
        self._history.insert(0, [])
        for entries in self._history[HISTORY_HEARTBEATS:]:
            for _, name in entries:
                self._messages.pop(name, None)
                self._holders.pop(name, None)
                self._num_given.pop(name, None)
        del self._history[HISTORY_HEARTBEATS:]


HUB_DEGREE = Degree(8, 12, 128)
"""For a node that others rely on: no peer that asks for a place in the mesh is sent away."""
_PRUNE_BACK_OFF_S = 10
_MAX_BACK_OFF_S = 60


class BoundedGossipSub(GossipSub):
    """The router of a Pubsub, whose `seen_messages` it reads."""

    def __init__(self, degree: Degree = NODE_DEGREE) -> None:
        super().__init__(
            protocols=[PROTOCOL_ID_V11],
            degree=degree.wanted,
            degree_low=degree.low,
            degree_high=degree.high,
            heartbeat_interval=HEARTBEAT_S,  # with the default of 120 s a mesh would take that long
            heartbeat_initial_delay=0.1,
            prune_back_off=_PRUNE_BACK_OFF_S,
            spam_protection_enabled=False,  # it drops honest messages above 10 per second; see ForwarderGuard
            eclipse_protection_enabled=False,  # it counts addresses, and all nodes of a testbed have the same one
            adaptive_gossip_enabled=False,
        )
        self.mcache = self.recent = RecentMessages()  # pyright: ignore[reportAttributeAccessIssue]
        self.scorer = None
        self._num_heartbeats = 0
        self.num_dropped = 0
        """Messages dropped because the queue of a slow peer was full."""

    def forward(self, forwarder: ID, topic: str, message_id: bytes, message: rpc_pb2.Message) -> None:
        """Forward an accepted message to the mesh of its topic."""
        pubsub = self._pubsub
        self.recent.put(topic, message_id, message)
        self.time_since_last_publish[topic] = int(time.time())
        call = rpc_pb2.RPC(publish=[message])
        for peer_id in self._get_peers_to_send([topic], forwarder, pubsub.my_id):
            queue = pubsub.peer_queues.get(peer_id)
            if queue is not None and not queue.push(call):
                self.num_dropped += 1

    def gossip_heartbeat(self) -> defaultdict[ID, dict[str, list[bytes]]]:
        """Return the ids to announce at this heartbeat, by peer and topic."""
        self._num_heartbeats += 1
        return defaultdict(dict) if self._num_heartbeats % WINDOW_HEARTBEATS else super().gossip_heartbeat()

    async def send_recent_messages(self, peer_id: ID, topic: str) -> None:
        """Send a peer that has just joined a topic what it missed."""
        self._send_messages(peer_id, self.recent.window(topic))

    async def handle_rpc(self, rpc: rpc_pb2.RPC, sender_peer_id: ID) -> None:
        """Handle the control part of a call. Topics that this node is not in are ignored."""
        control = rpc.control
        for prune in control.prune:
            if prune.topicID in self.mesh:
                self._leave_mesh_of(sender_peer_id, prune.topicID, prune.backoff)
        for graft in control.graft:
            await self.handle_graft(graft, sender_peer_id)
        wanted = [i for have in control.ihave if have.topicID in self.mesh for i in have.messageIDs][:MAX_IDS]
        wanted = [i for i in dict.fromkeys(wanted) if not self._pubsub.seen_messages.has(i)]
        if wanted and self._check_ihave_rate_limit(sender_peer_id, ""):
            await self.emit_iwant(wanted, sender_peer_id)
        asked = list(dict.fromkeys(i for want in control.iwant for i in want.messageIDs))[:MAX_IDS]
        if asked and self._check_iwant_rate_limit(sender_peer_id):
            self._send_messages(sender_peer_id, asked)

    async def emit_control_message(self, control_msg: rpc_pb2.ControlMessage, to_peer: ID) -> None:
        self.send_rpc(to_peer, rpc_pb2.RPC(control=control_msg), priority=True)

    @property
    def _pubsub(self) -> Pubsub:
        assert self.pubsub is not None, "a router is attached when its pubsub is made"
        return self.pubsub

    def _send_messages(self, peer_id: ID, ids: Iterable[bytes]) -> None:
        found = [message for i in ids if (message := self.recent.give(bytes(i), peer_id)) is not None]
        if found:
            self.send_rpc(peer_id, rpc_pb2.RPC(publish=found))

    def _leave_mesh_of(self, peer_id: ID, topic: str, back_off_s: int) -> None:
        self.mesh[topic].discard(peer_id)
        self._add_back_off(peer_id, topic, False, min(back_off_s or _PRUNE_BACK_OFF_S, _MAX_BACK_OFF_S))

    def _periodic_security_cleanup(self) -> None:
        """Also drop, at every heartbeat, what py-libp2p would keep for good."""
        super()._periodic_security_cleanup()
        now = int(time.time())
        for topic, until_by_peer in list(self.back_off.items()):
            for peer_id in [peer_id for peer_id, until in until_by_peer.items() if until <= now]:
                del until_by_peer[peer_id]
            if not until_by_peer:
                del self.back_off[topic]
        for topic in self.time_since_last_publish.keys() - self.fanout.keys():
            del self.time_since_last_publish[topic]
