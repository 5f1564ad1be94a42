"""The libp2p transport over real sockets on loopback: joining, index, requests, hostile peers, and every way to die."""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from swarm.config import NetworkSection
from swarm.errors import ConfigError, NetworkError, RequestError
from swarm.network.hivemind import session
from swarm.network.hivemind.index_storage import as_claimed
from swarm.network.hivemind.parts import DHTID
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.index_entry import MAX_VALUE_BYTES, UNSIGNED, IndexValidator, Validity
from swarm.network.make_transport import make_transport
from swarm.network.requests.framing import MAX_CALL_BYTES
from swarm.network.tcp_address import TcpAddress
from swarm.network.transport import RequestRefused
from swarm.records.identity import Identity, create, load

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
STRANGER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
LARGE_BODY = os.urandom(1 << 20) * 16


async def echo(peer_id: str, request: bytes) -> bytes:
    return peer_id.encode() + b":" + request


async def large(peer_id: str, request: bytes) -> bytes:
    return LARGE_BODY


async def refuse(peer_id: str, request: bytes) -> bytes:
    raise RequestRefused("not now")


async def break_down(peer_id: str, request: bytes) -> bytes:
    raise KeyError("secret")


async def hang(peer_id: str, request: bytes) -> bytes:
    return await asyncio.get_running_loop().create_future()


def make_node(
    folder: Path, *, validator: IndexValidator | None = None, health_interval_s: float = 15.0, **settings: object
) -> HivemindTransport:
    config = NetworkSection.model_validate(settings)
    folder.mkdir(exist_ok=True)
    node = HivemindTransport(
        config, create(folder / "identity.key"), folder, validator, health_interval_s=health_interval_s
    )
    for handler in (echo, large, refuse, break_down, hang):
        node.serve(f"test/{handler.__name__}", handler, max_request_bytes=1000)
    return node


@asynccontextmanager
async def running(*nodes: HivemindTransport) -> AsyncIterator[None]:
    try:
        for node in nodes:
            await node.start()
        yield
    finally:
        for node in nodes:
            await node.stop()


@asynccontextmanager
async def swarm(
    folder: Path, size: int, validator: Callable[[int], IndexValidator | None] = lambda number: None
) -> AsyncIterator[list[HivemindTransport]]:
    """Nodes that all joined through the first one."""
    first = make_node(folder / "0", validator=validator(0), health_interval_s=0.2)
    async with running(first):
        others = [
            make_node(
                folder / str(number),
                validator=validator(number),
                initial_peers=first.addresses(),
                health_interval_s=0.2,
            )
            for number in range(1, size)
        ]
        async with running(*others):
            yield [first, *others]


async def ask(node: HivemindTransport, peer_id: str, name: str, request: bytes = b"hi", **limits: float) -> bytes:
    return await node.request(
        peer_id,
        f"test/{name}",
        request,
        max_response_bytes=int(limits.get("max_response_bytes", 1000)),
        deadline_s=limits.get("deadline_s", 10.0),
    )


async def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Poll something that sends no event: another process, or another node's view of the swarm."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def daemon_pid(node: HivemindTransport) -> int:
    assert node._session is not None
    assert node._session.daemon_pid is not None
    return node._session.daemon_pid


def num_neighbors(node: HivemindTransport) -> int:
    return len(node._session.neighbors) if node._session is not None else 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_nodes_that_joined_through_one_peer_share_an_index_and_reach_each_other(tmp_path: Path) -> None:
    async with swarm(tmp_path, 4) as nodes:
        for node in nodes:
            assert await node.store("key", f"{node.peer_id}/0", node.peer_id.encode(), node.now() + 60)
        expected = {f"{node.peer_id}/0": node.peer_id.encode() for node in nodes}
        for node in nodes:
            assert await node.load("key") == expected
            assert await node.load("other") == {}
        for one in nodes:
            for other in nodes:
                if one is not other:  # most of these pairs never exchanged an address
                    assert await ask(one, other.peer_id, "echo") == one.peer_id.encode() + b":hi"
        assert set(await nodes[3].connected_peers()) == {node.peer_id for node in nodes[:3]}
        (address,) = nodes[0].addresses()
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert address.endswith(f"/p2p/{nodes[0].peer_id}")


