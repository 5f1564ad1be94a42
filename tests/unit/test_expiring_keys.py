"""What was seen is remembered until it expires, in bounds."""

from swarm.limits.bounded_maps import ExpiringKeys
from tests.unit.experience_factory import Clock


def test_a_key_is_there_until_it_expires_and_may_be_added_again() -> None:
    clock = Clock()
    keys = ExpiringKeys[str](clock, 10)
    keys.add("a", clock.now + 5)
    assert "a" in keys and "b" not in keys
    clock.now += 5
    assert "a" not in keys
    keys.add("a", clock.now + 5)
    assert "a" in keys and len(keys) == 1


def test_the_first_ones_make_room() -> None:
    clock = Clock()
    keys = ExpiringKeys[int](clock, 10)
    for number in range(25):
        keys.add(number, clock.now + 1000)
    assert len(keys) == 10 and [number in keys for number in (14, 15, 24)] == [False, True, True]


def test_one_that_lives_long_keeps_no_expired_ones_behind_it() -> None:
    clock = Clock()
    keys = ExpiringKeys[int](clock, 100_000)
    keys.add(-1, clock.now + 1e6)
    for number in range(20_000):
        keys.add(number, clock.now + 10)
        clock.now += 1
    assert len(keys) < 300 and -1 in keys


def test_expired_keys_go_once_there_are_twice_as_many_as_were_alive() -> None:
    clock = Clock()
    keys = ExpiringKeys[int](clock, 100_000)
    for number in range(300):
        keys.add(number, clock.now + (1 if number < 10 else 1000) if number else clock.now + 2000)
    clock.now += 1
    assert keys.num_alive() == 291, "nine of them expire at this moment"
    for number in range(300, 512):
        keys.add(number, clock.now + 1000)
    assert len(keys) == 512, "it has looked at 257 keys, all alive"
    for number in range(512, 515):
        keys.add(number, clock.now + 1000)
    assert len(keys) == 506 == keys.num_alive()


def test_what_has_expired_already_is_not_kept() -> None:
    clock = Clock()
    keys = ExpiringKeys[str](clock, 10)
    keys.add("a", clock.now)
    assert len(keys) == 0 and "a" not in keys
