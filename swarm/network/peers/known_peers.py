"""The peers through which a node joins the swarm, stays in it, and joins again when it has lost everyone.

    configured (initial_peers) ─┐
    connected  ── see ──────────┼─→ KnownPeers ──> greeted at start, when no peer is left, and now and then
    announced  ── learn ────────┘        └─ peers.json, read at the next start

    start, no peer left, machine woke up ──> greet configured peers ──none answers──> greet the stored ones
    every health check                   ──> greet missing peers, remember the connected ones

A connected peer is often seen at a port that only its outgoing connection has. The addresses that it announces can be
dialled, so they replace those at which it was seen.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import NetworkError
from swarm.network.peers.dialling import (
    MAX_AGE_S,
    MAX_PEERS,
    Addresses,
    Dialling,
    StoredPeer,
    dialable,
    network_at,
    read_peers,
    write_peers,
)
from swarm.network.peers.surroundings import Change, Surroundings
from swarm.network.reach.reachability import interleaved_by_network
from swarm.network.tcp_address import TcpAddress
from swarm.observability.plain_text import counted, none_answers

if TYPE_CHECKING:
    from swarm.network.hivemind.session import HivemindSession


logger = logging.getLogger(__name__)


SAVE_INTERVAL_S = 30.0
SAVE_SOON_S = 2.0
FEW_PEERS = 8
"""While the file holds fewer peers than this, it is written SAVE_SOON_S after a change: a node that is killed in its first
minute must find somebody else than its bootstrap peer again."""
_TOUCH_INTERVAL_S = 3600.0
"""The file is written this often even when only the times in it have changed."""
_ANNOUNCEMENT_AGE_S = 300.0
"""The announced addresses of a connected peer are asked for again after this time."""
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class _Peer:
    addresses: Addresses
    seen_at: float
    """When the peer was last connected or announced."""
    announced_at: float = _NEVER
    """When `addresses` were announced; never for addresses at which it was only seen."""
    is_elsewhere: bool = False
    """Whether it was last seen at a host that it had not announced: it has moved, or is behind a router."""
    is_met: bool = False
    """Whether this node was connected to it, now or before."""
    network: str = ""
    """Network at which it was seen last, whatever it announces."""


class KnownPeers:
    """The configured peers, which are never forgotten, and at most MAX_PEERS others."""

    def __init__(
        self,
        initial: Iterable[TcpAddress],
        own_peer_id: str,
        path: Path | None = None,
        clock: Callable[[], float] = time.time,
        dialling: Dialling | None = None,
    ) -> None:
        """`initial` holds addresses that each name a peer; those of this node are skipped. `path` is the stored list.

        `dialling` decides which announced addresses are believed and which are dialled now; None accepts all of them.
        """
        self._own_peer_id = own_peer_id
        self._path = path
        self._clock = clock
        self._dialling = dialling
        self._initial: dict[str, Addresses] = {}
        for address in initial:
            if address.peer_id is not None and address.peer_id != own_peer_id:
                self._initial[address.peer_id] = (*self._initial.get(address.peer_id, ()), address.transport)
        stored = read_peers(path, clock()) if path is not None else {}
        self._peers: dict[str, _Peer] = {
            peer_id: _Peer(
                peer.addresses, peer.last_seen, peer.last_seen, is_met=True, network=_network(peer.addresses)
            )
            for peer_id, peer in sorted(stored.items(), key=lambda item: item[1].last_seen)
            if peer_id != own_peer_id
        }
        """Ordered by time: the peer seen last is last."""
        self._has_changed = False
        self._saved_at = _NEVER
        self._num_saved = len(stored)

    def see(self, connected: Mapping[str, Addresses]) -> None:
        """Remember peers with an open connection, {peer id: addresses at which they were seen}."""
        now = self._clock()
        if self._dialling is not None:
            for peer_id, addresses in connected.items():
                self._dialling.see(peer_id, addresses)
        # Known peers come first, so they keep their place when there is no room.
        for peer_id in sorted(connected, key=lambda peer_id: peer_id not in self._peers):
            known = self._peers.get(peer_id)
            seen_at = dialable(peer_id, connected[peer_id])
            if known is None or known.announced_at == _NEVER:
                peer = _Peer(seen_at, now, is_met=True)
            else:
                is_elsewhere = not _hosts(seen_at) <= _hosts(known.addresses)
                peer = replace(known, seen_at=now, is_elsewhere=is_elsewhere, is_met=True)
            self._remember(peer_id, replace(peer, network=_network(seen_at)))

    def answered(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Note that a peer was found where another one was dialled: its address does not count as dead."""
        if self._dialling is not None:
            self._dialling.answered(peer_id, addresses)

    def learn(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Remember the addresses that a peer announces for itself. A stranger never replaces a peer that was connected."""
        believed = addresses if self._dialling is None else self._dialling.believed(peer_id, addresses)
        now, announced = self._clock(), dialable(peer_id, believed)
        known = self._peers.get(peer_id)
        if announced and known is not None and all(map(_is_circuit, announced)):  # they end with their relay
            announced = dialable(peer_id, (*filterfalse(_is_circuit, known.addresses), *announced))
        if announced:
            peer = _Peer(announced, now, now)
            self._remember(
                peer_id, peer if known is None else replace(peer, is_met=known.is_met, network=known.network)
            )

    def unannounced(self, connected: Iterable[str]) -> list[str]:
        """Return those of `connected` whose announced addresses are not known, old or doubtful."""
        since = self._clock() - _ANNOUNCEMENT_AGE_S
        known = ((peer_id, self._peers[peer_id]) for peer_id in connected if peer_id in self._peers)
        return [peer_id for peer_id, peer in known if peer.announced_at < since or peer.is_elsewhere]

    def configured(self) -> dict[str, Addresses]:
        """Return {peer id: addresses} of the configured peers, with the other addresses at which they were seen."""
        return {peer_id: self._addresses(peer_id) for peer_id in self._initial}

    def stored(self) -> dict[str, Addresses]:
        """Return {peer id: addresses} of the other peers, the one seen last first."""
        return {
            peer_id: self._addresses(peer_id)
            for peer_id, peer in reversed(self._peers.items())
            if peer_id not in self._initial and peer.addresses
        }

    def __len__(self) -> int:
        """Return the number of peers, configured and others."""
        return len(self._initial.keys() | self._peers.keys())

    def absent(self, neighbors: Collection[str], rng: random.Random) -> dict[str, Addresses]:
        """Return the configured peers that are not among `neighbors`, and one of the others by chance.

        A bootstrap peer that restarts knows nobody, and after a partition neither half knows the other. Unless somebody
        greets them, there are two swarms from then on.
        """
        others = [peer_id for peer_id in self.stored() if peer_id not in neighbors]
        chosen = [rng.choice(others)] if others else []
        missing = [peer_id for peer_id in self._initial if peer_id not in neighbors]
        return {peer_id: self._addresses(peer_id) for peer_id in (*missing, *chosen)}

    def due(self, peers: Mapping[str, Addresses]) -> dict[str, Addresses]:
        """Return those of `peers` that may be dialled now, each with the addresses to try. It counts as a dial."""
        if self._dialling is None:
            return dict(peers)
        chosen = {peer_id: self._dialling.take(peer_id, addresses) for peer_id, addresses in peers.items()}
        return {peer_id: addresses for peer_id, addresses in chosen.items() if addresses}

    def forget_failures(self) -> None:
        """Forget failed dials: this machine has slept, or is in another network."""
        if self._dialling is not None:
            self._dialling.forget_failures()

    def save(self, *, at_once: bool = False) -> None:
        """Write the list if it has changed, at most every SAVE_INTERVAL_S unless `at_once`, or while it is short."""
        now = self._clock()
        age_s = abs(now - self._saved_at)  # clocks may be set back, too
        interval_s = SAVE_INTERVAL_S if self._num_saved >= FEW_PEERS else SAVE_SOON_S
        is_due = age_s >= (interval_s if self._has_changed else _TOUCH_INTERVAL_S)
        if self._path is None or not self._peers or not (is_due or at_once):
            return
        self._saved_at, self._has_changed, self._num_saved = now, False, len(self._peers)
        write_peers(
            self._path,
            {
                peer_id: StoredPeer(peer_id=peer_id, addresses=peer.addresses, last_seen=peer.seen_at)
                for peer_id, peer in self._peers.items()
                if peer.addresses
            },
        )

    def _addresses(self, peer_id: str) -> Addresses:
        peer = self._peers.get(peer_id)
        return tuple(dict.fromkeys((*self._initial.get(peer_id, ()), *(peer.addresses if peer else ()))))

    def _remember(self, peer_id: str, peer: _Peer) -> None:
        """Store it as the peer seen last, where there is room for it."""
        if peer_id == self._own_peer_id:
            return
        known = self._peers.pop(peer_id, None)
        if known is None and not self._make_room(peer):
            return
        self._has_changed = self._has_changed or known is None or known.addresses != peer.addresses
        self._peers[peer_id] = replace(peer, is_met=peer.is_met or (known is not None and known.is_met))

    def _make_room(self, newcomer: _Peer) -> bool:
        """Drop peers not seen for a week; else a stranger; else, for a connected peer, another peer that was connected."""
        oldest = newcomer.seen_at - MAX_AGE_S
        for peer_id in [peer_id for peer_id, peer in self._peers.items() if peer.seen_at < oldest]:
            del self._peers[peer_id]
        if len(self._peers) < MAX_PEERS:
            return True
        leaving = next((peer_id for peer_id, peer in self._peers.items() if not peer.is_met), None)
        if leaving is None and newcomer.is_met:
            leaving = self._longest_absent(newcomer)
        if leaving is None:
            return False
        del self._peers[leaving]
        return True

    def _longest_absent(self, newcomer: _Peer) -> str | None:
        """Choose a peer of the newcomer's network where that has most peers here; else of the networks that have most.

        New identities cost nothing, so otherwise those of one machine would replace all others. Peers that are
        connected now stay, as they have proven themselves longer.
        """
        sizes = Counter(peer.network for peer in self._peers.values())
        most = max(sizes.values())
        shares = {newcomer.network} if sizes[newcomer.network] == most else {one for one in sizes if sizes[one] == most}
        absent = (
            one for one, peer in self._peers.items() if peer.network in shares and peer.seen_at < newcomer.seen_at
        )
        return next(absent, None)


def _is_circuit(address: str) -> bool:
    return TcpAddress.parse(address).relay_id is not None


def _network(addresses: Addresses) -> str:
    return network_at(TcpAddress.parse(addresses[0])) if addresses else ""


def _hosts(addresses: Addresses) -> set[str]:
    return {TcpAddress.parse(address).host for address in addresses}


_LEAVE_TIMEOUT_S = 0.5
_MAX_QUESTIONS = 16
"""Peers that are asked something at one health check."""
_MAX_CHECKS_PER_REFRESH = 4
"""Health checks from one search for the nearest peers to the next, in a swarm where nobody has come or gone for some time."""


class Joining:
    """Joins the swarm with the session of a transport, and keeps it joined. Raises nothing."""

    def __init__(self, peers: KnownPeers, rng: random.Random, surroundings: Surroundings) -> None:
        self._peers = peers
        self._rng = rng
        self._surroundings = surroundings
        self._was_connected: bool | None = None
        """Whether other peers were connected at the last attempt that nobody answered; None where there was no such
        attempt."""
        self._neighbors = frozenset[str]()  # those connected after the last refresh
        self._num_checks = 0  # since then
        self._checks_per_refresh = 1

    async def join(self, session: "HivemindSession", num_failures: int = 0) -> bool:
        """Return whether any configured or stored peer answered; True in a swarm of one."""
        configured, stored = self._peers.configured(), self._peers.stored()
        if not (configured or stored):
            return True
        num_answers = await self._greet(session, configured) or await self._greet(session, stored)
        num_answers = num_answers or await self._ping_connected(session)
        if num_answers == 0:
            await self._log_unanswered(session, len(configured) + len(stored), is_first=num_failures == 0)
            return False
        self._was_connected = None
        await session.refresh()
        await self.remember(session)
        logger.info(
            "joined the network: %s answered, of %d in the settings and %d remembered",
            counted(num_answers, "peer"), len(configured), len(stored),
        )  # fmt: skip
        return True

    async def stay(self, session: "HivemindSession") -> None:
        """Greet missing peers and the nearest ones, with a session that has peers."""
        await self._greet(session, self._peers.absent(session.neighbors, self._rng))
        before = self._neighbors
        self._num_checks += 1
        if await _connected_neighbors(session) != before or self._num_checks >= self._checks_per_refresh:
            await session.refresh()
            self._neighbors, self._num_checks = await _connected_neighbors(session), 0
            is_quiet = self._neighbors == before
            self._checks_per_refresh = min(2 * self._checks_per_refresh, _MAX_CHECKS_PER_REFRESH) if is_quiet else 1
        await self.remember(session)

    async def resume(self, session: "HivemindSession") -> None:
        """Join again if the machine slept or moved, over new connections where the old ones must be dead."""
        change = self._surroundings.look()
        if change is Change.NONE:
            return
        logger.info("joining again: %s", change.value)
        self._peers.forget_failures()
        if change is not Change.ADDRESS_ADDED:
            await session.drop_connections()
        await self.join(session)

    async def _greet(self, session: "HivemindSession", peers: Mapping[str, Addresses]) -> int:
        return await session.greet(self._peers.due(peers))

    async def _ping_connected(self, session: "HivemindSession") -> int:
        """Ask peers that have connected to this node, of which no address may be known, whether they host the index."""
        with contextlib.suppress(NetworkError):  # the next health check reports it
            connected = await session.peers()
            self._peers.see(connected)
            self._peers.save()
            return await session.ping(interleaved_by_network(connected, self._rng)[:_MAX_QUESTIONS])
        return 0

    async def _log_unanswered(self, session: "HivemindSession", num_known: int, *, is_first: bool) -> None:
        """Log it once, not at every attempt; again where peers that host no index have come or gone."""
        num_others = 0
        with contextlib.suppress(NetworkError):  # the next health check reports it
            num_others = len(await session.peers())
        is_news = is_first or self._was_connected is not bool(num_others)
        self._was_connected = bool(num_others)
        if not num_others:
            level = logging.WARNING if is_news else logging.DEBUG
            logger.log(level, "%s; this node continues alone and keeps trying", none_answers(num_known))
            return
        # A node that hosts the index has one, and others have nothing to add to it.
        level = (logging.INFO if session.hosts_index else logging.WARNING) if is_news else logging.DEBUG
        text = (
            "no other peer that hosts the index answers; exchanges with the %s connected to this node, and keeps trying"
        )
        logger.log(level, text, "one" if num_others == 1 else f"{num_others}")

    async def leave(self, session: "HivemindSession") -> None:
        """Store the peers of the last moment."""
        with contextlib.suppress(TimeoutError):  # a daemon that hangs must not delay the end
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await self.remember(session)
        self._peers.save(at_once=True)

    async def remember(self, session: "HivemindSession") -> None:
        """Update the list of peers through which a later start, or a node that lost everyone, joins."""
        with contextlib.suppress(NetworkError):  # the next health check reports it
            connected = await session.peers()
            self._peers.see(connected)
            wanted = (*self._peers.configured(), *sorted(session.neighbors))
            await session.prefer(peer_id for peer_id in wanted if peer_id in connected)
            asked = self._peers.unannounced(connected)[:_MAX_QUESTIONS]
            for peer_id, addresses in (await session.listening_addresses(asked)).items():
                self._peers.learn(peer_id, addresses)
            self._peers.save()


async def _connected_neighbors(session: "HivemindSession") -> frozenset[str]:
    """Return the peers of the routing table that are connected: one that died is not, long before a question finds that out."""
    with contextlib.suppress(NetworkError):  # the next health check reports it
        return session.neighbors & (await session.peers()).keys()
    return frozenset()