def _forget_all(nodes: list[HivemindTransport]) -> None:
    """Let these hosts lose what they hold."""
    for node in nodes:
        assert node._session is not None
        node._session._node.protocol.storage.get = lambda key: None


async def test_entries_are_stored_and_read_without_a_search_until_hosts_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []

    class CountedSearch(session.IndexSearch):
        async def run(self) -> None:
            searched.append(self._target)
            await super().run()

    def is_searched(key: str) -> bool:
        key_id = DHTID.generate(source=key)
        return not {key_id, key_id ^ 1}.isdisjoint(searched)  # other searches keep the table of peers up to date

    monkeypatch.setattr(session, "IndexSearch", CountedSearch)
    async with swarm(tmp_path, 6) as nodes:
        node, expires_at = nodes[0], nodes[0].now() + 60
        await node.load("key 0")  # finds all five others
        for number in range(1, 4):
            assert await node.store(f"key {number}", "a", b"1", expires_at)
            assert await node.load(f"key {number}") == {"a": b"1"}
        assert not any(is_searched(f"key {number}") for number in range(1, 4))
        _forget_all(nodes[1:4])  # at least two of the five hosts, and never all
        assert await node.load("key 1") == {"a": b"1"}
        assert await nodes[5].load("key 3") == {"a": b"1"}
        await asyncio.gather(nodes[3].stop(), nodes[4].stop())
        assert await node.store("key 4", "a", b"4", expires_at)
        assert is_searched("key 4")
        assert await nodes[5].load("key 4") == {"a": b"4"}


async def test_later_entry_replaces_an_earlier_one_and_expired_ones_are_gone(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2) as (one, other):
        now = one.now()
        assert await one.store("key", "s", b"first", now + 60)
        assert await other.store("key", "s", b"second", now + 61)
        await one.store("key", "s", b"third", now + 60)
        assert not await one.store("key", "past", b"x", now - 1)
        assert await one.store("key", "far", b"x", now + 1e9)  # cut to an hour
        assert await one.load("key") == await other.load("key") == {"s": b"second", "far": b"x"}
        with pytest.raises(ValueError, match=f"<= {MAX_VALUE_BYTES} bytes"):
            await one.store("key", "s", bytes(MAX_VALUE_BYTES + 1), now + 60)


async def test_large_body_and_as_many_requests_at_once_as_one_peer_may(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2) as (one, other):
        body = await ask(one, other.peer_id, "large", max_response_bytes=1 << 24, deadline_s=20)
        assert body == LARGE_BODY
        requests = [ask(one, other.peer_id, "echo", b"%d" % number) for number in range(16)]
        answers = await asyncio.gather(*requests)
        assert [answer.partition(b":")[2] for answer in answers] == [b"%d" % number for number in range(16)]
        await until(lambda: other.traffic.requests_served == 17)  # counted when the acknowledgement has arrived
        assert one.traffic.bytes_received == len(LARGE_BODY) + sum(map(len, answers))


async def test_short_requests_need_no_stream_and_go_by_stream_where_the_peer_takes_no_calls(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2) as (one, other):
        assert other._session is not None
        client = other._session._p2p._client
        await client.control.remove_stream_handler("test/echo")
        assert await ask(one, other.peer_id, "echo") == one.peer_id.encode() + b":hi"
        with pytest.raises(RequestError, match="protocol"):
            await ask(one, other.peer_id, "echo", max_response_bytes=MAX_CALL_BYTES + 1)
        await client.remove_unary_handler("test/refuse/call")
        with pytest.raises(RequestError, match="not now"):
            await ask(one, other.peer_id, "refuse")


