"""Exchanges a node's adapter for that of one other node while training goes on.

    compute thread                         node's loop
    ──────────────                         ───────────
    offer(snapshot) ──────────────────→    hash, sign → PartnerSearch → paired → fetch ←→ AdapterServer
    future.done()? … result() ←────────    Partner(peer, snapshot) or Alone(reason), within `time_limit_s`

An adapter is served until its partner has it or its time is over. A newer offer ends the search of the one before, and waits for
its transfers. Memory holds the own adapter, perhaps a newer one that waits, and for a moment twice that of the partner.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from swarm.errors import RequestError, SwarmError
from swarm.limits.peer_backoff import PeerBackoff
from swarm.merging.exchange.offered_adapter import AdapterServer, OfferedAdapter
from swarm.merging.exchange.partner_search import PartnerSearch
from swarm.merging.exchange.proposal import (
    ADAPTER_PROTOCOL,
    MAX_MESSAGE_BYTES,
    MERGE_PROTOCOL,
    Fetched,
    ProposalHandler,
)
from swarm.merging.exchange.ready_list import ReadyList
from swarm.merging.exchange.recent_partners import LONGEST_SEARCH_S, MergeTimeouts, RecentPartners
from swarm.network.context import NodeContext
from swarm.network.requests.blob_protocol import BLOB_REQUEST_BYTES, sha256
from swarm.network.requests.transfer import Download, fetch
from swarm.records.adapter_offer import MAX_LIFETIME_S, AdapterOffer, sign_offer
from swarm.sharing.reputation import AuthorShares
from swarm.types import Alone, Outcome, Partner, Snapshot

logger = logging.getLogger(__name__)


class _Request:
    """A snapshot that waits for an outcome. It drops the future then, which holds the adapter of another node."""

    def __init__(self, snapshot: Snapshot, future: "Future[Outcome]", outcomes: Counter[str]) -> None:
        self.snapshot = snapshot
        self._future: Future[Outcome] | None = future
        self._outcomes = outcomes

    def finish(self, outcome: Outcome) -> None:
        """Set the outcome; only the first one counts."""
        future, self._future = self._future, None
        if future is not None:
            self._outcomes["merged" if isinstance(outcome, Partner) else outcome.reason] += 1
            future.set_result(outcome)


class MergeExchange:
    """The exchanges of one node. `offer` may be called from any thread; all else runs on the node's loop."""

    def __init__(
        self,
        timeouts: MergeTimeouts,
        context: NodeContext,
        *,
        rng: random.Random,
        max_level: Callable[[], int] = lambda: 0,
        shares: AuthorShares | None = None,
    ) -> None:
        """Serves its protocols at once, so it must be made before the transport starts.

        `max_level`: level of the node's shard in the directory. `shares`: each peer's share of merges; without it all peers
        are alike.
        """
        transport = context.transport
        self._timeouts = timeouts
        self._context = context
        self._transport = transport
        self._rng = rng
        self._own: OfferedAdapter | None = None
        self._recent = RecentPartners(shares)
        self._backoff = PeerBackoff(context.clock, rng)
        self._ready = ReadyList(context, rng, max_level=max_level, standing=self._recent.standing)
        self._search = PartnerSearch(
            timeouts, context, ready=self._ready, recent=self._recent, backoff=self._backoff, rng=rng
        )
        self._proposals = ProposalHandler(context, self._current, self._recent)
        self._next: _Request | None = None
        self._offered_at: float | None = None
        """When the last offer began, on the loop's clock."""
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.outcomes: Counter[str] = Counter()
        """Offers that have ended: `merged`, or the reason of `Alone`."""
        self.declined = self._proposals.declined
        """Proposals of others that were declined, by reason."""
        transport.serve(MERGE_PROTOCOL, self._proposals.answer, max_request_bytes=MAX_MESSAGE_BYTES)
        server = AdapterServer(self._current)
        transport.serve(ADAPTER_PROTOCOL, server.answer, max_request_bytes=BLOB_REQUEST_BYTES)

    def _current(self) -> OfferedAdapter | None:
        """The adapter that is being offered at this moment."""
        return self._own

    def time_limit_s(self, num_bytes: int) -> float:
        """Longest time from an offer to its outcome, for an adapter of this size.

        An adapter that is offered during the transfers of the one before waits up to `MergeTimeouts.transfer_s` longer.
        """
        return self._timeouts.total_s(num_bytes, self._timeouts.search_s or LONGEST_SEARCH_S)

    def offer(self, snapshot: Snapshot) -> "Future[Outcome]":
        """Find a partner for this adapter. Returns at once, from any thread; the future never raises."""
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it: the loop would have to ask before it finishes
        request, loop = _Request(snapshot, future, self.outcomes), self._loop
        try:
            if loop is None:
                raise RuntimeError("not running")
            loop.call_soon_threadsafe(self._take, request)
        except RuntimeError:  # a loop that is closed raises the same
            request.finish(Alone("stopped"))
        return future

    def report_unusable(self, peer_id: str) -> None:
        """Note that a partner's adapter was unusable: it has to wait, longer each time. Safe from any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the node ends
                loop.call_soon_threadsafe(self._recent.failed, peer_id)

    def is_known(self, peer_id: str) -> bool:
        """Whether a peer has proven itself by admitted experience. Safe from any thread."""
        return self._recent.is_known(peer_id)

    async def work(self) -> None:
        """Serve offers from the transport's start to its stop. Ends only when cancelled, or by an error that is a bug."""
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                await self._arrived.wait()
                await self._hold_until_replaced(self._take_next())
        finally:
            self._loop = None
            if self._next is not None:
                self._next.finish(Alone("stopped"))

    def _take(self, request: _Request) -> None:
        if self._loop is None:
            request.finish(Alone("stopped"))
            return
        if self._next is not None:
            self._next.finish(Alone("replaced"))
        self._next = request
        self._arrived.set()

    def _take_next(self) -> _Request:
        request, self._next = self._next, None
        self._arrived.clear()
        assert request is not None, "it comes with the event"
        return request

    async def _hold_until_replaced(self, request: _Request) -> None:
        holding = asyncio.create_task(self._hold_or_give_up(request))
        newer = asyncio.create_task(self._arrived.wait())
        try:
            await asyncio.wait({holding, newer}, return_when=asyncio.FIRST_COMPLETED)
            if self._own is not None and self._own.partner is not None:
                await asyncio.wait(
                    {holding}
                )  # a partner that is fetching gets all of it, so the next offer begins a little later
        finally:
            newer.cancel()
            holding.cancel()
            await asyncio.wait({holding})
            self._own = None
            request.finish(Alone("replaced" if self._arrived.is_set() else "stopped"))
        if not holding.cancelled():
            holding.result()

    async def _hold_or_give_up(self, request: _Request) -> None:
        """An error of disk or network costs an outer step alone; any other error is a bug."""
        try:
            await self._hold(request)
        except (OSError, SwarmError) as error:
            logger.warning("an exchange of adapters failed: %s", error)
            request.finish(Alone("unreachable"))

    async def _hold(self, request: _Request) -> None:
        """Find a partner and fetch its adapter; then wait until the partner has fetched the own one."""
        now = asyncio.get_running_loop().time()
        search_s = self._timeouts.search_after(0.0 if self._offered_at is None else now - self._offered_at)
        self._offered_at = now
        own = self._own = await self._sign(request.snapshot, search_s)
        is_anybody_ready = await self._search.run(own, search_s)
        if own.partner is None:
            self._own = None  # from here on nobody can become its partner
            request.finish(Alone("declined" if is_anybody_ready else "nobody"))
            return
        self._recent.add(own.partner.peer_id)
        self._ready.note_round(own.partner)
        ends_at = asyncio.get_running_loop().time() + self._timeouts.transfer_s(own.offer.num_bytes)
        if await self._fetch_for(request, own.partner, ends_at):
            await self._acknowledge(own.partner)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                await own.fetched.wait()

    async def _fetch_for(self, request: _Request, partner: AdapterOffer, ends_at: float) -> bool:
        """Fetch the partner's adapter for a request. Returns whether it came; the adapter itself is not kept here."""
        outcome = await self._fetch(partner, ends_at)
        request.finish(outcome)
        return isinstance(outcome, Partner)

    async def _sign(self, snapshot: Snapshot, search_s: float) -> OfferedAdapter:
        digest, level = await sha256(snapshot.payload), await self._ready.level(snapshot.lineage)
        now, num_bytes = self._transport.now(), len(snapshot.payload)
        offer = AdapterOffer.of(
            replace(snapshot, outer_round=self._ready.caught_up(snapshot.outer_round)),
            peer_id=self._context.peer_id,
            sha256=digest,
            level=level,
            created_at=now,
            expires_at=now + min(self._timeouts.total_s(num_bytes, search_s), MAX_LIFETIME_S),
        )
        record = sign_offer(self._context.identity, self._context.swarm_id, offer)
        return OfferedAdapter(offer, record, snapshot.payload)

    async def _fetch(self, partner: AdapterOffer, ends_at: float) -> Outcome:
        wanted = Download(
            partner.sha256, partner.num_bytes, ADAPTER_PROTOCOL, base_timeout_s=self._timeouts.request_timeout_s
        )
        try:
            async with asyncio.timeout_at(ends_at):
                payload = await fetch(self._transport, [partner.peer_id], wanted, self._rng)
        except TimeoutError:
            reason = "deadline"
        except RequestError as error:
            reason = error.reason
        else:
            self._backoff.answered(partner.peer_id)
            return partner.partner(payload)
        self._recent.failed(partner.peer_id)
        return Alone(reason)

    async def _acknowledge(self, partner: AdapterOffer) -> None:
        """Tell the partner that it need not keep its adapter any longer. If the message is lost it keeps it a while."""
        with contextlib.suppress(RequestError):
            await self._transport.request(
                partner.peer_id,
                MERGE_PROTOCOL,
                Fetched(partner.sha256).encode(),
                max_response_bytes=MAX_MESSAGE_BYTES,
                deadline_s=self._timeouts.request_timeout_s,
            )
