"""A silo of two real nodes: they learn from each other, an outsider gets nothing, and no other address is contacted."""

import ast
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tomli_w

from swarm.config import NetworkSection
from swarm.errors import RequestError
from swarm.manifest.files import read_manifest
from swarm.network.hivemind.transport import HivemindTransport
from swarm.records.identity import Identity, load
from swarm.sharing.body_store import BODY_PROTOCOL
from swarm.sharing.index import Shard, presence_key
from swarm.silo.bulletin import BULLETIN_PROTOCOL, encode_question
from tests.e2e.node_process import NodeProcess, node_settings, wait_for
from tests.swarm_process import SwarmProcess
from tests.unit.silo_factory import swarm

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Member(NodeProcess):
    """`swarm join` of a silo, every address that it contacts written down."""

    def __init__(self, folder: Path, listen: str) -> None:
        self.folder = folder
        self.contacted = folder.parent / f"{folder.name}.contacted"
        self.output = folder.parent / f"{folder.name}.out"
        self.remotes: set[tuple[str, int]] = set()
        self.hosts: set[str] = set()
        """Remote ends of what the daemon has open to others, as seen so far."""
        settings = node_settings(folder, network={"poll_interval_s": 0.2, "listen": [listen]})
        config = folder.with_suffix(".toml")
        config.write_text(tomli_w.dumps(settings))
        self.process = SwarmProcess(
            "join", str(folder / "manifest.toml"), str(config),
            cwd=folder.parent, output=self.output, contacts=self.contacted,
        )  # fmt: skip

    def look_at_sockets(self) -> None:
        """Where the node and its daemon have dialled to: connections at ports that they do not listen on."""
        node = psutil.Process(self.process.pid)
        for part in (node, *node.children(recursive=True)):
            open_now = part.net_connections("inet")
            assert not [one for one in open_now if one.type == socket.SOCK_DGRAM], (
                "no UDP: no lookups, no announcements"
            )
            listening = {one.laddr[1] for one in open_now if one.status == psutil.CONN_LISTEN}
            self.hosts |= {one.raddr[0] for one in open_now if one.raddr}
            self.remotes |= {
                (one.raddr[0], one.raddr[1]) for one in open_now if one.raddr and one.laddr[1] not in listening
            }

    def addresses_contacted(self) -> set[tuple[str, int]]:
        """By Python itself; sockets of the file system are left out."""
        found: set[tuple[str, int]] = set()
        for line in self.contacted.read_text().splitlines():
            target = ast.literal_eval(line.partition(" ")[2])
            if isinstance(target, tuple):
                found.add((str(target[0]), int(target[1] or 0)))
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def learned(*members: Member) -> None:
    """Waits until each has learned from records of the others; looks at the sockets meanwhile."""
    looked_at = 0.0

    def probe() -> bool | None:
        nonlocal looked_at
        if time.monotonic() - looked_at > 1.0:  # a look takes as long as ten of what else is asked here
            looked_at = time.monotonic()
            for member in members:
                member.look_at_sockets()
        return all(member.last_round.get("train/swarm_groups_total", 0) > 0 for member in members) or None

    wait_for(probe, "learning from each other", *members, deadline_s=DEADLINE_S)


