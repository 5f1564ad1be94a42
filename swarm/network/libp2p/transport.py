"""The transport of a node without the daemon. It is all in Python, and runs where no binary of the daemon does.

    index    → `swarm/index/1` of full peers (configured ones, and those whose presence says that they host the index)
    requests → streams of a py-libp2p host, to daemons and to other light nodes
    gossip   → a second host, as on every node

It hosts no part of the index. Others reach it only over connections that it opened, or where its address can be
dialled. While no full peer is connected, light nodes share an index among themselves (`peer_index`).
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swarm.config import NetworkSection
from swarm.errors import NetworkError, RequestError
from swarm.limits.bounded_maps import BoundedPeers
from swarm.network.gossip import Gossip, GossipSlot
from swarm.network.index_entry import MAX_LIFETIME_S, Copy, IndexRule, IndexValidator, check_entry
from swarm.network.index_gateway import (
    INDEX_PROTOCOL,
    INDEX_TIMEOUT_S,
    MAX_INDEX_REQUEST_BYTES,
    MAX_INDEX_RESPONSE_BYTES,
    IndexGateway,
    load_request,
    read_loaded,
    read_stored,
    store_request,
)
from swarm.network.libp2p.host import Libp2pHost
from swarm.network.network_context import NetworkContext
from swarm.network.peer_index import NUM_ASKED, PeerIndex, ServedShare
from swarm.network.peers.dialling import PEERS_FILE, Reach
from swarm.network.peers.known_peers import KnownPeers
from swarm.network.peers.surroundings import announced_addresses
from swarm.network.reach.reachability import IndexOutage, Surveyed
from swarm.network.requests.framing import Stream, StreamRequests
from swarm.network.requests.lines import StreamLine
from swarm.network.requests.server import RequestServer
from swarm.network.tcp_address import parse_setting, with_actual_ports
from swarm.network.transport import (
    Admits,
    Contact,
    GossipHandler,
    Line,
    LineHandler,
    RequestHandler,
    by_place,
    everybody,
)
from swarm.records.identity import Identity

logger = logging.getLogger(__name__)

NUM_INDEX_PEERS = 3
"""Full peers that a node stays connected to and asks. A single one could withhold entries."""
_TEND_INTERVAL_S = 5.0
_MAX_CONTACTS = 512


class LightTransport:
    """See `transport.Transport`."""

    hosts_index = False

    def __init__(
        self,
        config: NetworkSection,
        identity: Identity,
        state_dir: Path,
        validator: IndexValidator | None = None,
        admits: Admits = everybody,
    ) -> None:
        """`state_dir` is the node's folder, which stores known peers and ports. Raises ConfigError for a malformed address."""
        self.peer_id = identity.peer_id
        self._context = NetworkContext.of(config, identity, state_dir, validator=validator, admits=admits)
        self.traffic = self._context.traffic
        self.gossip = GossipSlot(None if config.gossip == "off" else self._make_gossip)
        self._rule = IndexRule(validator, self.now)
        self._rng = self._context.rng("index")
        self._dialling = self._context.dialling
        self._listen = parse_setting("listen", config.listen)
        self._announce = parse_setting("announce", config.announce)
        self._server = RequestServer.of(self._context)
        self._requests = StreamRequests(self._open_stream, self.traffic)
        self._contacts: BoundedPeers[Contact] = BoundedPeers(_MAX_CONTACTS)
        initial = parse_setting("initial_peers", config.initial_peers)
        self._peers = KnownPeers(initial, self.peer_id, state_dir / PEERS_FILE, clock=self.now, dialling=self._dialling)
        self._configured = {
            peer_id: Contact(peer_id, addresses, (), hosts_index=True)
            for peer_id, addresses in self._peers.configured().items()
        }
        self._peer_index = PeerIndex(self._rule, self.now, self._ask_index_of, admits)
        gateway = IndexGateway(ServedShare(self._peer_index), self._rule, network_of=self._dialling.network_of)
        self._server.serve(INDEX_PROTOCOL, gateway.answer, max_request_bytes=MAX_INDEX_REQUEST_BYTES)
        self._outage = IndexOutage()
        self._host: Libp2pHost | None = None
        self._host_refused: Counter[str] = Counter()
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises NetworkError. Full peers that do not answer are no error; they are tried again."""
        assert self._host is None, "started twice"
        try:
            self._host = await self._open_first()
            await self.gossip.start()
            await self._maintain(self._host)
        except BaseException:
            await self.stop()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="network-supervisor")

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        await self._server.close()
        await self.gossip.stop()
        host, self._host = self._host, None
        if host is not None:
            await host.close()

    @property
    def refused(self) -> Counter[str]:
        return by_place(
            requests=self._server.refused,
            gossip=self.gossip.rejected,
            host=self._host_refused,
            index=self._rule.refused,
        )

    def now(self) -> float:
        return time.time()

    def addresses(self) -> tuple[str, ...]:
        if self._host is None:
            return ()
        addresses = tuple(map(str, self._announce)) or announced_addresses(self._host.addresses)
        return tuple(f"{address}/p2p/{self.peer_id}" for address in addresses)

    def gossip_addresses(self) -> tuple[str, ...]:
        return self.gossip.addresses

    def meet(self, contact: Contact) -> None:
        self.gossip.meet(contact.peer_id, contact.gossip_addresses)
        addresses = self._dialling.believed(contact.peer_id, contact.addresses)
        if addresses and contact.peer_id != self.peer_id and contact.peer_id not in self._configured:
            self._contacts.put(contact.peer_id, replace(contact, addresses=addresses))
            self._peers.learn(contact.peer_id, contact.addresses)
            self._peers.save()
            if (
                self._host is not None and contact.peer_id in self._host.peers()
            ):  # it connected before its record arrived
                self._contacts.met(contact.peer_id, self._dialling.network_of(contact.peer_id))

    def _on_seen(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        self._dialling.see(peer_id, addresses)
        self._contacts.met(peer_id, self._dialling.network_of(peer_id))

    def advice(self) -> tuple[str, ...]:
        return self._outage.advice()

    def seen_at(self, peer_id: str) -> tuple[str, ...]:
        return self._dialling.seen_at(peer_id)

    async def connected_peers(self) -> tuple[str, ...]:
        return () if self._host is None else self._host.peers()

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        check_entry(key, subkey, value)
        expires_at = min(expires_at, self.now() + MAX_LIFETIME_S)
        if self._is_cut_off and (peers := self._peers_to_ask()):
            return await self._peer_index.store(key, subkey, value, expires_at=expires_at, peers=peers)
        request = store_request(key, subkey, value, expires_at=expires_at)
        is_stored = False
        for answer in (await self._ask_index(request)).values():
            with contextlib.suppress(RequestError):  # this peer is broken; the others count
                is_stored = read_stored(answer) or is_stored
        return is_stored

    async def load(self, key: str) -> dict[str, bytes]:
        if self._is_cut_off and (peers := self._peers_to_ask()):
            return await self._peer_index.load(key, peers=peers)
        answers: list[list[Copy]] = []
        for peer_id, answer in (await self._ask_index(load_request(key))).items():
            with contextlib.suppress(RequestError):  # this peer is broken; the others count
                answers.append([(peer_id, subkey, value, None) for subkey, value in read_loaded(answer).items()])
        return await self._rule.newest(key, answers)

    def serve(self, protocol: str, handler: RequestHandler, *, max_request_bytes: int) -> None:
        assert self._host is None, "serve() comes before start()"
        self._server.serve(protocol, handler, max_request_bytes=max_request_bytes)

    async def request(
        self, peer_id: str, protocol: str, request: bytes, *, max_response_bytes: int, deadline_s: float
    ) -> bytes:
        return await self._requests.request(
            peer_id, protocol, request, max_response_bytes=max_response_bytes, deadline_s=deadline_s
        )

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

    def _make_gossip(self) -> Gossip:
        if self._context.config.gossip == "daemon":
            raise NetworkError('network.gossip = "daemon" needs network.backend = "hivemind", got "libp2p"; change one')
        from swarm.network.libp2p.gossip import Libp2pGossip

        return Libp2pGossip(self._context)

    async def _open_first(self) -> Libp2pHost:
        wanted = self._listen
        self._listen = self._context.ports.reuse("listen", wanted)
        try:
            host = await self._open()
        except NetworkError:
            if self._listen == wanted:
                raise
            self._listen = wanted  # another program took the port of the last start a moment ago
            host = await self._open()
        self._context.ports.store("listen", wanted, self._listen)
        return host

    async def _open(self) -> Libp2pHost:
        host = await Libp2pHost.open(
            self._context.identity,
            self._listen,
            protocols=self._server.protocols,
            handler=self._server.answer_stream,
            refused=self._host_refused,
            on_seen=self._on_seen,
            timeout_s=self._context.config.startup_timeout_s,
        )
        self._listen = with_actual_ports(self._listen, host.addresses)
        return host

    async def _open_stream(self, peer_id: str, protocol: str) -> Stream:
        host = self._host
        if host is None:
            raise NetworkError("the network is down; it is being restarted")
        if peer_id not in host.peers():
            contact = self._configured.get(peer_id) or self._contacts.get(peer_id)
            if contact is None:
                raise NetworkError("no address of this peer is known")
            addresses = self._dialling.take(peer_id, contact.addresses)
            if not addresses:
                raise NetworkError("its addresses did not answer recently")
            await host.connect(peer_id, addresses)
        return await host.open_stream(peer_id, protocol)

    async def _ask_index(self, request: bytes) -> dict[str, bytes]:
        """Ask full peers and return {peer id: answer} of those that answer."""
        host = self._host
        connected = set(host.peers()) if host is not None else set()
        full = [contact.peer_id for contact in self._full_peers()]
        full.sort(key=lambda peer_id: peer_id not in connected)
        asked = full[:NUM_INDEX_PEERS]
        answers = await asyncio.gather(*(self._ask(peer_id, request) for peer_id in asked))
        return {peer_id: answer for peer_id, answer in zip(asked, answers, strict=True) if answer is not None}

    async def _ask(self, peer_id: str, request: bytes) -> bytes | None:
        try:
            return await self._ask_index_of(peer_id, request)
        except RequestError as error:
            logger.debug("index peer %s: %s", peer_id, error)
            return None

    async def _ask_index_of(self, peer_id: str, request: bytes) -> bytes:
        return await self.request(
            peer_id,
            INDEX_PROTOCOL,
            request,
            max_response_bytes=MAX_INDEX_RESPONSE_BYTES,
            deadline_s=min(INDEX_TIMEOUT_S, self._context.config.request_timeout_s),
        )

    @property
    def _is_cut_off(self) -> bool:
        """Whether no full peer is connected, as far as this node knows."""
        connected = set() if self._host is None else set(self._host.peers())
        return connected.isdisjoint(contact.peer_id for contact in self._full_peers())

    def _peers_to_ask(self) -> list[str]:
        """Return the connected peers in random order."""
        connected = [] if self._host is None else list(self._host.peers())
        return self._rng.sample(connected, len(connected))

    async def _supervise(self) -> None:
        """Keep a host open that is connected to full peers, for as long as the node runs."""
        while True:
            if self._host is None:
                try:
                    self._host = await self._open()
                except NetworkError as error:
                    logger.warning("the network did not restart, trying again: %s", error)
                    await asyncio.sleep(_TEND_INTERVAL_S)
                    continue
            exited = asyncio.create_task(self._host.exited())
            try:
                await asyncio.wait({exited}, timeout=_TEND_INTERVAL_S)
            finally:
                exited.cancel()  # has no effect where it is done
            if exited.done():
                logger.warning("the network failed and is being restarted: %s", exited.result())
                host, self._host = self._host, None
                await host.close()
            else:
                await self._maintain(self._host)

    async def _maintain(self, host: Libp2pHost) -> None:
        """Connect to full peers where there are too few, and to others where there are none."""
        full = self._full_peers()
        await self._connect_to(host, full, NUM_INDEX_PEERS)
        if self._is_cut_off:
            others = [Contact(one, at, (), hosts_index=False) for one, at in self._peers.stored().items()]
            self._rng.shuffle(others)
            await self._connect_to(host, others, NUM_ASKED)
        self._outage.note(
            Surveyed(
                has_host=not self._is_cut_off,
                num_connected=len(host.peers()),
                num_known=len(self._peers),
                is_one_machine=self._dialling.reach is Reach.MACHINE,
            )
        )
        self._peers.save()

    async def _connect_to(self, host: Libp2pHost, contacts: Sequence[Contact], num_wanted: int) -> None:
        """Connect to peers until `num_wanted` of them are connected."""
        connected = set(host.peers())
        absent = [contact for contact in contacts if contact.peer_id not in connected]
        num_missing = num_wanted - (len(contacts) - len(absent))
        chosen: dict[str, tuple[str, ...]] = {}
        for contact in absent:
            if len(chosen) >= num_missing:
                break
            if addresses := self._dialling.take(contact.peer_id, contact.addresses):
                chosen[contact.peer_id] = addresses
        await asyncio.gather(*(self._connect(host, peer_id, addresses) for peer_id, addresses in chosen.items()))

    def _full_peers(self) -> list[Contact]:
        """Contacts that host the index, in random order: configured ones first, then peers that were connected, then
        strangers.
        """
        others = [contact for one in self._contacts if (contact := self._contacts.get(one)) and contact.hosts_index]
        self._rng.shuffle(others)
        others.sort(key=lambda contact: not self._contacts.is_met(contact.peer_id))
        return [*self._rng.sample(list(self._configured.values()), len(self._configured)), *others]

    @staticmethod
    async def _connect(host: Libp2pHost, peer_id: str, addresses: tuple[str, ...]) -> None:
        try:
            await host.connect(peer_id, addresses)
        except NetworkError as error:
            logger.debug("full peer %s: %s", peer_id, error)
