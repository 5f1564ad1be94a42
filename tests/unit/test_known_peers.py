"""Whom a node remembers, over its restarts too, and whom it greets when."""

import json
import logging
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.network.peers.dialling import (
    MAX_ADDRESSES_PER_PEER,
    MAX_AGE_S,
    MAX_FILE_BYTES,
    MAX_PEERS,
    dialable,
    read_peers,
)
from swarm.network.peers.known_peers import FEW_PEERS, SAVE_INTERVAL_S, SAVE_SOON_S, Joining, KnownPeers
from swarm.network.peers.surroundings import Surroundings
from swarm.network.tcp_address import TcpAddress
from swarm.records.identity import Identity

IDS = [Identity(bytes([number]) * 32).peer_id for number in range(100)]
OWN_ID, BOOT_ID, SECOND_ID, OTHER_ID = IDS[:4]
OWN = TcpAddress("ip4", "1.2.3.4", 1, OWN_ID)
BOOT = TcpAddress("ip4", "1.2.3.4", 2, BOOT_ID)
SECOND = TcpAddress("ip4", "1.2.3.5", 2, SECOND_ID)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def at(port: int, host: str = "9.9.9.9") -> str:
    return f"/ip4/{host}/tcp/{port}"


def test_configured_peers_are_known_with_all_their_addresses_but_oneself() -> None:
    peers = KnownPeers([OWN, BOOT, TcpAddress("ip6", "::1", 3, BOOT_ID)], OWN_ID)
    assert peers.configured() == {BOOT_ID: ("/ip4/1.2.3.4/tcp/2", "/ip6/::1/tcp/3")}
    assert peers.stored() == {}


def test_addresses_seen_are_tried_after_the_configured_ones(clock: Clock) -> None:
    peers = KnownPeers([BOOT], OWN_ID, clock=clock)
    peers.see({OTHER_ID: (at(9),), BOOT_ID: (at(8, "8.8.8.8"), at(2, "1.2.3.4")), OWN_ID: (at(1),)})
    assert peers.configured() == {BOOT_ID: (at(2, "1.2.3.4"), at(8, "8.8.8.8"))}
    assert peers.stored() == {OTHER_ID: (at(9),)}


def test_announced_addresses_replace_those_a_peer_was_seen_at(clock: Clock) -> None:
    peers = KnownPeers([], OWN_ID, clock=clock)
    peers.see({OTHER_ID: (at(54321),)})  # the port of its outgoing connection
    assert peers.unannounced([OTHER_ID, SECOND_ID]) == [OTHER_ID]
    peers.learn(OTHER_ID, ["/ip4/9.9.9.9/udp/1/quic-v1", at(0), at(1, "0.0.0.0"), "nonsense", at(4001), at(4001)])
    peers.see({OTHER_ID: (at(54321),)})
    assert peers.stored() == {OTHER_ID: (at(4001),)}
    assert peers.unannounced([OTHER_ID]) == []
    clock.now += 301
    assert peers.unannounced([OTHER_ID]) == [OTHER_ID]
    peers.learn(OTHER_ID, [])
    assert peers.stored() == {OTHER_ID: (at(4001),)}
    peers.learn(OTHER_ID, [at(4001)])
    assert peers.unannounced([OTHER_ID]) == []
    peers.see({OTHER_ID: (at(54321), at(54321, "7.7.7.7"))})  # it has moved
    assert peers.unannounced([OTHER_ID]) == [OTHER_ID]
    peers.learn(OTHER_ID, [at(4001, "7.7.7.7")])
    peers.see({OTHER_ID: (at(54321, "7.7.7.7"),)})
    assert peers.unannounced([OTHER_ID]) == []
    assert peers.stored() == {OTHER_ID: (at(4001, "7.7.7.7"),)}


