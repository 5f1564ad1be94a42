"""Proposals of others, judged: rate first, then form and signature, then terms, then whether this node is free.

request ─ rate ─ decode ─ verify ─ terms ─ recent ─ OfferedAdapter.take ─> own signed offer, or a reason
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable

from swarm.network.token_bucket import TokenBucket
from swarm.pairing.offered_adapter import OfferedAdapter
from swarm.pairing.proposal import Decline, Declined, Fetched, Taken, check_terms, decode_request, is_current
from swarm.pairing.recent_partners import RecentPartners
from swarm.records.adapter_offer import AdapterOffer, verify_offer
from swarm.records.rejection import InvalidRecord

PEER_PER_S, PEER_BURST = 0.5, 6.0
"""Messages of one peer. An honest one proposes to a given peer every few seconds at most."""
ALL_PER_S, ALL_BURST = 50.0, 100.0
"""Of all peers: checking that many signatures takes 4 ms of a second. Own proposals do not depend on it."""
MAX_REMEMBERED_PEERS = 1024


class ProposalDoor:
    """Answers `swarm/merge/1`. Runs on the node's loop."""

    def __init__(
        self,
        swarm_id: str,
        own_peer_id: str,
        clock: Callable[[], float],
        current: Callable[[], OfferedAdapter | None],
        recent: RecentPartners,
        *,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        """`current`: the adapter that is being offered, if any. `monotonic`: seconds for the rates; the loop's by default."""
        self._swarm_id = swarm_id
        self._own_peer_id = own_peer_id
        self._clock = clock
        self._current = current
        self._recent = recent
        self._monotonic = monotonic or _loop_time
        self._limits = MessageLimits()
        self.declined: Counter[str] = Counter()
        """Proposals that were not taken, by reason."""

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        """A request handler: never raises, never waits."""
        try:
            verdict = self._judge(peer_id, request)
        except InvalidRecord:
            verdict = Decline.INVALID
        if isinstance(verdict, Taken):
            return verdict.encode()
        self.declined[verdict.value] += 1
        return Declined(verdict.value).encode()

    def _judge(self, peer_id: str, request: bytes) -> Taken | Decline:
        if not self._limits.admit(peer_id, self._monotonic()):
            return Decline.RATE
        message = decode_request(request)
        own = self._current()
        if isinstance(message, Fetched):
            self._note_fetched(own, peer_id, message)
            return Taken(b"")
        if own is None:
            return Decline.IDLE  # before the signature is looked at: the answer is the same for a forged one
        theirs = verify_offer(message.record, self._swarm_id)
        if theirs.peer_id != peer_id or peer_id == self._own_peer_id or not is_current(theirs, self._clock()):
            return Decline.INVALID
        return self._consider(own, theirs)

    def _consider(self, own: OfferedAdapter, theirs: AdapterOffer) -> Taken | Decline:
        reason = check_terms(own.offer, theirs)
        if reason is not None:
            return reason
        if own.partner is None and self._recent.has_failed(theirs.peer_id):
            return Decline.FAILED
        if own.partner is None and self._recent.is_banned(theirs.peer_id):
            return Decline.BANNED
        if own.partner is None and not self._recent.may_have_it(theirs.peer_id, own.takes_strangers):
            return Decline.SHARE
        if own.partner is None and not own.takes_anybody and theirs.peer_id in self._recent:
            return Decline.RECENT
        if own.take(theirs):
            return Taken(own.record)
        return Decline.BUSY if own.partner is None else Decline.PAIRED

    @staticmethod
    def _note_fetched(own: OfferedAdapter | None, peer_id: str, message: Fetched) -> None:
        is_partner = own is not None and own.partner is not None and own.partner.peer_id == peer_id
        if own is not None and is_partner and own.offer.sha256 == message.sha256:
            own.fetched.set()


class MessageLimits:
    """Token buckets by peer and for all; the peers longest unheard are forgotten."""

    def __init__(self) -> None:
        self._all: TokenBucket | None = None
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def admit(self, peer_id: str, now: float) -> bool:
        if self._all is None:
            self._all = TokenBucket(ALL_PER_S, ALL_BURST, now)
        bucket = self._peers.get(peer_id)
        if bucket is None:
            bucket = self._peers[peer_id] = TokenBucket(PEER_PER_S, PEER_BURST, now)
            if len(self._peers) > MAX_REMEMBERED_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer_id)
        return bucket.try_take(1, now) and self._all.try_take(1, now)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
