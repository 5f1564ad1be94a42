"""One run of the libp2p daemon with a node of hivemind's DHT on it.

A broken session is closed and replaced by a new one (`supervisor`), never repaired. `supervisor` imports this module
when it opens the first session, since it imports hivemind.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.errors import NetworkError
from swarm.network.hivemind import daemon_control as call_repairs
from swarm.network.hivemind.daemon import (
    MAX_DAEMON_BYTES,
    Daemon,
    DaemonSettings,
    RuntimeFolder,
    remove_abandoned,
    start_relay,
)
from swarm.network.hivemind.daemon_control import DaemonControl, ShortCalls, answered_instead
from swarm.network.hivemind.index_guard import IndexGuard, unwrap, wrap
from swarm.network.hivemind.index_search import IndexSearch, KnownPlaces, Places
from swarm.network.hivemind.parts import (
    DHTID,
    P2P,
    DHTNode,
    DHTProtocol,
    Multiaddr,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    StreamInfo,
    hivemind_cli,
    p2pclient,
    use_hivemind_log_handler,
)
from swarm.network.index_entry import NUM_HOSTS_READ
from swarm.network.reach.role import Role, addresses_from_daemon
from swarm.network.requests.server import RequestServer

logger = logging.getLogger(__name__)

StreamHandler = Callable[[str, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""(peer id, protocol, reader, writer); it closes the stream and raises nothing."""
OtherPeerCallback = Callable[[str, tuple[str, ...]], None]
"""(peer id, addresses) of a peer that answered in place of the peer that was dialled. Whoever listens there can lie."""

NUM_REPLICAS = 5
_RPC_TIMEOUT_S = 3.0
"""Timeout of one question to one peer. A peer that stays silent delays every search that meets it."""
_CONNECT_TIMEOUT_S = 5.0
_BLACKLIST_S = 2.0
_BAN_GROWTH = 1.5
"""A peer that did not answer is not asked for 2, 3, 4.5, ... seconds. hivemind's own pauses soon reach minutes."""
_CONTROL_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 0.5
MAX_PREFERRED = 128
"""Connections that are kept before others: half of those that the daemon leaves when there are too many."""
_NOBODY = PeerID(b"\x00")
"""An invalid peer id, to which no call can be sent."""