async def test_requests_that_cannot_be_answered_are_request_errors_with_the_reason(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2) as (one, other):
        for peer_id, name, request, limits, reason in [
            (STRANGER, "echo", b"", {}, "no address of this peer is known"),
            ("nonsense", "echo", b"", {}, "not a peer id"),
            (one.peer_id, "echo", b"", {}, "dial to self"),
            (other.peer_id, "none", b"", {}, "protocols not supported"),
            (other.peer_id, "refuse", b"", {}, "refused: not now"),
            (other.peer_id, "break_down", b"", {}, "failed: the handler broke"),
            (other.peer_id, "echo", bytes(1001), {}, "a request must be <= 1000 bytes, got 1001"),
            (other.peer_id, "echo", bytes(5_000_000), {}, "a request must be <= 1000 bytes, got 5000000"),
            (other.peer_id, "large", b"", {"max_response_bytes": 10**6}, "a response must be <= 1000000 bytes"),
            (other.peer_id, "hang", b"", {"deadline_s": 0.2}, "no answer within 0.2 s"),
        ]:
            with pytest.raises(RequestError, match=reason):
                await ask(one, peer_id, name, request, **limits)
        assert one.traffic.requests_failed == 10
        assert await ask(one, other.peer_id, "echo") == one.peer_id.encode() + b":hi"
        await other.stop()
        with pytest.raises(RequestError, match="failed to dial"):
            await ask(one, other.peer_id, "echo")


async def test_hostile_entries_are_neither_stored_nor_believed_and_honest_ones_survive(tmp_path: Path) -> None:
    seen: set[tuple[str, str, bytes]] = set()

    def accept_good(key: str, subkey: str, value: bytes) -> Validity | None:
        seen.add((key, subkey, value))
        return UNSIGNED if value == b"good" else None

    async with swarm(tmp_path, 3, lambda number: None if number == 2 else accept_good) as (one, other, mallory):
        now = one.now()
        assert await one.store("key", "a/0", b"good", now + 60)
        await mallory.store("key", "m/0", b"bad", now + 60)
        await mallory.store("key", "a/0", b"bad", now + 61)
        assert await mallory.load("key") == {"a/0": b"bad", "m/0": b"bad"}  # so it does answer with them
        session = mallory._session
        assert session is not None
        node = session._node
        node.protocol.record_validator = None  # from here on it takes from itself whatever it sends to others
        node.protocol.storage._judge = as_claimed  # type: ignore[attr-defined]
        await node.store("key", b"key\0good", now + 1e6, subkey="m/1")  # would outlive everything
        await node.store("key", b"other\0good", now + 50, subkey="m/2")  # an entry of another key
        await node.store("key", b"key\0good", now + 51, subkey=("m", 3))
        held = await node.get("key", latest=True)
        assert held is not None
        assert len(held.value) >= 4
        await node.store("plain", b"plain\0good", now + 3000)  # a plain value would replace all subkeys
        assert await one.store("plain", "a/0", b"good", now + 60)
        assert await one.load("plain") == await other.load("plain") == {"a/0": b"good"}
        for reader in (one, other):
            assert await reader.load("key") == {"a/0": b"good"}
        assert seen == {
            ("key", "a/0", b"good"),
            ("key", "m/0", b"bad"),
            ("key", "a/0", b"bad"),
            ("plain", "a/0", b"good"),
        }


async def test_a_peer_that_names_made_up_peers_near_a_key_keeps_no_entry_from_the_others(tmp_path: Path) -> None:
    from swarm.network.hivemind.parts import DHTID, PeerID

    key_id = DHTID.generate(source="key")
    names = [PeerID.from_base58(Identity(os.urandom(32)).peer_id) for _ in range(600)]
    made_up = sorted((DHTID.generate(source=name.to_bytes()).xor_distance(key_id), name) for name in names)[:20]
    async with swarm(tmp_path, 4) as (one, other, liar, reader):
        for node in (other, reader):
            assert node._session is not None
            await node._session.refresh()
        assert liar._session is not None
        liar._session._node.protocol.routing_table.get_nearest_neighbors = lambda *_, **__: [
            (DHTID.generate(source=name.to_bytes()), name) for _, name in made_up
        ]
        assert await other.store("key", "a/0", b"good", other.now() + 60)
        for node in (one, reader):
            assert node._session is not None
            held = node._session._node.protocol.storage.get(key_id)
            assert held is not None
            assert "a/0" in held.value.data
        assert await reader.load("key") == {"a/0": b"good"}


