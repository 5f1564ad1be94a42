"""Which memberships an owner may sign, and what each command makes of the roll."""

from dataclasses import replace

import pytest

from swarm.errors import SiloError
from swarm.records.identity import Identity
from swarm.silo.grant import decode_token
from swarm.silo.owner import Owner
from swarm.silo.roll import MAX_MEMBERS, MAX_TIME_S
from tests.unit.silo_factory import DAY_S, NOW, OWNER, found, identity_of, invite

ANN, BEN, CAT = (identity_of(number) for number in range(3))


def listed(owner: Owner) -> list[str]:
    return [one.peer_id for one in owner.roll.members]


def test_each_command_makes_the_next_version_and_only_some_the_next_epoch() -> None:
    owner = found(ANN, BEN)
    assert (owner.roll.version, owner.roll.epoch, listed(owner)) == (3, 1, [ANN.peer_id, BEN.peer_id])
    invite(owner, CAT)
    assert (owner.roll.version, owner.roll.epoch) == (4, 1)
    invite(owner, ANN)
    assert (owner.roll.version, listed(owner)) == (5, [BEN.peer_id, CAT.peer_id, ANN.peer_id])
    owner.revoke(BEN.peer_id, NOW)
    assert (owner.roll.version, owner.roll.epoch, listed(owner)) == (6, 2, [CAT.peer_id, ANN.peer_id])
    owner.rotate(NOW)
    assert (owner.roll.version, owner.roll.epoch) == (7, 3)
    with pytest.raises(SiloError, match="who is none"):
        owner.revoke(BEN.peer_id, NOW)


@pytest.mark.parametrize(
    ("until", "is_valid"),
    [(NOW - 1, False), (NOW, False), (NOW + 1, True), (MAX_TIME_S, True), (MAX_TIME_S + 1, False)],
)
def test_a_membership_ends_after_now_and_within_what_a_roll_can_hold(until: float, is_valid: bool) -> None:
    owner = found(ANN)
    if is_valid:
        assert decode_token(invite(owner, BEN, until)).grant.until == until
    else:
        with pytest.raises(SiloError, match="set another --days"):
            invite(owner, BEN, until)
        assert listed(owner) == [ANN.peer_id]


def test_a_membership_is_renewed_to_the_same_or_a_later_end() -> None:
    owner = found(ANN, until=NOW + DAY_S)
    for until in (NOW + DAY_S, NOW + 2 * DAY_S):
        invite(owner, ANN, until)
        assert [one.until for one in owner.roll.members] == [until]
    with pytest.raises(SiloError, match="revoke it, then invite anew"):
        invite(owner, ANN, NOW + 2 * DAY_S - 1)


def test_the_last_place_is_given_and_who_is_on_a_full_roll_is_renewed() -> None:
    line = found(ANN).roll.members[0]
    others = tuple(replace(line, peer_id=Identity(n.to_bytes(32, "big")).peer_id) for n in range(1, MAX_MEMBERS))
    owner = Owner(OWNER, replace(found().roll, members=others))
    invite(owner, ANN)
    invite(owner, ANN, NOW + 2 * DAY_S)
    assert len(owner.roll.members) == MAX_MEMBERS
    with pytest.raises(SiloError, match="<= 1024 members"):
        invite(owner, BEN)


def test_a_rotation_drops_whose_time_is_over() -> None:
    owner = found(ANN)
    invite(owner, BEN, NOW + 10)
    invite(owner, CAT, NOW + 11)
    owner.rotate(NOW + 10)
    assert listed(owner) == [ANN.peer_id, CAT.peer_id]
