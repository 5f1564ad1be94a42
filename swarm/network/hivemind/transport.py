"""The transport over libp2p: hivemind's DHT for the index, raw streams for requests.

    node → HivemindTransport → HivemindSession: daemon (Go) + DHT node → peers
                  └ a supervisor that replaces a broken session and joins again when no peer is left

hivemind is imported by `start`, never before: a command that opens no socket starts without it.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.config import NetworkSection
from swarm.errors import NetworkError
from swarm.network.gossip import Gossip, GossipSlot
from swarm.network.index_entry import MAX_LIFETIME_S, check_entry
from swarm.network.index_gateway import INDEX_PROTOCOL, MAX_INDEX_REQUEST_BYTES, IndexGateway
from swarm.network.peers.joining import Joining
from swarm.network.peers.known_peers import KnownPeers
from swarm.network.reach.reachability import ASK_TIMEOUT_S, MAX_REACH_REQUEST_BYTES, REACH_PROTOCOL, ReachService
from swarm.network.reach.reachability_watch import ReachabilityWatch
from swarm.network.reach.role import role_of
from swarm.network.requests.client import Stream, StreamRequests
from swarm.network.requests.server import RequestServer
from swarm.network.tcp_address import TcpAddress, parse_setting, with_actual_ports
from swarm.network.transport import Contact, GossipHandler, IndexValidator, RequestHandler, TrafficCounter, by_place
from swarm.records.identity import Identity, write_libp2p_key

if TYPE_CHECKING:
    from swarm.network.hivemind.index_guard import IndexGuard
    from swarm.network.hivemind.session import HivemindSession

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 15.0
_START_ATTEMPTS = 3
_RETRY_PAUSE_S = 0.5
_MAX_RETRY_PAUSE_S = 15.0
_KEY_FILE = "libp2p.key"
_PEERS_FILE = "peers.json"


class HivemindTransport:
    """See `transport.Transport`. Also counts `num_restarts` of the daemon that the supervisor had to make."""

    def __init__(
        self,
        config: NetworkSection,
        identity: Identity,
        state_dir: Path,
        validator: IndexValidator | None = None,
        *,
        health_interval_s: float = HEALTH_INTERVAL_S,
    ) -> None:
        """`state_dir`: the node's folder, which keeps the daemon's key. Raises ConfigError for a malformed address."""
        self.peer_id = identity.peer_id
        self.traffic = TrafficCounter()
        self.num_restarts = 0
        self._session: HivemindSession | None = None
        self._guard: IndexGuard | None = None  # of the session
        self._supervisor: asyncio.Task[None] | None = None
        self._config = config
        self._identity = identity
        self._key_file = state_dir / _KEY_FILE
        self._validator = validator
        self._health_interval_s = health_interval_s
        self._rng = random.Random(identity.peer_id)  # spreads the retries of nodes that lost the same peer
        self._listen = parse_setting("listen", config.listen)
        self._announce = parse_setting("announce", config.announce)
        self._server = RequestServer.of(config, self.traffic)
        self._requests = StreamRequests(self._open_stream, self.traffic, self._call)
        self.gossip = GossipSlot(None if config.gossip == "off" else self._make_gossip)
        self.serve(INDEX_PROTOCOL, IndexGateway(self).answer, max_request_bytes=MAX_INDEX_REQUEST_BYTES)
        initial = parse_setting("initial_peers", config.initial_peers)
        self._peers = KnownPeers(initial, self.peer_id, state_dir / _PEERS_FILE, self.now)
        self._joining = Joining(self._peers, self._rng)
        self._relays = parse_setting("relays", config.relays) or parse_setting("initial_peers", config.initial_peers)
        self._watch = ReachabilityWatch(
            config.reachability,
            is_local=all(address.is_loopback for address in self._listen),
            has_known_peers=bool(self._peers.configured()),
        )
        self._own_addresses: tuple[TcpAddress, ...] = ()  # as the system gave them, at the last look from outside
        service = ReachService(self._observed, self.now)
        self._server.serve(REACH_PROTOCOL, service.answer, max_request_bytes=MAX_REACH_REQUEST_BYTES)

    async def start(self) -> None:
        """Raises NetworkError. Initial peers that do not answer are no error: the supervisor goes on trying."""
        assert self._session is None, "started twice"
        write_libp2p_key(self._identity, self._key_file)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.stop)
            self._session = await self._open_first()
            if not self._announce:  # then the addresses told are those listened on
                self._listen = with_actual_ports(self._listen, self._session.addresses)
            await asyncio.gather(self._joining.join(self._session), self.gossip.start())
            self._supervisor = asyncio.create_task(self._supervise(), name="network-supervisor")
            self._supervisor.add_done_callback(_report_end)
            undo.pop_all()

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        await self._server.close()
        await self.gossip.stop()
        session, self._session = self._session, None
        if session is not None:
            await self._joining.leave(session)
            await session.close()

    @property
    def refused(self) -> Counter[str]:
        guard = self._guard
        index = Counter[str]() if guard is None else guard.refused
        return by_place(requests=self._server.refused, gossip=self.gossip.rejected, index=index)

    def now(self) -> float:
        return time.time()

    def addresses(self) -> tuple[str, ...]:
        session = self._session
        return () if session is None else tuple(f"{address}/p2p/{self.peer_id}" for address in session.addresses)

    def gossip_addresses(self) -> tuple[str, ...]:
        return self.gossip.addresses

    @property
    def hosts_index(self) -> bool:
        return self._session is not None and bool(self._watch.is_reachable)

    def meet(self, contact: Contact) -> None:
        self.gossip.meet(contact.peer_id, contact.gossip_addresses)
        if contact.addresses and contact.hosts_index:  # those that only ask others are of no help in joining
            self._peers.learn(contact.peer_id, contact.addresses)

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
        """See `transport.Transport`. An expiration more than an hour ahead is cut to that."""
        check_entry(key, subkey, value)
        session = self._session
        if session is None:
            return False
        self.traffic.bytes_sent += len(value)
        expires_at = min(expires_at, self.now() + MAX_LIFETIME_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.request_timeout_s):
                return await session.store(key, subkey, value, float(expires_at))
        return False

    async def load(self, key: str) -> dict[str, bytes]:
        session = self._session
        if session is None:
            return {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.request_timeout_s):
                entries = await session.load(key)
                self.traffic.bytes_received += sum(len(value) for value, _ in entries.values())
                return {subkey: value for subkey, (value, expires_at) in entries.items() if expires_at > self.now()}
        return {}

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        assert self._session is None, "serve() comes before start()"
        self._server.serve(protocol, handler, max_request_bytes=max_request_bytes)

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        return await self._requests.request(
            peer_id, protocol, request, max_response_bytes=max_response_bytes, deadline_s=deadline_s
        )

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        self.gossip.subscribe(topic, handler)

    def unsubscribe(self, topic: str) -> None:
        self.gossip.unsubscribe(topic)

    async def publish(self, topic: str, message: bytes) -> None:
        await self.gossip.publish(topic, message)

    def _make_gossip(self) -> Gossip:
        if self._config.gossip == "daemon":
            from swarm.network.hivemind.daemon_gossip import DaemonGossip

            return DaemonGossip(
                self.peer_id, lambda: self._session.control if self._session is not None else None, self.traffic
            )
        from swarm.network.libp2p.gossip import Libp2pGossip

        return Libp2pGossip.of(self._config, self._identity, self.traffic)

    async def _call(self, peer_id: str, protocol: str, request: bytes) -> bytes:
        session = self._session
        if session is None:
            raise NetworkError("the network is down; it is being restarted")
        return await session.calls.ask(peer_id, protocol, request)

    async def _open_stream(self, peer_id: str, protocol: str) -> Stream:
        session = self._session
        if session is None:
            raise NetworkError("the network is down; it is being restarted")
        return await session.open_stream(peer_id, protocol)

    async def _open_first(self) -> "HivemindSession":
        """A few attempts in the first half of the start-up time. Raises NetworkError with the cause of the last one."""
        start, timeout_s = time.monotonic(), self._config.startup_timeout_s
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                return await self._open(start + timeout_s - time.monotonic())
            except NetworkError as error:
                pause_s = self._pause_s(attempt)
                # A hurried attempt would end in a timeout, and hide the cause that this one found.
                if attempt == _START_ATTEMPTS or time.monotonic() - start + pause_s > timeout_s / 2:
                    raise
                logger.warning("network did not start, trying again in %.1f s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def _open(self, timeout_s: float) -> "HivemindSession":
        try:
            from swarm.network.hivemind.index_guard import IndexGuard
            from swarm.network.hivemind.session import HivemindSession
        except ImportError as error:
            raise NetworkError(
                f'network.backend "hivemind" needs the package hivemind, got {error}; install it, or set "off"'
            ) from None
        self._guard = IndexGuard(self._validator, self.now)
        return await HivemindSession.open(
            key_file=self._key_file,
            listen=self._listen,
            announce=self._announced(),
            role=role_of(self._config, self._listen, self._relays, is_reachable=self._watch.is_reachable),
            guard=self._guard,
            protocols=self._server.protocols,
            handler=self._server.answer_stream,
            call_handler=self._server.answer_call,
            timeout_s=timeout_s,
        )

    async def _supervise(self) -> None:
        """Keep a working session with at least one peer, for as long as the node runs."""
        num_lonely = 0
        while True:
            await self._look_from_outside()
            session = self._session
            assert session is not None
            pause_s = self._pause_s(num_lonely) if num_lonely else self._health_interval_s
            cause = await self._cause_of_failure(session, min(pause_s, self._health_interval_s))
            if cause is not None:
                await self._replace(session, cause)
                continue
            await self._joining.resume(session)
            if not session.neighbors:
                num_lonely = 0 if await self._joining.join(session, num_lonely) else num_lonely + 1
            else:
                num_lonely = 0
                await self._joining.stay(session)

    async def _cause_of_failure(self, session: "HivemindSession", after_s: float) -> str | None:
        """Wait, then look whether the session works; a daemon that exits cuts the wait short."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                return await session.exited()
        try:
            await session.check()
        except NetworkError as error:
            return str(error)
        return None

    async def _replace(self, session: "HivemindSession", cause: str) -> None:
        self.num_restarts += 1
        logger.warning("the libp2p daemon broke down and is restarted (%d so far): %s", self.num_restarts, cause)
        await self._reopen(session)

    async def _reopen(self, session: "HivemindSession") -> None:
        await session.close()
        self._session = None  # not before: `stop` closes what is here if it comes in between
        attempt = 0
        while self._session is None:
            try:
                self._session = await self._open(self._config.startup_timeout_s)
            except NetworkError as error:
                attempt += 1
                pause_s = self._pause_s(attempt)
                logger.warning("network did not restart, trying again in %.1f s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
        await self._joining.join(self._session)

    async def _look_from_outside(self) -> None:
        """Ask peers whether they can dial this node, where that is due, and change its role by the answer."""
        session = self._session
        assert session is not None
        try:
            await session.refresh_addresses()
            if not self._watch.is_due(session.addresses):
                return
            peers = tuple(await session.peers())
        except NetworkError:
            return  # the next look at the daemon's health says more
        if not self._announce and self._watch.proven is None:  # else they tell what was announced, not what is there
            own = (TcpAddress.parse(text) for text in session.addresses)
            self._own_addresses = tuple(one for one in own if one.relay_id is None and not one.is_loopback)
        # Not the daemon's addresses: one that is told to be private keeps its public ones to itself.
        ports = tuple(dict.fromkeys(one.port for one in self._announce or self._listen if not one.is_loopback))
        if await self._watch.look(self._ask_about_reach, peers, ports):
            now = f"can be dialled at {self._watch.proven}" if self._watch.is_reachable else "cannot be dialled"
            logger.info("%d peers asked: this node %s; its part in the network changes", len(peers), now)
            await self._reopen(session)

    async def _ask_about_reach(self, peer_id: str, request: bytes) -> bytes:
        return await self.request(peer_id, REACH_PROTOCOL, request, max_response_bytes=1024, deadline_s=ASK_TIMEOUT_S)

    async def _observed(self, peer_id: str) -> tuple[str, ...]:
        return () if self._session is None else await self._session.observed(peer_id)

    def _announced(self) -> tuple[TcpAddress, ...]:
        """What others are told: the configured addresses, or those listened on and the proven one behind a router."""
        proven, own = self._watch.proven, self._own_addresses
        if self._announce or proven is None or proven in own:
            return self._announce
        return (proven, *own)

    def _pause_s(self, attempt: int) -> float:
        """Grows by half each time, with jitter: 0.5 to 1 times the pause."""
        pause_s = min(_RETRY_PAUSE_S * 1.5**attempt, _MAX_RETRY_PAUSE_S)
        return pause_s * self._rng.uniform(0.5, 1.0)


def _report_end(supervisor: asyncio.Task[None]) -> None:
    if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
        logger.error("the network is no longer supervised", exc_info=error)
