"""What is taken from the swarm: useful things more often, and nobody gains by claims, by volume or by lies."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm.config import SharingSection
from swarm.pool.experience_pool import ExperiencePool, PooledGroup
from swarm.records.codec import encode_body
from swarm.records.identity import Identity
from swarm.records.rejection import Rejection
from swarm.sharing.inbox import NewestVersions
from swarm.sharing.reputation import Reputation
from swarm.sharing.usefulness import Beliefs, InformativeChoice, UniformChoice, Usefulness
from swarm.types import GroupSummary, Header, Lineage, RolloutGroup, TaskRef
from tests.unit.experience_factory import ALICE, LINEAGE, MALLORY, NOW, Clock, group, header_of

HONEST = [Identity(bytes([number]) * 32).peer_id for number in range(4)]
LIAR = MALLORY.peer_id
DRAWS = 2000


def reputation_of() -> Reputation:
    return Reputation(21_600.0, Clock())


def usefulness(beliefs: Beliefs | None = None, reputation: Reputation | None = None) -> Usefulness:
    made = Usefulness(600.0, Clock(), (reputation or reputation_of()).weight)
    made.learn(beliefs or {})
    return made


def offer(author: str, *claims: float, source: str = "spelling", number: int = 0, **changes: object) -> Header:
    """A header about as many groups as there are claimed mean rewards."""
    groups = tuple(GroupSummary(TaskRef(source, "cd" * 8, 99, i), 4, mean) for i, mean in enumerate(claims))
    return replace(header_of([group()], b""), author=author, sequence=number, groups=groups, **changes)  # type: ignore[arg-type]


def in_pool(source: str = "spelling", mean_reward: float = 0.5, **changes: object) -> PooledGroup:
    return replace(PooledGroup(ALICE.peer_id, LINEAGE.policy, source, mean_reward, NOW), **changes)  # type: ignore[arg-type]


def informative(useful: Usefulness | None = None, pool: ExperiencePool | None = None, **settings: object):
    config = SharingSection.model_validate(settings)
    pool = pool or ExperiencePool(":memory:", config, Clock())
    return InformativeChoice(config, pool=pool, usefulness=useful or usefulness(), rng=random.Random(0), shares=None)


def chosen(
    choice: InformativeChoice | UniformChoice, offered: list[Header], under_way: Sequence[Header] = ()
) -> Header:
    header = choice.choose(offered, under_way)
    assert header is not None
    return header


def shares(choice: InformativeChoice | UniformChoice, offered: list[Header]) -> dict[str, float]:
    counts = Counter(chosen(choice, offered).author for _ in range(DRAWS))
    return {author: counts[author] / DRAWS for author in {header.author for header in offered}}


def test_weight_by_hand() -> None:
    """Beta(1, 1) and one answer of mean ½: 4 · 1.5 · 1.5 / (3 · 4) = ¾; half of its age left; a stranger's word ½."""
    assert usefulness().of_header(offer(LIAR, 0.5, created_at=NOW - 300)) == pytest.approx(0.75 * 0.5 * 0.5)
    assert usefulness({"spelling": (5.0, 2.0)}).of_header(offer(LIAR, 1.0)) == pytest.approx(4 * 12 / (8 * 9) * 0.5)
    assert usefulness({"spelling": (5.0, 2.0)}).of_group(in_pool(mean_reward=0.25)) == pytest.approx(
        4 * 6 * 5 / (11 * 12) * 0.5
    )


def test_the_frontier_is_wanted_most_then_the_unknown_and_hopeless_or_solved_things_least() -> None:
    useful = usefulness({"frontier": (20.0, 20.0), "solved": (40.0, 0.5), "hopeless": (0.5, 40.0)})
    weights = [useful.of_group(in_pool(source)) for source in ("frontier", "unknown", "solved", "hopeless")]
    assert weights == sorted(weights, reverse=True) and weights[1] > 2 * weights[2]
    assert usefulness({"solved": (400.0, 0.5)}).of_group(in_pool("solved", 1.0)) == 0.05  # the floor: never nothing


