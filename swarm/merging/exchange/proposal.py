"""What two nodes say to each other before they exchange adapters: `swarm/merge/1`, msgpack both ways.

request   [0, signed offer]   propose: my adapter for yours       answer   [0, signed offer]   taken: fetch it
          [1, SHA-256]        your adapter of this hash is here            [1, reason]         declined

Proposals of others, judged: rate first, then form and signature, then terms, then whether this node is free.

request ─ rate ─ decode ─ verify ─ terms ─ recent ─ OfferedAdapter.take ─> own signed offer, or a reason
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from swarm.limits.token_bucket import PeerBuckets, TokenBucket
from swarm.merging.exchange.offered_adapter import OfferedAdapter
from swarm.merging.exchange.recent_partners import RecentPartners
from swarm.network.index_entry import CLOCK_SKEW_S
from swarm.network.requests.blob_protocol import DIGEST_BYTES
from swarm.records.adapter_offer import AdapterOffer, verify_offer
from swarm.records.codec import MAX_RECORD_BYTES
from swarm.records.context import SwarmContext
from swarm.records.rejection import InvalidRecord
from swarm.records.signing import check_array, check_bytes, check_int, check_text, pack, unpack

MERGE_PROTOCOL = "swarm/merge/1"
ADAPTER_PROTOCOL = "swarm/adapter/1"
"""Pieces of an adapter, as `requests.blob_protocol` has them; to its partner only."""
MAX_MESSAGE_BYTES = MAX_RECORD_BYTES + 8
MAX_LAG_ROUNDS = 4
"""Adapters further apart in outer rounds are not merged."""
_PROPOSE, _FETCHED = 0, 1
_TAKEN, _DECLINED = 0, 1


class Decline(StrEnum):
    """Why a proposal was not taken."""

    RATE = "rate"
    """Too many proposals of this peer, or of all."""
    INVALID = "invalid"
    """Not the proposer's own signed offer to this swarm, or none at this time."""
    IDLE = "idle"
    """No adapter to merge at this moment."""
    LINEAGE = "lineage"
    PRECISION = "precision"
    LENGTH = "length"
    """Not as many bytes as an adapter of this lineage and precision has."""
    ROUND = "round"
    """More than MAX_LAG_ROUNDS apart."""
    FAILED = "failed"
    """Took a proposal of late and gave no adapter, or one of no use."""
    BANNED = "banned"
    """Has made false claims about its experience."""
    SHARE = "share"
    """Strangers, or those of its address group, have had their share of merges; it is the turn of others."""
    RECENT = "recent"
    """Was the partner a short while ago; it is the turn of others."""
    BUSY = "busy"
    """Is proposing to another at this moment."""
    PAIRED = "paired"
    """Has a partner for this adapter."""


PASSING = (Decline.RATE, Decline.SHARE, Decline.RECENT, Decline.BUSY)
"""Reasons that may be gone a moment later; the others hold for as long as the adapter is offered."""


@dataclass(frozen=True, slots=True)
class Proposal:
    record: bytes
    """A signed offer, not looked at yet."""

    def encode(self) -> bytes:
        return pack([_PROPOSE, self.record])


@dataclass(frozen=True, slots=True)
class Fetched:
    """Thanks: the adapter with this hash need not be kept for me any longer."""

    sha256: bytes

    def encode(self) -> bytes:
        return pack([_FETCHED, self.sha256])


@dataclass(frozen=True, slots=True)
class Taken:
    record: bytes
    """The signed offer of whoever takes the proposal; empty where there is nothing to say."""

    def encode(self) -> bytes:
        return pack([_TAKEN, self.record])


@dataclass(frozen=True, slots=True)
class Declined:
    reason: str

    def encode(self) -> bytes:
        return pack([_DECLINED, self.reason])


def decode_request(data: bytes) -> Proposal | Fetched:
    """Raises InvalidRecord."""
    kind, content = check_array(unpack(data, max_bytes=MAX_MESSAGE_BYTES), 2)
    if check_int(kind, _PROPOSE, _FETCHED) == _PROPOSE:
        return Proposal(check_bytes(content))
    return Fetched(check_bytes(content, DIGEST_BYTES))


def decode_answer(data: bytes) -> Taken | Declined:
    """Raises InvalidRecord."""
    kind, content = check_array(unpack(data, max_bytes=MAX_MESSAGE_BYTES), 2)
    if check_int(kind, _TAKEN, _DECLINED) == _TAKEN:
        return Taken(check_bytes(content))
    return Declined(check_text(content, 32))


def check_terms(own: AdapterOffer, theirs: AdapterOffer) -> Decline | None:
    """Why two adapters cannot be merged; None where they can."""
    if theirs.lineage != own.lineage:
        return Decline.LINEAGE
    if theirs.precision != own.precision:
        return Decline.PRECISION
    if theirs.num_bytes != own.num_bytes:
        return Decline.LENGTH
    return Decline.ROUND if abs(theirs.outer_round - own.outer_round) > MAX_LAG_ROUNDS else None


def is_current(offer: AdapterOffer, now: float) -> bool:
    """Whether an offer is of this time, as far as clocks agree."""
    return offer.created_at <= now + CLOCK_SKEW_S and now < offer.expires_at


PEER_PER_S, PEER_BURST = 0.5, 6.0
"""Messages of one peer. An honest one proposes to a given peer every few seconds at most."""
ALL_PER_S, ALL_BURST = 50.0, 100.0
"""Of all peers: checking that many signatures takes 4 ms of a second. Own proposals do not depend on it."""
MAX_REMEMBERED_PEERS = 1024


class ProposalHandler:
    """Answers `swarm/merge/1`. Runs on the node's loop."""

    def __init__(
        self,
        context: SwarmContext,
        current: Callable[[], OfferedAdapter | None],
        recent: RecentPartners,
        *,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        """`current`: the adapter that is being offered, if any. `monotonic`: seconds for the rates; the loop's by default."""
        self._swarm_id = context.swarm_id
        self._own_peer_id = context.peer_id
        self._clock = context.clock
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
    """How many messages each peer, and all peers together, may send. One instance limits one protocol."""

    def __init__(self) -> None:
        self._all = TokenBucket(ALL_PER_S, ALL_BURST, 0.0)
        self._peers = PeerBuckets(PEER_PER_S, PEER_BURST, MAX_REMEMBERED_PEERS)

    def __len__(self) -> int:
        return len(self._peers)

    def admit(self, peer_id: str, now: float) -> bool:
        """Whether a message of this peer may be answered now. `now`: seconds of the loop's clock."""
        return self._peers.of(peer_id, now).try_take(1, now) and self._all.try_take(1, now)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