async def test_killed_daemon_is_replaced_at_the_same_address(tmp_path: Path) -> None:
    async with swarm(tmp_path, 3) as nodes:
        first, old_pid, old_addresses = nodes[0], daemon_pid(nodes[0]), nodes[0].addresses()
        await nodes[1].store("key", "s", b"kept", nodes[1].now() + 60)
        os.kill(old_pid, signal.SIGKILL)
        await until(lambda: first.num_restarts == 1 and first._session is not None and daemon_pid(first) != old_pid)
        assert first.addresses() == old_addresses
        await until(lambda: num_neighbors(first) == 2)  # rejoined by itself
        assert await first.load("key") == {"s": b"kept"}
        assert await ask(first, nodes[2].peer_id, "echo") == first.peer_id.encode() + b":hi"
        assert await ask(nodes[2], first.peer_id, "echo") == nodes[2].peer_id.encode() + b":hi"
        assert is_gone(old_pid)


async def test_daemon_that_hangs_is_noticed_and_replaced(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2) as (first, other):
        old_pid = daemon_pid(first)
        os.kill(old_pid, signal.SIGSTOP)
        await until(lambda: first._session is not None and daemon_pid(first) != old_pid, 60)
        assert is_gone(old_pid)
        await until(lambda: num_neighbors(first) == num_neighbors(other) == 1)
        assert await ask(other, first.peer_id, "echo") == other.peer_id.encode() + b":hi"
        assert other.num_restarts == 0  # it was not taken in by the silence of its peer


