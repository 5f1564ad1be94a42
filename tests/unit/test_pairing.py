"""Who is promised an adapter, who may fetch it, and what becomes of proposals that should not be taken."""

import hashlib
import time
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.merging.exchange.offered_adapter import AdapterServer, OfferedAdapter
from swarm.merging.exchange.proposal import (
    ALL_BURST,
    MAX_LAG_ROUNDS,
    MAX_REMEMBERED_PEERS,
    PEER_BURST,
    Accepted,
    Declined,
    Fetched,
    Proposal,
    ProposalHandler,
    decode_answer,
    decode_request,
)
from swarm.merging.exchange.recent_partners import MAX_REMEMBERED, MAX_WAIT_OFFERS, RecentPartners
from swarm.network.requests.blob_protocol import PIECE_BYTES, BlobRequest
from swarm.network.transport import RequestRefused
from swarm.records.adapter_offer import AdapterOffer, sign_offer
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord
from tests.unit.experience_factory import ALICE, LINEAGE, MALLORY, NOW, READER, SWARM_ID, Clock, context_of

PAYLOAD = bytes(range(256)) * 20


def offer_of(identity: Identity, payload: bytes = PAYLOAD, **changes: object) -> AdapterOffer:
    digest = hashlib.sha256(payload).digest()
    offer = AdapterOffer(
        identity.peer_id, LINEAGE.policy, 10, 250, "bf16", len(payload), digest, 0, NOW, NOW + 60
    )  # fmt: skip
    return replace(offer, **changes)  # type: ignore[arg-type]


def adapter_of(identity: Identity, payload: bytes = PAYLOAD) -> OfferedAdapter:
    offer = offer_of(identity, payload)
    return OfferedAdapter(offer, sign_offer(identity, SWARM_ID, offer), payload)


class Reader:
    """The reader's proposal handler, with an adapter on offer or none."""

    def __init__(self) -> None:
        self.own: OfferedAdapter | None = adapter_of(READER)
        self.clock = Clock(NOW)
        self.recent = RecentPartners()
        self.handler = ProposalHandler(context_of(READER, self.clock), lambda: self.own, self.recent)

    async def ask(self, identity: Identity, **changes: object) -> str:
        record = sign_offer(identity, SWARM_ID, offer_of(identity, **changes))
        return await self.ask_as(identity.peer_id, Proposal(record).encode())

    async def ask_as(self, peer_id: str, request: bytes) -> str:
        answer = decode_answer(await self.handler.answer(peer_id, request))
        return "taken" if isinstance(answer, Accepted) else answer.reason


# ---- one adapter, one partner


def test_an_adapter_has_one_partner_for_good() -> None:
    own = adapter_of(READER)
    assert own.is_free and own.propose(ALICE.peer_id)
    assert not own.propose(MALLORY.peer_id)
    assert not own.take(offer_of(MALLORY))
    own.withdraw()
    assert own.take(offer_of(MALLORY))
    assert own.paired.is_set()
    assert not own.take(offer_of(ALICE)) and not own.propose(ALICE.peer_id)
    assert own.take(offer_of(MALLORY))  # asked again, because the answer was lost
    assert not own.take(offer_of(MALLORY, b"another adapter"))


def test_crossing_proposals_pair_at_once() -> None:
    one, other = adapter_of(ALICE), adapter_of(READER)
    assert one.propose(READER.peer_id) and other.propose(ALICE.peer_id)
    assert one.take(other.offer) and other.take(one.offer)
    for own in (one, other):  # then the answers to the proposals come in
        own.withdraw()
    assert one.take(other.offer) and other.take(one.offer)
    assert one.partner == other.offer and other.partner == one.offer


@given(st.lists(st.tuples(st.sampled_from(["propose", "withdraw", "take"]), st.integers(0, 2)), max_size=12))
def test_no_order_of_events_gives_a_second_partner(events: list[tuple[str, int]]) -> None:
    own, others = adapter_of(READER), [offer_of(Identity(bytes([number]) * 32)) for number in range(3)]
    partners = set()
    for event, number in events:
        if event == "propose":
            own.propose(others[number].peer_id)
        elif event == "withdraw":
            own.withdraw()
        elif own.take(others[number]):
            partners.add(others[number].peer_id)
    assert len(partners) <= 1
    assert ({own.partner.peer_id} if own.partner else set()) == partners
    assert own.paired.is_set() == bool(partners)


# ---- who may fetch


async def fetched(server: AdapterServer, peer_id: str, request: BlobRequest) -> bytes | None:
    try:
        return await server.answer(peer_id, request.encode())
    except RequestRefused:
        return None


