"""The transport over the libp2p daemon: hivemind's DHT for the index, raw streams for requests.

node → HivemindTransport → HivemindSession: daemon (Go) + DHT node → peers
              └ SessionSupervisor replaces a broken session and joins again when no peer is left
"""

import asyncio
import contextlib
import importlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from swarm.config import NetworkSection
from swarm.errors import NetworkError
from swarm.machine.memory import HeapTrimmer
from swarm.network.gossip import Gossip, GossipSlot
from swarm.network.hivemind.supervisor import HEALTH_INTERVAL_S, SessionSupervisor
from swarm.network.index_entry import MAX_LIFETIME_S, IndexRule, IndexValidator, check_entry
from swarm.network.index_gateway import (
    INDEX_PROTOCOL,
    INDEX_TIMEOUT_S,
    MAX_INDEX_REQUEST_BYTES,
    MAX_INDEX_RESPONSE_BYTES,
    IndexGateway,
)
from swarm.network.network_context import NetworkContext
from swarm.network.peer_index import PeerIndex
from swarm.network.peers.dialling import PEERS_FILE
from swarm.network.peers.known_peers import KnownPeers
from swarm.network.peers.peer_routing import (
    ADDRESSES_PROTOCOL,
    MAX_ADDRESSES_REQUEST_BYTES,
    MAX_ADDRESSES_RESPONSE_BYTES,
    PeerRouting,
    SessionSlot,
)
from swarm.network.peers.peer_routing import ASK_TIMEOUT_S as ADDRESSES_TIMEOUT_S
from swarm.network.reach.reachability import (
    ASK_TIMEOUT_S,
    MAX_REACH_REQUEST_BYTES,
    REACH_PROTOCOL,
    ReachService,
    interleaved_by_network,
)
from swarm.network.requests.framing import Stream, StreamRequests
from swarm.network.requests.lines import StreamLine
from swarm.network.requests.server import RequestServer
from swarm.network.tcp_address import parse_setting
from swarm.network.transport import (
    Admits,
    Contact,
    GossipHandler,
    Line,
    LineHandler,
    RequestHandler,
    TrafficCounter,
    by_place,
    everybody,
)
from swarm.records.identity import Identity

if TYPE_CHECKING:
    from swarm.network.hivemind.session import HivemindSession

Answer = TypeVar("Answer")
_NO_ADDRESS = "failed to find any peer in table"
"""The daemon's message where it has no address of a peer and knows nobody to ask."""
_OLD_KEY_FILE = "libp2p.key"
"""Where earlier releases stored the daemon's copy of the key."""


