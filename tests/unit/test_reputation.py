"""What a node remembers of others, by its own evidence; and which part of what it reads each gets for that."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from swarm.admission.reward_verifier import STRANGERS_BURST_S, STRANGERS_PER_S, VerificationBudget
from swarm.config import NetworkSection, SharingSection
from swarm.network.make_transport import make_transport
from swarm.network.transport import Contact, ValidationResult
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import Identity
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.sharing.inbox import MAX_STRANGERS, considered_of
from swarm.sharing.index import Shard
from swarm.sharing.peer_tracker import PeerTracker
from swarm.sharing.reputation import (
    BURST_GROUPS,
    FIRST_BAN_S,
    KNOWN_ARE_HEARD_FOR_S,
    MAX_AUTHORS,
    MAX_BAN_S,
    PROBATION_BODIES,
    AddressGroups,
    AuthorShares,
    Reputation,
    SeenAt,
)
from swarm.sharing.usefulness import UniformChoice
from swarm.types import Header
from tests.unit.experience_factory import (
    ALICE,
    MALLORY,
    READER,
    Clock,
    context_of,
    group,
    header_of,
    make_inbox,
    signed,
)

HALF_LIFE_S = 21_600.0
LIAR = MALLORY.peer_id
KNOWN = (ALICE.peer_id, "bob", "carol")


def made(clock: Clock | None = None, path: Path | None = None) -> Reputation:
    return Reputation(HALF_LIFE_S, clock or Clock(), path)


def known(reputation: Reputation, *authors: str) -> Reputation:
    for author in authors:
        for _ in range(20):
            reputation.admitted(author)
    return reputation


def test_weight_by_hand_and_what_says_nothing() -> None:
    reputation = made()
    assert reputation.weight(LIAR) == 0.5
    for reason in (Rejection.TASK_FAILED, Rejection.TASK_MISMATCH, Rejection.UNKNOWN_TASK, Rejection.STRANGERS_BUSY):
        assert not reputation.refused(LIAR, reason)
    assert reputation.weight(LIAR) == 0.5
    for _ in range(3):
        reputation.admitted(LIAR)
    assert reputation.weight(LIAR) == pytest.approx(4 / 5)
    reputation.refused(LIAR, Rejection.UNAVAILABLE)
    assert reputation.weight(LIAR) == pytest.approx(4 / 5.25)
    reputation.refused(LIAR, Rejection.REWARD_MISMATCH)  # half of what was earned, and four
    assert reputation.weight(LIAR) == pytest.approx(2.5 / (2 + 1.5 + 4.25))


def test_evidence_halves_with_every_half_life() -> None:
    clock = Clock()
    reputation = made(clock)
    for _ in range(6):
        reputation.admitted(LIAR)
    clock.now += HALF_LIFE_S
    assert reputation.weight(LIAR) == pytest.approx(4 / 5)
    clock.now += 20 * HALF_LIFE_S
    assert reputation.weight(LIAR) == pytest.approx(0.5, abs=1e-4)
    clock.now -= 100 * HALF_LIFE_S  # a clock set back makes nothing larger
    assert reputation.weight(LIAR) <= 7 / 8


def test_evidence_counts_up_to_a_hundred_in_the_proportion_in_which_it_came() -> None:
    reputation = made()
    for _ in range(300):
        reputation.admitted(LIAR)
    assert reputation.weight(LIAR) == pytest.approx(101 / 102)
    reputation.hint(LIAR, 100.0)  # half of two hundred is bad, and a hundred count
    assert reputation.weight(LIAR) == pytest.approx(51 / 102)
    assert reputation.trust(LIAR) == pytest.approx((51 / 101) ** 3)


def test_a_strangers_lie_bans_it_and_bans_grow_and_expire() -> None:
    clock = Clock()
    reputation = made(clock)
    assert reputation.refused(LIAR, Rejection.REWARD_MISMATCH)
    assert reputation.is_banned(LIAR)
    assert not reputation.refused(LIAR, Rejection.REWARD_MISMATCH), "it is banned already"
    clock.now += FIRST_BAN_S
    assert not reputation.is_banned(LIAR)
    assert reputation.refused(LIAR, Rejection.REWARD_MISMATCH)
    clock.now += FIRST_BAN_S
    assert reputation.is_banned(LIAR)
    clock.now += FIRST_BAN_S
    assert not reputation.is_banned(LIAR)
    for _ in range(12):
        reputation.refused(LIAR, Rejection.COPIED)
        clock.now += MAX_BAN_S
    assert not reputation.is_banned(LIAR)


def test_each_ban_is_twice_as_long_as_the_one_before_unless_that_was_long_ago() -> None:
    clock = Clock()
    reputation = made(clock)

    def ban_s() -> float:
        assert reputation.refused(LIAR, Rejection.REWARD_MISMATCH)
        until = reputation.banned_until(LIAR)
        banned_s, clock.now = until - clock.now, until
        assert reputation.banned_until(LIAR) == 0
        return banned_s

    bans = []
    for pause_s in (0.0, 3600.0, 2 * MAX_BAN_S, 2 * MAX_BAN_S + 1, 0.0):
        bans.append(ban_s())
        clock.now += pause_s
    assert bans == [FIRST_BAN_S, 2 * FIRST_BAN_S, 4 * FIRST_BAN_S, 8 * FIRST_BAN_S, FIRST_BAN_S]


def test_a_false_claim_bans_only_below_a_fifth_of_the_trust() -> None:
    reputation = made()
    for author in ("at the bound", "below"):
        reputation.admitted(author)
        reputation.hint(author, 1.0)  # 1.5 of 7.5 are left of it once it lies
    reputation.hint("below", 0.01)
    assert not reputation.refused("at the bound", Rejection.COPIED) and reputation.weight("at the bound") == 0.2
    assert reputation.refused("below", Rejection.COPIED)


def test_unlikely_answers_count_by_their_part_of_the_group() -> None:
    reputation = made()
    reputation.unlikely(LIAR, 0.25)  # half a bad body
    assert reputation.weight(LIAR) == pytest.approx(1 / 2.5)


def test_probation_ends_with_the_fourth_good_body_unless_more_of_them_were_bad() -> None:
    reputation, known_after = made(), []
    for _ in range(4):
        known_after.append(reputation.is_known(LIAR))
        reputation.admitted(LIAR)
    assert known_after == [False] * 4 and reputation.is_known(LIAR) and reputation.num_known() == 1
    reputation.hint(LIAR, 4.0)
    assert reputation.is_known(LIAR) and reputation.has_known(), "as many bad ones"
    reputation.hint(LIAR, 0.01)
    assert not reputation.is_known(LIAR) and not reputation.has_known()


def test_an_author_is_untried_until_a_tenth_of_a_body_speaks_for_or_against_it() -> None:
    reputation = made()
    reputation.hint("hardly", 0.09)
    reputation.hint("a tenth", 0.1)
    reputation.admitted("both")
    reputation.hint("both", 1.0)
    assert [reputation.is_untried(name) for name in ("new", "hardly", "a tenth", "both")] == [True, True, False, False]


def test_who_is_well_known_may_err_once_and_cannot_spend_a_good_name_on_lies() -> None:
    reputation = known(made(), LIAR)
    outcomes = [reputation.refused(LIAR, Rejection.REWARD_MISMATCH) for _ in range(4)]
    assert outcomes == [False, False, False, True]


def test_silence_and_slowness_ban_nobody() -> None:
    reputation = made()
    for _ in range(500):
        assert not reputation.refused(LIAR, Rejection.UNAVAILABLE) and not reputation.refused(LIAR, Rejection.TOO_SLOW)
        assert not reputation.refused(LIAR, Rejection.WRONG_HASH)
    assert not reputation.is_banned(LIAR) and reputation.weight(LIAR) < 0.02


def test_strangers_do_not_displace_whom_we_know() -> None:
    reputation = known(made(), ALICE.peer_id)
    for number in range(3 * MAX_AUTHORS):
        reputation.refused(f"sybil {number}", Rejection.UNAVAILABLE)
    assert len(reputation) == MAX_AUTHORS
    assert reputation.is_known(ALICE.peer_id)


def test_who_has_just_come_displaces_the_one_known_longest_ago_where_all_are_known() -> None:
    clock = Clock()
    reputation = made(clock)
    for number in range(MAX_AUTHORS):
        clock.now += 1e-3
        for _ in range(int(PROBATION_BODIES)):
            reputation.admitted(str(number))
    reputation.hint("new", 1.0)
    remembered = reputation.last_evidence()
    assert "new" in remembered and "0" not in remembered and "1" in remembered
    reputation.hint("next", 1.0)
    assert "new" not in reputation.last_evidence() and "1" in reputation.last_evidence()


@pytest.mark.parametrize("field", ["good", "bad", "at", "banned_until", "num_bans"])
@pytest.mark.parametrize("value", ['"x"', "null", "-2", "NaN", "1e400", "[]", "true"])
def test_a_number_that_is_none_fails_no_later_judgement(tmp_path: Path, field: str, value: str) -> None:
    path = tmp_path / "reputation.json"
    path.write_text(f'{{"mallory": {{"{field}": {value}}}}}')
    reputation = Reputation(3600, Clock(), path)
    assert reputation.weight("mallory") == 0.5 and not reputation.is_banned("mallory")


def test_a_ban_of_a_file_lasts_no_longer_than_one_that_this_node_gives(tmp_path: Path) -> None:
    path, clock = tmp_path / "reputation.json", Clock()
    path.write_text(f'{{"alice": {{"at": {clock()}, "banned_until": 1e11, "good": 1e9}}}}')
    reputation = Reputation(3600, clock, path)
    assert reputation.banned_until("alice") == clock() + MAX_BAN_S
    assert reputation.weight("alice") < 0.995, "and evidence is bounded as ever"


def test_reputation_outlives_the_process_and_a_damaged_file_does_not_stop_the_next(
    tmp_path: Path, is_durable: Callable[[Path], bool]
) -> None:
    path, clock = tmp_path / "reputation.json", Clock()
    first = known(made(clock, path), ALICE.peer_id)
    first.refused(LIAR, Rejection.HEADER_MISMATCH)
    first.save()
    again = made(clock, path)
    assert again.is_known(ALICE.peer_id) and again.is_banned(LIAR)
    assert again.weight(ALICE.peer_id) == first.weight(ALICE.peer_id)
    assert is_durable(path)
    for damaged in ('{"a": 1}', '{"a": {"good": 1, "unknown": 2}}', "[]", '{"a'):
        path.write_text(damaged)
        assert len(made(clock, path)) == 0


# --- shares


def networks_of_their_own(peer_id: str) -> tuple[str, ...]:
    return (f"/memory/{peer_id}",)


def shares_of(reputation: Reputation, seen_at: SeenAt = networks_of_their_own, share: float = 0.25) -> AuthorShares:
    return AuthorShares(reputation, share, AddressGroups(seen_at))


def test_bodies_of_known_authors_earn_strangers_their_part_over_time() -> None:
    shares = shares_of(known(made(), *KNOWN))
    strangers = header_of([group()], b"a", author=LIAR)
    own = header_of([group()] * 3, b"b", author=KNOWN[0])
    shares.heard(KNOWN[0])
    assert shares.within_share([strangers]) == [strangers]
    for _ in range(14):
        shares.pulled(strangers)  # two more than the burst
    assert shares.within_share([strangers, own]) == [own]
    for _ in range(2):
        shares.pulled(own)  # three groups earn strangers one
    assert shares.within_share([strangers, own]) == [own]
    shares.pulled(own)
    assert shares.within_share([strangers, own]) == [strangers, own]
    shares.put_back(own)
    assert shares.within_share([strangers, own]) == [own]


def test_strangers_wait_from_their_last_group_on_until_no_known_author_is_active() -> None:
    clock = Clock()
    shares = shares_of(known(made(clock), *KNOWN))
    stranger, own = (header_of([group()], b"", author=author) for author in (LIAR, KNOWN[0]))
    shares.heard(KNOWN[0])
    shares.heard(LIAR)
    for _ in range(int(BURST_GROUPS)):
        assert shares.within_share([stranger, own]) == [stranger, own]
        shares.pulled(stranger)
    assert shares.within_share([stranger, own]) == [own]
    clock.now += KNOWN_ARE_HEARD_FOR_S
    shares.heard(LIAR)
    assert shares.within_share([stranger, own]) == [own]
    clock.now += 1
    assert shares.within_share([stranger, own]) == [stranger, own]


@pytest.mark.parametrize("num_before", [1000, -1000])
def test_neither_debt_nor_credit_of_strangers_is_more_than_a_burst(num_before: int) -> None:
    shares = shares_of(known(made(), *KNOWN))
    shares.heard(KNOWN[0])
    stranger, own = (header_of([group()], b"", author=author) for author in (LIAR, KNOWN[0]))
    for _ in range(abs(num_before)):
        shares.pulled(own if num_before > 0 else stranger)
    spent, spending = (stranger, 1) if num_before > 0 else (own, 3)  # three groups of a known author earn strangers one
    for _ in range(int(BURST_GROUPS) * spending):
        assert (shares.within_share([stranger]) == [stranger]) == (num_before > 0)
        shares.pulled(spent)
    shares.pulled(spent)
    assert (shares.within_share([stranger]) == [stranger]) == (num_before < 0)


def test_strangers_never_wait_where_their_share_has_no_bound() -> None:
    shares = shares_of(known(made(), *KNOWN), share=1.0)
    shares.heard(KNOWN[0])
    headers = [header_of([group()], b"", author=author) for author in (LIAR, KNOWN[0])]
    for _ in range(20):
        for header in headers:
            shares.pulled(header)
    assert shares.within_share(headers) == headers


def test_bound_on_strangers_counts_each_known_author_once() -> None:
    shares = shares_of(known(made(), *KNOWN))
    assert shares.bound_on_strangers([LIAR, "new"]) == ({LIAR, "new"}, 1.0)
    assert shares.bound_on_strangers([LIAR, KNOWN[0], KNOWN[0]]) == ({LIAR}, 0.75)
    assert shares.bound_on_strangers([LIAR, *KNOWN, "new"]) == ({LIAR, "new"}, 0.25)


def test_neighbours_are_the_strangers_of_one_address_group() -> None:
    at_home = ["/ip4/192.0.2.1/tcp/1"]
    shares = shares_of(
        known(made(), "known"), seen(dict.fromkeys(("a", "b", "known"), at_home) | {"c": ["/ip4/8.8.8.8/tcp/1"]})
    )
    assert shares.neighbours("a", ["b", "c", "known"]) == {"a", "b"}


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ((), None),
        (("/ip4/8.8.8.8/tcp/1",), "8.8.8.0/24"),
        (("/ip4/8.8.8.8/tcp/1", "/ip4/8.8.4.4/tcp/1"), "8.8.4.0/24"),
        (("/ip4/8.8.8.8/tcp/1", "/ip4/10.0.0.1/tcp/1"), None),
        (("/dns4/Example.org/tcp/1",), "host example.org"),
    ],
)
def test_public_group_of_a_peer(addresses: tuple[str, ...], expected: str | None) -> None:
    assert shares_of(made(), seen({"a": addresses})).public_group("a") == expected


def seen(places: Mapping[str, Sequence[str]]) -> SeenAt:
    return lambda peer_id: places.get(peer_id, ())


def test_strangers_together_get_their_share_and_no_more() -> None:
    honest = [f"honest {i}" for i in range(4)]
    sybils = [f"sybil {i}" for i in range(50)]
    standing = shares_of(known(made(), *honest)).standing([*honest, *sybils])
    of_sybils = sum(standing[sybil] for sybil in sybils) / sum(standing.values())
    assert of_sybils == pytest.approx(0.25)
    reputation = known(made(), *honest)
    for name in (*sybils, honest[0]):
        reputation.admitted(name)
    for name in (*sybils[:20], honest[0]):
        reputation.hint(name, 1.0)  # less of what each weighs, and the same bound on all
    standing = shares_of(reputation).standing([*honest, *sybils])
    assert sum(standing[sybil] for sybil in sybils) / sum(standing.values()) == pytest.approx(0.25)
    alone = shares_of(known(made(), *honest), share=1.0).standing([*honest, sybils[0]])
    assert alone[sybils[0]] == pytest.approx(1 / (1 + PROBATION_BODIES))


def test_a_share_grows_through_probation() -> None:
    reputation = known(made(), *KNOWN)
    parts = []
    for _ in range(6):
        standing = shares_of(reputation).standing([*KNOWN, LIAR])
        parts.append(standing[LIAR] / sum(standing.values()))
        reputation.admitted(LIAR)
    assert parts == pytest.approx([(1 + n) / 5 / (3 + (1 + n) / 5) for n in range(4)] + [0.25, 0.25])


def test_whoever_is_known_first_does_not_crowd_out_those_who_come_next() -> None:
    others = [f"honest {i}" for i in range(4)]
    parts = []
    for num_known in range(4):
        standing = shares_of(known(made(), *KNOWN[:num_known])).standing([*KNOWN[:num_known], *others])
        parts.append(sum(standing[name] for name in others) / sum(standing.values()))
    assert parts == pytest.approx([1.0, 0.75, 0.5, 0.8 / 3.8])  # with three of them probation begins


def test_where_nobody_lied_all_known_authors_stand_alike_however_much_they_sent() -> None:
    reputation = known(made(), *KNOWN)
    for _ in range(200):
        reputation.admitted(ALICE.peer_id)
    assert len(set(shares_of(reputation).standing(KNOWN).values())) == 1
    reputation.hint("bob", 7.0)
    assert shares_of(reputation).standing(KNOWN)["bob"] == pytest.approx((21 / 28) ** 3), "others have better"


def test_strangers_pay_for_what_strangers_did_until_their_own_first_true_bodies() -> None:
    clock = Clock()
    reputation = made(clock)
    assert reputation.promise("new") == 1.0
    for number in range(39):
        reputation.refused(f"sybil {number}", Rejection.REWARD_MISMATCH)
    assert reputation.promise("new") == pytest.approx(1 / 40)
    reputation.admitted("new")
    assert reputation.promise("new") == pytest.approx((2 / 41 + 1) / 2)
    clock.now += 3600.0
    assert reputation.promise("next") > 1 / 4, "it is soon forgotten"
    for number in range(20):
        reputation.admitted(f"honest {number}")
    assert reputation.promise("next") > 0.85, "and made good by those that come after"


def test_what_strangers_are_like_is_learned_from_the_first_body_of_each() -> None:
    reputation = made()
    for _ in range(2):
        reputation.hint("vague", 0.75)  # counts as one bad body at most
    assert reputation.promise("new") == 1 / 2
    for _ in range(2):
        reputation.admitted("honest")  # the second is no first body any more
    assert reputation.promise("new") == 2 / 3


def test_a_body_of_many_groups_counts_once_in_what_strangers_are_like() -> None:
    """Twelve groups of unlikely answers, which show when they are measured for training, a while after they were admitted."""
    clock = Clock()
    reputation = made(clock)
    reputation.admitted("sybil")
    clock.now += 30.0
    for _ in range(12):
        reputation.unlikely("sybil", 1.0)
    assert reputation.promise("new") > 0.6


def test_what_known_authors_do_says_nothing_about_strangers() -> None:
    reputation = known(made(), *KNOWN)
    before = reputation.promise("new")
    for _ in range(3):
        reputation.refused(ALICE.peer_id, Rejection.REWARD_MISMATCH)
    assert reputation.promise("new") == before


def test_fresh_names_by_the_hundred_hold_up_honest_ones_for_a_few_rounds_even_where_all_are_strangers() -> None:
    """200 names a round that lie once and never come again, three honest ones; 64 failed pulls in a row end a round."""
    reputation, numbers = made(), iter(range(10**6))
    choice = UniformChoice(random.Random(0), shares_of(reputation))
    offered: list[Header] = []
    pulls: list[Counter[bool]] = []
    for _ in range(16):
        fresh = [f"sybil {next(numbers)}" for _ in range(200)]
        random.Random(len(pulls)).shuffle(fresh)
        names = [*fresh[:100], *KNOWN, *fresh[100:]]
        offered += [header_of([group(author=name)], bytes(4) + name.encode(), author=name) for name in names]
        offered = [header for header in offered if not reputation.is_banned(header.author)][-1024:]
        pulls.append(Counter())
        failures = 0
        while failures < 64 and pulls[-1][True] < len(KNOWN):
            header = choice.choose(offered, ())
            offered.remove(header)
            is_true = header.author in KNOWN
            pulls[-1][is_true] += 1
            failures = 0 if is_true else failures + 1
            if is_true:
                reputation.admitted(header.author)
            else:
                reputation.refused(header.author, Rejection.REWARD_MISMATCH)
    assert all(round_[True] == len(KNOWN) for round_ in pulls[8:]), pulls
    late = sum(pulls[8:], Counter[bool]())
    assert late[True] > late[False], "the part of strangers is a quarter once three are known"


def test_among_strangers_an_address_group_counts_as_two() -> None:
    sybils = [f"sybil {i}" for i in range(50)]
    places = {
        name: [f"/ip4/10.9.8.{number}/tcp/1", f"/ip4/77.{number}.1.1/tcp/1"] for number, name in enumerate(sybils)
    }
    honest = [f"honest {i}" for i in range(4)]
    places |= {name: [f"/ip4/192.{number}.0.1/tcp/1"] for number, name in enumerate(honest)}
    standing = shares_of(made(), seen(places)).standing([*honest, *sybils])
    assert sum(standing[sybil] for sybil in sybils) / sum(standing.values()) == pytest.approx(2 / 6)


def test_a_thousand_fresh_names_leave_known_authors_and_strangers_elsewhere_in_the_draw() -> None:
    sybils, honest = [f"sybil {i}" for i in range(1000)], [f"honest {i}" for i in range(4)]
    places = {name: [f"/ip4/10.9.8.{number % 250}/tcp/1"] for number, name in enumerate(sybils)}
    places |= {name: [f"/ip4/192.{number}.0.1/tcp/1"] for number, name in enumerate(honest)}
    shares = shares_of(known(made(), *KNOWN), seen(places))
    considered = considered_of({*sybils, *honest, *KNOWN}, shares, random.Random(0))
    assert considered >= {*honest, *KNOWN} and len(considered) == MAX_STRANGERS + len(KNOWN)
    few = {*sybils[:MAX_STRANGERS], *KNOWN}
    assert considered_of(few, shares, random.Random(0)) == few


def test_whoever_is_known_cannot_be_crowded_out_by_false_addresses() -> None:
    reputation = known(made(), *KNOWN)
    standing = shares_of(reputation, lambda peer_id: ["/ip4/192.0.2.7/tcp/1"]).standing(
        [*KNOWN, *(f"sybil {i}" for i in range(50))]
    )
    assert standing[ALICE.peer_id] / sum(standing.values()) == pytest.approx(1 / 3.4)  # two strangers' part is .4


def test_those_who_were_never_connected_are_one_group() -> None:
    hidden = [f"hidden {i}" for i in range(8)]
    shares = shares_of(made(), seen({"open": ["/ip4/192.0.2.1/tcp/1"]}))
    assert shares.standing([*hidden, "open"]) == {"open": 1.0} | dict.fromkeys(hidden, 0.25)


def test_address_groups_by_kind() -> None:
    relay = "/ip4/10.0.0.1/tcp/1/p2p/12D3KooWRelay/p2p-circuit"
    groups = AddressGroups(seen({"a": ["/ip4/10.0.0.77/tcp/0", "/ip6/2001:db8:1:2::1/tcp/0", relay]}))
    assert groups.of("a") == {"10.0.0.0/24", "2001:db8:1::/48", "relay 12D3KooWRelay"}
    assert groups.of("nobody") == {"unknown"}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/ip4/10.0.0.77/tcp/1/p2p/12D3KooWDirect", "10.0.0.0/24"),
        ("/p2p-circuit", "unknown"),
        ("/ip4", "unknown"),
        ("", "unknown"),
        ("/ip4/10.0.0.300/tcp/1", "unknown"),
    ],
)
def test_address_without_a_relay_or_a_network_is_no_group_of_its_own(address: str, expected: str) -> None:
    assert AddressGroups(seen({"a": [address]})).of("a") == {expected}


async def test_sixteen_fresh_names_that_invent_addresses_get_the_part_of_two(tmp_path: Path) -> None:
    """What counts is where the transport of a node has seen them, and not what their presence says."""
    transport = make_transport(NetworkSection(backend="libp2p"), READER, tmp_path)
    assert transport is not None
    honest, sybils = KNOWN, [Identity(bytes([number]) * 32).peer_id for number in range(16)]
    for number, name in enumerate(sybils):
        transport.meet(Contact(name, (f"/ip4/11.{number}.0.1/tcp/4001",), (), hosts_index=False))
    transport._dialling.see(sybils[0], ["/ip4/12.0.0.1/tcp/50000"])  # type: ignore[attr-defined]
    for number, name in enumerate(honest):
        transport._dialling.see(name, [f"/ip4/13.{number}.0.1/tcp/50000"])  # type: ignore[attr-defined]
    shares = PeerTracker(SharingSection(), context_of(), seen_at=transport.seen_at).shares
    standing = shares.standing([*honest, *sybils])
    of_sybils = sum(standing[name] for name in sybils) / sum(standing.values())
    assert of_sybils == pytest.approx((1 + 2) / (1 + 2 + len(honest)))  # one came and shows itself, the rest are two


def test_headers_are_drawn_by_standing() -> None:
    choice = UniformChoice(random.Random(0), shares_of(known(made(), *KNOWN)))
    offered = [header_of([group(author=name)], b"", author=name) for name in (*KNOWN, LIAR)]
    liar = offered[-1]
    drawn = Counter(choice.choose(offered, ()).author for _ in range(2000))
    assert 0.04 < drawn[LIAR] / 2000 < 0.085  # .2 of 3.2
    assert choice.choose([liar], ()) == liar, "where nobody else offers"


def test_headers_of_a_banned_author_are_not_offered_nor_passed_on_until_the_ban_ends() -> None:
    clock = Clock()
    config = SharingSection()
    authors = PeerTracker(config, context_of(clock=clock))
    inbox = make_inbox(config, clock, tracker=authors)

    def arrives(number: int) -> ValidationResult:
        header = header_of([group(author=LIAR)], bytes([number]), author=LIAR, created_at=clock.now)
        return inbox.take_gossip(Shard(0, 0), signed(header, MALLORY))

    assert arrives(1) is ValidationResult.ACCEPT
    authors.refused(LIAR, Rejection.REWARD_MISMATCH)
    assert inbox.pick() is None, "what it had offered before is gone too"
    assert arrives(2) is ValidationResult.IGNORE
    assert inbox.totals.rejected == {"banned": 2}
    clock.now += FIRST_BAN_S - 300
    assert arrives(3) is ValidationResult.IGNORE
    clock.now += 300
    header = header_of([group(author=LIAR)], b"4", author=LIAR, created_at=clock.now, expires_at=clock.now + 600)
    assert inbox.take_gossip(Shard(0, 0), signed(header, MALLORY)) is ValidationResult.ACCEPT


def test_a_ban_empties_the_pool_of_its_author() -> None:
    clock = Clock()
    pool = ExperiencePool(":memory:", SharingSection(), clock)
    pool.add(b"m" * 32, clock.now + 600, clock.now, [group(index=i, author=LIAR) for i in range(3)])
    pool.add(b"a" * 32, clock.now + 600, clock.now, [group()])
    assert pool.drop_author(LIAR) == 3
    assert pool.num_fresh() == 1 and pool.dropped == {"banned_author": 3} and pool.knows_body(b"m" * 32)


# --- time for checking


def test_all_strangers_together_have_one_budget_and_known_authors_their_own() -> None:
    now = 0.0
    budget = VerificationBudget(lambda: now, is_known=lambda author: author == "alice")
    for number in range(6):
        budget.check(f"fresh {number}")
        budget.spend(f"fresh {number}", 12.0)  # below what one author gets
    with pytest.raises(InvalidRecord) as caught:
        budget.check("another")
    assert caught.value.reason is Rejection.STRANGERS_BUSY
    budget.check("alice")
    now = (72.0 - STRANGERS_BURST_S) / STRANGERS_PER_S + 0.1
    budget.check("another")
