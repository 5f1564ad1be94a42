"""Dialling back: who is dialled, how often, whose proof counts; and when a node asks."""

import asyncio
import contextlib
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarm.errors import RequestError
from swarm.network.peers.dialling import MAX_AGE_S
from swarm.network.reach.dial_back import answers_as, is_signed_by
from swarm.network.reach.reachability import (
    ADVISE_AFTER_S,
    HURRY_INTERVAL_S,
    MAX_TEST_BYTES,
    NUM_WITNESSES,
    PROBE_INTERVAL_S,
    IndexOutage,
    ReachabilityResult,
    ReachabilityWatch,
    ReachService,
    Sighting,
    Surveyed,
    bytes_request,
    conclude,
    dial_request,
    hello_request,
    interleaved_by_network,
    read_greeting,
)
from swarm.network.reach.role import REACHED_FILE, LastReached, ReservationWatch
from swarm.network.tcp_address import TcpAddress
from swarm.network.transport import RequestRefused
from tests.unit.experience_factory import Clock

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
RELAY = "12D3KooWPNiWGyhCcR5PdrR4GK4fxuvZ6XbEsxtT3svW5aT2PLeF"


def service(*addresses: str, clock: Clock | None = None) -> ReachService:
    async def observed(peer_id: str) -> Sequence[str]:
        return addresses

    return ReachService(observed, lambda: 1234.5, clock or Clock())


async def test_greeting_tells_time_and_the_address_seen() -> None:
    greeting = read_greeting(await service("/ip4/11.0.0.3/tcp/9").answer(PEER, hello_request()))
    assert (greeting.time_s, greeting.host) == (1234.5, "11.0.0.3")


async def test_peer_behind_a_relay_has_no_address_and_is_not_dialled() -> None:
    relayed = service(f"/ip4/11.0.0.2/tcp/1/p2p/{RELAY}/p2p-circuit")
    assert read_greeting(await relayed.answer(PEER, hello_request())).host == ""
    with pytest.raises(RequestRefused):
        await relayed.answer(PEER, dial_request(4001))


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1", "/ip4/169.254.1.1/tcp/1"])
async def test_addresses_of_this_machine_are_never_dialled(address: str) -> None:
    with pytest.raises(RequestRefused, match="not known"):
        await service(address).answer(PEER, dial_request(4001))


@pytest.mark.parametrize(
    "request_bytes",
    [b"", b"\x03", b"\x00\x00", dial_request(0), b"\x01\x01", bytes_request(MAX_TEST_BYTES + 1), b"\x02\x01"],
)
async def test_malformed_request_is_refused(request_bytes: bytes) -> None:
    with pytest.raises(RequestRefused, match="malformed"):
        await service().answer(PEER, request_bytes)


async def test_each_peer_and_all_together_are_limited_per_minute() -> None:
    async def observed(peer_id: str) -> Sequence[str]:
        return [f"/ip4/11.0.0.{peer_id}/tcp/4001"]

    clock = Clock()
    asked = ReachService(observed, clock, clock)
    for _ in range(4):
        assert len(await asked.answer("0", bytes_request(10))) == 10
    with pytest.raises(RequestRefused, match="too many"):
        await asked.answer("0", bytes_request(10))
    for number in range(1, 17):
        await asked.answer(f"{number}", bytes_request(1))
    with pytest.raises(RequestRefused, match="too many"):
        await asked.answer("17", bytes_request(1))
    clock.now += 61
    await asked.answer("0", bytes_request(10))


@pytest.mark.parametrize("place", ["/ip4/11.0.99.9/tcp/{}", "/ip6/2a00:1:2:{0:x}::{0:x}/tcp/4001"])
async def test_names_of_one_machine_do_not_use_up_the_answers_for_others(place: str) -> None:
    async def observed(peer_id: str) -> Sequence[str]:
        return ["/ip4/11.0.1.1/tcp/4001"] if peer_id == "honest" else [place.format(2000 + int(peer_id))]

    async def dial(peer_id: str, host: str, port: int) -> bool:
        return True

    asked = ReachService(observed, Clock(), Clock(), dial)
    for kind in (hello_request(), dial_request(4001), bytes_request(1)):
        for number in range(700):
            with contextlib.suppress(RequestRefused):
                await asked.answer(f"{number % 64}", kind)
        assert await asked.answer("honest", kind)


