"""Keeps the session of a transport alive: opens it, checks it, replaces it, and asks peers whether they can dial this
node.

    open ─→ [session] ─→ look from outside ─→ wait, check ─→ join or stay ─┐
               ↑            ↑   │ role has changed   │ hangs              │
               │            └───┼────────────────────┼────────────────────┘
               └──── reopen ────┴────────────────────┘  and at once where the daemon has ended

hivemind is imported when the first session opens, so a command that opens no socket starts without it.
"""

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from swarm.errors import NetworkError
from swarm.network.network_context import NetworkContext
from swarm.network.peers.dialling import Reach
from swarm.network.peers.known_peers import Joining, KnownPeers
from swarm.network.peers.peer_routing import PeerRouting, SessionSlot
from swarm.network.peers.surroundings import Surroundings, announced_addresses, local_addresses
from swarm.network.reach.reachability import (
    Ask,
    IndexOutage,
    ReachabilityWatch,
    Surveyed,
    interleaved_by_network,
)
from swarm.network.reach.role import LastReached, ReservationWatch, role_of
from swarm.network.requests.server import RequestServer
from swarm.network.tcp_address import CIRCUIT, TcpAddress, parse_setting, with_actual_ports
from swarm.records.identity import write_libp2p_key

if TYPE_CHECKING:
    from swarm.network.hivemind.index_guard import IndexGuard
    from swarm.network.hivemind.session import HivemindSession

logger = logging.getLogger(__name__)

_Failure = tuple[str, str]
"""(reason, as in `SessionSupervisor.broken`; cause in words) why a daemon has to be replaced."""
HEALTH_INTERVAL_S = 15.0
_CHECKS_IN_A_ROW = 3
"""Checks in a row that must fail. A new daemon costs all connections, and would be slow, too, on a busy machine."""
_START_ATTEMPTS = 3
_RETRY_PAUSE_S = 0.5
_MAX_RETRY_PAUSE_S = 15.0