def test_only_some_addresses_of_a_peer_are_kept_and_none_that_names_another() -> None:
    assert dialable(OTHER_ID, map(at, range(1, 20))) == tuple(map(at, range(1, MAX_ADDRESSES_PER_PEER + 1)))
    assert dialable(OTHER_ID, [f"{at(1)}/p2p/{OTHER_ID}", f"{at(2)}/p2p/{SECOND_ID}"]) == (at(1),)


def test_list_is_bounded_and_the_peer_longest_gone_leaves(clock: Clock) -> None:
    peers = KnownPeers([BOOT], OWN_ID, clock=clock)
    peers.see({peer_id: (at(1),) for peer_id in IDS[4 : 4 + MAX_PEERS]})
    peers.see({peer_id: (at(1),) for peer_id in IDS[4:]})  # all seen in this moment: those known longer stay
    assert set(peers.stored()) == set(IDS[4 : 4 + MAX_PEERS])
    clock.now += 10
    peers.see({IDS[4]: (at(2),)})
    peers.see({IDS[99]: (at(3),)})
    stored = peers.stored()
    assert len(stored) == MAX_PEERS
    assert next(iter(stored)) == IDS[99]
    assert IDS[4] in stored
    assert IDS[5] not in stored
    assert BOOT_ID in peers.configured()


def test_strangers_displace_each_other_but_no_peer_that_was_met(clock: Clock) -> None:
    peers = KnownPeers([], OWN_ID, clock=clock)
    met, strangers = IDS[4:34], IDS[34:]
    peers.see({peer_id: (at(1),) for peer_id in met})
    for stranger in strangers:
        clock.now += 1
        peers.learn(stranger, [at(2)])
    assert len(peers.stored()) == MAX_PEERS
    assert set(met) < set(peers.stored())
    assert strangers[-1] in peers.stored()
    assert strangers[0] not in peers.stored()
    peers.see({peer_id: (at(1),) for peer_id in IDS[4 : 4 + MAX_PEERS]})
    peers.learn(IDS[99], [at(2)])
    assert IDS[99] not in peers.stored()


def test_names_of_one_network_do_not_replace_the_peers_that_were_met(clock: Clock) -> None:
    peers = KnownPeers([], OWN_ID, clock=clock)
    honest = {Identity(number.to_bytes(2, "big") * 16).peer_id: number for number in range(1, MAX_PEERS + 1)}
    for peer_id, number in honest.items():
        clock.now += 1
        peers.see({peer_id: (at(4001, f"11.0.{number}.1"),)})
    for number in range(1000, 1300):
        clock.now += 60
        name = Identity(number.to_bytes(2, "big") * 16).peer_id
        peers.see({name: (at(number, f"12.0.0.{number % 256}"),)})
        peers.learn(name, [at(4001, f"13.0.{number % 256}.1")])
        peers.see({name: (at(number, f"12.0.0.{number % 256}"),)})
    assert len(honest.keys() & peers.stored().keys()) >= MAX_PEERS - 2


def test_configured_peers_that_are_no_neighbors_are_absent_and_one_of_the_others(clock: Clock) -> None:
    peers = KnownPeers([BOOT, SECOND], OWN_ID, clock=clock)
    assert peers.absent({SECOND_ID}, random.Random(1)) == {BOOT_ID: ("/ip4/1.2.3.4/tcp/2",)}
    peers.see({peer_id: (at(1),) for peer_id in IDS[4:9]})
    chosen = set()
    for seed in range(50):
        absent = peers.absent({SECOND_ID, IDS[4]}, random.Random(seed))
        assert absent.pop(BOOT_ID)
        chosen |= set(absent)
    assert chosen == set(IDS[5:9])