def test_claims_move_a_weight_by_an_eighth_at_most_where_nothing_is_known_and_hardly_where_something_is() -> None:
    best, worst = offer(LIAR, 0.5), offer(LIAR, 0.0)
    unknown, known = usefulness(), usefulness({"spelling": (15.0, 15.0)})
    assert unknown.of_header(best) / unknown.of_header(worst) == pytest.approx(1.125)
    assert known.of_header(best) / known.of_header(worst) < 1.002


def test_an_author_that_claims_one_half_everywhere_gains_no_more_than_that() -> None:
    honest = [offer(author, 0.0, 1.0) for author in HONEST]
    got = shares(informative(), [*honest, offer(LIAR, 0.5, 0.5)])
    assert got[LIAR] < 0.2 * 1.125 + 0.03


def test_an_author_that_is_caught_lying_falls_back_and_is_still_looked_at() -> None:
    reputation = reputation_of()
    for author in HONEST:
        reputation.admitted(author)
    for _ in range(2):
        reputation.refused(LIAR, Rejection.HEADER_MISMATCH)
    offered = [offer(author, 0.25) for author in HONEST] + [offer(LIAR, 0.5)]
    got = shares(informative(usefulness(reputation=reputation)), offered)
    assert 0.0 < got[LIAR] < 0.08  # 1/10 against 2/3: .04


def test_a_flood_of_headers_is_one_ticket() -> None:
    flood = [offer(LIAR, 0.5, number=number) for number in range(300)]
    offered = [offer(author, 0.5) for author in HONEST] + flood
    for choice in (informative(), UniformChoice(random.Random(0))):
        assert abs(shares(choice, offered)[LIAR] - 0.2) < 0.04


def test_useful_headers_of_an_author_come_first_but_not_always() -> None:
    useful = usefulness({"solved": (60.0, 0.5), "spelling": (10.0, 10.0)})
    offered = [offer(LIAR, 1.0, source="solved"), offer(LIAR, 0.5)]
    choice = informative(useful)
    counts = Counter(chosen(choice, offered).groups[0].task.source for _ in range(DRAWS))
    assert counts["spelling"] > 0.85 * DRAWS and counts["solved"] > 0


def test_nobody_is_read_ahead_beyond_its_share_while_others_offer() -> None:
    config = SharingSection(swarm_groups=4)  # 12 are read ahead, 6 of one author
    pool = ExperiencePool(":memory:", config, Clock())
    mine = [group(index=i, author=LIAR) for i in range(5)]
    pool.add(b"1" * 32, NOW + 600, NOW, mine)
    useful = usefulness({"hopeless": (0.5, 60.0)})
    offered = [offer(LIAR, 0.5), offer(HONEST[0], 0.0, source="hopeless")]
    assert shares(informative(useful, pool, swarm_groups=4), offered)[LIAR] > 0.8
    under_way = [offer(LIAR, 0.5, number=7)]  # the sixth
    choice = informative(useful, pool, swarm_groups=4)
    assert {chosen(choice, offered, under_way).author for _ in range(50)} == {HONEST[0]}
    assert choice.choose(offered[:1], under_way) is None  # the next batch is safe without it
    lone = informative(useful, swarm_groups=4, max_share_per_peer=0.1)
    assert chosen(lone, offered[:1], [offer(LIAR, *[0.5] * 3)]).author == LIAR  # but a batch that lacks groups is not


def test_long_headers_gain_nothing() -> None:
    offered = [offer(LIAR, *[0.5] * 12), *(offer(author, 0.5, 0.5, 0.5) for author in HONEST)]
    got = shares(informative(), offered)
    groups = {author: share * (12 if author == LIAR else 3) for author, share in got.items()}
    assert abs(groups[LIAR] / sum(groups.values()) - 0.2) < 0.04