class SessionSupervisor:
    """Runs sessions: call `open`, `join` and `begin`; it then works on its own until `end` and `close`."""

    def __init__(
        self,
        context: NetworkContext,
        sessions: SessionSlot,
        *,
        server: RequestServer,
        peers: KnownPeers,
        routing: PeerRouting,
        ask_about_reach: Ask,
        health_interval_s: float,
    ) -> None:
        """`server` answers the requests that arrive over a session. Raises ConfigError for a malformed address."""
        self.guard: IndexGuard | None = None
        """Guard of the session."""
        self.broken: Counter[str] = Counter()
        """How often the daemon was replaced, by reason: `exit`, `memory` (it took too much), `hang`."""
        config = context.config
        self._context = context
        self._sessions = sessions
        self._server = server
        self._ask_about_reach = ask_about_reach
        self._rng = context.rng("supervisor")
        self._routing = routing
        self._health_interval_s = health_interval_s
        self._task: asyncio.Task[None] | None = None
        self._wanted = parse_setting("listen", config.listen)
        self._listen = self._wanted
        self._announce = parse_setting("announce", config.announce)
        self._relays = parse_setting("relays", config.relays) or parse_setting("initial_peers", config.initial_peers)
        self._peers = peers
        self._joining = Joining(peers, self._rng, Surroundings())
        self._watch = ReachabilityWatch(
            config.reachability,
            is_local=all(address.is_loopback for address in self._listen),
            has_known_peers=bool(peers.configured()),
        )
        self._last_reached = LastReached(context.reached_file)
        self._outage = IndexOutage()
        self._reservation = ReservationWatch()

    @property
    def is_reachable(self) -> bool:
        """Whether others can dial this node, as far as it knows."""
        return self._watch.is_reachable

    def advice(self) -> tuple[str, ...]:
        """Return what the node lacks to exchange with others, and what a person can do."""
        return self._outage.advice()

    async def open(self) -> None:
        """Raises NetworkError."""
        self._sessions.current = await self._open_first()
        if not self._announce:  # then the announced addresses are those listened on
            self._listen = with_actual_ports(self._listen, self._sessions.current.addresses)
            self._context.ports.store("listen", self._wanted, self._listen)

    async def join(self) -> None:
        """Join the swarm. Initial peers that do not answer are no error: from `begin` on they are tried again."""
        assert self._sessions.current is not None, "open comes first"
        await self._joining.join(self._sessions.current)

    def begin(self) -> None:
        """Supervise the session from now on."""
        self._task = asyncio.create_task(self._supervise(), name="network-supervisor")
        self._task.add_done_callback(_report_end)

    async def end(self) -> None:
        """Stop supervising; the session stays open."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def close(self) -> None:
        """Store the peers of the last moment, and close the session."""
        session, self._sessions.current = self._sessions.current, None
        if session is not None:
            await self._joining.leave(session)
            await session.close()

    async def _open_first(self) -> "HivemindSession":
        """Make a few attempts in the first half of the start-up time. Raises NetworkError with the last cause."""
        start, timeout_s = time.monotonic(), self._context.config.startup_timeout_s
        for attempt in range(1, _START_ATTEMPTS + 1):
            # Checked each time: another program may have taken the port of the last start a moment ago.
            self._listen = self._context.ports.reuse("listen", self._wanted)
            self._watch.resume(self._last_reached.read(self._ports(), local_addresses()))
            try:
                return await self._open(start + timeout_s - time.monotonic())
            except NetworkError as error:
                pause_s = self._pause_s(attempt)
                # A hurried attempt would end in a timeout and hide the cause that this one found.
                if attempt == _START_ATTEMPTS or time.monotonic() - start + pause_s > timeout_s / 2:
                    raise
                logger.warning("network did not start, trying again in %.1f s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def _open(self, timeout_s: float) -> "HivemindSession":
        try:
            from swarm.network.hivemind.daemon import DaemonSettings
            from swarm.network.hivemind.index_guard import IndexGuard
            from swarm.network.hivemind.session import HivemindSession
        except ImportError as error:
            raise NetworkError(
                f'network.backend "hivemind" needs the package hivemind, got {error}; install it, or set "off"'
            ) from None
        self.guard = IndexGuard(self._context.validator, time.time, admits=self._context.admits, routing=self._routing)
        role = role_of(self._context.config, self._listen, self._relays, is_reachable=self._watch.is_reachable)
        return await HivemindSession.open(
            DaemonSettings(role, listen=self._listen, announce=self._announced()),
            write_key=functools.partial(write_libp2p_key, self._context.identity),
            guard=self.guard,
            server=self._server,
            on_other_peer=self._peers.answered,
            rng=self._rng,
            timeout_s=timeout_s,
        )

    async def _supervise(self) -> None:
        """Keep a working session with at least one peer, for as long as the node runs."""
        is_first = True
        while True:
            session = self._sessions.current
            assert session is not None
            failure = await _first(session.broke_down(), self._attend(session, has_joined=is_first))
            is_first = False
            if failure is not None:
                reason, cause = failure
                self.broken[reason] += 1
                logger.warning(
                    "the libp2p daemon failed and is being restarted (%d so far): %s", self.broken.total(), cause
                )
            await self._reopen(session)

    async def _attend(self, session: "HivemindSession", *, has_joined: bool) -> _Failure | None:
        """Check the session and keep its peers, until it has to be replaced.

        Returns None where the node needs another role.
        """
        if not has_joined:
            await self._joining.join(session)
        # A node that nobody answered soon asks again: a peer may not have known it yet.
        num_attempts_alone = 0 if session.neighbors else 1
        while not await self._is_role_outdated(session):
            pause_s = self._pause_s(num_attempts_alone) if num_attempts_alone else self._health_interval_s
            await asyncio.sleep(min(pause_s, self._health_interval_s))
            if (hang := await _hang(session)) is not None:
                return "hang", hang
            await self._joining.resume(session)
            if not session.neighbors:
                self._watch.hurry()
                num_attempts_alone = (
                    0 if await self._joining.join(session, num_attempts_alone) else num_attempts_alone + 1
                )
            else:
                num_attempts_alone = 0
                await self._joining.stay(session)
            if await self._needs_new_reservation(session):
                break
        return None

    async def _needs_new_reservation(self, session: "HivemindSession") -> bool:
        """Note who can be reached and whether any of them hosts the index; say whether a relay needs a new daemon here."""
        try:
            connected = await session.peers()
            await session.refresh_addresses()
        except NetworkError:
            return False  # the next check of the daemon says more
        self._outage.note(
            Surveyed(
                has_host=not session.is_cut_off,
                num_connected=len(connected),
                num_known=len(self._peers),
                was_dialled=self._watch.is_reachable,
                is_one_machine=self._context.dialling.reach is Reach.MACHINE,
            )
        )
        has_reservation = any(CIRCUIT in address for address in session.addresses)
        is_relay_connected = any(relay.peer_id in connected for relay in self._relays)
        needs_relay = session.needs_relay and self._reservation.needs_new_daemon(
            has_reservation=has_reservation, is_relay_connected=is_relay_connected
        )
        if needs_relay:
            logger.info("a relay is back: asking it again for a place")
        return needs_relay

    async def _reopen(self, session: "HivemindSession") -> None:
        await session.close()
        self._sessions.current = None  # not earlier: `stop` closes what is here if it comes in between
        attempt = 0
        while self._sessions.current is None:
            try:
                self._sessions.current = await self._open(self._context.config.startup_timeout_s)
            except NetworkError as error:
                attempt += 1
                pause_s = self._pause_s(attempt)
                logger.warning("network did not restart, trying again in %.1f s: %s", pause_s, error)
                await asyncio.sleep(pause_s)

    async def _is_role_outdated(self, session: "HivemindSession") -> bool:
        """Ask peers, where that is due, whether they can dial this node, and say whether the answer changes its role."""
        try:
            await session.refresh_addresses()
            if not self._watch.is_due(session.addresses):
                return False
            peers = interleaved_by_network(await session.peers(), self._rng)
        except NetworkError:
            return False  # the next check of the daemon says more
        has_changed = await self._watch.look(self._ask_about_reach, peers, self._ports())
        self._last_reached.write(self._watch.proven, local_addresses())
        if has_changed:
            now = f"can be dialled at {self._watch.proven}" if self._watch.is_reachable else "cannot be dialled"
            logger.info("asked %d peers: this node %s; its role in the network changes", len(peers), now)
        return has_changed

    def _announced(self) -> tuple[TcpAddress, ...]:
        """Return the addresses to announce: configured ones, or the listening ones and the proven one behind a router."""
        proven = self._watch.proven
        own = tuple(map(TcpAddress.parse, announced_addresses(map(str, self._listen))))
        if self._announce or proven is None or proven in own:
            return self._announce
        return (proven, *(one for one in own if not one.is_loopback))

    def _ports(self) -> tuple[int, ...]:
        """Return the ports at which others may dial this node.

        Not those of the daemon's addresses: one in the private role does not report its public addresses.
        """
        return tuple(dict.fromkeys(one.port for one in self._announce or self._listen if not one.is_loopback))

    def _pause_s(self, attempt: int) -> float:
        """Return a pause that grows by half with each attempt, times a random factor from 0.5 to 1."""
        pause_s = min(_RETRY_PAUSE_S * 1.5**attempt, _MAX_RETRY_PAUSE_S)
        return pause_s * self._rng.uniform(0.5, 1.0)


async def _hang(session: "HivemindSession") -> str | None:
    """Return why a session counts as hanging, or None where it works."""
    cause = None
    for _ in range(_CHECKS_IN_A_ROW):
        try:
            await session.check()
        except NetworkError as error:
            cause = str(error)
        else:
            return None
    return cause


async def _first(*work: Coroutine[Any, Any, _Failure | None]) -> _Failure | None:
    """Return the result of what ends first, and cancel the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report_end(supervisor: asyncio.Task[None]) -> None:
    if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
        logger.error("the supervision of the network has ended", exc_info=error)