def test_peers_are_found_again_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "peers.json"
    peers = KnownPeers([BOOT], OWN_ID, path, clock)
    peers.see({OTHER_ID: (at(54321),), BOOT_ID: (), IDS[9]: ("/ip4/1.1.1.1/udp/9/quic-v1",)})
    peers.learn(OTHER_ID, [at(4001)])
    clock.now += 5
    peers.learn(IDS[8], [at(8)])
    peers.save()
    assert path.stat().st_size < 1000
    again = KnownPeers([], OWN_ID, path, clock)
    assert list(again.stored().items()) == [(IDS[8], (at(8),)), (OTHER_ID, (at(4001),))]
    again.see({OTHER_ID: (at(11111),)})
    assert again.stored()[OTHER_ID] == (at(4001),)
    assert KnownPeers([], OTHER_ID, path, clock).stored() == {IDS[8]: (at(8),)}
    clock.now += MAX_AGE_S - 5
    assert list(KnownPeers([], OWN_ID, path, clock).stored()) == [IDS[8]]


def test_peer_known_by_a_host_name_is_found_again_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    path, named = tmp_path / "peers.json", "/dns4/bootstrap.example.org/tcp/2"
    first = KnownPeers([TcpAddress("dns4", "bootstrap.example.org", 2, BOOT_ID)], OWN_ID, path, clock)
    first.see({BOOT_ID: (named,), OTHER_ID: ("/dns6/other.example.org/tcp/3",)})
    first.save()
    again = KnownPeers([], OWN_ID, path, clock)
    assert again.stored() == {BOOT_ID: (named,), OTHER_ID: ("/dns6/other.example.org/tcp/3",)}
    again.see(
        {SECOND_ID: ("/dns4/third.example.org/tcp/4",)}
    )  # a newcomer is compared with the networks of those known
    assert SECOND_ID in again.stored()


