"""A presence record says who signed it, fits into the index, and nothing in it can be changed."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.records.codec import MAX_RECORD_BYTES, decode_record, encode_record
from swarm.records.presence import (
    MAX_ADDRESS_CHARS,
    MAX_ADDRESSES,
    MAX_LIFETIME_S,
    MAX_SHARD_LEVEL,
    Presence,
    sign_presence,
    verify_presence,
)
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.records.signing import Purpose, pack, sign_record, verify_once
from tests.unit.experience_factory import ALICE, MALLORY, NOW, SWARM_ID

SAID = Presence(
    ALICE.peer_id, ("/ip4/192.0.2.1/tcp/4001",), ("/ip4/192.0.2.1/tcp/4002",), True, 3, NOW, NOW + 120
)  # fmt: skip


def reason_of(data: bytes, swarm_id: str = SWARM_ID) -> Rejection:
    with pytest.raises(InvalidRecord) as caught:
        verify_presence(data, swarm_id)
    return caught.value.reason


def signed_fields(**changes: object) -> bytes:
    """A record of Alice's whose payload she packed herself."""
    fields = {
        "version": 1, "swarm_id": bytes.fromhex(SWARM_ID), "addresses": ["/ip4/192.0.2.1/tcp/1"], "gossip_addresses": [],
        "hosts_index": True, "level": 0, "created_at": NOW, "expires_at": NOW + 60,
    }  # fmt: skip
    payload = pack(list((fields | changes).values()))
    return encode_record(sign_record(ALICE, SWARM_ID, payload, Purpose.PRESENCE))


def test_presence_comes_back_equal() -> None:
    assert verify_presence(sign_presence(ALICE, SWARM_ID, SAID), SWARM_ID) == SAID


def test_the_longest_presence_fits_into_an_index_entry() -> None:
    addresses = tuple(f"/dns4/{'x' * (MAX_ADDRESS_CHARS - 6)}" for _ in range(MAX_ADDRESSES))
    longest = replace(SAID, addresses=addresses, gossip_addresses=addresses, level=MAX_SHARD_LEVEL)
    record = sign_presence(ALICE, SWARM_ID, longest)
    assert 900 < len(record) <= MAX_RECORD_BYTES
    assert verify_presence(record, SWARM_ID) == longest


def test_addresses_beyond_the_bounds_are_left_out() -> None:
    many = ("/ip4/192.0.2.1/tcp/" + "9" * MAX_ADDRESS_CHARS, *(f"/ip4/192.0.2.{n}/tcp/1" for n in range(9)))
    kept = verify_presence(sign_presence(ALICE, SWARM_ID, replace(SAID, addresses=many)), SWARM_ID)
    assert kept.addresses == many[1 : 1 + MAX_ADDRESSES]


@settings(max_examples=100)
@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    record = bytearray(sign_presence(ALICE, SWARM_ID, SAID))
    position = data.draw(st.integers(0, len(record) - 1))
    record[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidRecord):
        verify_presence(bytes(record), SWARM_ID)


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_invalid_record(data: bytes) -> None:
    with pytest.raises(InvalidRecord):
        verify_presence(data, SWARM_ID)


def test_name_of_another_peer_over_the_own_signature() -> None:
    record = decode_record(sign_presence(MALLORY, SWARM_ID, SAID))
    assert reason_of(encode_record(replace(record, author=ALICE.peer_id))) is Rejection.BAD_SIGNATURE


def test_a_header_s_signature_is_none_for_a_presence() -> None:
    payload = decode_record(sign_presence(ALICE, SWARM_ID, SAID)).payload
    assert reason_of(encode_record(sign_record(ALICE, SWARM_ID, payload))) is Rejection.BAD_SIGNATURE


def test_presence_of_another_swarm() -> None:
    record = sign_presence(ALICE, SWARM_ID, SAID)
    assert reason_of(record, "cd" * 16) is Rejection.FOREIGN_SWARM


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, Rejection.VERSION),
        ({"version": True}, Rejection.MALFORMED),
        ({"swarm_id": b"short"}, Rejection.MALFORMED),
        ({"addresses": ["/ip4/192.0.2.1/tcp/1"] * (MAX_ADDRESSES + 1)}, Rejection.MALFORMED),
        ({"addresses": ["x" * (MAX_ADDRESS_CHARS + 1)]}, Rejection.MALFORMED),
        ({"addresses": [b"bytes"]}, Rejection.MALFORMED),
        ({"gossip_addresses": "text"}, Rejection.MALFORMED),
        ({"hosts_index": 1}, Rejection.MALFORMED),
        ({"level": MAX_SHARD_LEVEL + 1}, Rejection.MALFORMED),
        ({"level": -1}, Rejection.MALFORMED),
        ({"level": True}, Rejection.MALFORMED),
        ({"created_at": True}, Rejection.MALFORMED),
        ({"created_at": float("nan")}, Rejection.MALFORMED),
        ({"expires_at": float("inf")}, Rejection.MALFORMED),
        ({"expires_at": NOW + MAX_LIFETIME_S + 1}, Rejection.CLOCK_SKEW),
        ({"more": 1}, Rejection.MALFORMED),
    ],
)
def test_what_a_peer_may_not_say_of_itself(changes: dict[str, object], reason: Rejection) -> None:
    assert reason_of(signed_fields(**changes)) is reason
    assert verify_presence(signed_fields(), SWARM_ID).peer_id == ALICE.peer_id


def test_the_longest_life_is_allowed() -> None:
    record = signed_fields(expires_at=NOW + MAX_LIFETIME_S)
    assert verify_presence(record, SWARM_ID).expires_at == NOW + MAX_LIFETIME_S


def test_a_record_that_comes_again_is_not_verified_again_and_a_changed_one_is() -> None:
    record = sign_presence(ALICE, SWARM_ID, replace(SAID, created_at=NOW + 1))
    verify_once.cache_clear()
    for _ in range(2):
        verify_presence(record, SWARM_ID)
    assert verify_once.cache_info()[:2] == (1, 1)  # hits, misses
    assert reason_of(record[:-1] + bytes([record[-1] ^ 1])) is Rejection.BAD_SIGNATURE
