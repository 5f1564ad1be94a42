"""Shards halve the swarm evenly, anyone can compute them, and nodes settle on a level instead of wavering."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.sharing.index import (
    EPOCH_S,
    MAX_LEVEL,
    MERGE_BELOW,
    SPLIT_ABOVE,
    Shard,
    next_level,
    shard_of,
    thinning_depth,
)
from tests.unit.experience_factory import ALICE, MALLORY, NOW, SWARM_ID

PEERS = [f"peer-{number}" for number in range(4096)]
shards = st.integers(0, MAX_LEVEL).flatmap(
    lambda level: st.builds(Shard, st.just(level), st.integers(0, (1 << level) - 1))
)


def test_golden_values() -> None:
    # printf "shard:$SWARM:$ALICE:3000000" | sha256sum → 0890333a…; "depth:…" → 54ad… (0101) and 3e71… (0011)
    assert NOW // EPOCH_S == 3_000_000
    expected = {0: "0.0", 4: "4.0", 5: "5.1", 8: "8.8", 12: "12.89", 16: "16.890"}
    assert {level: shard_of(SWARM_ID, ALICE.peer_id, level, NOW).name for level in expected} == expected
    assert (thinning_depth(SWARM_ID, ALICE.peer_id), thinning_depth(SWARM_ID, MALLORY.peer_id)) == (1, 2)


@given(shards)
def test_name_and_shard_are_one_to_one(shard: Shard) -> None:
    assert Shard.parse(shard.name) == shard


@given(st.one_of(st.text(max_size=8), st.from_regex(r"[0-9]{1,3}\.[0-9a-fA-F]{1,5}", fullmatch=True)))
def test_a_text_is_the_name_of_a_shard_or_of_none(text: str) -> None:
    shard = Shard.parse(text)
    if shard is not None:
        assert shard.name == text
        assert 0 <= shard.level <= MAX_LEVEL and 0 <= shard.number < 1 << shard.level


@pytest.mark.parametrize("text", ["", "0", "0.1", "1.2", "01.0", "1.01", "17.0", "-1.0", "3.F", "3.5 ", "3.5\n", "٣.0"])
def test_what_is_no_name_of_a_shard(text: str) -> None:
    assert Shard.parse(text) is None


@given(st.text(max_size=30), st.integers(0, MAX_LEVEL - 1), st.floats(0, 4e9))
def test_each_shard_lies_in_one_of_the_level_above(peer_id: str, level: int, now: float) -> None:
    wide, narrow = (shard_of(SWARM_ID, peer_id, step, now) for step in (level, level + 1))
    assert narrow.number >> 1 == wide.number


@pytest.mark.parametrize("level", [1, 3, 5])
def test_shards_are_balanced_and_drawn_anew_each_epoch(level: int) -> None:
    first = {peer_id: shard_of(SWARM_ID, peer_id, level, NOW) for peer_id in PEERS}
    sizes = Counter(first.values())
    mean = len(PEERS) / (1 << level)
    assert len(sizes) == 1 << level
    assert all(abs(size - mean) < 5 * mean**0.5 for size in sizes.values())  # five standard deviations
    assert first == {peer_id: shard_of(SWARM_ID, peer_id, level, NOW + EPOCH_S - 1) for peer_id in PEERS}
    stayed = sum(first[peer_id] == shard_of(SWARM_ID, peer_id, level, NOW + EPOCH_S) for peer_id in PEERS)
    assert stayed == pytest.approx(mean, abs=5 * mean**0.5)


def test_half_of_the_peers_are_listed_one_level_further_up() -> None:
    depths = Counter(min(thinning_depth(SWARM_ID, peer_id), 4) for peer_id in PEERS)
    for depth in range(4):
        assert depths[depth] == pytest.approx(len(PEERS) / 2 ** (depth + 1), rel=0.2)


def test_other_swarms_draw_other_shards() -> None:
    mine = [shard_of(SWARM_ID, peer_id, 8, NOW) for peer_id in PEERS[:64]]
    assert mine != [shard_of("cd" * 16, peer_id, 8, NOW) for peer_id in PEERS[:64]]


@pytest.mark.parametrize(
    ("level", "num_members", "num_authors", "expected"),
    [
        (0, 1, 0, 0),
        (0, SPLIT_ABOVE, SPLIT_ABOVE, 0),
        (0, SPLIT_ABOVE + 1, SPLIT_ABOVE // 2 + 1, 1),
        (0, 2000, SPLIT_ABOVE // 2, 0),  # made-up members are heard of and never heard
        (3, MERGE_BELOW - 1, 500, 2),
        (3, MERGE_BELOW, 0, 3),
        (MAX_LEVEL, 2000, 2000, MAX_LEVEL),
    ],
)
def test_level_that_follows(level: int, num_members: int, num_authors: int, expected: int) -> None:
    assert next_level(level, num_members, num_authors) == expected


@given(st.integers(1, 200_000), st.integers(0, MAX_LEVEL))
def test_a_swarm_of_any_size_settles_from_any_level_and_stays(size: int, level: int) -> None:
    seen = [level]
    for _ in range(MAX_LEVEL + 2):
        members = max(1, size >> seen[-1])
        seen.append(next_level(seen[-1], members, members))
    assert seen[-1] == seen[-2]
    steps = {after - before for before, after in itertools.pairwise(seen)} - {0}
    assert len(steps) <= 1  # only up, or only down
    assert seen[-1] in (0, MAX_LEVEL) or MERGE_BELOW <= size >> seen[-1] <= SPLIT_ABOVE


@given(st.integers(SPLIT_ABOVE + 1, 2 * SPLIT_ABOVE), st.floats(0.25, 0.75))
def test_halves_of_a_shard_that_split_do_not_join_again(num_members: int, share: float) -> None:
    """However unevenly the hash cuts, within reason."""
    assert next_level(1, int(num_members * share), num_members) >= 1
