"""An offer to merge says who signed it and for which adapter; nothing in it can be changed, and each has its place."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.network.index_entry import MAX_KEY_BYTES
from swarm.records.adapter_offer import MAX_LIFETIME_S, AdapterList, AdapterOffer, sign_offer, verify_offer
from swarm.records.codec import decode_record, encode_record
from swarm.records.presence import MAX_SHARD_LEVEL
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import Purpose, pack, sign_record
from swarm.sharing.index import EntryValidator, Shard, adapter_key, shard_of, thinning_depth
from swarm.types import MAX_ADAPTER_BYTES
from tests.unit.experience_factory import ALICE, LINEAGE, MALLORY, NOW, SWARM_ID

SAID = AdapterOffer(
    ALICE.peer_id, LINEAGE.policy, 3, 75, "int8", 2_200_000, b"h" * 32, 0, NOW, NOW + 60
)  # fmt: skip
EVERYBODY = Shard(0, 0)
KEY = adapter_key(SWARM_ID, "merge", LINEAGE.policy, EVERYBODY)


def reason_of(data: bytes, swarm_id: str = SWARM_ID) -> Rejection:
    with pytest.raises(InvalidRecord) as caught:
        verify_offer(data, swarm_id)
    return caught.value.reason


def signed_fields(**changes: object) -> bytes:
    """A record of Alice's whose payload she packed herself."""
    fields = {
        "version": 1, "swarm_id": bytes.fromhex(SWARM_ID), "lineage": bytes(16), "outer_round": 0, "policy_version": 0,
        "precision": "bf16", "num_bytes": 1, "sha256": bytes(32), "level": 0, "created_at": NOW, "expires_at": NOW + 60,
    }  # fmt: skip
    payload = pack(list((fields | changes).values()))
    return encode_record(sign_record(ALICE, SWARM_ID, payload, Purpose.ADAPTER_OFFER))


def reason_of_entry(key: str, subkey: str, offer: AdapterOffer = SAID, signed_for: AdapterList = "merge") -> str | None:
    is_valid = EntryValidator(SWARM_ID)
    if is_valid(key, subkey, sign_offer(ALICE, SWARM_ID, offer, signed_for)):
        return None
    (reason,) = is_valid.rejected
    return reason


def test_offer_comes_back_equal_and_fits_into_an_index_entry() -> None:
    largest = replace(
        SAID,
        outer_round=2**48,
        policy_version=2**48,
        precision="x" * 16,
        num_bytes=MAX_ADAPTER_BYTES,
        level=MAX_SHARD_LEVEL,
    )
    for offer in (SAID, largest):
        record = sign_offer(ALICE, SWARM_ID, offer)
        assert verify_offer(record, SWARM_ID) == offer
        assert len(record) < 300
    assert len(adapter_key(SWARM_ID, "merge", LINEAGE.policy, Shard(16, 0xFFFF)).encode()) <= MAX_KEY_BYTES


@settings(max_examples=60)
@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    record = bytearray(sign_offer(ALICE, SWARM_ID, SAID))
    record[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidRecord):
        verify_offer(bytes(record), SWARM_ID)


def test_signature_of_another_peer_purpose_or_swarm_is_none() -> None:
    record = decode_record(sign_offer(MALLORY, SWARM_ID, SAID))
    assert reason_of(encode_record(replace(record, author=ALICE.peer_id))) is Rejection.BAD_SIGNATURE
    for purpose in (Purpose.HEADER, Purpose.PRESENCE):
        assert (
            reason_of(encode_record(sign_record(ALICE, SWARM_ID, record.payload, purpose))) is Rejection.BAD_SIGNATURE
        )
    assert reason_of(sign_offer(ALICE, SWARM_ID, SAID), "cd" * 16) is Rejection.FOREIGN_SWARM


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, Rejection.VERSION),
        ({"lineage": b"short"}, Rejection.MALFORMED),
        ({"outer_round": -1}, Rejection.MALFORMED),
        ({"policy_version": True}, Rejection.MALFORMED),
        ({"precision": "x" * 17}, Rejection.MALFORMED),
        ({"precision": b"bf16"}, Rejection.MALFORMED),
        ({"num_bytes": 0}, Rejection.MALFORMED),
        ({"num_bytes": MAX_ADAPTER_BYTES + 1}, Rejection.MALFORMED),
        ({"sha256": bytes(31)}, Rejection.MALFORMED),
        ({"level": MAX_SHARD_LEVEL + 1}, Rejection.MALFORMED),
        ({"created_at": float("nan")}, Rejection.MALFORMED),
        ({"expires_at": NOW + MAX_LIFETIME_S + 1}, Rejection.CLOCK_SKEW),
        ({"more": 1}, Rejection.MALFORMED),
    ],
)
def test_what_a_peer_may_not_say_of_its_adapter(changes: dict[str, object], reason: Rejection) -> None:
    assert reason_of(signed_fields(**changes)) is reason
    assert verify_offer(signed_fields(), SWARM_ID).peer_id == ALICE.peer_id


def test_the_longest_life_is_allowed() -> None:
    record = signed_fields(expires_at=NOW + MAX_LIFETIME_S)
    assert verify_offer(record, SWARM_ID).expires_at == NOW + MAX_LIFETIME_S


def test_only_the_owner_is_listed_under_its_name_and_lineage() -> None:
    assert reason_of_entry(KEY, ALICE.peer_id) is None
    assert reason_of_entry(KEY.replace("/merge/", "/other/"), ALICE.peer_id) == "wrong_slot"
    assert reason_of_entry(KEY, MALLORY.peer_id) == "wrong_slot"
    assert reason_of_entry(KEY, f"{ALICE.peer_id}/0") == "wrong_slot"
    for place in (
        adapter_key(SWARM_ID, "merge", "33" * 16, EVERYBODY),
        f"{SWARM_ID}/merge/{LINEAGE.policy}",
        f"{KEY}/0",
    ):
        assert reason_of_entry(place, ALICE.peer_id) == "wrong_slot"
    foreign = adapter_key("cd" * 16, "merge", LINEAGE.policy, EVERYBODY)
    assert reason_of_entry(foreign, ALICE.peer_id) == "foreign_swarm"


@pytest.mark.parametrize("signed_for", get_args(AdapterList))
@pytest.mark.parametrize("listed_in", get_args(AdapterList))
def test_an_offer_is_listed_only_where_its_owner_has_listed_it(signed_for: AdapterList, listed_in: AdapterList) -> None:
    """Otherwise a stranger lists a peer that wants to merge as a donor, or for the final merge."""
    key = adapter_key(SWARM_ID, listed_in, LINEAGE.policy, EVERYBODY)
    allowed = None if signed_for == listed_in else "bad_signature"
    assert reason_of_entry(key, ALICE.peer_id, signed_for=signed_for) == allowed


def test_an_offer_is_listed_in_its_own_shard_and_as_far_above_it_as_its_name_allows() -> None:
    offer, depth = replace(SAID, level=6), thinning_depth(SWARM_ID, ALICE.peer_id)
    for level in range(9):
        own = shard_of(SWARM_ID, ALICE.peer_id, level, NOW)
        allowed = None if 6 - depth <= level <= 6 else "wrong_slot"
        assert reason_of_entry(adapter_key(SWARM_ID, "merge", LINEAGE.policy, own), ALICE.peer_id, offer) == allowed
    other = Shard(6, shard_of(SWARM_ID, ALICE.peer_id, 6, NOW).number ^ 1)
    assert reason_of_entry(adapter_key(SWARM_ID, "merge", LINEAGE.policy, other), ALICE.peer_id, offer) == "wrong_slot"
