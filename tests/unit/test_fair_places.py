"""Who gets a place where there are not enough."""

from contextlib import ExitStack

import pytest

from swarm.limits.connection_slots import ConnectionSlots, NoPlace, network_of


def hold(stack: ExitStack, places: ConnectionSlots, address: str, left: list[str], name: str) -> None:
    stack.enter_context(places.hold(address, lambda: left.append(name)))


def test_places_come_back() -> None:
    places = ConnectionSlots(1)
    for _ in range(3):
        with places.hold("a", pytest.fail), pytest.raises(NoPlace), places.hold("b", pytest.fail):
            pass
    assert places.num_taken == 0


def test_the_address_that_holds_most_gives_up_its_oldest() -> None:
    places, left = ConnectionSlots(4), list[str]()
    with ExitStack() as stack:
        for name in ("m1", "m2", "m3"):
            hold(stack, places, "mallory", left, name)
        hold(stack, places, "alice", left, "a1")
        hold(stack, places, "bob", left, "b1")
        assert (left, places.num_taken) == (["m1"], 4)
        with pytest.raises(NoPlace):  # 2, 1, 1: nobody holds more than a newcomer would by more than one
            hold(stack, places, "alice", left, "a2")
        with pytest.raises(NoPlace):
            hold(stack, places, "mallory", left, "m4")
    assert (left, places.num_taken) == (["m1"], 0)


def test_addresses_of_one_ipv6_network_are_one_and_those_of_ipv4_are_not() -> None:
    places, left = ConnectionSlots(4), list[str]()
    with ExitStack() as stack:
        for number in range(4):
            hold(stack, places, f"2a00:1:7:{number}::1", left, f"m{number}")
        with pytest.raises(NoPlace):
            hold(stack, places, "2a00:1:7:5::1", left, "m5")
        for address in ("2a00:1:8::1", "::ffff:192.0.2.1", "192.0.2.2"):
            hold(stack, places, address, left, address)
    assert left == ["m0", "m1", "m2"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2a00:1:7:5::1", "2a00:1:7::/48"),
        ("fd00::1", "fd00::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("a relay", "a relay"),
    ],
)
def test_what_counts_as_one_address(address: str, expected: str) -> None:
    assert network_of(address) == expected


def test_where_the_newest_wins_an_address_pushes_out_its_own_oldest() -> None:
    places, left = ConnectionSlots(2, newest_wins=True), list[str]()
    with ExitStack() as stack:
        for number in range(5):
            hold(stack, places, "mallory", left, f"m{number}")
        assert left == ["m0", "m1", "m2"]
        hold(stack, places, "alice", left, "a0")
        hold(stack, places, "mallory", left, "m5")
        assert places.num_taken == 2
    assert left[:4] == ["m0", "m1", "m2", "m3"]
    assert places.num_taken == 0


def test_neighbours_at_home_have_places_of_their_own() -> None:
    places, left = ConnectionSlots(2), list[str]()
    with ExitStack() as stack:
        hold(stack, places, "fe80::1%eth0", left, "a")
        hold(stack, places, "fd00::1", left, "b")
        with pytest.raises(NoPlace):
            hold(stack, places, "fd00::2", left, "c")
    assert left == []