class HivemindSession:
    """Daemon, control connection and DHT node, made by `open`. It cannot be used after `close`."""

    def __init__(
        self,
        daemon: Daemon,
        folder: RuntimeFolder,
        p2p: P2P,
        node: DHTNode,
        role: Role,
        on_other_peer: OtherPeerCallback,
        rng: random.Random,
    ) -> None:
        self._daemon = daemon
        self._folder = folder
        self._p2p = p2p
        self._node = node
        self._role = role
        self.control = DaemonControl(daemon.control_socket)
        self.calls = ShortCalls(p2p._client)
        self._preferred: tuple[str, ...] = ()  # peers whose connections the daemon keeps, the longest known first
        self.addresses: tuple[str, ...] = ()
        """Multiaddresses of this node, without /p2p."""
        self._on_other_peer = on_other_peer
        self._places = KnownPlaces(time.monotonic, lambda: node.protocol.routing_table.uid_to_peer_id)
        self._rng = rng

    @classmethod
    async def open(
        cls,
        settings: DaemonSettings,
        *,
        write_key: Callable[[Path], None],
        guard: IndexGuard,
        server: RequestServer,
        on_other_peer: OtherPeerCallback,
        rng: random.Random,
        timeout_s: float,
    ) -> "HivemindSession":
        """Start a daemon and a DHT node that knows no peer yet. Raises NetworkError and leaves nothing behind.

        `write_key` writes the daemon's key to a file, which exists only until the daemon has read it.
        """
        quiet_hivemind()
        # Socket paths have at most 107 bytes, so they lie in /tmp, in a folder that only this user can enter.
        await asyncio.to_thread(remove_abandoned)
        folder = RuntimeFolder()
        binary, role = Path(hivemind_cli.__path__[0]) / "p2pd", settings.role
        key_file = folder.path / "key"
        daemon = Daemon(binary, folder.path / "control.sock", settings, key_file=key_file)
        try:
            async with contextlib.AsyncExitStack() as undo, asyncio.timeout(timeout_s):
                undo.push_async_callback(_remove, daemon, folder)
                write_key(key_file)
                await daemon.start(timeout_s)
                if role.is_relay:
                    await start_relay(daemon, folder.path, settings.listen, timeout_s=timeout_s)
                key_file.unlink(missing_ok=True)
                p2p, node = await _attach(folder, guard, role)
                session = cls(daemon, folder, p2p, node=node, role=role, on_other_peer=on_other_peer, rng=rng)
                undo.push_async_callback(session.close)
                for protocol in server.protocols:
                    await session._p2p.add_binary_stream_handler(protocol, _adapted(protocol, server.answer_stream))
                    await session.calls.serve(protocol, server.answer_call)
                session.addresses = await session._own_addresses()
                undo.pop_all()
                return session
        except (P2PDaemonError, OSError, EOFError) as error:
            cause = str(error) or f"no answer within {timeout_s:.0f} s"
            raise NetworkError(f"the libp2p daemon must answer, got {cause}; it said: {daemon.last_output}") from None

    async def broke_down(self) -> tuple[str, str]:
        """Wait until the daemon has ended or takes too much memory: ("exit" or "memory", the cause in words)."""
        exited = asyncio.create_task(self._daemon.wait())
        outgrown = asyncio.create_task(self._daemon.outgrown())
        try:
            await asyncio.wait({exited, outgrown}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return "exit", f"exit code {exited.result()}, last output: {self._daemon.last_output}"
            return "memory", f"it uses {outgrown.result() >> 20} MiB of memory, and may use {MAX_DAEMON_BYTES >> 20}"
        finally:
            exited.cancel()
            outgrown.cancel()

    @property
    def daemon_pid(self) -> int | None:
        return self._daemon.pid

    @property
    def hosts_index(self) -> bool:
        """Whether others find a part of the index here."""
        return self._role.is_full

    @property
    def needs_relay(self) -> bool:
        """Whether others reach this node through relays only."""
        return bool(self._role.relays) and not (self._role.is_full or self._role.is_local)

    @property
    def is_cut_off(self) -> bool:
        """Whether this node neither hosts the index nor knows a peer that does."""
        return not self.hosts_index and not self.neighbors

    @property
    def neighbors(self) -> frozenset[str]:
        """Peer ids in the routing table of the DHT."""
        return frozenset(peer_id.to_base58() for peer_id in self._node.protocol.routing_table.peer_id_to_uid)

    async def greet(self, peers: Mapping[str, Sequence[str]]) -> int:
        """Connect to peers {peer id: addresses} and join each other's routing tables. Returns how many answered."""
        answers = await asyncio.gather(*(self._greet(peer_id, addresses) for peer_id, addresses in peers.items()))
        return sum(answers)

    async def ping(self, peer_ids: Iterable[str]) -> int:
        """Let connected peers that host the index enter the routing table. Returns how many answered."""
        return sum(await asyncio.gather(*map(self._ping, peer_ids)))

    async def refresh(self) -> None:
        """Search for the nearest peers, which fills the routing table and removes peers that do not answer."""
        await self._find(self._node.node_id)

    async def check(self) -> None:
        """Make a round trip on the connection that carries the DHT. Raises NetworkError where nothing comes back."""
        client: Any = self._p2p._client
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                await client.call_unary_handler(_NOBODY, "round-trip", b"")
        except (P2PDaemonError, P2PHandlerError):
            return  # the daemon itself refused, without asking any peer, so it works
        except TimeoutError:
            raise NetworkError(f"the libp2p daemon must answer within {_CONTROL_TIMEOUT_S:.0f} s") from None

    async def peers(self) -> dict[str, tuple[str, ...]]:
        """Return connected peers with the addresses at which they are seen. Raises NetworkError where the daemon hangs."""
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                return await self.control.peers()
        except TimeoutError:
            raise NetworkError(f"the libp2p daemon must answer within {_CONTROL_TIMEOUT_S:.0f} s") from None

    async def listening_addresses(self, peer_ids: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return where connected peers listen, {peer id: addresses}; peers for which that is not known are left out."""
        found: dict[str, tuple[str, ...]] = {}
        with contextlib.suppress(TimeoutError, NetworkError):
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                for peer_id in peer_ids:
                    found[peer_id] = await self.control.listening_addresses(peer_id)
        return found

    async def prefer(self, connected: Iterable[str]) -> None:
        """Keep the connections to these peers when strangers open so many that the daemon closes some.

        Otherwise it would close the oldest ones, and soon only peers that keep connecting under new identities would be
        left. At most MAX_PREFERRED count; those that were preferred before come first.
        """
        wanted = dict.fromkeys(connected)
        known = [peer_id for peer_id in self._preferred if peer_id in wanted]
        before, self._preferred = self._preferred, tuple(dict.fromkeys((*known, *wanted)))[:MAX_PREFERRED]
        with contextlib.suppress(TimeoutError, NetworkError):
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                for peer_id in set(before) - set(self._preferred):
                    await self.control.prefer_no_more(peer_id)
                for peer_id in self._preferred:  # the daemon forgets it with the connection
                    await self.control.prefer(peer_id)

    async def drop_connections(self) -> None:
        """Close every connection: after a sleep or in another network they are dead, which TCP notices late."""
        with contextlib.suppress(TimeoutError, NetworkError):
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                for peer_id in await self.control.peers():
                    await self.control.disconnect(peer_id)

    async def observed(self, peer_id: str) -> tuple[str, ...]:
        """Return the addresses at which a connected peer is seen; empty where there is no answer."""
        with contextlib.suppress(TimeoutError, NetworkError):
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                return await self.control.seen_at(peer_id)
        return ()

    async def refresh_addresses(self) -> None:
        """Read the addresses again, since relay reservations and networks change. Raises NetworkError where it hangs."""
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                self.addresses = await self._own_addresses()
        except TimeoutError:
            raise NetworkError(f"the libp2p daemon must answer within {_CONTROL_TIMEOUT_S:.0f} s") from None

    async def _own_addresses(self) -> tuple[str, ...]:
        reported = await self.control.addresses()
        connected = await self.control.peers() if self._role.relays else {}
        return addresses_from_daemon(reported, self._role.relays, connected)

    async def store(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Store an entry. Returns whether any of the nodes nearest to `key` accepted it.

        hivemind's own `store` returns what the slowest replica said, so a hostile one could deny every success.
        """
        key_id, entry = DHTID.generate(source=key), DHTProtocol.serializer.dumps(wrap(key, value))
        was_stored = False
        if nearest := self._places.near(key_id):
            num_answers, was_stored = await self._store_near(nearest, key_id, subkey, entry, expires_at)
            if num_answers >= NUM_REPLICAS:
                return was_stored
            self._places.forget()
        nearest = await self._find(key_id)
        return (await self._store_near(nearest, key_id, subkey, entry, expires_at))[1] or was_stored

    async def _find(self, key_id: DHTID) -> list[tuple[DHTID, PeerID]]:
        """Search for the nodes nearest to a key, without the entries under it.

        Asked for the key itself, each node would send all of them. The nodes nearest to the adjacent id are the same ones
        in the same order.
        """
        search = IndexSearch(self._node, DHTID(key_id ^ 1))
        await search.run()
        self._places.note(key_id, search, least=NUM_REPLICAS)
        return search.nearest

    async def _store_near(
        self, nearest: Sequence[tuple[DHTID, PeerID]], key_id: DHTID, subkey: str, entry: bytes, expires_at: float
    ) -> tuple[int, bool]:
        """Store an entry at NUM_REPLICAS nodes, this one among them if it is near. Returns (how many answered, whether any
        accepted it).
        """
        candidates = self._by_distance(nearest, key_id)[: 2 * NUM_REPLICAS]
        num_answers, is_stored = 0, False
        while candidates and num_answers < NUM_REPLICAS:
            num_missing = NUM_REPLICAS - num_answers
            chosen, candidates = candidates[:num_missing], candidates[num_missing:]
            answers = await asyncio.gather(
                *(self._store_at(node_id, peer_id, key_id, subkey, entry, expires_at) for node_id, peer_id in chosen)
            )
            num_answers += sum(answer is not None for answer in answers)
            is_stored = is_stored or any(answers)
        return num_answers, is_stored

    def _by_distance(self, nearest: Iterable[tuple[DHTID, PeerID]], key_id: DHTID) -> Places:
        """Return the nodes that may hold a key, this one among them where it hosts the index, nearest first."""
        own = [(self._node.node_id, self._node.peer_id)] if self._role.is_full else []
        return sorted([*nearest, *own], key=lambda one: one[0] ^ key_id)

    async def load(self, key: str) -> dict[str, tuple[bytes, float]]:
        """Return {subkey: (value, expires_at)}."""
        search = IndexSearch(self._node, key_id := DHTID.generate(source=key))
        hosts = self._known_hosts(key_id)
        if not (hosts and await search.read(hosts)):
            await search.run()
            self._places.note(key_id, search, least=NUM_REPLICAS)
        found: dict[str, tuple[bytes, float]] = {}
        for subkey, entry in search.entries.data.items():
            stored = DHTProtocol.serializer.loads(entry.value)
            assert isinstance(stored, bytes), "the guard lets nothing else through"
            found[subkey] = unwrap(stored), entry.expiration_time
        return found

    def _known_hosts(self, key_id: DHTID) -> Places:
        """Return the hosts of a key from which it is read, this node first; none where a search has to find them."""
        nearest = self._places.near(key_id)
        hosts = self._by_distance(nearest, key_id)[:NUM_REPLICAS] if nearest else []
        self._rng.shuffle(hosts)
        return sorted(hosts, key=lambda host: host[0] != self._node.node_id)[:NUM_HOSTS_READ]

    async def open_stream(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises NetworkError: no such peer, not reachable, or it does not serve the protocol."""
        return await self.control.open_stream(peer_id, protocol)

    async def close(self) -> None:
        """Leave the DHT and end the daemon. Raises nothing and takes at most two seconds."""
        self._node.is_alive = False
        with contextlib.suppress(TimeoutError, P2PDaemonError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):  # a dead daemon never answers
                await self._node.shutdown()
        await self._p2p.shutdown()
        await _remove(self._daemon, self._folder)

    async def _store_at(
        self, node_id: DHTID, peer_id: PeerID, key_id: DHTID, subkey: str, entry: bytes, expires_at: float
    ) -> bool | None:
        """Return whether the node accepted the entry; None where it does not answer."""
        protocol = self._node.protocol
        if node_id != self._node.node_id:
            answers = await protocol.call_store(peer_id, [key_id], [entry], [expires_at], [subkey])
            return answers[0] if answers else None
        subkey_bytes = protocol.serializer.dumps(subkey)
        return protocol._validate_record(key_id.to_bytes(), subkey_bytes, entry, expires_at) and (
            protocol.storage.store(key_id, entry, expires_at, subkey=subkey)
        )

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> bool:
        """Connect to a peer. Returns whether there is a connection now."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self.control.connect(peer_id, addresses)
        except (NetworkError, TimeoutError) as error:
            logger.debug("peer %s does not answer at %s: %s", peer_id, addresses, error or "timeout")
            if isinstance(error, NetworkError):
                for other, address in answered_instead(error, addresses):
                    self._on_other_peer(other, (address,))
            return False
        return True

    async def _greet(self, peer_id: str, addresses: Sequence[str]) -> bool:
        return await self.connect(peer_id, addresses) and await self._ping(peer_id)

    async def _ping(self, peer_id: str) -> bool:
        # The peer pings back before it lists this node. hivemind warns if it cannot, or if the clocks differ by 3 s.
        node_id = await self._node.protocol.call_ping(PeerID.from_base58(peer_id), validate=True, strict=False)
        return node_id is not None


async def _attach(folder: RuntimeFolder, guard: IndexGuard, role: Role) -> tuple[P2P, DHTNode]:
    """Connect to the daemon and start a DHT node on it, protected by `guard`."""
    p2pclient.ControlClient = call_repairs.WholeMessages  # hivemind takes the class from there
    # A subclass per session is the only way to tell hivemind where its client socket goes.
    private_p2p: type[P2P] = type("PrivateP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder.path}/"})
    p2p = await private_p2p.replicate(Multiaddr(f"/unix{folder.path}/control.sock"))
    assert p2p.peer_id is not None, "replicate has asked for it"
    client: Any = p2p._client  # hivemind declares it as None
    call_repairs.install(client.control)
    for task in (client.control._read_task, client.control._write_task):
        # They end with an error when the daemon dies, which is noticed elsewhere. The error is read so that asyncio
        # does not log it.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
    node = await DHTNode.create(
        p2p=p2p,
        node_id=DHTID.generate(source=p2p.peer_id.to_bytes()),  # the same place in the DHT after a restart
        num_replicas=NUM_REPLICAS,
        wait_timeout=_RPC_TIMEOUT_S,
        blacklist_time=_BLACKLIST_S,
        backoff_rate=_BAN_GROWTH,
        record_validator=guard,
        client_mode=not role.is_full,
        # Entries change every second and every reader wants the latest, so caches would only cost traffic.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
        reuse_get_requests=False,  # it never forgets a key
    )
    guard.protect(node.protocol)
    return p2p, node


def _adapted(protocol: str, handler: StreamHandler):
    async def on_stream(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await handler(info.peer_id.to_base58(), protocol, reader, writer)

    return on_stream


async def _remove(daemon: Daemon, folder: RuntimeFolder) -> None:
    await daemon.stop()
    folder.remove()


def quiet_hivemind() -> None:
    """Remove the log handler that importing hivemind installs."""
    use_hivemind_log_handler("nowhere")
    is_debugging = logging.getLogger().isEnabledFor(logging.DEBUG)
    logging.getLogger("hivemind").setLevel(logging.DEBUG if is_debugging else logging.WARNING)
