"""Gossip over py-libp2p's GossipSub. A message is validated before it is forwarded, so garbage stops at the first
honest hop.

    peer → stream → pubsub (forwarder banned? handler's decision) → mesh of the topic

It needs no inbound port: a node behind a router dials others. pubsub adds no signature; the author signs the record
inside. If a peer manages to break py-libp2p, the service is opened again, and the index carries the headers meanwhile.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

from swarm.errors import NetworkError
from swarm.limits.bounded_maps import BoundedMap
from swarm.network.gossip import NODE_DEGREE, Addresses, ForwarderGuard, GossipAddressBook
from swarm.network.libp2p.host import Libp2pHost
from swarm.network.libp2p.parts import IHost, background_trio_service
from swarm.network.libp2p.pubsub import GuardedPubsub
from swarm.network.libp2p.router import HUB_DEGREE, BoundedGossipSub
from swarm.network.network_context import NetworkContext
from swarm.network.peers.surroundings import announced_addresses
from swarm.network.tcp_address import parse_setting, with_actual_ports
from swarm.network.transport import MAX_GOSSIP_BYTES, GossipHandler

logger = logging.getLogger(__name__)

NUM_NEIGHBORS = 8
"""Connections that a node keeps up. Others may connect to it beyond that."""
NUM_CHOSEN = 4
"""Neighbours that a node chose itself, however many chose it, so that strangers cannot surround it."""
MAINTENANCE_INTERVAL_S = 2.0
_SILENCE_S = 5.0
"""How long a peer may be in no topic after it was in one; twice as long after each time that it was disconnected for that."""
_MAX_SILENCE_S = 600.0
_MAX_RESTART_PAUSE_S = 30.0
_MAX_REPORTED = 256
"""Banned peers whose ban was already logged."""


class Libp2pGossip:
    """See `gossip.Gossip`."""

    def __init__(self, context: NetworkContext) -> None:
        """Raises ConfigError for a malformed address in the settings."""
        config = context.config
        self._context = context
        self._listen = parse_setting("gossip_listen", config.gossip_listen) or tuple(
            replace(address, port=0) for address in parse_setting("listen", config.listen)
        )
        self._announce = parse_setting("gossip_announce", config.gossip_announce)
        self._degree = HUB_DEGREE if config.serve_gossip else NODE_DEGREE
        self._chosen: set[str] = set()  # neighbours that this node dialled
        self._handlers: dict[str, GossipHandler] = {}
        self._guard = ForwarderGuard(time.monotonic, context.admits)
        self._rng = context.rng("gossip")
        self._address_book = GossipAddressBook(context.identity.peer_id, self._rng, context.dialling)
        self._host: Libp2pHost | None = None
        self._refused: Counter[str] = Counter()  # connections and streams that the host refused
        self._pubsub: GuardedPubsub | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._subscribers: set[str] = set()
        """Connected peers that were known to be in some topic."""
        self._reported: BoundedMap[str, None] = BoundedMap(_MAX_REPORTED)
        self._silent_since: dict[str, float] = {}
        self._hang_ups: BoundedMap[str, int] = BoundedMap(_MAX_REPORTED)
        """How often peers were disconnected since they were last known to be in a topic."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_restarts = 0

    @property
    def rejected(self) -> Counter[str]:
        return self._guard.rejected + self._refused

    @property
    def addresses(self) -> Addresses:
        if self._announce:
            return tuple(map(str, self._announce))
        return () if self._host is None else announced_addresses(self._host.addresses)

    async def start(self) -> None:
        """Raises NetworkError."""
        wanted = self._listen
        self._listen = self._context.ports.reuse("gossip", wanted)
        try:
            await self._open()
        except NetworkError:
            if self._listen == wanted:
                raise
            self._listen = wanted  # another program took the port of the last start a moment ago
            await self._open()
        self._context.ports.store("gossip", wanted, self._listen)
        self._supervisor = asyncio.create_task(self._supervise(), name="gossip-supervisor")

    async def stop(self) -> None:
        tasks = [task for task in (self._supervisor, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        host, self._host, self._pubsub, self._supervisor = self._host, None, None, None
        if host is not None:
            await host.close()

    def peers(self) -> tuple[str, ...]:
        return () if self._host is None else self._host.peers()

    def meet(self, peer_id: str, addresses: Addresses) -> None:
        num_known = len(self._address_book)
        self._address_book.meet(peer_id, addresses)
        if len(self._address_book) > num_known and len(self.peers()) < NUM_NEIGHBORS:
            self._wake.set()

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        is_new = topic not in self._handlers
        self._handlers[topic] = handler
        if is_new and self._pubsub is not None:
            self._in_background(self._pubsub.subscribe, topic)

    def unsubscribe(self, topic: str) -> None:
        if self._handlers.pop(topic, None) is not None and self._pubsub is not None:
            self._in_background(self._pubsub.unsubscribe, topic)

    async def publish(self, topic: str, message: bytes) -> None:
        if len(message) > MAX_GOSSIP_BYTES:
            raise ValueError(f"a gossip message must be <= {MAX_GOSSIP_BYTES} bytes, got {len(message)}")
        if self._pubsub is not None and self._host is not None:
            with contextlib.suppress(NetworkError):  # being restarted; the index has the record
                await self._host.run(self._pubsub.publish, topic, message)

    async def _open(self) -> None:
        self._host = await Libp2pHost.open(
            self._context.identity,
            self._listen,
            services=self._services,
            refused=self._refused,
            on_seen=self._context.dialling.see,
            timeout_s=self._context.config.startup_timeout_s,
        )
        self._listen = with_actual_ports(self._listen, self._host.addresses)  # others know these ports by now
        assert self._pubsub is not None, "made by _services"
        for topic in self._handlers:
            await self._host.run(self._pubsub.subscribe, topic)

    @contextlib.asynccontextmanager
    async def _services(self, host: IHost) -> AsyncIterator[None]:
        """Run pubsub on a new host for as long as the host lives. In trio."""
        router = BoundedGossipSub(self._degree)
        pubsub = GuardedPubsub(host, router, guard=self._guard, handlers=self._handlers, traffic=self._context.traffic)
        async with background_trio_service(pubsub), background_trio_service(router):
            await pubsub.wait_until_ready()
            self._pubsub = pubsub
            yield

    async def _supervise(self) -> None:
        """Keep a host open that has enough neighbours, for as long as the node runs."""
        num_failures = 0
        while True:
            if self._host is None:
                await asyncio.sleep(min(2.0**num_failures, _MAX_RESTART_PAUSE_S) * self._rng.uniform(0.5, 1.0))
                num_failures = 0 if await self._reopen() else num_failures + 1
                continue
            cause = await self._pause(self._host)
            if cause is not None:
                logger.warning("the gossip service failed and is being restarted: %s", cause)
                host, self._host, self._pubsub = self._host, None, None
                await host.close()
            else:
                self._wake.clear()
                await self._maintain(self._host)

    async def _pause(self, host: Libp2pHost) -> str | None:
        """Wait until there is something to do. Returns why the host ended, if it did."""
        exited, woken = asyncio.create_task(host.exited()), asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({exited, woken}, timeout=MAINTENANCE_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            return exited.result() if exited.done() else None
        finally:
            exited.cancel()
            woken.cancel()

    async def _reopen(self) -> bool:
        self.num_restarts += 1
        try:
            await self._open()
        except NetworkError as error:
            logger.warning("the gossip service did not start: %s", error)
            return False
        return True

    async def _maintain(self, host: Libp2pHost) -> None:
        """Disconnect banned peers, and connect to others where there are too few."""
        for peer_id in host.peers():
            if self._guard.is_banned(peer_id):
                self._log_ban(peer_id)
                self._address_book.forget(peer_id)
                with contextlib.suppress(NetworkError):
                    await host.disconnect(peer_id)
        connected = host.peers()
        for peer_id in connected:
            self._address_book.met(peer_id)
        self._chosen &= set(connected)
        num_missing = max(NUM_NEIGHBORS - len(connected), NUM_CHOSEN - len(self._chosen))
        shut_out = filter(self._guard.is_banned, self._address_book)
        chosen = self._address_book.choose(num_missing, {*connected, *shut_out})
        await asyncio.gather(*(self._connect(host, peer_id, at) for peer_id, at in chosen.items()))
        await self._hang_up_on_forgotten(host)

    def _log_ban(self, peer_id: str) -> None:
        """Log a ban once per peer, which may dial again every few seconds."""
        is_news = peer_id not in self._reported
        level = logging.INFO if is_news else logging.DEBUG
        logger.log(level, "gossip peer %s is banned: not a member, or too many invalid messages", peer_id)
        self._reported[peer_id] = None

    async def _hang_up_on_forgotten(self, host: Libp2pHost) -> None:
        """Disconnect peers whose subscriptions pubsub has lost, so that they connect again.

        When a connection ends, py-libp2p forgets the subscriptions of its peer. Where another connection to that peer
        is still open, as after a change of address, the peer would never repeat them and receive nothing any more.
        """
        now = time.monotonic()
        topics = self._pubsub.peer_topics.values() if self._pubsub is not None else ()
        streams = {str(peer_id): stream for peer_id, stream in self._pubsub.peers.items()} if self._pubsub else {}
        connected = {*host.peers(), *streams}  # a stream may be on a connection that py-libp2p has forgotten
        subscribed = {str(peer_id) for peer_ids in topics for peer_id in peer_ids} & connected
        for peer_id in subscribed:
            self._hang_ups.pop(peer_id, None)
        # the end of the old connection may undo what the peer has said on the new one, too
        silent = ({*self._subscribers, *self._hang_ups} & connected) - subscribed
        self._silent_since = {peer_id: self._silent_since.get(peer_id, now) for peer_id in silent}
        self._subscribers = subscribed | silent
        for peer_id, since in list(self._silent_since.items()):
            num_hang_ups = self._hang_ups.get(peer_id, 0)
            if now - since >= min(_SILENCE_S * 2**num_hang_ups, _MAX_SILENCE_S):
                self._hang_ups[peer_id] = (
                    num_hang_ups + 1
                )  # a peer that has left all topics has longer and longer peace
                del self._silent_since[peer_id]
                with contextlib.suppress(NetworkError):
                    await host.disconnect(peer_id, [streams[peer_id]] if peer_id in streams else [])

    async def _connect(self, host: Libp2pHost, peer_id: str, addresses: Addresses) -> None:
        try:
            await host.connect(peer_id, addresses)
            self._chosen.add(peer_id)
        except NetworkError as error:
            logger.debug("gossip peer %s: %s", peer_id, error)

    def _in_background(self, function, topic: str) -> None:
        async def work() -> None:
            if self._host is not None:
                with contextlib.suppress(NetworkError):
                    await self._host.run(function, topic)

        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