@pytest.mark.parametrize("port", [1, 22, 25, 80, 442, 444, 1023])
async def test_ports_of_other_services_are_not_dialled_back(port: int) -> None:
    with pytest.raises(RequestRefused, match="below 1024"):
        await service("/ip4/11.0.0.3/tcp/50000").answer(PEER, dial_request(port))


async def test_names_without_number_do_not_have_one_address_dialled_back_more_often() -> None:
    dialled: list[tuple[str, int]] = []

    async def observed(peer_id: str) -> Sequence[str]:
        return [f"/ip4/11.0.0.{4 if peer_id == 'neighbour' else 3}/tcp/50000"]

    async def note(peer_id: str, host: str, port: int) -> bool:
        dialled.append((host, port))
        return False

    asked = ReachService(observed, Clock(), Clock(), note)
    for number in range(20):
        with contextlib.suppress(RequestRefused):
            await asked.answer(f"name {number}", dial_request(4001 + number))
    assert dialled == [("11.0.0.3", port) for port in range(4001, 4005)]
    assert await asked.answer("neighbour", dial_request(443)) == b"\x00"
    assert dialled[-1] == ("11.0.0.4", 443)


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"1234567",
        struct.pack(">d", 1.0) + b"here",
        struct.pack(">d", 1.0) + b"2a00::1%/p2p",
        struct.pack(">d", float("nan")),
        b"\x00" * 8 + b"\xff",
    ],
)
def test_malformed_greeting_is_a_request_error(response: bytes) -> None:
    with pytest.raises(RequestError):
        read_greeting(response)


PUBLIC, OTHER, PRIVATE = Sighting("11.0.0.3", 4001), Sighting("11.0.0.3", None), Sighting("192.168.1.2", 4001)


@pytest.mark.parametrize(
    ("sightings", "is_reachable"),
    [
        ([], None),
        ([PUBLIC], True),
        ([OTHER], False),
        ([PUBLIC, OTHER], False),  # two answer, so two must have got through
        ([PUBLIC, PUBLIC, OTHER], True),
        ([PUBLIC, PUBLIC, OTHER, OTHER, OTHER], False),
        ([PRIVATE, PRIVATE], True),  # a swarm of one home
        ([PRIVATE, PRIVATE, OTHER], False),  # neighbours do not outvote the world
    ],
)
def test_who_is_believed(sightings: list[Sighting], is_reachable: bool | None) -> None:
    assert conclude(sightings).is_reachable is is_reachable


@pytest.mark.parametrize("seed", range(5))
def test_names_of_one_network_are_not_the_witnesses_of_a_node(seed: int) -> None:
    honest = {f"honest {number}": (f"/ip4/11.0.{number}.1/tcp/4001",) for number in range(NUM_WITNESSES - 1)}
    names = {f"name {number:03}": (f"/ip4/11.0.99.{number % 250}/tcp/{2000 + number}",) for number in range(300)}
    order = interleaved_by_network({**names, **honest}, random.Random(seed))
    assert set(order) == names.keys() | honest.keys()
    assert sum(one in honest for one in order[:NUM_WITNESSES]) == NUM_WITNESSES - 1


def test_neighbours_at_one_place_are_asked_in_any_order() -> None:
    connected = {f"node {number}": ("/ip4/127.0.0.1/tcp/4001", "nonsense") for number in range(6)} | {"odd": ()}
    orders = {tuple(interleaved_by_network(connected, random.Random(seed))) for seed in range(20)}
    assert len(orders) > 10 and all(set(order) == connected.keys() for order in orders)


def test_finding_names_the_address_that_was_reached() -> None:
    assert conclude([PUBLIC, PUBLIC]) == ReachabilityResult(True, TcpAddress("ip4", "11.0.0.3", 4001))