def test_file_is_written_when_the_list_changed_and_not_too_often(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "peers.json"
    peers = KnownPeers([], OWN_ID, path, clock)
    peers.save(at_once=True)
    assert not path.exists(), "a list of nobody must not replace one of somebody"

    def written() -> set[str]:
        return set(read_peers(path, clock.now))

    peers.see({OTHER_ID: (at(1),)})
    peers.save()
    assert written() == {OTHER_ID}
    peers.see({SECOND_ID: (at(2),)})
    peers.save()
    assert written() == {OTHER_ID}
    clock.now += SAVE_INTERVAL_S
    peers.save()
    assert written() == {OTHER_ID, SECOND_ID}
    path.unlink()
    clock.now += SAVE_INTERVAL_S
    peers.see({SECOND_ID: (at(2),)})
    peers.save()
    assert not path.exists()
    clock.now += 3600
    peers.save()
    assert written() == {OTHER_ID, SECOND_ID}
    peers.see({IDS[7]: (at(2),)})
    peers.save(at_once=True)
    assert IDS[7] in written()
    assert [item.name for item in tmp_path.iterdir()] == ["peers.json"]


def test_short_list_is_written_soon_and_a_long_one_seldom(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "peers.json"
    peers = KnownPeers([], OWN_ID, path, clock)
    for number in range(1, FEW_PEERS + 1):
        peers.see({IDS[number]: (at(number),)})
        peers.save()
        assert len(read_peers(path, clock.now)) == number
        clock.now += SAVE_SOON_S
    peers.see({IDS[50]: (at(50),)})
    peers.save()
    assert len(read_peers(path, clock.now)) == FEW_PEERS


def test_circuits_do_not_replace_an_address_at_which_the_peer_was_seen(clock: Clock) -> None:
    peers, circuit = KnownPeers([], OWN_ID, clock=clock), f"{at(2)}/p2p/{BOOT_ID}/p2p-circuit"
    peers.see({OTHER_ID: (at(9),)})
    peers.learn(OTHER_ID, [circuit])
    assert peers.stored() == {OTHER_ID: (at(9), circuit)}
    peers.learn(OTHER_ID, [at(7), circuit])
    assert peers.stored() == {OTHER_ID: (at(7), circuit)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"[" * 100_000,
        b" " * (MAX_FILE_BYTES + 1),
        b'{"version": 2, "peers": []}',
        b'{"version": 1, "peers": [{"peer_id": 7}]}',
        b'{"version": 1, "peers": [{"peer_id": "x", "addresses": [], "last_seen": NaN}]}',
        json.dumps({"version": 1, "peers": [{"peer_id": "x", "addresses": [], "last_seen": 1}] * 65}).encode(),
    ],
    ids=range(8),
)
def test_damaged_file_is_a_warning_and_an_empty_list(
    tmp_path: Path, clock: Clock, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        peers = KnownPeers([], OWN_ID, path, clock)
    assert "cannot read the stored peers" in caplog.text
    assert peers.stored() == {}
    peers.see({OTHER_ID: (at(1),)})
    peers.save()
    assert set(read_peers(path, clock.now)) == {OTHER_ID}


def test_what_is_wrong_in_a_sound_file_is_left_out(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "peers.json"
    entries = [
        {"peer_id": "nobody", "addresses": [at(1)], "last_seen": clock.now},
        {"peer_id": IDS[5], "addresses": ["/ip4/300.1.1.1/tcp/1", "file:///etc"], "last_seen": clock.now},
        {"peer_id": IDS[6], "addresses": ["x", at(6)], "last_seen": clock.now},
        {"peer_id": IDS[7], "addresses": [at(7)], "last_seen": clock.now - MAX_AGE_S},
        {"peer_id": IDS[8], "addresses": [at(8)], "last_seen": clock.now * 10},
    ]
    path.write_text(json.dumps({"version": 1, "peers": entries}))
    found = read_peers(path, clock.now)
    assert {peer_id: peer.addresses for peer_id, peer in found.items()} == {IDS[6]: (at(6),), IDS[8]: (at(8),)}
    assert found[IDS[8]].last_seen == clock.now


def test_disk_that_takes_nothing_costs_a_warning(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    peers = KnownPeers([], OWN_ID, tmp_path / "gone" / "peers.json", clock)
    peers.see({OTHER_ID: (at(1),)})
    peers.save()
    assert "cannot store" in caplog.text


@given(st.binary(max_size=300) | st.text().map(str.encode) | st.just(b'{"peers": [{}]}'))
def test_no_file_raises(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "peers.json"
    path.write_bytes(content)
    assert read_peers(path, 1e9) == {}


class Session:
    """A session whose neighbours a test chooses; it counts searches for the nearest peers."""

    def __init__(self) -> None:
        self.neighbors = frozenset(IDS[4:8])
        self.connected = {*IDS[4:8], IDS[20]}
        self.refreshed_at: list[int] = []
        self.num_checks = 0

    async def refresh(self) -> None:
        self.refreshed_at.append(self.num_checks)

    async def greet(self, peers: object) -> int:
        return 0

    async def peers(self) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(self.connected, ())

    async def prefer(self, connected: object) -> None: ...

    async def listening_addresses(self, peer_ids: object) -> dict[str, tuple[str, ...]]:
        return {}


async def test_the_nearest_peers_are_searched_for_rarely_where_nobody_comes_or_goes(clock: Clock) -> None:
    joining, session = Joining(KnownPeers([], OWN_ID, clock=clock), random.Random(0), Surroundings()), Session()

    async def check(times: int) -> None:
        for _ in range(times):
            session.num_checks += 1
            await joining.stay(session)  # type: ignore[arg-type]

    await check(12)
    assert session.refreshed_at == [1, 2, 4, 8, 12]
    session.neighbors |= {IDS[9]}
    session.connected.add(IDS[9])
    await check(4)
    assert session.refreshed_at[5:] == [13, 14, 16], "at once, and soon again"
    await check(8)
    assert session.refreshed_at[8:] == [20, 24]
    session.connected.remove(IDS[4])
    await check(1)
    assert session.refreshed_at[10:] == [25], "one that died is still in the table"