def test_one_lineage_leaves_room_for_the_others() -> None:
    config = SharingSection(swarm_groups=4, max_share_per_lineage=0.5)
    pool = ExperiencePool(":memory:", config, Clock())
    for number, author in enumerate(HONEST[:3]):
        pool.add(bytes([number]) * 32, NOW + 600, NOW, [group(index=i, author=author) for i in range(2)])
    offered = [offer(HONEST[3], 0.5), offer(ALICE.peer_id, 0.5, lineage=Lineage("99" * 16, "22" * 16))]
    choice = informative(None, pool, swarm_groups=4, max_share_per_lineage=0.5)
    assert {chosen(choice, offered).author for _ in range(50)} == {ALICE.peer_id}


def drawn(pool: ExperiencePool, count: int, seed: int, useful: Usefulness) -> list[RolloutGroup]:
    return pool.draw(count, random.Random(seed), useful.of_group)


def test_groups_in_the_pool_are_drawn_by_usefulness_with_one_ticket_per_author() -> None:
    flooded, first = 0, Counter[str]()
    useful = usefulness({"spelling": (10.0, 10.0), "solved": (200.0, 0.5)})
    for seed in range(300):
        pool = ExperiencePool(":memory:", SharingSection(), Clock())
        pool.add(b"m" * 32, NOW + 600, NOW, [group(index=i, author=LIAR) for i in range(40)])
        for number, author in enumerate(HONEST):
            pool.add(bytes([number]) * 32, NOW + 600, NOW, [group(index=number, author=author)])
        flooded += drawn(pool, 1, seed, useful)[0].author == LIAR
        pool.add(b"s" * 32, NOW + 600, NOW, [solved(i) for i in range(4)])
        first.update(one.task.source for one in drawn(pool, 2, seed, useful))
    assert 0.13 < flooded / 300 < 0.28
    assert first["solved"] < 0.1 * first["spelling"]


def solved(index: int) -> RolloutGroup:
    one = group(index=index, author=ALICE.peer_id)
    return replace(one, task=replace(one.task, source="solved"))


def test_the_share_per_peer_holds_for_useful_groups_too() -> None:
    pool = ExperiencePool(":memory:", SharingSection(), Clock())
    pool.add(b"m" * 32, NOW + 600, NOW, [group(index=i, author=LIAR) for i in range(40)])
    pool.add(b"a" * 32, NOW + 600, NOW, [solved(i) for i in range(4)])
    got = drawn(pool, 8, 0, usefulness({"solved": (200.0, 0.5)}))
    assert Counter(one.author for one in got) == {LIAR: 4, ALICE.peer_id: 4}


def versioned(version: int, index: int = 0, lineage: Lineage = LINEAGE) -> Header:
    groups = [replace(group(index=index, lineage=lineage), policy_version=version)]
    return header_of(groups, encode_body(groups), policy_version=version, lineage=lineage)


def test_a_header_is_stale_by_its_own_author_s_newest_version_and_an_author_may_start_anew() -> None:
    clock = Clock()
    newest = NewestVersions(4, 600.0, clock)
    newest.note(versioned(100))
    newest.note(replace(versioned(3), author=LIAR))
    newest.note(versioned(2, lineage=Lineage("99" * 16, "22" * 16)))  # another base of the same author
    assert [newest.is_stale(versioned(version)) for version in (100, 96, 95)] == [False, False, True]
    assert not newest.is_stale(replace(versioned(1), author=LIAR))
    assert not newest.is_stale(versioned(1, lineage=Lineage("99" * 16, "22" * 16)))
    clock.now += 601
    newest.note(versioned(0))
    assert not newest.is_stale(versioned(0))
    unbounded = NewestVersions(0, 600.0, clock)
    unbounded.note(versioned(10**9))
    assert not unbounded.is_stale(versioned(0))
