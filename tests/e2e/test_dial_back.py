"""The proof of `dial_back` against a real daemon: it shows its own identity, and no other."""

from pathlib import Path

from swarm.config import NetworkSection
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.reach.dial_back import answers_as
from swarm.network.tcp_address import TcpAddress
from swarm.records.identity import create


async def test_a_node_answers_as_itself_and_as_nobody_else(tmp_path: Path) -> None:
    node = HivemindTransport(NetworkSection(), create(tmp_path / "identity.key"), tmp_path)
    await node.start()
    try:
        address = TcpAddress.parse(node.addresses()[0])
        assert await answers_as(node.peer_id, address.host, address.port, timeout_s=5.0)
        other = create(tmp_path / "other.key").peer_id
        assert not await answers_as(other, address.host, address.port, timeout_s=5.0)
    finally:
        await node.stop()