async def test_only_who_it_is_promised_to_gets_the_adapter() -> None:
    own = adapter_of(READER)
    server, all_of_it = AdapterServer(lambda: own), BlobRequest(own.offer.sha256, 0, len(PAYLOAD))
    assert await fetched(server, ALICE.peer_id, all_of_it) is None
    own.propose(ALICE.peer_id)
    own.withdraw()  # no answer came: it may have been lost on the way
    assert await fetched(server, ALICE.peer_id, all_of_it) == PAYLOAD
    own.take(offer_of(MALLORY))
    assert await fetched(server, ALICE.peer_id, all_of_it) is None
    assert await fetched(server, MALLORY.peer_id, all_of_it) == PAYLOAD
    assert await fetched(server, MALLORY.peer_id, BlobRequest(bytes(32), 0, 1)) is None
    assert await fetched(AdapterServer(lambda: None), MALLORY.peer_id, all_of_it) is None


async def test_a_partner_gets_the_adapter_twice_and_no_more() -> None:
    payload = bytes(3 * PIECE_BYTES)
    own = adapter_of(READER, payload)
    own.take(offer_of(ALICE))
    server, num_bytes = AdapterServer(lambda: own), 0
    for _ in range(20):
        num_bytes += len(await fetched(server, ALICE.peer_id, BlobRequest(own.offer.sha256, 0, PIECE_BYTES)) or b"")
    assert num_bytes == 2 * (len(payload) + PIECE_BYTES)
    manifests = [await fetched(server, ALICE.peer_id, BlobRequest(own.offer.sha256)) for _ in range(3)]
    assert manifests == [None] * 3


# ---- what is not taken


async def test_mergeable_proposal_is_answered_with_the_own_offer() -> None:
    reader = Reader()
    assert reader.own is not None
    request = Proposal(sign_offer(ALICE, SWARM_ID, offer_of(ALICE))).encode()
    for _ in range(2):  # the second time because the first answer was lost
        answer = decode_answer(await reader.handler.answer(ALICE.peer_id, request))
        assert answer == Accepted(reader.own.record)
    assert reader.own.partner == offer_of(ALICE)
    assert await reader.ask(MALLORY) == "paired"
    reader.own = adapter_of(READER)
    reader.own.propose(ALICE.peer_id)
    assert await reader.ask(MALLORY) == "busy"
    assert reader.handler.declined == Counter(busy=1, paired=1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lineage": "33" * 16}, "lineage"),
        ({"precision": "int8"}, "precision"),
        ({"num_bytes": len(PAYLOAD) + 1}, "length"),
        ({"outer_round": 10 + MAX_LAG_ROUNDS + 1}, "round"),
        ({"outer_round": 10 - MAX_LAG_ROUNDS - 1}, "round"),
        ({"outer_round": 10 + MAX_LAG_ROUNDS}, "taken"),
        ({"created_at": NOW - 120, "expires_at": NOW - 60}, "invalid"),
        ({"created_at": NOW + 60, "expires_at": NOW + 120}, "invalid"),
    ],
)
async def test_terms_that_do_not_fit_are_declined_with_the_reason(changes: dict[str, object], reason: str) -> None:
    assert await Reader().ask(ALICE, **changes) == reason


async def test_only_the_owner_of_the_connection_proposes_its_own_offer_to_this_swarm() -> None:
    record = sign_offer(ALICE, SWARM_ID, offer_of(ALICE))
    foreign = sign_offer(ALICE, "cd" * 16, offer_of(ALICE))
    forged = record[:-1] + bytes([record[-1] ^ 1])
    own = sign_offer(READER, SWARM_ID, offer_of(READER))
    for peer_id, sent in [
        (MALLORY.peer_id, record),  # an offer of Alice's that Mallory read in the index
        (ALICE.peer_id, foreign),
        (ALICE.peer_id, forged),
        (ALICE.peer_id, b""),
        (READER.peer_id, own),
    ]:
        assert await Reader().ask_as(peer_id, Proposal(sent).encode()) == "invalid"
    for junk in (b"", b"\xc1", b"\x92\x02\xc4\x00", b"\x92\x00\xa0", bytes(5000)):
        assert await Reader().ask_as(ALICE.peer_id, junk) == "invalid"


async def test_old_offer_of_a_peer_is_not_taken_again() -> None:
    reader = Reader()
    old = Proposal(sign_offer(ALICE, SWARM_ID, offer_of(ALICE))).encode()
    assert await reader.ask_as(ALICE.peer_id, old) == "taken"
    reader.own = adapter_of(READER)
    reader.clock.now = NOW + 61
    assert await reader.ask_as(ALICE.peer_id, old) == "invalid"


async def test_node_without_an_adapter_is_idle() -> None:
    reader = Reader()
    reader.own = None
    assert await reader.ask(ALICE) == "idle"


async def test_flood_of_one_peer_is_turned_away_unread_and_others_are_heard() -> None:
    reader = Reader()
    answers = Counter([await reader.ask_as(MALLORY.peer_id, b"junk") for _ in range(200)])
    assert answers == Counter(rate=200 - int(PEER_BURST), invalid=int(PEER_BURST))
    assert await reader.ask(ALICE) == "taken"


