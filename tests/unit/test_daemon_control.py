"""The daemon's answers carry strangers' addresses and words: what is none of a message is a NetworkError in one line."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import base58
import pytest

from swarm.errors import NetworkError
from swarm.network.hivemind.daemon import _inherited_environment
from swarm.network.hivemind.daemon_control import DaemonControl, answered_instead
from swarm.network.hivemind.parts import p2pd_pb2, read_pbmsg_safe
from swarm.network.libp2p.pubsub import encode_frame
from swarm.network.peers.dialling import MAX_CLAIMED
from tests.unit.experience_factory import ALICE

messages: Any = p2pd_pb2
Daemon = Callable[[bytes], AbstractAsyncContextManager[tuple[DaemonControl, asyncio.Queue[Any]]]]


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    """Answers every request with the same bytes, and shows what it was asked."""

    @asynccontextmanager
    async def serve(answer: bytes) -> AsyncIterator[tuple[DaemonControl, asyncio.Queue[Any]]]:
        asked: asyncio.Queue[Any] = asyncio.Queue()

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = messages.Request()
            await read_pbmsg_safe(reader, request)
            asked.put_nowait(request)
            writer.write(answer)
            writer.write_eof()
            await reader.read()
            writer.close()

        async with await asyncio.start_unix_server(on_connection, tmp_path / "control.sock"):
            yield DaemonControl(tmp_path / "control.sock"), asked

    return serve


def framed(**fields: Any) -> bytes:
    return encode_frame(messages.Response(**fields).SerializeToString())


async def test_address_that_cannot_be_written_costs_no_more_than_itself(daemon: Daemon) -> None:
    async with daemon(framed(type=messages.Response.OK)) as (control, asked):
        await control.connect(ALICE.peer_id, ["/dns4/a_b/tcp/1", "/ip4/192.0.2.7/tcp/1", "/nonsense"])
        request = await asked.get()
    assert request.connect.peer == base58.b58decode(ALICE.peer_id)
    assert list(request.connect.addrs) == [bytes.fromhex("04c0000207060001")]


async def test_addresses_of_no_known_kind_are_left_out(daemon: Daemon) -> None:
    addresses = [b"\xc1", b"\x35" + b"\xff" * 20, bytes.fromhex("04c0000207060001")]
    answer = framed(type=messages.Response.OK, identify=messages.IdentifyResponse(id=b"x", addrs=addresses))
    async with daemon(answer) as (control, _):
        assert await control.addresses() == ("/ip4/192.0.2.7/tcp/1",)


async def test_a_peer_that_tells_thousands_of_addresses_is_read_to_a_bound(daemon: Daemon) -> None:
    addresses = [bytes.fromhex("04c0000207060001")] * 50_000
    info = messages.PeerInfo(id=b"x", addrs=addresses)
    answer = framed(type=messages.Response.OK, dht=messages.DHTResponse(type=messages.DHTResponse.VALUE, peer=info))
    async with daemon(answer) as (control, _):
        assert await control.listening_addresses(ALICE.peer_id) == ("/ip4/192.0.2.7/tcp/1",) * MAX_CLAIMED


async def test_one_connected_peer_is_found_among_many(daemon: Daemon) -> None:
    at = [bytes.fromhex(f"04c00002{number:02x}060001") for number in (7, 8)]
    peers = [messages.PeerInfo(id=base58.b58decode(ALICE.peer_id), addrs=[one]) for one in at]
    others = [messages.PeerInfo(id=b"x", addrs=[b"nonsense"])] * 500
    async with daemon(framed(type=messages.Response.OK, peers=[*others, *peers])) as (control, _):
        assert await control.seen_at(ALICE.peer_id) == ("/ip4/192.0.2.7/tcp/1", "/ip4/192.0.2.8/tcp/1")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 20,
        b"\x05\xff\xff\xff\xff\xff",
        b"\x7f" + bytes(5),
        framed(type=messages.Response.ERROR, error=messages.ErrorResponse(msg="two\nlines\x1b[31m")),
        framed(type=messages.Response.ERROR, error=messages.ErrorResponse(msg="text!")).replace(
            b"text!", b"te\xff\xfe!"
        ),
    ],
)
async def test_broken_answer_is_a_network_error_in_one_line(daemon: Daemon, answer: bytes) -> None:
    async with daemon(answer) as (control, _):
        with pytest.raises(NetworkError) as caught:
            await control.peers()
        assert str(caught.value).isprintable()
        with pytest.raises(NetworkError):
            async for _message in control.subscribe("topic"):
                raise AssertionError("no message was sent")


def test_the_daemon_gets_nothing_of_the_nodes_environment_but_what_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "SSH_AUTH_SOCK", "SWARM_PASSPHRASE"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("GOMAXPROCS", "2")
    environment = _inherited_environment()
    assert environment["GOMAXPROCS"] == "2" and environment["GOGC"] == "50"
    assert "secret" not in environment.values()


def test_only_an_address_that_was_dialled_is_believed_to_be_that_of_another_peer() -> None:
    dialled, other = "/ip4/11.0.0.1/tcp/4001", "/ip4/10.0.0.1/tcp/4001"
    words = "failed to negotiate security protocol: peer id mismatch: expected 12D3KooWxyz, but remote key matches"
    error = NetworkError(
        f"failed to dial: all dials failed * [{dialled}] {words} {ALICE.peer_id} * [{other}] {words} {ALICE.peer_id} "
        f"* [{dialled}] {words} nonsense * [{dialled}] dial backoff"
    )
    assert list(answered_instead(error, [dialled])) == [(ALICE.peer_id, dialled)]
