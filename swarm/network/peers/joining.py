"""How a node gets into the swarm, stays in it, and finds it again.

start, no peer left, machine woke up ──> greet configured peers ──none answers──> greet the stored ones
every health check                   ──> greet who is missing, remember who is there
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from swarm.errors import NetworkError
from swarm.network.peers.known_peers import KnownPeers
from swarm.network.peers.peer_list import Addresses
from swarm.network.peers.surroundings import Change, Surroundings

if TYPE_CHECKING:
    from swarm.network.hivemind.session import HivemindSession

logger = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S = 0.5
_MAX_QUESTIONS = 16
"""Peers whose listening addresses are asked for at one health check."""


class Joining:
    """What the supervisor of a transport does with a session that works. Raises nothing."""

    def __init__(self, peers: KnownPeers, rng: random.Random, surroundings: Surroundings | None = None) -> None:
        self._peers = peers
        self._rng = rng
        self._surroundings = surroundings or Surroundings()
        self._was_connected: bool | None = None
        """At the last attempt to which nobody answered; None where somebody did, or none was made."""

    async def join(self, session: "HivemindSession", num_failures: int = 0) -> bool:
        """Whether any peer answered of those configured and those seen before; True in a swarm of one."""
        configured, stored = self._peers.configured(), self._peers.stored()
        if not (configured or stored):
            return True
        num_answers = await self._greet(session, configured) or await self._greet(session, stored)
        if num_answers == 0:
            await self._tell_unanswered(session, len(configured) + len(stored), is_first=num_failures == 0)
            return False
        self._was_connected = None
        await session.refresh()
        await self.remember(session)
        logger.info("joined: %d of %d configured and %d stored peers", num_answers, len(configured), len(stored))
        return True

    async def stay(self, session: "HivemindSession") -> None:
        """For a session that has peers: greet those that are missing, and the nearest ones."""
        await self._greet(session, self._peers.absent(session.neighbors, self._rng))
        await session.refresh()
        await self.remember(session)

    async def resume(self, session: "HivemindSession") -> None:
        """Join anew if the machine slept or moved, over new connections where the old ones must be dead."""
        change = self._surroundings.look()
        if change is Change.NONE:
            return
        logger.info("joining again: %s", change.value)
        self._peers.forgive()
        if change is not Change.ADDRESS_ADDED:
            await session.drop_connections()
        await self.join(session)

    async def _greet(self, session: "HivemindSession", peers: Mapping[str, Addresses]) -> int:
        return await session.greet(self._peers.due(peers))

    async def _tell_unanswered(self, session: "HivemindSession", num_known: int, *, is_first: bool) -> None:
        """Once, not at every attempt; again where others have come that host none of the index, or have gone."""
        num_others = 0
        with contextlib.suppress(NetworkError):  # the next health check tells
            num_others = len(await session.peers())
        is_news = is_first or self._was_connected is not bool(num_others)
        self._was_connected = bool(num_others)
        if not num_others:
            level = logging.WARNING if is_news else logging.DEBUG
            logger.log(level, "none of %d known peers answers; this node goes on alone and keeps trying", num_known)
            return
        # Who hosts the index itself has one, and lacks nothing that the others could ask for.
        level = (logging.INFO if session.hosts_index else logging.WARNING) if is_news else logging.DEBUG
        text = "no other peer that hosts the index answers; connected to %s, keeps trying"
        logger.log(level, text, "1 other" if num_others == 1 else f"{num_others} others")

    async def leave(self, session: "HivemindSession") -> None:
        """Store the peers of the last moment."""
        with contextlib.suppress(TimeoutError):  # a daemon that hangs must not hold up the end
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await self.remember(session)
        self._peers.save(at_once=True)

    async def remember(self, session: "HivemindSession") -> None:
        """Keep the list of peers through which a later start, or a node that lost everyone, joins."""
        with contextlib.suppress(NetworkError):  # the next health check tells
            connected = await session.peers()
            self._peers.see(connected)
            kept = (*self._peers.configured(), *sorted(session.neighbors))
            await session.keep(peer_id for peer_id in kept if peer_id in connected)
            asked = self._peers.unannounced(connected)[:_MAX_QUESTIONS]
            for peer_id, addresses in (await session.listening_addresses(asked)).items():
                self._peers.learn(peer_id, addresses)
            self._peers.save()