async def test_flood_of_many_names_costs_bounded_work_and_memory() -> None:
    reader = Reader()
    names = [f"12D3KooW{number:040d}" for number in range(20_000)]
    tracemalloc.start()
    began_at = time.perf_counter()
    answers = Counter([await reader.ask_as(name, b"junk") for name in names])
    took_s = time.perf_counter() - began_at
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answers["invalid"] < ALL_BURST + 50 * (took_s + 1)
    assert len(reader.handler._limits) == MAX_REMEMBERED_PEERS
    assert peak_bytes < 4 << 20


async def test_thanks_are_taken_from_the_partner_alone() -> None:
    reader = Reader()
    own = reader.own
    assert own is not None
    thanks = Fetched(own.offer.sha256).encode()
    await reader.ask(ALICE)
    await reader.ask_as(MALLORY.peer_id, thanks)
    await reader.ask_as(ALICE.peer_id, Fetched(bytes(32)).encode())
    assert not own.fetched.is_set()
    await reader.ask_as(ALICE.peer_id, thanks)
    assert own.fetched.is_set()


# ---- whose turn it is


def test_as_many_partners_wait_as_there_are_others_enough() -> None:
    recent = RecentPartners()
    for name in "abcdefghijkl":
        recent.add(name)

    def waiting() -> str:
        return "".join(name for name in "abcdefghijkl" if name in recent)

    for num_ready, expected in [(0, ""), (1, ""), (2, ""), (3, "l"), (8, "jkl"), (100, "efghijkl")]:
        recent.see(map(str, range(num_ready)))
        assert waiting() == expected
    assert len(waiting()) == MAX_REMEMBERED
    for _ in range(MAX_REMEMBERED):  # nobody was ready for so many offers
        recent.begin_offer()
    assert waiting() == ""


async def test_a_peer_that_proposes_first_every_time_has_to_wait_for_its_turn() -> None:
    reader, taken = Reader(), []
    reader.recent.see("abcdefg")
    for number in range(12):
        reader.own = adapter_of(READER)
        reader.handler._limits = type(reader.handler._limits)()
        taken.append(await reader.ask(MALLORY) == "taken")
        if not taken[-1]:
            reader.own.take(offer_of(Identity(number.to_bytes(32, "big"))))
        assert reader.own.partner is not None
        reader.recent.add(reader.own.partner.peer_id)
    assert taken == [True, False, False, False] * 3


async def test_recent_partner_is_better_than_none() -> None:
    reader = Reader()
    reader.recent.see("abc")
    reader.recent.add(ALICE.peer_id)
    assert reader.own is not None
    assert await reader.ask(ALICE) == "recent"
    reader.own.takes_anybody = True
    assert await reader.ask(ALICE) == "taken"


def offers_until_it_will_do(recent: RecentPartners, peer_id: str) -> int:
    for number in range(1000):
        recent.begin_offer()
        recent.see(["other"])
        if not recent.has_failed(peer_id):
            return number
    raise AssertionError("never")


def test_partner_that_gave_nothing_waits_longer_each_time_until_that_is_long_ago() -> None:
    recent = RecentPartners()
    waits = []
    for _ in range(5):
        recent.failed("liar")
        waits.append(offers_until_it_will_do(recent, "liar"))
    assert waits == [8, 16, 32, 64, 64]
    for _ in range(MAX_WAIT_OFFERS + 1):
        recent.begin_offer()
    recent.failed("liar")
    assert offers_until_it_will_do(recent, "liar") == 8


def test_partner_that_failed_is_better_than_nobody_at_all() -> None:
    recent = RecentPartners()
    recent.failed("one")
    recent.failed("two")
    recent.begin_offer()
    recent.see(["one", "two"])
    assert not recent.has_failed("one") and not recent.has_failed("two")
    recent.see(["three"])
    assert recent.has_failed("one") and recent.has_failed("two") and not recent.has_failed("three")


async def test_proposal_of_a_peer_that_failed_is_declined_however_long_the_search() -> None:
    reader = Reader()
    reader.recent.see(["other"])
    reader.recent.failed(MALLORY.peer_id)
    assert reader.own is not None
    reader.own.takes_anybody = True
    assert await reader.ask(MALLORY) == "failed"
    assert await reader.ask(ALICE) == "taken"


# ---- messages


@given(st.binary(max_size=80))
def test_random_bytes_raise_nothing_but_invalid_record(data: bytes) -> None:
    for decode in (decode_request, decode_answer):
        try:
            message = decode(data)
        except InvalidRecord:
            continue
        assert isinstance(message, Proposal | Fetched | Accepted | Declined)


def test_messages_come_back_equal() -> None:
    for request in (Proposal(b"record"), Fetched(b"h" * 32)):
        assert decode_request(request.encode()) == request
    for answer in (Accepted(b"record"), Declined("busy")):
        assert decode_answer(answer.encode()) == answer
