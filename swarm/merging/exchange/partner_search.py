"""Searches for a partner: lists the own offer, reads who else is ready, and proposes to random ones while it can be asked.

    enlist ─> a while ─> read ─> propose to up to three, one after the other ─> pause, longer each time ─> read …
                └─────────────────────── accepted, on either side: paired ────────────┘

Nobody waits for a particular peer, every request has a deadline, and pauses are random. Nodes that begin together therefore fall
out of step, and two nodes that keep proposing to each other at the same moment separate by chance.
"""

import asyncio
import contextlib
import random

from swarm.errors import RequestError
from swarm.limits.peer_backoff import BUSY_PAUSE_S, SILENCE_PAUSE_S, UNREACHED_PAUSE_S, PeerBackoff
from swarm.merging.exchange.offered_adapter import OfferedAdapter
from swarm.merging.exchange.proposal import (
    MAX_MESSAGE_BYTES,
    MERGE_PROTOCOL,
    PASSING,
    Accepted,
    Proposal,
    check_terms,
    decode_answer,
    is_current,
)
from swarm.merging.exchange.ready_list import ReadyList
from swarm.merging.exchange.recent_partners import MergeTimeouts, RecentPartners
from swarm.network.context import NodeContext
from swarm.records.adapter_offer import AdapterOffer, verify_offer
from swarm.records.rejection import InvalidRecord

_PROPOSALS_PER_LOOK = 3
_WAITING_SHARE = 0.25
"""Largest part of the search in which a node is listed but does not propose. Without it, an arriving node would always pair with
whoever waits, and equally fast nodes would always meet the same partner. Strangers are accepted only after that part, when the
node has seen who else is ready: a node that is always ready and asks at once would be ahead of all others."""
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 4.0
_FEWEST_LOOKS = 64
"""In a long search pauses are longer: who comes later looks at once, and finds this node on the list."""
_PAUSE_AFTER_S = {"busy": BUSY_PAUSE_S, "unreachable": UNREACHED_PAUSE_S}
_MAY_HAVE_ARRIVED = ("deadline", "cut", "damaged")
"""Failures after which the peer may have accepted without this node knowing, so that it is asked once more."""