@pytest.mark.essential
def test_silo_of_two_nodes_lets_nobody_in_and_nothing_out(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    port_a, port_b = free_port(), free_port()
    listen_a, listen_b = (f"/ip4/127.0.0.1/tcp/{port}" for port in (port_a, port_b))
    swarm("silo", "init", "secret-lab", "--dir", a, "--address", listen_a)
    invitation = swarm("silo", "invite", swarm("silo", "request", "--dir", b), "--dir", a)
    swarm("silo", "join", invitation, "--dir", b)
    with Member(a, listen_a) as first, Member(b, listen_b) as second:
        learned(first, second)
        asyncio.run(outsider_gets_nothing(tmp_path / "eve", first, second))
        learned(first, second)
        assert_contacts(first, second, {port_a, port_b})
        swarm("silo", "revoke", load(b / "identity.key").peer_id, "--dir", a)
        wait_for(lambda: strangers(first) or None, "the revoked to be turned away", first)
        assert first.process.poll() is None and second.process.poll() is None
        first.signal(2)
        assert first.wait() in (0, 130)
    assert json.loads(swarm("silo", "members", "--dir", a, "--json"))["epoch"] == 2
    for folder in (a, b):
        assert_no_secret_but_in_the_key_file(folder)


async def outsider_gets_nothing(folder: Path, *members: Member) -> None:
    """With the manifest, the addresses and the silo's id, but without a membership."""
    folder.mkdir()
    peers = tuple(member.address() for member in members)
    network = NetworkSection(initial_peers=peers, gossip="off", request_timeout_s=5.0)
    eve = HivemindTransport(network, Identity(b"e" * 32), folder)
    manifest = read_manifest(str(members[0].folder / "manifest.toml"))
    await eve.start()
    try:
        for address in peers:
            peer_id = address.rpartition("/p2p/")[2]
            for protocol, request in ((BULLETIN_PROTOCOL, encode_question(0, b"")), (BODY_PROTOCOL, bytes(32))):
                with pytest.raises(RequestError, match="not a member"):
                    await eve.request(peer_id, protocol, request, max_response_bytes=1 << 20, deadline_s=10)
        assert await eve.load(presence_key(manifest.id, Shard(0, 0))) == {}
        session = eve._session
        assert session is not None and not session.neighbors, "no member has answered a call of its DHT"
    finally:
        await eve.stop()


def strangers(member: Member) -> int:
    refused = member.last_round.get("network/refused", {})
    return sum(
        count for reason, count in refused.items() if reason.endswith("/stranger") and reason != "gossip/stranger"
    )


def assert_contacts(first: Member, second: Member, configured_ports: set[int]) -> None:
    """Members contact the configured addresses, and what members have signed there: the ports of each other's gossip."""
    listening = configured_ports | {port for one in (first, second) for port in listening_ports(one)}
    for one in (first, second):
        one.look_at_sockets()  # those before may have been too early for a connection that is open by now
        assert one.hosts == {"127.0.0.1"}
    contacted = [one.addresses_contacted() | one.remotes for one in (first, second)]
    assert {host for host, _ in contacted[0] | contacted[1]} == {"127.0.0.1"}
    assert {port for _, port in contacted[0] | contacted[1]} <= listening | {0}


def listening_ports(member: Member) -> set[int]:
    node = psutil.Process(member.process.pid)
    return {
        one.laddr[1]
        for part in (node, *node.children(recursive=True))
        for one in part.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }


def assert_no_secret_but_in_the_key_file(folder: Path) -> None:
    """Not in logs, metrics, configuration or status, and the daemon's copy of the key is gone."""
    seeds = [path.read_bytes() for path in (folder / "identity.key", folder / "silo-owner.key") if path.exists()]
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".key":
            data = path.read_bytes()
            assert not [seed for seed in seeds if seed in data or seed.hex().encode() in data.lower()], path
    assert not (folder / "libp2p.key").exists()


def test_silo_of_one_with_the_network_off_opens_no_socket(tmp_path: Path) -> None:
    settings = node_settings(
        tmp_path / "one",
        node={"dir": str(tmp_path / "one"), "threads": 1, "max_rounds": 1},
        network={"backend": "off"},
        sharing={"own_groups": 3, "swarm_groups": 0, "publish": False},
        observability={"http": False},
    )
    config = tmp_path / "one.toml"
    config.write_text(tomli_w.dumps(settings))
    contacted = tmp_path / "contacted"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.e2e.audited_node", str(contacted), "run", str(config)],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, env=ENVIRONMENT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert contacted.read_text() == ""
