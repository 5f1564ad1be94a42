"""Sealed transports over real sockets: a member with the daemon, a newcomer with or without it, and an outsider."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from swarm.config import Config, parse
from swarm.errors import RequestError
from swarm.machine.node_folder import NodeFolder
from swarm.network.index_entry import UNSIGNED, IndexValidator
from swarm.network.transport import Contact, Transport, ValidationResult
from swarm.records.codec import encode_record
from swarm.records.identity import Identity
from swarm.records.signing import sign_record
from swarm.silo.grant import make_request, read_request
from swarm.silo.owner import Owner
from swarm.silo.silo_files import SiloFiles
from swarm.silo.silo_transport import node_transport
from tests.unit.silo_factory import MANIFEST_TEXT, NAME, OWNER, SILO_ID, folder_of, identity_of

ANN, BEN = identity_of(0), identity_of(1)
DEADLINE_S = 60.0
_LOOK_S = 0.1


def config_of(folder: Path, backend: str, peers: tuple[str, ...] = ()) -> Config:
    return parse(
        {
            "node": {"dir": str(folder)},
            "swarm": {"name": NAME, "id": SILO_ID, "silo_owner": OWNER.peer_id},
            "network": {"backend": backend, "initial_peers": peers, "reachability": "public"},
        }
    )


def transport_of(config: Config, identity: Identity) -> Transport:
    folder = NodeFolder(config.node.dir)
    validator: IndexValidator = lambda key, *_: UNSIGNED if key.startswith(SILO_ID) else None  # noqa: E731
    transport = node_transport(config, identity, folder, validator)
    assert transport is not None
    transport.serve("echo", echo, max_request_bytes=1 << 20)
    return transport


async def echo(peer_id: str, request: bytes) -> bytes:
    return request


async def in_time(probe: Callable[[], Awaitable[bool]], what: str) -> None:
    """Asks again until it is so; a failed request is a no."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        try:
            if await probe():
                return
        except RequestError:
            pass
        await asyncio.sleep(_LOOK_S)  # between two looks at what daemons do
    raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}")


@pytest.mark.parametrize("backend", ["hivemind", "libp2p"])
async def test_newcomer_joins_by_its_invitation_and_is_out_once_revoked(tmp_path: Path, backend: str) -> None:
    now = time.time()
    owner = Owner.found(OWNER, SILO_ID, now)
    owner.invite(read_request(make_request(ANN)), now + 3600, now, MANIFEST_TEXT)
    ann = transport_of(config_of(folder_of(tmp_path / "ann", owner), "hivemind"), ANN)
    (tmp_path / "ben").mkdir()
    SiloFiles(tmp_path / "ben").write_token(
        owner.invite(read_request(make_request(BEN)), now + 3600, now, MANIFEST_TEXT)
    )
    heard: list[bytes] = []
    await ann.start()
    ben = transport_of(config_of(tmp_path / "ben", backend, ann.addresses()), BEN)
    record = encode_record(sign_record(BEN, SILO_ID, b"x" * 900))
    try:
        ann.subscribe("topic", lambda peer_id, message: heard.append(message) or ValidationResult.ACCEPT)
        ben.subscribe("topic", lambda peer_id, message: ValidationResult.ACCEPT)
        await ben.start()
        await in_time(lambda: echoes(ben, ANN), "Ben is answered")
        assert await ben.connected_peers() == (ANN.peer_id,)
        await in_time(lambda: stores(ben, ann, record, now), "Ben's entry is found by Ann")
        ben.meet(Contact(ANN.peer_id, (), ann.gossip_addresses(), hosts_index=True))
        await in_time(lambda: gossips(ben, record, heard), "Ben's message is heard by Ann")
        owner.revoke(BEN.peer_id, time.time())
        SiloFiles(tmp_path / "ann").write_roll(owner.data)
        await in_time(lambda: is_refused(ben, ANN), "Ben is refused")
        assert await ann.connected_peers() == ()
        assert set(ann.refused) & {"requests/stranger", "index/stranger", "silo/stranger"}
    finally:
        await ben.stop()
        await ann.stop()


async def echoes(caller: Transport, called: Identity) -> bool:
    large = bytes(range(256)) * 2048
    return await caller.request(called.peer_id, "echo", large, max_response_bytes=len(large), deadline_s=10) == large


async def is_refused(caller: Transport, called: Identity) -> bool:
    try:
        await caller.request(called.peer_id, "echo", b"x", max_response_bytes=10, deadline_s=10)
    except RequestError as error:
        return "not a member" in str(error)
    return False


async def stores(writer: Transport, reader: Transport, value: bytes, now: float) -> bool:
    key, subkey = f"{SILO_ID}/key", f"{writer.peer_id}/0"
    await writer.store(key, subkey, value, time.time() + 300)
    return await reader.load(key) == {subkey: value}


async def gossips(writer: Transport, message: bytes, heard: list[bytes]) -> bool:
    await writer.publish("topic", message)
    return heard[:1] == [message]
