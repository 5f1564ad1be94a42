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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.config import NetworkSection
from swarm.errors import NetworkError, RequestError
from swarm.network.framing import FrameError, Status, read_response, write_acknowledgement, write_request
from swarm.network.index_entry import MAX_LIFETIME_S, check_entry
from swarm.network.known_peers import KnownPeers
from swarm.network.request_server import RequestServer
from swarm.network.tcp_address import parse_setting, with_actual_ports
from swarm.network.transport import IndexValidator, RequestHandler, TrafficCounter
from swarm.records.identity import Identity, is_peer_id, write_libp2p_key

if TYPE_CHECKING:
    from swarm.network.hivemind_session import HivemindSession

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 15.0
_START_ATTEMPTS = 3
_RETRY_PAUSE_S = 0.5
_MAX_RETRY_PAUSE_S = 15.0
_KEY_FILE = "libp2p.key"


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
        self._config = config
        self._identity = identity
        self._key_file = state_dir / _KEY_FILE
        self._validator = validator
        self._health_interval_s = health_interval_s
        self._rng = random.Random(identity.peer_id)  # spreads the retries of nodes that lost the same peer
        self._listen = parse_setting("listen", config.listen)
        self._announce = parse_setting("announce", config.announce)
        self._server = RequestServer(
            max_concurrent=config.max_connections_inbound, timeout_s=config.request_timeout_s, traffic=self.traffic
        )
        self._peers = KnownPeers(parse_setting("initial_peers", config.initial_peers), self.peer_id)
        self._session: HivemindSession | None = None
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises NetworkError. Initial peers that do not answer are no error: the supervisor goes on trying."""
        assert self._session is None, "started twice"
        write_libp2p_key(self._identity, self._key_file)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.stop)
            self._session = await self._open_first()
            if not self._announce:  # then the addresses told are those listened on
                self._listen = with_actual_ports(self._listen, self._session.addresses)
            await self._join(self._session)
            self._supervisor = asyncio.create_task(self._supervise(), name="network-supervisor")
            self._supervisor.add_done_callback(_report_end)
            undo.pop_all()

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        await self._server.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def now(self) -> float:
        return time.time()

    def addresses(self) -> tuple[str, ...]:
        session = self._session
        return () if session is None else tuple(f"{address}/p2p/{self.peer_id}" for address in session.addresses)

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
        try:
            async with asyncio.timeout(deadline_s), self._stream(peer_id, protocol) as (reader, writer):
                write_request(writer, request)
                response = await read_response(reader, max_response_bytes)
                write_acknowledgement(writer)
        except TimeoutError:
            raise self._failure(peer_id, protocol, f"no answer within {deadline_s:g} s") from None
        except (NetworkError, FrameError, OSError) as error:
            raise self._failure(peer_id, protocol, str(error) or type(error).__name__) from None
        self.traffic.bytes_sent += len(request)
        self.traffic.bytes_received += len(response.body)
        if response.status != Status.OK:
            raise self._failure(peer_id, protocol, f"{response.status.name.lower()}: {response.reason}")
        return response.body

    @contextlib.asynccontextmanager
    async def _stream(
        self, peer_id: str, protocol: str
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        session = self._session
        if session is None:
            raise NetworkError("the network is down; it is being restarted")
        if not is_peer_id(peer_id):
            raise NetworkError("this is no peer id")
        reader, writer = await session.open_stream(peer_id, protocol)
        try:
            yield reader, writer
            writer.close()
        finally:
            if not writer.is_closing():
                writer.transport.abort()  # what is still buffered is of no use to anyone

    def _failure(self, peer_id: str, protocol: str, reason: str) -> RequestError:
        self.traffic.requests_failed += 1
        return RequestError(f"request {protocol} to {peer_id} failed: {reason}")

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
            from swarm.network.hivemind_session import HivemindSession
            from swarm.network.index_guard import IndexGuard
        except ImportError as error:
            raise NetworkError(
                f'network.backend "hivemind" needs the package hivemind, got {error}; install it, or set "off"'
            ) from None
        return await HivemindSession.open(
            key_file=self._key_file,
            listen=self._listen,
            announce=self._announce,
            guard=IndexGuard(self._validator, self.now),
            protocols=self._server.protocols,
            handler=self._server.answer_stream,
            timeout_s=timeout_s,
        )

    async def _supervise(self) -> None:
        """Keep a working session with at least one peer, for as long as the node runs."""
        num_lonely = 0
        while True:
            session = self._session
            assert session is not None
            pause_s = self._pause_s(num_lonely) if num_lonely else self._health_interval_s
            cause = await self._cause_of_failure(session, min(pause_s, self._health_interval_s))
            if cause is not None:
                await self._replace(session, cause)
            elif not session.neighbors:
                num_lonely = 0 if await self._join(session, num_lonely) else num_lonely + 1
            else:
                num_lonely = 0
                await session.greet(self._peers.absent(session.neighbors))
                await session.refresh()

    async def _cause_of_failure(self, session: "HivemindSession", after_s: float) -> str | None:
        """Wait, then look whether the session works; a daemon that exits cuts the wait short."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                return await session.exited()
        try:
            await session.check()
            self._peers.see(await session.peers())
        except NetworkError as error:
            return str(error)
        return None

    async def _replace(self, session: "HivemindSession", cause: str) -> None:
        self.num_restarts += 1
        logger.warning("the libp2p daemon broke down and is restarted (%d so far): %s", self.num_restarts, cause)
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
        await self._join(self._session)

    async def _join(self, session: "HivemindSession", num_failures: int = 0) -> bool:
        """Whether any peer answered of those configured and those seen before; True in a swarm of one."""
        known = self._peers.all()
        if not known:
            return True
        num_answers = await session.greet(known)
        if num_answers == 0:
            level = logging.DEBUG if num_failures else logging.WARNING  # say it once, not at every attempt
            logger.log(level, "none of %d known peers answers; this node goes on alone and keeps trying", len(known))
            return False
        await session.refresh()
        await self.connected_peers()  # remembers them
        logger.info("joined through %d of %d known peers", num_answers, len(known))
        return True

    def _pause_s(self, attempt: int) -> float:
        """Grows by half each time, with jitter: 0.5 to 1 times the pause."""
        pause_s = min(_RETRY_PAUSE_S * 1.5**attempt, _MAX_RETRY_PAUSE_S)
        return pause_s * self._rng.uniform(0.5, 1.0)


def _report_end(supervisor: asyncio.Task[None]) -> None:
    if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
        logger.error("the network is no longer supervised", exc_info=error)
