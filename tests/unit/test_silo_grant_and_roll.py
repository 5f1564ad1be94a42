"""The bounds of requests, grants, tokens and rolls: the last value that is accepted, and the first that is not."""

import re
from dataclasses import replace

import pytest

from swarm.errors import SiloError
from swarm.manifest.manifest import MAX_BYTES as MAX_MANIFEST_BYTES
from swarm.silo.grant import (
    MAX_GRANT_BYTES,
    MAX_TOKEN_BYTES,
    Grant,
    MembershipRequest,
    decode_grant,
    decode_token,
    encode_grant,
    encode_token,
    make_request,
    read_request,
)
from swarm.silo.roll import (
    MAX_TIME_S,
    WRAPPED_BYTES,
    Roll,
    decode_roll,
    encode_roll,
    open_envelope,
    sign,
)
from swarm.silo.sealing import MAX_EPOCH, EpochKey, box, box_key, open_epoch_key
from tests.unit.silo_factory import NOW, OWNER, SILO_ID, found, identity_of, invite

ANN, BEN = (identity_of(number) for number in range(2))
REQUEST = read_request(make_request(BEN))
TOKEN = invite(found(ANN), BEN)


def read(data: bytes) -> Roll:
    return decode_roll(data, OWNER.peer_id, SILO_ID)


def read_grant(data: bytes) -> Grant:
    return decode_grant(data, OWNER.peer_id, SILO_ID)


@pytest.mark.parametrize(
    ("field", "last", "first_refused"),
    [
        ("version", 2**53, 2**53 + 1),
        ("version", 1, 0),
        ("epoch", 2**32 - 1, 2**32),
        ("epoch", 1, 0),
        ("issued_at", MAX_TIME_S, MAX_TIME_S + 1),
        ("issued_at", 0.0, -1.0),
        ("owner_wrapped", bytes(WRAPPED_BYTES), bytes(WRAPPED_BYTES - 1)),
    ],
)
def test_numbers_of_a_roll_have_bounds(field: str, last: object, first_refused: object) -> None:
    roll = found(ANN).roll
    assert getattr(read(encode_roll(replace(roll, **{field: last}), OWNER)), field) == last
    with pytest.raises(SiloError, match="a silo's roll must be valid"):
        read(encode_roll(replace(roll, **{field: first_refused}), OWNER))


@pytest.mark.parametrize(
    ("changes", "is_valid"),
    [
        ({"until": MAX_TIME_S}, True),
        ({"until": MAX_TIME_S * 2}, False),
        ({"peer_id": "nobody"}, False),
        ({"box_key": b"short"}, False),
        ({"wrapped": b""}, False),
    ],
)
def test_lines_of_a_roll_are_checked(changes: dict[str, object], is_valid: bool) -> None:
    roll = found(ANN).roll
    data = encode_roll(replace(roll, members=(replace(roll.members[0], **changes),)), OWNER)
    if is_valid:
        assert read(data).members[0].until == MAX_TIME_S
    else:
        with pytest.raises(SiloError, match="a silo's roll must be valid"):
            read(data)


@pytest.mark.parametrize(
    ("until", "epoch", "is_valid"),
    [(0.0, 1, True), (MAX_TIME_S, MAX_EPOCH, True), (-1.0, 1, False), (MAX_TIME_S + 1, 1, False), (1.0, 0, False),
     (1.0, MAX_EPOCH + 1, False)],
)  # fmt: skip
def test_numbers_of_a_grant_have_bounds(until: float, epoch: int, is_valid: bool) -> None:
    data = encode_grant(OWNER, SILO_ID, REQUEST, until, epoch)
    assert len(data) <= MAX_GRANT_BYTES
    if is_valid:
        grant = read_grant(data)
        assert (grant.until, grant.epoch, grant.peer_id, grant.data) == (until, epoch, BEN.peer_id, data)
    else:
        with pytest.raises(SiloError, match="a silo's grant must be valid"):
            read_grant(data)


def test_a_grant_is_of_its_silo_and_of_a_peer() -> None:
    for swarm_id, request in (("ab" * 16, REQUEST), (SILO_ID, MembershipRequest("nobody", REQUEST.box_key))):
        with pytest.raises(SiloError, match="a silo's grant must be valid"):
            read_grant(encode_grant(OWNER, swarm_id, request, NOW, 1))


def test_an_envelope_is_opened_up_to_its_size() -> None:
    data = sign(ANN, b"domain", [b"x" * 1000])
    assert open_envelope(data, len(data))[0] in data
    with pytest.raises(SiloError, match=f"<= {len(data) - 1} bytes, got {len(data)}"):
        open_envelope(data, len(data) - 1)


def test_a_token_is_read_up_to_its_length_and_holds_base64_only() -> None:
    limit = 2 * MAX_TOKEN_BYTES
    assert decode_token(TOKEN + " " * (limit - len(TOKEN))) == decode_token(TOKEN)
    for text, message in (
        (TOKEN + " " * (limit + 1 - len(TOKEN)), f"<= {limit} characters, got {limit + 1}"),
        (TOKEN[:60] + "!!!!" + TOKEN[60:], "must be base64, got other characters"),
        (TOKEN[5:], "must begin with swarm-silo-invite-"),
    ):
        with pytest.raises(SiloError, match=message):
            decode_token(text)


def test_a_manifest_in_a_token_is_unpacked_up_to_its_size() -> None:
    grant, wrapped = decode_token(TOKEN).grant.data, decode_token(TOKEN).wrapped
    for num_bytes, message in (
        (MAX_MANIFEST_BYTES, "the manifest in it does not hold"),
        (0, "the manifest in it does not hold"),
        (MAX_MANIFEST_BYTES + 1, f"must have <= {MAX_MANIFEST_BYTES} bytes and say so"),
    ):
        with pytest.raises(SiloError, match=message):
            decode_token(encode_token(grant, wrapped, "x" * num_bytes))


def test_a_boxed_key_has_its_length() -> None:
    own = box_key(ANN).public_key().public_bytes_raw()
    for num_bytes in (31, 33):
        boxed = box(own, bytes(num_bytes), (7).to_bytes(4, "big") + b"context")
        with pytest.raises(SiloError, match=f"a group key must have 32 bytes, got {num_bytes}"):
            open_epoch_key(box_key(ANN), 7, boxed, context=b"context")
        with pytest.raises(ValueError, match=f"must have 32 bytes, got {num_bytes}"):
            EpochKey(bytes(num_bytes), 7)


def test_logs_of_a_silo_show_no_bytes_and_no_manifest() -> None:
    roll, token = found(ANN).roll, decode_token(TOKEN)
    shown = repr((roll, roll.members[0], token.grant, replace(token, manifest=None), REQUEST))  # type: ignore[arg-type]
    assert not re.search(r"=b['\"]", shown) and "manifest_text" not in shown
    assert ANN.peer_id in shown and BEN.peer_id in shown
