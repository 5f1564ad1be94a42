"""Gossip through the Go daemon's own pubsub: a tenth of the CPU, for swarms whose members trust each other.

The daemon forwards a message before this node has validated it, so invalid messages travel as far as valid ones. Each
node still validates what it accepts. The peer that signed a message counts as its forwarder.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter

from swarm.errors import NetworkError
from swarm.network.gossip import Addresses, ForwarderGuard
from swarm.network.peers.peer_routing import SessionSlot
from swarm.network.transport import MAX_GOSSIP_BYTES, GossipHandler, TrafficCounter

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S = 1.0


class DaemonGossip:
    """See `gossip.Gossip`. It has no address of its own, since it uses the daemon's connections."""

    addresses: Addresses = ()

    def __init__(self, own_peer_id: str, sessions: SessionSlot, traffic: TrafficCounter) -> None:
        self._own_peer_id = own_peer_id
        self._sessions = sessions
        self._traffic = traffic
        self._guard = ForwarderGuard(time.monotonic)
        self._handlers: dict[str, GossipHandler] = {}
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._is_running = False

    @property
    def rejected(self) -> Counter[str]:
        return self._guard.rejected

    async def start(self) -> None:
        self._is_running = True
        for topic in self._handlers:
            self._listen(topic)

    async def stop(self) -> None:
        self._is_running = False
        listeners, self._listeners = list(self._listeners.values()), {}
        for task in listeners:
            task.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)

    def peers(self) -> tuple[str, ...]:
        return ()

    def meet(self, peer_id: str, addresses: Addresses) -> None:
        """Do nothing: the daemon's connections serve both."""

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        self._handlers[topic] = handler
        if self._is_running and topic not in self._listeners:
            self._listen(topic)

    def unsubscribe(self, topic: str) -> None:
        self._handlers.pop(topic, None)
        listener = self._listeners.pop(topic, None)
        if listener is not None:
            listener.cancel()

    async def publish(self, topic: str, message: bytes) -> None:
        if len(message) > MAX_GOSSIP_BYTES:
            raise ValueError(f"a gossip message must be <= {MAX_GOSSIP_BYTES} bytes, got {len(message)}")
        session = self._sessions.current
        if session is not None:
            with contextlib.suppress(NetworkError):  # being restarted; the index has the record
                await session.control.publish(topic, message)
                self._traffic.gossip_messages_sent += 1
                self._traffic.gossip_bytes_sent += len(message)
                self._traffic.bytes_sent += len(message)

    def _listen(self, topic: str) -> None:
        self._listeners[topic] = asyncio.create_task(self._listen_until_stopped(topic), name=f"gossip {topic}")

    async def _listen_until_stopped(self, topic: str) -> None:
        while True:
            session = self._sessions.current
            if session is not None:
                try:
                    async for author, message in session.control.subscribe(topic):
                        if author != self._own_peer_id:
                            self._traffic.gossip_messages_received += 1
                            self._traffic.gossip_bytes_received += len(message)
                            self._traffic.bytes_received += len(message)
                            self._guard.judge(author, message, self._handlers.get(topic))
                except NetworkError as error:
                    logger.debug("the daemon's pubsub ended: %s", error)
            await asyncio.sleep(_RETRY_PAUSE_S)
