"""What strangers announce is bounded, and whoever announces most loses its own entries first."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm.limits.bounded_maps import BoundedMap, FairMap


def filled(entries: str, **bounds: int) -> FairMap[int, str]:
    """One entry for each letter, which is its owner; known owners are in capitals. Keys count from 0."""
    made = FairMap[int, str](is_known=str.isupper, **bounds)
    for key, owner in enumerate(entries):
        made.add(owner, key, owner)
    return made


def test_the_owner_that_holds_most_loses_its_oldest_entry() -> None:
    assert "".join(filled("abbbc", max_items=4).values()) == "abbc"
    assert list(filled("abbbc", max_items=4)) == [0, 2, 3, 4]
    assert "".join(filled("abcd", max_items=3).values()) == "bcd", "among equals the one that came first"


def test_known_owners_give_way_last_and_leave_room_for_others() -> None:
    assert "".join(filled("AAAbcd", max_items=4).values()) == "AAAd"
    assert "".join(filled("AAABB", max_items=4).values()) == "AABB", "where nobody else is left"
    assert "".join(filled("AAAAbc", max_items=4, max_per_owner=2).values()) == "AAbc"


def test_many_known_owners_leave_room_for_one_that_nobody_knows() -> None:
    assert "".join(filled("ABCABCABCd", max_items=9, safe_per_known=2).values()) == "BCABCABCd"
    assert "".join(filled("ABCABCdefg", max_items=6, safe_per_known=2).values()) == "ABCABC", (
        "their newest ones are safe"
    )
    assert "".join(filled("AAAddddd", max_items=6, safe_per_known=2).values()) == "AAAddd", "who holds most is first"
    assert "".join(filled("AAAddde", max_items=6, safe_per_known=2).values()) == "AAAdde", "and of equals the stranger"


def test_an_entry_that_comes_again_is_the_newest_one() -> None:
    made = filled("abc", max_items=3)
    made.add("a", 0, "again")
    assert made.values() == ["b", "c", "again"] and len(made) == 3
    assert made.pop(0) == "again" and made.pop(0) is None and made.get(0) is None and 0 not in made


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abcDE"), st.booleans()), max_size=80))
def test_bounds_hold_whatever_comes(steps: list[tuple[int, str, bool]]) -> None:
    made, owners = FairMap[int, str](8, 4, str.isupper), dict[int, str]()
    for key, owner, is_removed in steps:
        if is_removed:
            made.pop(key)
        else:
            made.add(owner, key, owner)
            owners[key] = owner
            assert key in made or max(Counter(made.values()).values()) > 1 or owner.islower()
        assert len(made) == len(made.values()) == len(list(made)) <= 8
        assert max(Counter(made.values()).values(), default=0) <= 4
        assert all(made.get(key) == owners[key] for key in made)
    for key in list(made):
        made.pop(key)
    assert len(made) == 0 and not made._owners and not made._by_count


def test_a_bounded_map_drops_the_entry_that_was_set_or_used_longest_ago() -> None:
    latest = BoundedMap[str, int](2)
    latest["a"], latest["b"], latest["a"] = 1, 2, 3
    latest["c"] = 4
    assert list(latest.items()) == [("a", 3), ("c", 4)]
    assert latest.get_or_add("a", lambda: 0) == 3
    assert latest.get_or_add("d", lambda: 5) == 5
    assert list(latest.items()) == [("a", 3), ("d", 5)]