class HivemindTransport:
    """See `transport.Transport`."""

    def __init__(
        self,
        config: NetworkSection,
        identity: Identity,
        state_dir: Path,
        validator: IndexValidator | None = None,
        admits: Admits = everybody,
        *,
        health_interval_s: float = HEALTH_INTERVAL_S,
    ) -> None:
        """`state_dir` is the node's folder, which stores known peers and ports. Raises ConfigError for a malformed
        address.
        """
        self.peer_id = identity.peer_id
        self._context = context = NetworkContext.of(config, identity, state_dir, validator=validator, admits=admits)
        self.traffic = context.traffic
        self._config = config
        self._old_key_file = state_dir / _OLD_KEY_FILE
        self._dialling = context.dialling
        self._server = RequestServer.of(context)
        self._sessions = SessionSlot()
        self._heap = HeapTrimmer()
        self._requests = StreamRequests(self._open_stream, self.traffic, self._call)
        if config.gossip == "libp2p":
            # Before there are other threads, since the import uses stand-ins that these must not meet.
            importlib.import_module("swarm.network.libp2p.gossip")
        self.gossip = GossipSlot(None if config.gossip == "off" else self._make_gossip)
        self.hosts = _HostedIndex(self._sessions, self.traffic, config.request_timeout_s)
        self._rng = context.rng("index")
        rule, reach = IndexRule(validator, self.now), ReachService(self._observed, self.now)
        self._peer_index = PeerIndex(rule, self.now, self._ask_index, admits)
        index = IndexGateway(_ServedIndex(self, self._peer_index), rule, network_of=self._dialling.network_of)
        self._server.serve(INDEX_PROTOCOL, index.answer, max_request_bytes=MAX_INDEX_REQUEST_BYTES)
        self._server.serve(REACH_PROTOCOL, reach.answer, max_request_bytes=MAX_REACH_REQUEST_BYTES)
        initial = parse_setting("initial_peers", config.initial_peers)
        self._peers = KnownPeers(initial, self.peer_id, state_dir / PEERS_FILE, clock=self.now, dialling=self._dialling)
        self._routing = PeerRouting(
            self._sessions, self._ask_for_addresses, context.rng("routing"), choose=self._dialling.take
        )
        self._server.serve(ADDRESSES_PROTOCOL, self._routing.answer, max_request_bytes=MAX_ADDRESSES_REQUEST_BYTES)
        self._supervisor = SessionSupervisor(
            context,
            self._sessions,
            server=self._server,
            peers=self._peers,
            routing=self._routing,
            ask_about_reach=self._ask_about_reach,
            health_interval_s=health_interval_s,
        )

    async def start(self) -> None:
        """Start. Raises NetworkError. Initial peers that do not answer are no error: they are tried again."""
        assert self._session is None, "started twice"
        self._old_key_file.unlink(missing_ok=True)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.stop)
            await self._supervisor.open()
            await asyncio.gather(self._supervisor.join(), self.gossip.start())
            self._supervisor.begin()
            undo.pop_all()

    async def stop(self) -> None:
        await self._supervisor.end()
        await self._server.close()
        await self.gossip.stop()
        self._heap.stop()
        await self._supervisor.close()

    @property
    def num_restarts(self) -> int:
        """How often the supervisor had to restart the daemon."""
        return self._supervisor.broken.total()

    @property
    def refused(self) -> Counter[str]:
        guard = self._supervisor.guard
        index = Counter[str]() if guard is None else guard.refused
        return by_place(
            requests=self._server.refused, gossip=self.gossip.rejected, index=index, daemon=self._supervisor.broken
        )

    def now(self) -> float:
        return time.time()

    def addresses(self) -> tuple[str, ...]:
        session = self._session
        return () if session is None else tuple(f"{address}/p2p/{self.peer_id}" for address in session.addresses)

    def gossip_addresses(self) -> tuple[str, ...]:
        return self.gossip.addresses

    @property
    def hosts_index(self) -> bool:
        return self._session is not None and self._supervisor.is_reachable

    @property
    def is_cut_off(self) -> bool:
        """Whether this node neither hosts the index nor knows a peer that does."""
        return self._session is not None and self._session.is_cut_off

    def meet(self, contact: Contact) -> None:
        self.gossip.meet(contact.peer_id, contact.gossip_addresses)
        self._routing.learn(contact.peer_id, contact.addresses)
        if contact.addresses:
            self._peers.learn(contact.peer_id, contact.addresses)
            self._peers.save()

    def advice(self) -> tuple[str, ...]:
        return self._supervisor.advice()

    def seen_at(self, peer_id: str) -> tuple[str, ...]:
        return self._dialling.seen_at(peer_id)

    async def connected_peers(self) -> tuple[str, ...]:
        session = self._session
        if session is None:
            return ()
        with contextlib.suppress(NetworkError):
            peers = await session.peers()
            self._peers.see(peers)
            return tuple(peers)
        return ()

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """See `transport.Transport`. An expiration more than an hour ahead is cut to an hour.

        Where no host of the index takes the entry, connected peers keep it.
        """
        check_entry(key, subkey, value)
        expires_at = float(min(expires_at, self.now() + MAX_LIFETIME_S))
        if await self.hosts.store(key, subkey, value, expires_at):
            return True
        peers = await self._peers_to_ask()
        return await self._peer_index.store(key, subkey, value, expires_at=expires_at, peers=peers)

    async def load(self, key: str) -> dict[str, bytes]:
        """See `transport.Transport`. Where no host of the index is known, connected peers are asked."""
        if self.is_cut_off:
            return await self._peer_index.load(key, peers=await self._peers_to_ask())
        return await self.hosts.load(key)

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        assert self._session is None, "serve() comes before start()"
        self._server.serve(protocol, handler, max_request_bytes=max_request_bytes)

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        response = await self._requests.request(
            peer_id, protocol, request, max_response_bytes=max_response_bytes, deadline_s=deadline_s
        )
        self._heap.note(len(response))
        return response

    def serve_lines(self, protocol: str, handler: LineHandler) -> None:
        self._server.serve_lines(protocol, handler)

    async def open_line(self, peer_id: str, protocol: str, *, deadline_s: float) -> Line:
        return StreamLine(peer_id, await self._requests.open(peer_id, protocol, deadline_s), self.traffic)

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        self.gossip.subscribe(topic, handler)

    def unsubscribe(self, topic: str) -> None:
        self.gossip.unsubscribe(topic)

    async def publish(self, topic: str, message: bytes) -> None:
        await self.gossip.publish(topic, message)

    @property
    def _session(self) -> "HivemindSession | None":
        return self._sessions.current

    def _make_gossip(self) -> Gossip:
        if self._config.gossip == "daemon":
            from swarm.network.hivemind.daemon_gossip import DaemonGossip

            return DaemonGossip(self.peer_id, self._sessions, self.traffic)
        from swarm.network.libp2p.gossip import Libp2pGossip

        return Libp2pGossip(self._context)

    async def _call(self, peer_id: str, protocol: str, request: bytes) -> bytes:
        session = self._session
        if session is None:
            raise NetworkError("the network is down; it is being restarted")
        return await self._reaching(peer_id, lambda: session.calls.ask(peer_id, protocol, request))

    async def _open_stream(self, peer_id: str, protocol: str) -> Stream:
        session = self._session
        if session is None:
            raise NetworkError("the network is down; it is being restarted")
        return await self._reaching(peer_id, lambda: session.open_stream(peer_id, protocol))

    async def _reaching(self, peer_id: str, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Call. Where the peer could not be reached, ask others for its addresses and call again. Raises NetworkError."""
        try:
            return await call()
        except NetworkError as error:
            if await self._routing.reach(peer_id):
                return await call()
            if _NO_ADDRESS in str(error):
                raise NetworkError("no address of this peer is known, here or to the peers that were asked") from None
            raise

    async def _ask_for_addresses(self, peer_id: str, request: bytes) -> bytes:
        return await self.request(
            peer_id,
            ADDRESSES_PROTOCOL,
            request,
            max_response_bytes=MAX_ADDRESSES_RESPONSE_BYTES,
            deadline_s=ADDRESSES_TIMEOUT_S,
        )

    async def _peers_to_ask(self) -> list[str]:
        """Return the connected peers in the order in which they are asked to share the index. Raises nothing."""
        session = self._session
        with contextlib.suppress(NetworkError):
            return [] if session is None else interleaved_by_network(await session.peers(), self._rng)
        return []

    async def _ask_index(self, peer_id: str, request: bytes) -> bytes:
        return await self.request(
            peer_id,
            INDEX_PROTOCOL,
            request,
            max_response_bytes=MAX_INDEX_RESPONSE_BYTES,
            deadline_s=min(INDEX_TIMEOUT_S, self._config.request_timeout_s),
        )

    async def _ask_about_reach(self, peer_id: str, request: bytes) -> bytes:
        return await self.request(peer_id, REACH_PROTOCOL, request, max_response_bytes=1024, deadline_s=ASK_TIMEOUT_S)

    async def _observed(self, peer_id: str) -> tuple[str, ...]:
        return () if self._session is None else await self._session.observed(peer_id)


class _HostedIndex:
    """The index at its hosts alone: searches of the DHT with the session of one transport. Raises nothing."""

    def __init__(self, sessions: SessionSlot, traffic: TrafficCounter, timeout_s: float) -> None:
        self._sessions = sessions
        self._traffic = traffic
        self._timeout_s = timeout_s

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        session = self._sessions.current
        if session is None or session.is_cut_off:
            return False
        self._traffic.bytes_sent += len(value)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                return await session.store(key, subkey, value, expires_at=expires_at)
        return False

    async def load(self, key: str) -> dict[str, bytes]:
        session = self._sessions.current
        if session is None:
            return {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                entries = await session.load(key)
                self._traffic.bytes_received += sum(len(value) for value, _ in entries.values())
                return {subkey: value for subkey, (value, expires_at) in entries.items() if expires_at > time.time()}
        return {}


class _ServedIndex:
    """The index that a node offers to others: that of the hosts, or its own share where it knows no host.

    It never asks connected peers for others, since these may be asked by them in turn, without end.
    """

    def __init__(self, transport: HivemindTransport, peer_index: PeerIndex) -> None:
        self._transport = transport
        self._peer_index = peer_index

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        if self._transport.is_cut_off:
            return self._peer_index.take(key, subkey, value, expires_at=expires_at)
        return await self._transport.hosts.store(key, subkey, value, min(expires_at, time.time() + MAX_LIFETIME_S))

    async def load(self, key: str) -> dict[str, bytes]:
        if self._transport.is_cut_off:
            return self._peer_index.own(key)
        return await self._transport.hosts.load(key)