class PartnerSearch:
    """The searches of one node, one after the other. It runs on the node's loop."""

    def __init__(
        self,
        timeouts: MergeTimeouts,
        context: NodeContext,
        *,
        ready: ReadyList,
        recent: RecentPartners,
        backoff: PeerBackoff,
        rng: random.Random,
    ) -> None:
        self._timeouts = timeouts
        self._swarm_id = context.swarm_id
        self._transport = context.transport
        self._ready = ready
        self._recent = recent
        self._backoff = backoff
        self._rng = rng
        self._unavailable: set[tuple[str, float]] = set()
        """Listed offers, by peer and time, that were declined for good during this search."""

    async def run(self, own: OfferedAdapter, search_s: float) -> bool:
        """Search until there is a partner or the time is over. Returns whether anybody else was ready at all."""
        loop = asyncio.get_running_loop()
        ends_at, listed_until = loop.time() + search_s, self._transport.now() + search_s
        self._recent.begin_offer()
        self._unavailable.clear()
        is_anybody_ready = bool(
            await self._look(own)
        )  # before anybody can propose, because whose turn it is depends on who is ready
        await self._ready.enlist(own.offer, own.record, listed_until)
        await self._wait(own, self._rng.uniform(0.0, search_s * _WAITING_SHARE))
        num_looks = 0
        while own.partner is None and loop.time() < ends_at:
            await self._ready.enlist(own.offer, own.record, listed_until)
            others = await self._look(own)
            is_anybody_ready = is_anybody_ready or bool(others)
            own.takes_strangers = loop.time() > ends_at - search_s * (1 - _WAITING_SHARE)
            own.takes_anybody = loop.time() > ends_at - search_s / 2
            await self._propose_to_some(own, others, ends_at)
            longest_s = min(max(_MAX_PAUSE_S, search_s / _FEWEST_LOOKS), _FIRST_PAUSE_S * 2.0 ** min(num_looks, 16))
            await self._wait(own, min(longest_s * self._rng.uniform(0.2, 1.0), ends_at - loop.time()))
            num_looks += 1
        return is_anybody_ready or own.partner is not None

    async def _look(self, own: OfferedAdapter) -> list[AdapterOffer]:
        """Read which other nodes could be asked now."""
        ready = await self._ready.candidates(own.offer)
        self._recent.see(one.peer_id for one in ready)
        return [one for one in ready if self._is_worth_asking(one)]

    async def _propose_to_some(self, own: OfferedAdapter, others: list[AdapterOffer], ends_at: float) -> None:
        eligible = [one for one in others if own.takes_anybody or one.peer_id not in self._recent]
        for other in self._drawn(own, eligible):
            if asyncio.get_running_loop().time() >= ends_at or not own.propose(other.peer_id):
                return
            try:
                theirs = await self._propose(own, other)
            finally:
                own.withdraw()
            if theirs is not None:
                own.take(theirs)

    def _drawn(self, own: OfferedAdapter, eligible: list[AdapterOffer]) -> list[AdapterOffer]:
        """Draw some of them, weighted by their standing."""
        by_peer = {one.peer_id: one for one in eligible if self._recent.may_have_it(one.peer_id, own.takes_strangers)}
        standing = self._recent.standing(by_peer)
        # Exponential keys (Efraimidis and Spirakis): the same as drawing one after the other by weight.
        keys = {peer_id: self._rng.expovariate(1.0) / weight for peer_id, weight in standing.items()}
        return [by_peer[peer_id] for peer_id in sorted(keys, key=keys.__getitem__)[:_PROPOSALS_PER_LOOK]]

    def _is_worth_asking(self, other: AdapterOffer) -> bool:
        recent, peer_id = self._recent, other.peer_id
        is_left_alone = peer_id in self._backoff or recent.has_failed(peer_id) or recent.is_banned(peer_id)
        return not is_left_alone and (other.peer_id, other.created_at) not in self._unavailable

    async def _propose(self, own: OfferedAdapter, other: AdapterOffer) -> AdapterOffer | None:
        """Propose to a peer. Returns its own offer, perhaps newer than the listed one, where it accepts."""
        peer_id = other.peer_id
        for is_last in (False, True):
            try:
                answer = await self._transport.request(
                    peer_id,
                    MERGE_PROTOCOL,
                    Proposal(own.record).encode(),
                    max_response_bytes=MAX_MESSAGE_BYTES,
                    deadline_s=self._timeouts.request_timeout_s,
                )
                return self._read(own, other, answer)
            except RequestError as error:
                if is_last or error.reason not in _MAY_HAVE_ARRIVED:
                    self._backoff.failed(peer_id, _PAUSE_AFTER_S.get(error.reason, SILENCE_PAUSE_S))
                    return None
            except InvalidRecord:
                self._backoff.failed(peer_id)
                return None
        raise AssertionError("unreachable")

    def _read(self, own: OfferedAdapter, other: AdapterOffer, answer: bytes) -> AdapterOffer | None:
        """Raises InvalidRecord for an answer that no honest peer gives."""
        message = decode_answer(answer)
        if not isinstance(message, Accepted):
            if message.reason not in PASSING:
                self._unavailable.add((other.peer_id, other.created_at))
            return None
        theirs = verify_offer(message.record, self._swarm_id)
        is_theirs = theirs.peer_id == other.peer_id and is_current(theirs, self._transport.now())
        if not is_theirs or check_terms(own.offer, theirs) is not None:
            self._backoff.failed(other.peer_id)
            return None
        return theirs

    @staticmethod
    async def _wait(own: OfferedAdapter, duration_s: float) -> None:
        """Wait this long, or until there is a partner."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, duration_s)):
                await own.paired.wait()
