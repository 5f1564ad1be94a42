"""Who is a member: what the owner signed last, and nothing that is forged, altered, expired, older or of another silo."""

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import SiloError
from swarm.manifest import manifest as manifests
from swarm.records.identity import Identity
from swarm.silo.grant import (
    MembershipRequest,
    decode_grant,
    decode_token,
    encode_grant,
    make_request,
    read_request,
)
from swarm.silo.membership import Membership
from swarm.silo.owner import Owner
from swarm.silo.roll import MAX_MEMBERS, Member, decode_roll, encode_roll
from swarm.silo.sealing import box_key
from swarm.silo.silo_files import SeenRolls
from tests.unit.silo_factory import (
    DAY_S,
    MANIFEST,
    MANIFEST_TEXT,
    NOW,
    OWNER,
    SILO_ID,
    found,
    identity_of,
    invite,
    membership_of,
)

ANN, BEN, CAT, EVE = (identity_of(number) for number in range(4))
DATA = found(ANN, BEN).data
TOKEN = invite(found(ANN), BEN)
GRANT = decode_token(TOKEN).grant.data


def fault_of(call) -> str:
    with pytest.raises(SiloError) as caught:
        call()
    return caught.value.fault


def test_roll_says_who_the_members_are_and_gives_them_one_key() -> None:
    ann, ben = membership_of(ANN, DATA), membership_of(BEN, DATA)
    assert ann.is_member(BEN.peer_id) and ann.is_member(ANN.peer_id) and not ann.is_member(EVE.peer_id)
    sealed = ann.keys.current.seal("gossip", b"text", b"")
    assert ben.keys.current.open("gossip", sealed, b"") == b"text"


def test_outsider_with_the_roll_has_no_key() -> None:
    eve = membership_of(EVE, DATA)
    assert eve.keys.epoch == 0 and not eve.is_member(EVE.peer_id)


