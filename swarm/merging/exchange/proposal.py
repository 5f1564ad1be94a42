"""The messages of two nodes before they exchange adapters (`swarm/merge/1`, msgpack both ways), and the answers to them.

request   [0, signed offer]   propose: my adapter for yours       answer   [0, signed offer]   accepted: fetch it
          [1, SHA-256]        your adapter of this hash is here            [1, reason]         declined

`ProposalHandler` checks the rate first, then form and signature, then the terms, and last whether this node is free:

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
"""Serves pieces of an adapter, as in `requests.blob_protocol`, to its partner only."""
MAX_MESSAGE_BYTES = MAX_RECORD_BYTES + 8
MAX_LAG_ROUNDS = 4
"""Adapters further apart in outer rounds are not merged."""
_PROPOSE, _FETCHED = 0, 1
_ACCEPTED, _DECLINED = 0, 1


class Decline(StrEnum):
    """Why a proposal was declined."""

    RATE = "rate"
    """Too many proposals of this peer, or of all peers."""
    INVALID = "invalid"
    """It is not the proposer's own signed offer to this swarm, or has expired."""
    IDLE = "idle"
    """This node offers no adapter at this moment."""
    LINEAGE = "lineage"
    PRECISION = "precision"
    LENGTH = "length"
    """The adapter has another length than the adapters of this lineage and precision."""
    ROUND = "round"
    """The adapters are more than MAX_LAG_ROUNDS outer rounds apart."""
    FAILED = "failed"
    """The proposer recently accepted a merge and gave no adapter, or an unusable one."""
    BANNED = "banned"
    """The proposer made false claims about its experience."""
    SHARE = "share"
    """Strangers, or the peers of its address group, have had their share of merges; it is the turn of others."""
    RECENT = "recent"
    """The proposer was the partner recently; it is the turn of others."""
    BUSY = "busy"
    """This node is proposing to another one at this moment."""
    PAIRED = "paired"
    """This node has a partner for its adapter already."""


PASSING = (Decline.RATE, Decline.SHARE, Decline.RECENT, Decline.BUSY)
"""Reasons that may no longer hold a moment later; the others hold for as long as the adapter is offered."""


@dataclass(frozen=True, slots=True)
class Proposal:
    record: bytes
    """A signed offer, not checked yet."""

    def encode(self) -> bytes:
        return pack([_PROPOSE, self.record])


@dataclass(frozen=True, slots=True)
class Fetched:
    """Says that the sender has the adapter with this hash, which need not be kept for it any longer."""

    sha256: bytes

    def encode(self) -> bytes:
        return pack([_FETCHED, self.sha256])


@dataclass(frozen=True, slots=True)
class Accepted:
    record: bytes
    """The signed offer of the node that accepts; empty in answer to `Fetched`."""

    def encode(self) -> bytes:
        return pack([_ACCEPTED, self.record])


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


def decode_answer(data: bytes) -> Accepted | Declined:
    """Raises InvalidRecord."""
    kind, content = check_array(unpack(data, max_bytes=MAX_MESSAGE_BYTES), 2)
    if check_int(kind, _ACCEPTED, _DECLINED) == _ACCEPTED:
        return Accepted(check_bytes(content))
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
    """Whether an offer is valid now, as far as clocks agree."""
    return offer.created_at <= now + CLOCK_SKEW_S and now < offer.expires_at


PEER_PER_S, PEER_BURST = 0.5, 6.0
"""Rate limit of one peer's messages. An honest node proposes to a given peer every few seconds at most."""
ALL_PER_S, ALL_BURST = 50.0, 100.0
"""Rate limit of all peers together: checking that many signatures takes 4 ms per second. It does not limit own proposals."""
MAX_REMEMBERED_PEERS = 1024


class ProposalHandler:
    """Answers the messages of `swarm/merge/1` for one node. It runs on the node's loop."""

    def __init__(
        self,
        context: SwarmContext,
        current: Callable[[], OfferedAdapter | None],
        recent: RecentPartners,
        *,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        """`current`:

        returns the adapter that is being offered, if any. `monotonic`: clock of the rate limits; by default the loop's.
        """
        self._swarm_id = context.swarm_id
        self._own_peer_id = context.peer_id
        self._clock = context.clock
        self._current = current
        self._recent = recent
        self._monotonic = monotonic or _loop_time
        self._limits = MessageLimits()
        self.declined: Counter[str] = Counter()
        """Proposals that were declined, by reason."""

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        """Answer one message. It never raises and never waits."""
        try:
            reply = self._reply(peer_id, request)
        except InvalidRecord:
            reply = Decline.INVALID
        if isinstance(reply, Accepted):
            return reply.encode()
        self.declined[reply.value] += 1
        return Declined(reply.value).encode()

    def _reply(self, peer_id: str, request: bytes) -> Accepted | Decline:
        if not self._limits.admit(peer_id, self._monotonic()):
            return Decline.RATE
        message = decode_request(request)
        own = self._current()
        if isinstance(message, Fetched):
            self._note_fetched(own, peer_id, message)
            return Accepted(b"")
        if own is None:
            return Decline.IDLE  # before the signature is checked: a forged offer gets the same answer
        theirs = verify_offer(message.record, self._swarm_id)
        if theirs.peer_id != peer_id or peer_id == self._own_peer_id or not is_current(theirs, self._clock()):
            return Decline.INVALID
        return self._consider(own, theirs)

    def _consider(self, own: OfferedAdapter, theirs: AdapterOffer) -> Accepted | Decline:
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
            return Accepted(own.record)
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