async def test_node_starts_alone_and_joins_when_its_peer_appears(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    first = make_node(tmp_path / "0", listen=(f"/ip4/127.0.0.1/tcp/{port}",))
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{first.peer_id}"
    early = make_node(tmp_path / "1", initial_peers=(address,), health_interval_s=0.2)
    async with running(early):
        assert "the only known peer does not answer" in caplog.text
        assert await early.store("key", "early", b"1", early.now() + 60)
        assert await early.load("key") == {"early": b"1"}
        async with running(first):
            await until(lambda: num_neighbors(early) == 1)
            await first.store("key", "first", b"2", first.now() + 60)
            assert await early.load("key") == {"early": b"1", "first": b"2"}


async def test_node_that_lost_all_peers_finds_them_again(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2) as (first, other):
        await other.stop()
        await until(lambda: num_neighbors(first) == 0)
        await other.start()
        await until(lambda: num_neighbors(first) == 1)
        assert await ask(first, other.peer_id, "echo") == first.peer_id.encode() + b":hi"


async def test_bootstrap_peer_that_starts_anew_is_found_by_the_others(tmp_path: Path) -> None:
    port = free_port()
    listen = (f"/ip4/127.0.0.1/tcp/{port}",)
    first = make_node(tmp_path / "0", listen=listen)
    initial_peers = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{first.peer_id}",)
    others = [
        make_node(tmp_path / str(number), initial_peers=initial_peers, health_interval_s=0.2) for number in (1, 2)
    ]
    async with running(first, *others):
        await first.stop()
        await until(lambda: [num_neighbors(other) for other in others] == [1, 1])  # they still have each other
        again = HivemindTransport(NetworkSection(listen=listen), load(tmp_path / "0" / "identity.key"), tmp_path / "0")
        async with running(again):
            await until(lambda: num_neighbors(again) == 2, 20)


async def test_ports_that_the_system_chose_are_taken_again_at_the_next_start(tmp_path: Path) -> None:
    for backend in ("hivemind", "libp2p"):
        config, folder = NetworkSection(backend=backend), tmp_path / backend
        folder.mkdir()
        identity = create(folder / "identity.key")

        async def addresses() -> tuple[tuple[str, ...], tuple[str, ...]]:
            node = make_transport(config, identity, folder)  # noqa: B023
            assert node is not None
            await node.start()
            try:
                return node.addresses(), node.gossip_addresses()
            finally:
                await node.stop()

        (first,), (gossip,) = await addresses()
        assert await addresses() == ((first,), (gossip,))
        with socket.socket() as other:  # somebody else has the one, and later the other
            other.bind(("127.0.0.1", TcpAddress.parse(first).port))
            other.listen()
            (second,), kept = await addresses()
        assert second != first and kept == (gossip,)
        assert (await addresses())[0] == (second,)
        with socket.socket() as other:
            other.bind(("127.0.0.1", TcpAddress.parse(gossip).port))
            other.listen()
            kept, (moved,) = await addresses()
        assert kept == (second,) and moved != gossip


async def test_who_is_connected_to_others_is_not_said_to_be_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None of the others hosts the index, so that none of them answers as one through whom to join."""
    caplog.set_level(logging.INFO)
    absent = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{STRANGER}"
    host = make_node(tmp_path / "0", initial_peers=(absent,), health_interval_s=0.2)
    async with running(host):
        assert "the only known peer does not answer; this node continues alone" in caplog.text
        caplog.clear()
        client = make_node(
            tmp_path / "1", initial_peers=host.addresses(), listen=("/ip4/0.0.0.0/tcp/0",), reachability="private"
        )
        async with running(client):
            await until(lambda: "no other peer that hosts the index answers; exchanges with the one" in caplog.text)
            assert "alone" not in caplog.text
            assert num_neighbors(host) == 0
        await until(lambda: "this node continues alone" in caplog.text)  # with the client gone, it is so again


async def test_stop_leaves_nothing_behind_within_three_seconds(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2) as (one, other):
        pid = daemon_pid(one)
        hanging = asyncio.create_task(ask(other, one.peer_id, "hang"))
        await until(lambda: len(one._server._conversations) == 1)
        start = time.monotonic()
        await one.stop()
        await one.stop()
        assert time.monotonic() - start < 3
        assert is_gone(pid)
        with pytest.raises(RequestError):
            await hanging
        assert (one.addresses(), await one.connected_peers(), await one.load("key")) == ((), (), {})
        assert not await one.store("key", "s", b"x", one.now() + 60)
        with pytest.raises(RequestError, match="network is down"):
            await ask(one, other.peer_id, "echo")


async def test_daemon_dies_with_a_node_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from swarm.config import NetworkSection\n"
        "from swarm.network.hivemind.transport import HivemindTransport\n"
        "from swarm.records.identity import create\n"
        "async def main():\n"
        "    folder = pathlib.Path(sys.argv[1])\n"
        "    node = HivemindTransport(NetworkSection(), create(folder / 'identity.key'), folder)\n"
        "    await node.start()\n"
        "    print(node._session.daemon_pid, flush=True)\n"
        "    await asyncio.get_running_loop().create_future()\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    assert not is_gone(pid)
    owner.kill()
    await owner.wait()
    await until(lambda: is_gone(pid), 5)


async def test_start_names_the_cause_of_failure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    children = psutil.Process().children()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for listen, cause in [
            (f"/ip4/127.0.0.1/tcp/{port}", "address already in use; stop the other program"),
            ("/ip4/192.0.2.1/tcp/4001", "cannot assign requested address"),
            ("/ip4/192.0.2.1/tcp/0", "failed to listen on any addresses"),
        ]:
            node = make_node(tmp_path / cause[:6], listen=(listen,), startup_timeout_s=2.0)
            with pytest.raises(NetworkError, match=cause):
                await node.start()
    assert psutil.Process().children() == children


async def test_malformed_addresses_are_config_errors(tmp_path: Path) -> None:
    for settings in (
        {"listen": ["nonsense"]},
        {"announce": ["/ip4/1.2.3.4"]},
        {"initial_peers": ["/ip4/1.2.3.4/tcp/1"]},
    ):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            HivemindTransport(NetworkSection.model_validate(settings), Identity(bytes(32)), tmp_path)


async def test_hivemind_leaves_logging_as_it_was(tmp_path: Path) -> None:
    async with running(make_node(tmp_path / "0")):
        assert logging.getLevelName(logging.WARNING) == "WARNING"
        hivemind = logging.getLogger("hivemind")
        assert hivemind.propagate
        formats = {type(handler.formatter).__module__ for handler in hivemind.handlers}  # pytest adds its own
        assert "hivemind.utils.logging" not in formats