@given(st.data())
def test_any_changed_byte_of_a_roll_is_the_one_error(data: st.DataObject) -> None:
    spoiled = bytearray(DATA)
    spoiled[data.draw(st.integers(0, len(DATA) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fault_of(lambda: decode_roll(bytes(spoiled), OWNER.peer_id, SILO_ID)) in ("forged", "malformed")


@given(st.binary(max_size=300))
def test_any_bytes_are_the_one_error(data: bytes) -> None:
    text = "swarm-silo-invite-" + data.decode("latin-1")
    for decode in (
        lambda: decode_roll(data, OWNER.peer_id, SILO_ID),
        lambda: decode_grant(data, OWNER.peer_id, SILO_ID),
        lambda: decode_token(text),
        lambda: read_request(text),
    ):
        assert fault_of(decode) in ("forged", "malformed")


@pytest.mark.parametrize("end", range(0, len(DATA), 37))
def test_truncated_roll_is_the_one_error(end: int) -> None:
    assert fault_of(lambda: decode_roll(DATA[:end], OWNER.peer_id, SILO_ID)) in ("forged", "malformed")


def test_roll_of_somebody_else_or_of_another_silo_is_refused() -> None:
    forged = encode_roll(replace(found(ANN).roll, version=99), EVE)
    assert fault_of(lambda: membership_of(ANN, DATA).accept_roll(forged)) == "forged"
    other = Owner.found(OWNER, "ab" * 16, NOW).data
    assert fault_of(lambda: membership_of(ANN, DATA).accept_roll(other)) == "malformed"


def test_older_roll_changes_nothing() -> None:
    owner = found(ANN, BEN)
    old = owner.data
    owner.revoke(BEN.peer_id, NOW)
    ann = membership_of(ANN, owner.data)
    assert fault_of(lambda: ann.accept_roll(old)) == "old"
    assert not ann.accept_roll(owner.data)
    assert not ann.is_member(BEN.peer_id) and ann.keys.epoch == 2


def test_older_roll_of_the_same_epoch_is_passed_over() -> None:
    owner = found(ANN)
    old = owner.data
    invite(owner, BEN)
    ann = membership_of(ANN, owner.data)
    assert not ann.accept_roll(old) and ann.roll_data == owner.data


@pytest.mark.parametrize(("num_added", "more"), [(8, "; 9 members"), (9, " and 1 more; 10 members")])
def test_a_line_of_the_log_names_few_members(caplog: pytest.LogCaptureFixture, num_added: int, more: str) -> None:
    caplog.set_level(logging.INFO)
    owner = found(ANN)
    ann = membership_of(ANN, owner.data)
    for number in range(num_added):
        invite(owner, identity_of(20 + number))
    ann.accept_roll(owner.data)
    assert caplog.messages[0].endswith(f"){more}") and caplog.messages[0].count("12D3") == 8


def test_who_is_not_on_the_roll_of_a_later_epoch_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    owner = found(ANN)
    before = owner.data
    token = decode_token(invite(owner, BEN))
    ben = membership_of(BEN)
    ben.accept_own_grant(token.grant.data, token.wrapped)
    ben.accept_roll(before)
    assert not caplog.records and ben.is_member(BEN.peer_id), "the roll is from before the invitation"
    owner.revoke(BEN.peer_id, NOW)
    ben.accept_roll(owner.data)
    assert "no longer a member" in caplog.text and not ben.is_member(BEN.peer_id) and ben.own_grant is None


def test_newer_roll_is_told_once_with_who_went_and_who_came(caplog: pytest.LogCaptureFixture) -> None:
    owner = found(ANN, BEN)
    caplog.set_level(logging.INFO)
    ann = membership_of(ANN, owner.data)
    assert not caplog.records, "at a start nothing has changed"
    invite(owner, CAT)
    ann.accept_roll(owner.data)
    assert not ann.accept_roll(owner.data)
    owner.revoke(BEN.peer_id, NOW)
    ann.accept_roll(owner.data)
    cat, ben = (f"{one.peer_name} ({one.peer_id})" for one in (CAT, BEN))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        f"a newer roll of the silo: epoch 1; removed: nobody; added: {cat}; 3 members",
        f"a newer roll of the silo: epoch 2 after 1; removed: {ben}; added: nobody; 2 members",
    ]


def test_a_higher_version_of_an_earlier_epoch_is_refused() -> None:
    """As an owner would make that worked on from a copy of an old roll."""
    owner = found(ANN, BEN)
    stale = Owner(OWNER, owner.roll)
    owner.revoke(BEN.peer_id, NOW)
    ann = membership_of(ANN, owner.data)
    for number in range(5):
        invite(stale, identity_of(20 + number))
    assert stale.roll.version > owner.roll.version
    assert fault_of(lambda: ann.accept_roll(stale.data)) == "old"


def test_a_second_roll_of_one_version_is_refused_and_named() -> None:
    """As of an owner whose key is used in two places, or whoever has stolen it."""
    owner = found(ANN, BEN)
    other = Owner(OWNER, owner.roll)
    owner.revoke(BEN.peer_id, NOW)
    other.rotate(NOW)
    assert other.roll.version == owner.roll.version
    ann = membership_of(ANN, owner.data)
    assert fault_of(lambda: ann.accept_roll(other.data)) == "two_rolls"
    assert not ann.is_member(BEN.peer_id) and not ann.accept_roll(owner.data)


def test_a_second_key_of_one_epoch_is_refused_with_its_roll() -> None:
    owner = found(ANN, BEN)
    other = Owner(OWNER, owner.roll)
    owner.rotate(NOW)
    other.rotate(NOW)
    invite(other, CAT)
    ann = membership_of(ANN, owner.data)
    assert fault_of(lambda: ann.accept_roll(other.data)) == "two_rolls"
    assert ann.roll_data == owner.data and not ann.is_member(CAT.peer_id)
    other.rotate(NOW)
    assert ann.accept_roll(other.data) and ann.keys.epoch == 3, "a later epoch mends it"


def test_a_roll_whose_key_does_not_open_changes_nothing() -> None:
    owner = found(ANN, BEN)
    ann = membership_of(ANN, owner.data)
    owner.revoke(BEN.peer_id, NOW)
    spoiled = replace(owner.roll.members[0], wrapped=bytes(80))
    roll = encode_roll(replace(owner.roll, members=(spoiled,)), OWNER)
    assert fault_of(lambda: ann.accept_roll(roll)) in ("forged", "malformed")
    assert ann.version == owner.roll.version - 1 and ann.is_member(BEN.peer_id) and ann.keys.epoch == 1
    assert ann.accept_roll(owner.data) and not ann.is_member(BEN.peer_id)


def test_newcomer_takes_no_roll_older_than_its_identity_has_seen() -> None:
    """Somebody who was revoked hands it the roll that still names him; the node has lost its own."""
    owner = found(ANN, BEN)
    before = owner.data
    owner.revoke(BEN.peer_id, NOW)
    seen = SeenRolls(SILO_ID)
    seen.note(owner.roll, owner.data)
    ann = Membership(SILO_ID, OWNER.peer_id, ANN, lambda: NOW, seen=seen)
    assert fault_of(lambda: ann.accept_roll(before)) == "old"
    assert ann.accept_roll(owner.data) and not ann.is_member(BEN.peer_id)


def test_a_clock_that_is_behind_makes_no_members() -> None:
    owner = found(ANN)
    invite(owner, BEN, until=NOW + 10)
    token = decode_token(invite(owner, CAT, until=NOW + 10))
    owner.roll = replace(owner.roll, issued_at=NOW + 20)
    ann = membership_of(ANN, owner.data, now=0.0)
    assert ann.is_member(ANN.peer_id) and not ann.is_member(BEN.peer_id)
    assert fault_of(lambda: ann.accept_grant(token.grant.data)) == "old"


def test_revoked_member_gets_no_key_and_the_others_a_new_one() -> None:
    owner = found(ANN, BEN, CAT)
    ann, ben = membership_of(ANN, owner.data), membership_of(BEN, owner.data)
    owner.revoke(BEN.peer_id, NOW)
    for one in (ann, ben):
        one.accept_roll(owner.data)
    assert ben.keys.epoch == 1 and ann.keys.epoch == 2
    sealed = ann.keys.current.seal("gossip", b"text", b"")
    assert fault_of(lambda: ben.keys.key_for(sealed)) == "unknown_epoch"
    assert membership_of(CAT, owner.data).keys.current.open("gossip", sealed, b"") == b"text"


def test_rotation_keeps_the_members_but_those_whose_time_is_over() -> None:
    owner = found(ANN)
    invite(owner, BEN, until=NOW + 10)
    owner.rotate(NOW + 11)
    assert [one.peer_id for one in owner.roll.members] == [ANN.peer_id] and owner.roll.epoch == 2


def test_membership_ends_by_itself() -> None:
    data = found(ANN, BEN, until=NOW + 10).data
    assert membership_of(ANN, data, now=NOW + 9).is_member(BEN.peer_id)
    assert not membership_of(ANN, data, now=NOW + 10).is_member(BEN.peer_id)


def test_newcomer_with_a_token_has_the_key_and_is_taken_by_its_grant() -> None:
    owner = found(ANN)
    ann = membership_of(ANN, owner.data)
    token = decode_token(invite(owner, BEN))
    ben = membership_of(BEN)
    ben.accept_own_grant(token.grant.data, token.wrapped)
    assert not ann.is_member(BEN.peer_id), "its roll is from before the invitation"
    ann.accept_grant(token.grant.data)
    assert ann.is_member(BEN.peer_id) and ann.grants[0].peer_id == BEN.peer_id
    sealed = ben.keys.current.seal("gossip", b"text", b"")
    assert ann.keys.current.open("gossip", sealed, b"") == b"text"
    ann.accept_roll(owner.data)
    assert ann.is_member(BEN.peer_id) and ann.grants == ()


def test_grant_is_worth_nothing_after_a_revocation() -> None:
    owner = found(ANN)
    token = decode_token(invite(owner, BEN))
    owner.revoke(BEN.peer_id, NOW)
    ann = membership_of(ANN, owner.data)
    assert fault_of(lambda: ann.accept_grant(token.grant.data)) == "old"
    assert not ann.is_member(BEN.peer_id)


def test_newcomer_takes_no_roll_from_before_its_invitation_epoch() -> None:
    owner = found(ANN, EVE)
    before = owner.data
    owner.revoke(EVE.peer_id, NOW)
    token = decode_token(invite(owner, BEN))
    ben = membership_of(BEN)
    ben.accept_own_grant(token.grant.data, token.wrapped)
    assert fault_of(lambda: ben.accept_roll(before)) == "old"


@pytest.mark.parametrize(("now", "is_valid"), [(NOW + DAY_S - 1, True), (NOW + DAY_S, False)])
def test_a_grant_is_valid_until_its_end(now: float, is_valid: bool) -> None:
    ann = membership_of(ANN, found(ANN, until=NOW + 2 * DAY_S).data, now=now)
    if is_valid:
        ann.accept_grant(GRANT)
    else:
        assert fault_of(lambda: ann.accept_grant(GRANT)) == "old"
    assert ann.is_member(BEN.peer_id) is is_valid


def test_a_grant_counts_only_where_it_adds_to_a_roll_of_its_epoch() -> None:
    owner = found(ANN, BEN)
    ben, cat = (decode_token(invite(owner, one)).grant.data for one in (BEN, CAT))
    newcomer, ann = membership_of(EVE), membership_of(ANN, owner.data)
    for membership in (newcomer, ann):
        for grant in (ben, cat):
            assert membership.accept_grant(grant).epoch == 1
        assert membership.grants == (), "without a roll, or on it already"
    assert not newcomer.is_member(BEN.peer_id)
    owner.rotate(NOW)
    late = decode_token(invite(owner, EVE)).grant.data
    assert ann.accept_grant(late).epoch == 2 and not ann.is_member(EVE.peer_id), "its roll is on its way"
    assert ann.grants == ()


def test_grants_end_with_the_roll_of_a_later_epoch() -> None:
    owner = found(ANN)
    ann = membership_of(ANN, owner.data)
    eve, cat = (decode_token(invite(owner, one)).grant.data for one in (EVE, CAT))
    ann.accept_grant(eve)
    invite(owner, BEN)
    stays = replace(owner.roll, members=tuple(one for one in owner.roll.members if one.peer_id != CAT.peer_id))
    ann.accept_grant(cat)
    ann.accept_roll(encode_roll(stays, OWNER))
    assert [one.peer_id for one in ann.grants] == [CAT.peer_id], "Eve is on the roll"
    owner.revoke(CAT.peer_id, NOW)
    ann.accept_roll(owner.data)
    assert ann.grants == () and not ann.is_member(CAT.peer_id)


def test_expired_and_forged_grants_are_refused() -> None:
    ann = membership_of(ANN, found(ANN).data, now=NOW + 2 * DAY_S)
    assert fault_of(lambda: ann.accept_grant(GRANT)) == "old"
    request = MembershipRequest(EVE.peer_id, box_key(EVE).public_key().public_bytes_raw())
    forged = encode_grant(EVE, SILO_ID, request, NOW + DAY_S, 1)
    assert fault_of(lambda: membership_of(ANN, DATA).accept_grant(forged)) == "forged"


def test_many_grants_are_remembered_within_bounds() -> None:
    owner = found(ANN)
    ann = membership_of(ANN, owner.data)
    for number in range(100):
        newcomer = Identity((1000 + number).to_bytes(32, "big"))
        request = MembershipRequest(newcomer.peer_id, box_key(newcomer).public_key().public_bytes_raw())
        ann.accept_grant(encode_grant(OWNER, SILO_ID, request, NOW + DAY_S, 1))
    assert len(ann.grants) == 64


def test_token_of_another_is_refused_and_its_key_does_not_open() -> None:
    token = decode_token(TOKEN)
    assert fault_of(lambda: membership_of(EVE).accept_own_grant(token.grant.data, token.wrapped)) == "stranger"
    request = MembershipRequest(EVE.peer_id, box_key(EVE).public_key().public_bytes_raw())
    own = encode_grant(OWNER, SILO_ID, request, NOW + DAY_S, 1)
    eve = membership_of(EVE)
    assert fault_of(lambda: eve.accept_own_grant(own, token.wrapped)) == "forged"
    assert eve.own_grant is None and not eve.is_member(EVE.peer_id)
    for peer_id, key in ((EVE.peer_id, token.grant.box_key), (BEN.peer_id, request.box_key)):
        mixed = encode_grant(OWNER, SILO_ID, MembershipRequest(peer_id, key), NOW + DAY_S, 1)
        assert fault_of(lambda mixed=mixed: eve.accept_own_grant(mixed, token.wrapped)) == "stranger"


def test_token_brings_the_manifest_and_survives_mail() -> None:
    assert decode_token("\n  ".join(TOKEN[i : i + 60] for i in range(0, len(TOKEN), 60))) == decode_token(TOKEN)
    assert decode_token(TOKEN).manifest == MANIFEST and decode_token(TOKEN).manifest_text == MANIFEST_TEXT
    assert len(TOKEN) < 1500, "short enough to paste"


def test_token_with_a_public_manifest_is_refused() -> None:
    public = manifests.create(OWNER, "open", 1, NOW, tasks=[{"kind": "reasoning_gym", "name": "lcm"}])
    owner = Owner.found(OWNER, public.id, NOW)
    text = owner.invite(read_request(make_request(BEN)), NOW + DAY_S, NOW, manifests.dump(public, OWNER))
    with pytest.raises(SiloError, match="must be of a silo, got the public swarm open"):
        decode_token(text)


def test_request_of_another_is_refused() -> None:
    text = make_request(BEN)
    assert read_request(text).peer_id == BEN.peer_id
    spoiled = text[:60] + ("A" if text[60] != "A" else "B") + text[61:]
    assert fault_of(lambda: read_request(spoiled)) in ("forged", "malformed")
    with pytest.raises(SiloError, match="must begin with swarm-silo-request-"):
        read_request(TOKEN)


def test_inviting_again_renews_and_never_shortens() -> None:
    owner = found(ANN, BEN)
    invite(owner, BEN, until=NOW + 2 * DAY_S)
    assert owner.roll.member(BEN.peer_id).until == NOW + 2 * DAY_S  # type: ignore[union-attr]
    assert len(owner.roll.members) == 2
    with pytest.raises(SiloError, match="revoke it, then invite anew"):
        invite(owner, BEN, until=NOW + 1)


def test_renewed_grant_counts_before_the_roll_has_come() -> None:
    owner = found(ANN, BEN, until=NOW + 10)
    ann = membership_of(ANN, owner.data, now=NOW + 5)
    ann.accept_grant(decode_token(invite(owner, BEN)).grant.data)
    late = membership_of(ANN, found(ANN, BEN, until=NOW + 10).data, now=NOW + 11)
    assert not late.is_member(BEN.peer_id)
    late.accept_grant(decode_token(invite(owner, BEN)).grant.data)
    assert late.is_member(BEN.peer_id)


def test_a_silo_has_a_bounded_number_of_members() -> None:
    owner = found(ANN)
    line = owner.roll.members[0]
    full = tuple(replace(line, peer_id=f"{line.peer_id}-{number}") for number in range(MAX_MEMBERS))
    with pytest.raises(SiloError, match="<= 1024 members"):
        invite(Owner(OWNER, replace(owner.roll, members=full)), BEN)


def test_member_twice_on_a_roll_is_refused() -> None:
    roll = found(ANN).roll
    doubled = encode_roll(replace(roll, members=roll.members * 2), OWNER)
    assert fault_of(lambda: decode_roll(doubled, OWNER.peer_id, SILO_ID)) == "malformed"


def test_a_full_roll_fits_its_bound() -> None:
    roll = found(ANN).roll
    members = tuple(
        Member(Identity(number.to_bytes(32, "big")).peer_id, b"x" * 32, NOW, roll.members[0].wrapped)
        for number in range(1, MAX_MEMBERS + 1)
    )
    assert len(decode_roll(encode_roll(replace(roll, members=members), OWNER), OWNER.peer_id, SILO_ID).members) == 1024


@pytest.mark.parametrize("secret", [OWNER.seed.hex(), "ooooo", ANN.seed.hex()])
def test_nothing_of_a_silo_prints_a_secret(secret: str) -> None:
    token, roll = decode_token(TOKEN), found(ANN).roll
    shown = repr((token, roll, token.grant, roll.members[0], membership_of(ANN, DATA).keys.current))
    assert secret not in shown and roll.members[0].wrapped.hex() not in shown
    assert repr(roll.members[0].wrapped)[2:-1] not in shown
