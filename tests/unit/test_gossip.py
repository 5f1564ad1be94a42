"""What all gossip planes share: whom they connect to, whom they stop listening to, and what runs before and after them."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.network.gossip import MAX_KNOWN_PEERS, Addresses, ForwarderGuard, GossipAddressBook, GossipSlot
from swarm.network.libp2p.router import MAX_WINDOW_IDS
from swarm.network.peers.dialling import FIRST_PAUSE_S, Dialling
from swarm.network.transport import MAX_GOSSIP_BYTES, GossipHandler, ValidationResult

AT = ("/ip4/11.0.0.1/tcp/4001",)
MALLORY = "mallory"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def says(verdict: ValidationResult) -> GossipHandler:
    return lambda peer_id, message: verdict


accept, ignore, reject = map(says, (ValidationResult.ACCEPT, ValidationResult.IGNORE, ValidationResult.REJECT))


def make_guard() -> tuple[ForwarderGuard, Clock]:
    clock = Clock()
    return ForwarderGuard(clock), clock


# ---- address book


def make_book(seed: int = 0) -> tuple[GossipAddressBook, Clock]:
    clock = Clock()
    return GossipAddressBook("me", random.Random(seed), Dialling(clock=clock, own_hosts=lambda: ["11.0.0.9"])), clock


def at(number: int) -> Addresses:
    """Addresses of peers in networks of their own."""
    return (f"/ip4/11.{number}.0.1/tcp/4001",)


def test_only_strangers_that_can_be_reached_are_chosen() -> None:
    book, _ = make_book()
    book.meet("me", at(1))
    book.meet("caller", ())
    book.meet("nowhere", ("/ip4/224.0.0.1/tcp/4001",))
    for number, name in enumerate(("a", "b", "c")):
        book.meet(name, at(number))
    assert book.choose(0, []) == book.choose(-3, []) == {}
    assert book.choose(9, ["b"]) == {"a": at(0), "c": at(2)}
    book.forget("a")
    book.forget("nobody")
    assert set(book) == {"b", "c"}


def test_a_choice_is_repeated_only_after_a_pause_even_if_the_peer_is_heard_of_again() -> None:
    book, clock = make_book()
    book.meet("a", at(1))
    book.meet("b", at(2))
    chosen = book.choose(1, [])
    assert chosen | book.choose(9, []) == {"a": at(1), "b": at(2)}
    book.meet("a", at(1))
    assert book.choose(9, []) == {}
    clock.now_s += FIRST_PAUSE_S
    assert book.choose(9, []).keys() == {"a", "b"}


def test_the_newest_addresses_of_a_peer_count() -> None:
    book, _ = make_book()
    book.meet("a", at(1))
    book.meet("a", at(2))
    assert book.choose(1, []) == {"a": at(2)}


def test_the_book_is_bounded_and_keeps_whom_it_met_or_heard_of_last() -> None:
    book, _ = make_book()
    for number in range(MAX_KNOWN_PEERS):
        book.meet(f"peer-{number}", AT)
    book.meet("peer-0", AT)
    book.met("peer-1")
    book.met("nobody")
    book.meet("new", AT)
    assert len(book) == MAX_KNOWN_PEERS
    assert {"peer-0", "peer-1", "new"} <= set(book) and "peer-2" not in book
    for number in range(2 * MAX_KNOWN_PEERS):
        book.meet(f"invented-{number}", AT)
    assert "peer-1" in book and "peer-0" not in book


def test_books_of_different_nodes_choose_differently() -> None:
    choices = set()
    for seed in range(8):
        book, _ = make_book(seed)
        for number in range(64):
            book.meet(f"peer-{number}", at(number))
        choices.add(tuple(book.choose(4, [])))
    assert len(choices) > 6


# ---- guard


def test_the_handler_decides_while_the_forwarder_behaves() -> None:
    guard, _ = make_guard()
    assert [guard.judge("a", b"m", handler) for handler in (accept, ignore, reject, None)] == [
        ValidationResult.ACCEPT, ValidationResult.IGNORE, ValidationResult.REJECT, ValidationResult.IGNORE,
    ]  # fmt: skip
    assert guard.rejected == {"invalid": 1}


def test_an_oversize_message_is_rejected_unseen() -> None:
    guard, _ = make_guard()
    seen: list[bytes] = []

    def see(peer_id: str, message: bytes) -> ValidationResult:
        seen.append(message)
        return ValidationResult.ACCEPT

    assert guard.judge("a", bytes(MAX_GOSSIP_BYTES), see) is ValidationResult.ACCEPT
    assert guard.judge("a", bytes(MAX_GOSSIP_BYTES + 1), see) is ValidationResult.REJECT
    assert len(seen) == 1


def test_strangers_are_neither_heard_nor_kept() -> None:
    guard = ForwarderGuard(lambda: 0.0, lambda peer_id, wanted: (peer_id, wanted) == ("member", "gossip"))
    assert guard.judge("member", b"m", accept) is ValidationResult.ACCEPT
    assert guard.judge("stranger", b"m", accept) is ValidationResult.IGNORE
    assert guard.is_banned("stranger") and not guard.is_banned("member")
    assert guard.rejected == {"stranger": 1}


def test_a_broken_handler_costs_its_message_and_nobody_is_blamed() -> None:
    def break_down(peer_id: str, message: bytes) -> ValidationResult:
        raise KeyError(message)

    guard, _ = make_guard()
    for _ in range(100):
        assert guard.judge("a", b"m", break_down) is ValidationResult.IGNORE
    assert not guard.is_banned("a")


def test_too_many_faults_shut_a_forwarder_out_for_five_minutes_and_nobody_else() -> None:
    guard, clock = make_guard()
    for _ in range(20):
        guard.judge(MALLORY, b"bad", reject)
    assert not guard.is_banned(MALLORY)
    guard.judge(MALLORY, b"bad", reject)
    assert guard.is_banned(MALLORY) and not guard.is_banned("honest")
    assert guard.judge(MALLORY, b"good", accept) is ValidationResult.IGNORE
    assert guard.judge("honest", b"good", accept) is ValidationResult.ACCEPT
    assert guard.rejected == {"invalid": 21, "shut_out": 1}
    clock.now_s += ForwarderGuard.BAN_S - 0.1
    assert guard.is_banned(MALLORY)
    clock.now_s += 0.2
    assert guard.judge(MALLORY, b"good", accept) is ValidationResult.ACCEPT


def test_faults_fade_so_that_an_error_now_and_then_is_forgiven() -> None:
    guard, clock = make_guard()
    for _ in range(100):
        guard.judge("honest", b"stale", reject)
        clock.now_s += 10.0
    assert not guard.is_banned("honest")


def test_what_is_ignored_is_nobodys_fault() -> None:
    guard, clock = make_guard()
    for _ in range(200):
        guard.judge("honest", b"known", ignore)
        clock.now_s += 0.01
    assert not guard.is_banned("honest") and not guard.rejected


def test_messages_beyond_the_rate_are_not_looked_at() -> None:
    guard, clock = make_guard()
    passed = Counter[ValidationResult]()
    for _ in range(20):  # 400 per second for two seconds
        clock.now_s += 0.1
        for _ in range(40):
            passed[guard.judge("busy", b"m", accept)] += 1
    assert passed[ValidationResult.ACCEPT] == pytest.approx(2 * 120 + 2 * 120, abs=25)  # the burst, then the rate
    assert guard.rejected["flood"] + guard.rejected["crowded"] == passed[ValidationResult.IGNORE]
    assert guard.rejected["flood"] == pytest.approx(800 - 2 * 200 - 2 * 200, abs=25)


def test_what_who_joins_two_topics_is_sent_at_once_is_no_flood() -> None:
    guard, clock = make_guard()
    for _ in range(2 * MAX_WINDOW_IDS):
        guard.judge("neighbour", b"m", accept)
    for _ in range(500):  # strangers keep its neighbour busy
        clock.now_s += 1 / 160
        guard.judge("neighbour", b"m", accept)
    assert not guard.is_banned("neighbour")


def test_a_message_for_which_there_is_no_time_is_not_asked_for_again() -> None:
    guard, _ = make_guard()
    passed_over: list[int] = []
    for number in range(300):
        verdict = guard.judge("a", b"m", accept, lambda number=number: passed_over.append(number))
        assert (verdict is ValidationResult.ACCEPT) is (number not in passed_over)
    assert len(passed_over) == guard.rejected["crowded"] > 0


def test_strangers_below_their_limits_have_no_honest_node_shut_out_by_its_neighbours() -> None:
    guard, clock = make_guard()
    neighbour, accepted = ForwarderGuard(clock), Counter[str]()
    for tick in range(3000):
        clock.now_s += 0.01
        for number in range(30):
            if guard.judge(f"name {tick // 300} {number}", b"m", accept) is ValidationResult.ACCEPT:
                accepted["stranger"] += 1
                neighbour.judge("node", b"m", accept)
        if tick % 200 == 0:
            accepted["honest"] += guard.judge("honest", b"m", accept) is ValidationResult.ACCEPT
        assert not neighbour.is_banned("node")
    assert accepted["honest"] == 15, "its own share is for it"
    assert accepted["stranger"] < 30 * 200


def test_a_lasting_flood_shuts_out() -> None:
    guard, clock = make_guard()
    for _ in range(10_000):
        clock.now_s += 0.0001  # 10,000 messages per second
        guard.judge(MALLORY, b"m", accept)
    assert guard.is_banned(MALLORY)
    assert guard.rejected["shut_out"] > 9_000


def test_an_honest_rate_never_shuts_out() -> None:
    guard, clock = make_guard()
    for _ in range(20_000):
        clock.now_s += 1 / 190
        guard.judge("busy", b"m", accept)
        assert not guard.is_banned("busy")
    assert not guard.rejected["flood"]


def test_other_work_is_paid_from_the_same_purse() -> None:
    guard, clock = make_guard()
    assert guard.admit("a", 300) and guard.admit("a", 100)
    assert not guard.admit("a", 1)
    assert guard.judge("a", b"m", accept) is ValidationResult.IGNORE
    clock.now_s += 0.1
    assert guard.admit("a", 19)
    for _ in range(200):
        guard.admit("a", 1000)
    assert guard.is_banned("a") and not guard.admit("a", 0)


def test_what_is_remembered_of_forwarders_is_bounded() -> None:
    guard, _ = make_guard()
    for number in range(3 * ForwarderGuard.MAX_FORWARDERS):
        guard.judge(f"peer-{number}", b"m", reject)
    assert len(guard._forwarders) == ForwarderGuard.MAX_FORWARDERS


@given(st.lists(st.tuples(st.sampled_from([accept, ignore, reject]), st.floats(0, 5)), max_size=200))
def test_a_peer_is_shut_out_only_by_more_than_twenty_faults(steps: list[tuple[GossipHandler, float]]) -> None:
    guard, clock = make_guard()
    for handler, pause_s in steps:
        clock.now_s += pause_s
        guard.judge("a", b"m", handler)
    if guard.is_banned("a"):
        assert sum(handler is reject for handler, _ in steps) > ForwarderGuard.MAX_FAULTS


# ---- slot


class Plane:
    """A gossip plane that writes down what it is asked."""

    addresses: Addresses = AT

    def __init__(self) -> None:
        self.rejected = Counter(invalid=3)
        self.calls: list[tuple[str, ...]] = []

    async def start(self) -> None:
        self.calls.append(("start",))

    async def stop(self) -> None:
        self.calls.append(("stop",))

    def peers(self) -> tuple[str, ...]:
        return ("a",)

    def meet(self, peer_id: str, addresses: Addresses) -> None:
        self.calls.append(("meet", peer_id))

    def subscribe(self, topic: str, handler: GossipHandler) -> None:
        self.calls.append(("subscribe", topic))

    def unsubscribe(self, topic: str) -> None:
        self.calls.append(("unsubscribe", topic))

    async def publish(self, topic: str, message: bytes) -> None:
        self.calls.append(("publish", topic))


async def test_topics_joined_before_the_start_are_joined_at_the_start() -> None:
    plane = Plane()
    slot = GossipSlot(lambda: plane)
    slot.subscribe("one", accept)
    slot.subscribe("left", accept)
    slot.unsubscribe("left")
    await slot.publish("one", b"nobody hears it yet")
    await slot.start()
    slot.subscribe("two", accept)
    slot.unsubscribe("one")
    slot.meet("a", AT)
    await slot.publish("two", b"m")
    assert (slot.addresses, slot.peers(), slot.rejected) == (AT, ("a",), {"invalid": 3})
    await slot.stop()
    await slot.stop()
    assert plane.calls == [
        ("subscribe", "one"), ("start",), ("subscribe", "two"), ("unsubscribe", "one"), ("meet", "a"),
        ("publish", "two"), ("stop",),
    ]  # fmt: skip


async def test_without_a_plane_nothing_happens_and_bounds_still_hold() -> None:
    slot = GossipSlot(None)
    await slot.start()
    slot.subscribe("one", accept)
    slot.meet("a", AT)
    await slot.publish("one", b"m")
    with pytest.raises(ValueError, match=f"<= {MAX_GOSSIP_BYTES} bytes, got {MAX_GOSSIP_BYTES + 1}"):
        await slot.publish("one", bytes(MAX_GOSSIP_BYTES + 1))
    slot.unsubscribe("one")
    assert (slot.addresses, slot.peers(), dict(slot.rejected)) == ((), (), {})
    await slot.stop()