async def test_who_does_not_speak_libp2p_is_nobody() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(http, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert not await answers_as(PEER, "127.0.0.1", port, timeout_s=2.0)
    assert not await answers_as(PEER, "127.0.0.1", port, timeout_s=2.0)  # nobody listens any more


@pytest.mark.parametrize("certificate", [b"", b"\x30\x03\x02\x01\x05", b"x" * 500])
def test_garbage_is_no_certificate(certificate: bytes) -> None:
    assert not is_signed_by(PEER, certificate)


def asks(*answers: bytes | None):
    """A network of one peer that sees this node at 11.0.0.3; answers to the dial request in turn, None: no answer."""
    rest = list(answers)

    async def ask(peer_id: str, request: bytes) -> bytes:
        if rest[0] is None:
            rest.pop(0)
            raise RequestError("gone")
        return struct.pack(">d", 0.0) + b"11.0.0.3" if request == hello_request() else rest.pop(0) or b""

    return ask


PROVEN = TcpAddress("ip4", "11.0.0.3", 4001)


def watch(clock: Clock, **settings: object) -> ReachabilityWatch:
    defaults: dict[str, object] = {"setting": "auto", "is_local": False, "has_known_peers": True}
    return ReachabilityWatch(**(defaults | settings), clock=clock)  # type: ignore[arg-type]


async def test_node_hosts_nothing_until_a_peer_got_through() -> None:
    clock = Clock()
    watched = watch(clock)
    assert not watched.is_reachable
    assert watched.is_due(["/ip4/10.0.0.1/tcp/1"])
    assert await watched.look(asks(b"\x01"), [PEER], [4001])
    assert watched.is_reachable
    assert not watched.is_due(["/ip4/10.0.0.1/tcp/1"])
    clock.now += PROBE_INTERVAL_S
    assert watched.is_due(["/ip4/10.0.0.1/tcp/1"])


async def test_reachable_node_is_demoted_by_the_second_failure_only() -> None:
    watched = watch(Clock())
    await watched.look(asks(b"\x01"), [PEER], [4001])
    assert not await watched.look(asks(None), [PEER], [4001])  # nobody could tell: nothing is learned
    assert not await watched.look(asks(b"\x00"), [PEER], [4001])
    assert await watched.look(asks(b"\x00"), [PEER], [4001])
    assert not watched.is_reachable


async def test_node_that_was_dialled_hosts_again_at_once_until_peers_deny_it() -> None:
    watched = watch(Clock())
    watched.resume(PROVEN)
    assert watched.is_reachable and watched.proven == PROVEN and watched.is_due([])
    assert not await watched.look(asks(b"\x00"), [PEER], [4001])
    assert await watched.look(asks(b"\x00"), [PEER], [4001])
    assert not watched.is_reachable and watched.proven is None
    for settings in ({"setting": "private"}, {"setting": "auto", "is_local": True}):
        other = watch(Clock(), **settings)
        other.resume(PROVEN)
        assert other.proven is None, settings


def test_last_address_counts_on_the_same_machine_for_a_week(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, path = Clock(), tmp_path / REACHED_FILE
    last = LastReached(path, clock)
    assert last.read([4001], ["11.0.0.3"]) is None and not caplog.messages
    last.write(PROVEN, ["11.0.0.3"])
    assert last.read([4001], ["11.0.0.3"]) == PROVEN
    assert last.read([4002], ["11.0.0.3"]) is None
    assert last.read([4001], ["11.0.0.3", "192.168.0.2"]) is None
    clock.now += MAX_AGE_S
    assert last.read([4001], ["11.0.0.3"]) is None
    clock.now -= MAX_AGE_S + 1
    assert last.read([4001], ["11.0.0.3"]) is None, "a clock that was set back says nothing of its age"
    clock.now += 1
    last.write(None, [])
    assert not path.exists()
    path.write_text('{"address": "/ip4/11.0.0.3/tcp/4001"}')
    assert last.read([4001], []) is None
    assert "asking peers again" in caplog.text
    assert LastReached(None).read([4001], []) is None


async def test_first_peer_is_asked_at_once() -> None:
    watched = watch(Clock())
    assert watched.is_due([])
    assert not await watched.look(asks(b"\x01"), [], [4001])
    assert watched.is_due([])
    assert await watched.look(asks(b"\x01"), [PEER], [4001])


async def test_node_that_is_needed_as_a_host_looks_every_minute() -> None:
    clock = Clock()
    watched = watch(clock)
    for _ in range(6):
        await watched.look(asks(b"\x00"), [PEER], [4001])
    clock.now += HURRY_INTERVAL_S
    assert not watched.is_due([])
    watched.hurry()
    assert watched.is_due([])
    await watched.look(asks(b"\x00"), [PEER], [4001])
    watched.hurry()
    assert not watched.is_due([])


def test_outage_gives_advice_after_a_while_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outage = IndexOutage(clock)
    alone = Surveyed(has_host=False, num_connected=0, num_known=2)
    outage.note(alone)
    assert outage.advice() == ()
    for _ in range(2):
        clock.now += ADVISE_AFTER_S
        outage.note(alone)
    assert outage.advice() == (alone.lack,)
    assert "none of 2 known peers answers" in alone.lack
    assert caplog.messages == [alone.lack]
    outage.note(Surveyed(has_host=True, num_connected=1, num_known=2))
    assert outage.advice() == ()


def test_what_is_missing_follows_from_who_is_there() -> None:
    assert Surveyed(has_host=False, num_connected=0, num_known=1).lack.startswith(
        "the only known peer does not answer: "
    )
    assert "forward" not in Surveyed(has_host=False, num_connected=0, num_known=2).lack
    assert "forward" in Surveyed(has_host=False, num_connected=0, num_known=2, was_dialled=False).lack
    assert "no peer can be dialled" in Surveyed(has_host=False, num_connected=1, num_known=2).lack
    assert not Surveyed(has_host=False, num_connected=1, num_known=2, is_one_machine=True).lack
    assert not Surveyed(has_host=True, num_connected=1, num_known=2).lack
    assert not Surveyed(has_host=True, num_connected=0, num_known=0).lack, "a swarm of one"


async def test_change_of_address_makes_a_look_due() -> None:
    watched = watch(Clock())
    assert watched.is_due(["/ip4/10.0.0.1/tcp/1"])
    await watched.look(asks(b"\x01"), [PEER], [4001])
    assert not watched.is_due(["/ip4/10.0.0.1/tcp/1", f"/ip4/1.1.1.1/tcp/1/p2p/{RELAY}/p2p-circuit"])
    assert watched.is_due(["/ip4/10.0.0.7/tcp/1"])


def test_settings_and_loopback_need_no_look() -> None:
    for settings, is_reachable in (
        ({"setting": "public"}, True),
        ({"setting": "private"}, False),
        ({"is_local": True}, True),
    ):
        watched = watch(Clock(), **settings)
        assert watched.is_reachable is is_reachable
        assert not watched.is_due(["/ip4/10.0.0.1/tcp/1"])


def test_first_node_of_a_swarm_takes_itself_for_reachable_until_asked() -> None:
    watched = watch(Clock(), has_known_peers=False)
    assert watched.is_reachable
    assert watched.is_due(["/ip4/10.0.0.1/tcp/1"])


def test_returning_relay_is_asked_by_a_new_daemon_once() -> None:
    clock = Clock()
    reservation = ReservationWatch(clock)
    lost = {"has_reservation": False, "is_relay_connected": True}
    assert not reservation.needs_new_daemon(**lost), "a peer that serves no relay is no loss"
    assert not reservation.needs_new_daemon(has_reservation=True, is_relay_connected=True)
    assert not reservation.needs_new_daemon(has_reservation=False, is_relay_connected=False)
    assert reservation.needs_new_daemon(**lost)
    assert not reservation.needs_new_daemon(**lost)
    assert not reservation.needs_new_daemon(has_reservation=False, is_relay_connected=False)
    assert not reservation.needs_new_daemon(**lost), "a relay that comes and goes costs few restarts"
    clock.now += 61
    assert reservation.needs_new_daemon(**lost)
