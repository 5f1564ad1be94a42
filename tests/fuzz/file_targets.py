"""What a node reads from files and from its daemon, as functions of bytes."""

import asyncio
import functools
import tempfile
from pathlib import Path

from swarm.errors import IdentityError, NetworkError
from swarm.network.hivemind.daemon_control import DaemonControl
from swarm.network.peers.dialling import MAX_PEERS, read_peers, write_peers
from swarm.network.peers.known_peers import KnownPeers
from swarm.records.identity import Identity, is_peer_id
from swarm.records.identity_moves import (
    ROTATION_FILE,
    is_sealed,
    open_export,
    read_export,
    read_statements,
    statement_is_valid,
)
from tests.fuzz.dht_targets import run_on_loop
from tests.unit.experience_factory import ALICE, NOW


def peers_file(data: bytes) -> bool:
    path = _file("peers.json", data)
    peers = read_peers(path, NOW)
    assert len(peers) <= MAX_PEERS
    assert all(is_peer_id(peer_id) and peer.addresses for peer_id, peer in peers.items())
    write_peers(path, peers)
    assert read_peers(path, NOW) == peers
    path.write_bytes(data)
    KnownPeers((), ALICE.peer_id, path, lambda: NOW).see({peer_id: peer.addresses for peer_id, peer in peers.items()})
    return bool(peers)


def rotation(data: bytes) -> bool:
    try:
        statements = read_statements(_file(ROTATION_FILE, data).parent)
    except IdentityError as error:
        assert "\n" not in str(error)
        return False
    assert all(map(statement_is_valid, statements))
    return bool(statements)


def identity_export(data: bytes) -> bool:
    """All but the passphrase, which takes 128 MiB and half a second."""
    try:
        content = read_export(_file("identity.json", data))
        if is_sealed(content):
            content["sealed"] = ""
        return isinstance(open_export(content, None), Identity)
    except IdentityError as error:
        assert "\n" not in str(error)
        return False


def daemon_answer(data: bytes) -> bool:
    """The daemon's answers, in which strangers' addresses and words are."""
    return run_on_loop(_ask_daemon(data))


async def _ask_daemon(data: bytes) -> bool:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        writer.write_eof()
        await reader.read()
        writer.close()

    path = _folder() / "control.sock"
    control, num_understood = DaemonControl(path), 0
    async with await asyncio.start_unix_server(answer, path):
        for ask in (control.addresses, control.peers, lambda: control.listening_addresses(ALICE.peer_id)):
            try:
                num_understood += bool(await ask())
            except NetworkError as error:
                assert str(error).isprintable()
        try:
            num_understood += len([message async for message in control.subscribe("topic")])
        except NetworkError:
            pass
    return num_understood > 0


def _file(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.write_bytes(data)
    return path


def _folder() -> Path:
    return Path(_temporary_folder().name)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="swarm-fuzz-")
