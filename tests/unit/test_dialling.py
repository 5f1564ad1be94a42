"""Which addresses a node dials when strangers name them, and how often."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import NetworkSection
from swarm.limits.bounded_maps import BoundedPeers
from swarm.network.peers.dialling import (
    FAILURES_WINDOW_S,
    FIRST_PROVEN_PAUSE_S,
    MAX_ADDRESSES_PER_PEER,
    MAX_CLAIMED,
    MAX_FAILURES,
    MAX_FAILURES_PER_GROUP,
    MAX_FAILURES_PER_HOST,
    MAX_PAUSE_S,
    WINDOW_S,
    Dialling,
    Reach,
    reach_of,
)
from swarm.network.peers.known_peers import KnownPeers
from swarm.network.tcp_address import TcpAddress
from swarm.records.identity import Identity

IDS = [Identity(number.to_bytes(2, "big") * 16).peer_id for number in range(80)]
BOOT, RELAY, PEER, OTHER = IDS[:4]
PUBLIC, HOME, MACHINE = "/ip4/11.0.0.7/tcp/4001", "/ip4/192.168.1.7/tcp/4001", "/ip4/127.0.0.1/tcp/4001"
WILDCARD = TcpAddress.parse("/ip4/0.0.0.0/tcp/4001")
LOOPBACK = TcpAddress.parse("/ip4/127.0.0.1/tcp/0")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def made(boot: str = "/ip4/11.0.0.1/tcp/4001", *, clock: Clock | None = None) -> Dialling:
    """The dialling of a node at home that joins through `boot`."""
    initial = [TcpAddress.parse(f"{boot}/p2p/{BOOT}")] if boot else []
    return Dialling([WILDCARD], configured=initial, clock=clock or Clock(), own_hosts=lambda: ["192.168.1.2"])


def circuit(address: str, relay: str = RELAY) -> str:
    return f"{address}/p2p/{relay}/p2p-circuit"


# ---- what is believed


@pytest.mark.parametrize(
    ("host", "reach"),
    [
        ("11.0.0.1", Reach.PUBLIC), ("2a01:db9::1", Reach.PUBLIC),
        ("10.1.2.3", Reach.PRIVATE), ("172.18.0.2", Reach.PRIVATE), ("192.168.0.1", Reach.PRIVATE),
        ("100.64.0.1", Reach.PRIVATE), ("fd00::1", Reach.PRIVATE),
        ("127.8.8.8", Reach.MACHINE), ("::1", Reach.MACHINE),
        ("0.0.0.0", None), ("0.1.2.3", None), ("169.254.169.254", None), ("fe80::1", None), ("224.0.0.1", None),
        ("ff0e::1", None), ("255.255.255.255", None), ("240.0.0.1", None), ("192.0.2.1", None), ("2001:db8::1", None),
        ("::ffff:127.0.0.1", None), ("::ffff:11.0.0.1", None), ("2002:7f00:1::1", None), ("2001:0:7f00:1::1", None),
        ("64:ff9b::7f00:1", None), ("::", None),
    ],
)  # fmt: skip
def test_reach_of_an_address(host: str, reach: Reach | None) -> None:
    assert reach_of(host) is reach


@pytest.mark.parametrize("claimed", [HOME, MACHINE, "/ip6/fd00::7/tcp/4001", "/ip6/::1/tcp/4001", circuit(HOME)])
def test_in_a_public_swarm_a_stranger_s_private_address_is_not_dialled(claimed: str) -> None:
    dialling = made()
    assert dialling.believed(PEER, [claimed]) == dialling.take(PEER, [claimed]) == ()
    assert dialling.believed(PEER, [claimed, PUBLIC]) == (PUBLIC,)


@pytest.mark.parametrize(
    "claimed",
    [
        "/ip4/11.0.0.7/tcp/22", "/ip4/11.0.0.7/tcp/80", "/ip4/11.0.0.7/tcp/0", "/ip4/169.254.169.254/tcp/8080",
        "/ip4/224.0.0.1/tcp/4001", "/ip4/192.0.2.7/tcp/4001", "/dns4/victim.example.org/tcp/4001",
        "/dns/localhost/tcp/4001", "/ip4/11.0.0.7/udp/4001/quic", f"{PUBLIC}/p2p/{OTHER}", "nonsense", "",
        circuit(circuit(PUBLIC)), "/ip4/11.0.0.7/tcp/4001" * 1000, circuit(f"/dns4/victim.example.org/tcp/{4001}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("boot", ["", "/ip4/11.0.0.1/tcp/4001", "/ip4/192.168.1.1/tcp/4001", MACHINE])
def test_what_no_stranger_may_name_in_any_swarm(boot: str, claimed: str) -> None:
    assert made(boot).believed(PEER, [claimed]) == ()


def test_a_swarm_of_one_home_or_of_one_machine_goes_on() -> None:
    home = made("/ip4/192.168.1.1/tcp/4001")
    assert home.reach is Reach.PRIVATE
    assert home.believed(PEER, [MACHINE, HOME, PUBLIC]) == (HOME, PUBLIC)
    machine = made(MACHINE)
    assert machine.reach is Reach.MACHINE
    assert machine.believed(PEER, [MACHINE, HOME]) == (MACHINE, HOME)


def test_containers_that_join_by_name_are_a_private_swarm_until_a_peer_is_seen_farther_away() -> None:
    dialling = made("/dns4/bootstrap/tcp/4001")
    container = "/ip4/172.18.0.5/tcp/4001"
    assert dialling.believed(PEER, [container]) == (container,)
    dialling.see(BOOT, ["/ip4/172.18.0.2/tcp/4001"])
    assert dialling.believed(PEER, [container]) == (container,)
    dialling.see(BOOT, ["/ip4/11.0.0.1/tcp/4001"])
    assert dialling.reach is Reach.PUBLIC
    assert dialling.believed(PEER, [container]) == ()


@pytest.mark.parametrize(
    ("section", "hosts", "reach"),
    [
        ({}, ["11.0.0.5"], Reach.MACHINE),
        ({"listen": ["/ip4/0.0.0.0/tcp/4001"]}, ["192.168.1.2"], Reach.PRIVATE),
        ({"listen": ["/ip4/0.0.0.0/tcp/4001"]}, [], Reach.PRIVATE),
        ({"listen": ["/ip4/0.0.0.0/tcp/4001"]}, ["192.168.1.2", "11.0.0.5"], Reach.PUBLIC),
        ({"listen": ["/ip4/0.0.0.0/tcp/4001"], "announce": ["/ip4/11.0.0.1/tcp/4001"]}, ["172.17.0.2"], Reach.PUBLIC),
        ({"initial_peers": [f"/ip4/11.0.0.1/tcp/4001/p2p/{BOOT}"]}, [], Reach.PUBLIC),
        ({"initial_peers": [f"/ip4/10.0.0.1/tcp/4001/p2p/{BOOT}"]}, ["11.0.0.5"], Reach.PRIVATE),
        ({"initial_peers": [f"/dns4/boot/tcp/4001/p2p/{BOOT}"]}, ["10.0.0.5"], Reach.PRIVATE),
    ],
)
def test_how_far_a_swarm_extends_follows_from_the_settings(
    section: dict[str, list[str]], hosts: list[str], reach: Reach
) -> None:
    assert Dialling.of(NetworkSection.model_validate(section), lambda: hosts).reach is reach


def test_a_neighbour_at_home_is_dialled_where_it_was_seen_and_nowhere_else_at_home() -> None:
    dialling = made()
    dialling.see(PEER, ["/ip4/192.168.1.7/tcp/55555"])
    assert dialling.believed(PEER, [PUBLIC, HOME, "/ip4/192.168.1.8/tcp/4001"]) == (HOME, PUBLIC)
    assert dialling.believed(OTHER, [HOME]) == ()
    dialling.see(OTHER, ["/ip4/127.0.0.1/tcp/55555"])  # through a proxy or tunnel in front of this node
    assert dialling.believed(OTHER, [MACHINE]) == ()


def test_one_presence_names_one_public_network_and_the_address_seen_comes_first() -> None:
    dialling = made()
    claimed = [f"/ip4/11.{number}.0.1/tcp/4001" for number in range(9)] + [
        "/ip6/2a01:1::1/tcp/4001",
        "/ip6/2a02::1/tcp/4001",
    ]
    assert dialling.believed(PEER, claimed) == (claimed[0], "/ip6/2a01:1::1/tcp/4001")
    dialling.see(PEER, ["/ip4/11.5.0.1/tcp/55555"])
    assert dialling.believed(PEER, claimed)[0] == claimed[5]
    same = [f"/ip4/11.0.0.{number}/tcp/4001" for number in range(1, 99)]
    assert dialling.believed(OTHER, same) == tuple(same[:MAX_ADDRESSES_PER_PEER])


def test_configured_peers_are_dialled_by_name_and_every_time() -> None:
    dialling = made("/dns4/boot.example.org/tcp/443")
    claimed = ["/dns4/boot.example.org/tcp/4002"]
    for _ in range(100):
        assert dialling.take(BOOT, claimed) == tuple(claimed)
    assert dialling.take(PEER, claimed) == ()


def test_a_circuit_is_believed_through_the_configured_relay_and_counts_for_other_hosts() -> None:
    dialling = made("/dns4/boot.example.org/tcp/443")
    through = circuit("/dns4/boot.example.org/tcp/443", BOOT)
    assert dialling.believed(PEER, [through]) == (through,)
    assert dialling.believed(PEER, [circuit("/dns4/boot.example.org/tcp/22", BOOT)]) == ()
    assert dialling.take(PEER, [circuit(PUBLIC)]) == (circuit(PUBLIC),)
    assert dialling.take(OTHER, [PUBLIC]) == dialling.take(OTHER, [circuit(PUBLIC)]) == ()


def test_a_list_of_thousands_of_addresses_is_cut() -> None:
    class Endless:
        num_read = 0

        def __iter__(self) -> "Endless":
            return self

        def __next__(self) -> str:
            self.num_read += 1
            return "/ip4/169.254.0.1/tcp/4001"

    endless = Endless()
    assert made().believed(PEER, endless) == ()
    assert endless.num_read == MAX_CLAIMED


# ---- how often


def num_dials(dialling: Dialling, clock: Clock, addresses: list[str], hours: float) -> int:
    """By a node that takes whatever it may, every 2 s, under ever new names."""
    number, count, until = 0, 0, clock.now_s + 3600 * hours
    while clock.now_s < until:
        for _ in range(8):
            number += 1
            count += len(dialling.take(f"name {number}", [addresses[number % len(addresses)]]))
        clock.now_s += 2.0
    return count


def test_a_bystander_is_dialled_a_few_times_however_many_names_it_has() -> None:
    clock = Clock()
    assert num_dials(made(clock=clock), clock, [PUBLIC], 0.5) <= MAX_FAILURES_PER_HOST + 1800 / MAX_PAUSE_S


def test_failures_count_for_the_host_and_for_its_network() -> None:
    clock = Clock()
    ports = [f"/ip4/11.0.0.7/tcp/{port}" for port in range(1024, 9000)]
    assert num_dials(made(clock=clock), clock, ports, 0.2) <= MAX_FAILURES_PER_HOST * (1 + 720 / WINDOW_S)
    hosts = [f"/ip4/11.0.0.{number}/tcp/{port}" for number in range(256) for port in range(4000, 4008)]
    assert num_dials(made(clock=clock), clock, hosts, 0.2) <= MAX_FAILURES_PER_GROUP * (1 + 720 / WINDOW_S)
    everywhere = [f"/ip4/11.{number >> 8}.{number & 255}.1/tcp/4001" for number in range(1 << 16)]
    assert num_dials(made(clock=clock), clock, everywhere, 0.1) <= MAX_FAILURES * (1 + 360 / FAILURES_WINDOW_S)


def test_pauses_grow_and_end_when_the_peer_itself_answers() -> None:
    clock = Clock()
    dialling = made(clock=clock)
    for pause_s in (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, MAX_PAUSE_S, MAX_PAUSE_S):
        assert dialling.take(PEER, [PUBLIC]) == (PUBLIC,)
        clock.now_s += pause_s - 0.1
        assert dialling.take(PEER, [PUBLIC]) == dialling.take(OTHER, [PUBLIC]) == ()
        clock.now_s += 0.2
    assert dialling.take(PEER, [PUBLIC])
    dialling.see(PEER, [PUBLIC])
    assert dialling.take(PEER, [PUBLIC]), "it has answered"
    clock.now_s += FIRST_PROVEN_PAUSE_S
    assert dialling.take(PEER, [PUBLIC]), "it was there before"


def test_others_who_name_the_address_of_a_peer_that_was_reached_do_not_keep_this_node_from_it() -> None:
    clock = Clock()
    dialling = made(clock=clock)
    assert dialling.take(PEER, [PUBLIC])
    dialling.see(PEER, [PUBLIC])
    for name in IDS[4:]:
        dialling.take(name, [PUBLIC])
    assert dialling.take(PEER, [PUBLIC])


def test_whoever_answers_in_place_of_a_made_up_name_is_dialled_and_the_name_is_not() -> None:
    clock = Clock()
    dialling = made(clock=clock)
    assert dialling.take(OTHER, [PUBLIC])
    dialling.see(PEER, [PUBLIC])
    assert dialling.take(PEER, [PUBLIC]), "it is the one that is there"
    num_dials = 0
    for number in range(60):
        num_dials += len(dialling.take(IDS[number + 4], [PUBLIC]))
        dialling.see(PEER, [PUBLIC])  # it answers each time
        clock.now_s += 2.0
    assert num_dials <= 5
    assert dialling.take(PEER, [PUBLIC])


def test_a_connection_from_a_peer_proves_no_port() -> None:
    dialling = made()
    assert dialling.take(OTHER, [PUBLIC])
    dialling.see(PEER, ["/ip4/11.0.0.7/tcp/55555"])
    assert dialling.take(PEER, [PUBLIC]) == ()


def test_many_nodes_of_one_machine_are_dialled_at_once() -> None:
    dialling = made(MACHINE)
    for number in range(40):
        assert dialling.take(f"name {number}", [f"/ip4/127.0.0.1/tcp/{4001 + number}"])


def test_after_a_sleep_all_are_tried_again() -> None:
    dialling = made()
    assert dialling.take(PEER, [PUBLIC]) and not dialling.take(PEER, [PUBLIC])
    dialling.forget_failures()
    assert dialling.take(PEER, [PUBLIC])


def test_what_is_remembered_is_bounded() -> None:
    clock = Clock()
    dialling = made(clock=clock)
    for number in range(4200):
        clock.now_s += 2.0
        address = f"/ip4/11.{number >> 8}.{number & 255}.1/tcp/4001"
        dialling.take(f"name {number}", [address])
        dialling.see(f"other {number}", [address])
    dialling.see("mover", [f"/ip4/11.{one}.0.1/tcp/4001" for one in range(12)])
    failures = dialling._failures
    assert max(len(dialling._seen), len(failures._pauses), len(failures._recent)) == 4096
    assert max(map(len, dialling._seen.values())) == 8


def test_connections_from_one_network_make_a_node_forget_nobody_else() -> None:
    dialling = made()
    dialling.see(PEER, [PUBLIC])
    for number in range(5000):
        dialling.see(f"name {number}", [f"/ip4/11.0.99.9/tcp/{1024 + number}"])
    assert dialling.seen_at(PEER) and len(dialling._seen) == 4096


@given(st.text(max_size=120), st.lists(st.text(alphabet="/ip46dnstcp2-circuwQ:.0123456789", max_size=80), max_size=6))
def test_no_text_raises(name: str, addresses: list[str]) -> None:
    dialling = made()
    dialling.see(name, addresses)
    assert dialling.take(name, addresses) in [(), *((one,) for one in dialling.believed(name, addresses))]


# ---- who is remembered


def test_names_by_the_hundred_do_not_displace_a_peer_that_was_met() -> None:
    peers: BoundedPeers[int] = BoundedPeers(8)
    for number in range(3):
        peers.put(f"met {number}", number)
        peers.met(f"met {number}")
    for number in range(100):
        peers.put(f"invented {number}", number)
    assert set(peers) == {"met 0", "met 1", "met 2", *(f"invented {number}" for number in range(95, 100))}
    peers.forget("met 0")
    assert not peers.is_met("met 0") and len(peers) == 7


def test_names_of_one_network_that_connect_displace_nobody_of_others() -> None:
    peers: BoundedPeers[int] = BoundedPeers(8)
    for number in range(3):
        peers.put(f"honest {number}", number)
        peers.met(f"honest {number}", f"network {number}")
    for number in range(100):
        peers.put(f"name {number}", number)
        peers.met(f"name {number}", "one network")
    assert {"honest 0", "honest 1", "honest 2"} <= set(peers)


@settings(max_examples=20)
@given(st.randoms(use_true_random=False))
def test_there_is_always_room_for_a_newcomer(rng: random.Random) -> None:
    peers: BoundedPeers[int] = BoundedPeers(6)
    for number in range(40):
        peers.put(f"peer {number}", number)
        assert peers.get(f"peer {number}") == number and len(peers) <= 6
        if rng.random() < 0.7:
            peers.met(rng.choice(list(peers)))


def test_peers_to_join_through_have_believed_addresses_and_take_turns() -> None:
    clock = Clock()
    dialling = made(clock=clock)
    peers = KnownPeers([], OTHER, None, clock, dialling)
    peers.learn(PEER, [HOME, MACHINE])
    assert peers.stored() == {}
    peers.learn(PEER, [HOME, PUBLIC])
    peers.see({RELAY: ("/ip4/11.0.0.9/tcp/4001",)})
    assert peers.due(peers.stored()) == {PEER: (PUBLIC,), RELAY: ("/ip4/11.0.0.9/tcp/4001",)}
    assert peers.due(peers.stored()) == {}
    peers.forget_failures()
    assert peers.due(peers.stored()).keys() == {PEER, RELAY}
    assert dialling.seen_at(RELAY) == ("/ip4/11.0.0.9/tcp/0",)
