"""The doctor: what it finds, the command it names, and that it survives what it asks."""

import asyncio
import json
import resource
import socket
import sys
import time
from pathlib import Path

import pytest

from swarm.config import NetworkSection, parse
from swarm.diagnostics.accelerator import check_accelerator
from swarm.diagnostics.check_result import CheckResult, Level
from swarm.diagnostics.machine import (
    check_daemon,
    check_descriptors,
    check_disk,
    check_identity,
    check_machine,
    check_membership,
    check_ports,
)
from swarm.diagnostics.swarm_view import PeerView, check_swarm, check_unanswered, judge_views
from swarm.machine.node_folder import NodeFolder
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.peers.dialling import StoredPeer, write_peers
from swarm.network.tcp_address import TcpAddress
from swarm.records.identity import create, write_seed
from swarm.records.identity_moves import write_sealed
from swarm.silo.silo_files import SiloFiles
from tests.swarm_process import swarm
from tests.unit.silo_factory import DAY_S, NOW, OWNER, SILO_ID, folder_of, found, identity_of, invite


def levels(findings: list[CheckResult]) -> dict[str, Level]:
    return {found.name: found.level for found in findings}


def says(text: str) -> list[str]:
    """A program that prints a text."""
    return [sys.executable, "-c", f"print({text!r})"]


def test_this_machine_is_fit_and_every_flaw_comes_with_a_fix(tmp_path: Path) -> None:
    findings = list(check_machine(parse({"node": {"dir": str(tmp_path / "node")}})))
    assert Level.PROBLEM not in levels(findings).values()
    assert {"python", "packages", "identity", "disk", "memory", "files", "daemon", "port"} <= set(levels(findings))
    assert all(bool(found.fix) == (found.level is not Level.OK) for found in findings)


def test_daemon_really_runs() -> None:
    assert check_daemon().level is Level.OK


def test_who_is_no_member_of_the_silo_or_not_for_long_is_told(tmp_path: Path) -> None:
    member, folder = identity_of(0), NodeFolder(tmp_path)
    config = parse({"node": {"dir": str(tmp_path)}, "swarm": {"id": SILO_ID, "silo_owner": OWNER.peer_id}})
    assert check_membership(config).level is Level.PROBLEM
    write_seed(member, folder.identity)
    folder_of(tmp_path, found(member, until=NOW + 30 * DAY_S))
    fine = check_membership(config, lambda: NOW)
    assert (fine.level, fine.text) == (Level.OK, "member for 30 more days; 1 on the roll of epoch 1")
    assert check_membership(config, lambda: NOW + 25 * DAY_S).level is Level.WARNING
    over = check_membership(config, lambda: NOW + 31 * DAY_S)
    assert over.level is Level.PROBLEM and "swarm silo request" in over.fix
    write_sealed(member, folder.identity, "a long passphrase")
    assert "passphrase" in check_membership(config, lambda: NOW).text


def test_days_of_an_invitation_from_before_a_revocation_do_not_count(tmp_path: Path) -> None:
    member, folder, owner = identity_of(0), NodeFolder(tmp_path), found()
    config = parse({"node": {"dir": str(tmp_path)}, "swarm": {"id": SILO_ID, "silo_owner": OWNER.peer_id}})
    write_seed(member, folder.identity)
    SiloFiles(tmp_path).write_token(invite(owner, member, until=NOW + 30 * DAY_S))
    folder_of(tmp_path, owner)
    assert check_membership(config, lambda: NOW).text.startswith("member for 30 more days")
    owner.revoke(member.peer_id, NOW)
    invite(owner, member, until=NOW + 2 * DAY_S)
    folder_of(tmp_path, owner)
    soon = check_membership(config, lambda: NOW)
    assert soon.level is Level.WARNING and soon.text.startswith("member for 2 more days")


def test_identity_that_others_can_read_is_a_problem(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path)
    create(folder.identity)
    assert check_identity(folder).level is Level.OK
    folder.identity.chmod(0o644)
    found = check_identity(folder)
    assert found.level is Level.PROBLEM
    assert f"chmod 600 {folder.identity}" in found.fix


def test_folder_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert check_disk(tmp_path / "node").level is not Level.PROBLEM
    found = check_disk(file / "node")
    assert found.level is Level.PROBLEM
    assert "cannot be written" in found.text
    assert "node.dir" in found.fix


def test_malformed_address_is_a_finding() -> None:
    findings = asyncio.run(check_swarm(NetworkSection(initial_peers=("/ip4/127.0.0.1/tcp/1",))))
    assert levels(findings) == {"network": Level.PROBLEM}


def test_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = check_ports([f"/ip4/127.0.0.1/tcp/{port}"])
        own = check_ports([f"/ip4/127.0.0.1/tcp/{port}"], is_running=True)
    assert found.level is Level.PROBLEM
    assert f"sport = :{port}" in found.fix
    assert own.level is Level.OK


def test_working_accelerator_is_told() -> None:
    said = json.dumps({"torch": "2.8", "device": "cpu", "matmul": True, "int8": True})
    assert levels(check_accelerator(parse({}), says(said))) == {"torch": Level.OK, "8-bit": Level.OK}


def test_torch_that_dies_hangs_or_lies_is_a_problem() -> None:
    crash = [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"]
    hang = [sys.executable, "-c", "import signal; signal.pause()"]
    wrong = says(json.dumps({"torch": "2.8", "device": "cpu", "matmul": False}))
    for command in (crash, hang, wrong, says("no json")):
        found = check_accelerator(parse({}), command, timeout_s=1.0)[0]
        assert (found.name, found.level) == ("torch", Level.PROBLEM)
        assert found.fix


def test_missing_8_bit_is_a_problem_only_for_a_quantised_base() -> None:
    command = says(json.dumps({"torch": "2.8", "device": "cpu", "matmul": True, "int8_error": "no kernel"}))
    for quantization, level in (("none", Level.WARNING), ("8bit", Level.PROBLEM)):
        findings = check_accelerator(parse({"policy": {"quantization": quantization}}), command)
        assert levels(findings)["8-bit"] is level


@pytest.mark.parametrize(("skew_s", "level"), [(0.2, Level.OK), (-2.0, Level.WARNING), (60.0, Level.PROBLEM)])
def test_clock_is_judged_by_the_median_of_the_peers(skew_s: float, level: Level) -> None:
    views = [PeerView(0.02, skew_s, 5.0), PeerView(0.02, skew_s, 5.0), PeerView(0.02, 9999.0, 5.0)]
    assert levels(judge_views(views)) == {"clock": level, "bandwidth": Level.OK}


def test_slow_line_is_a_warning() -> None:
    assert levels(judge_views([PeerView(0.4, 0.0, 0.05)]))["bandwidth"] is Level.WARNING


async def test_swarm_is_measured_through_a_real_peer(tmp_path: Path) -> None:
    node = HivemindTransport(NetworkSection(), create(tmp_path / "identity.key"), tmp_path)
    await node.start()
    try:
        findings = await check_swarm(NetworkSection(initial_peers=node.addresses()))
    finally:
        await node.stop()
    assert levels(findings) == dict.fromkeys(("peers", "reachability", "clock", "bandwidth"), Level.OK)


async def test_node_without_the_daemon_is_measured_as_well(tmp_path: Path) -> None:
    node = HivemindTransport(NetworkSection(), create(tmp_path / "identity.key"), tmp_path)
    await node.start()
    try:
        findings = await check_swarm(NetworkSection(backend="libp2p", initial_peers=node.addresses()))
    finally:
        await node.stop()
    assert levels(findings) == dict.fromkeys(("peers", "reachability", "clock", "bandwidth"), Level.OK)


class AheadOfTime(HivemindTransport):
    """A peer whose clock is a minute ahead."""

    def now(self) -> float:
        return super().now() + 60


async def test_clock_that_is_a_minute_off_is_found_through_a_real_peer(tmp_path: Path) -> None:
    node = AheadOfTime(NetworkSection(), create(tmp_path / "identity.key"), tmp_path)
    await node.start()
    try:
        findings = await check_swarm(NetworkSection(initial_peers=node.addresses()))
    finally:
        await node.stop()
    (clock,) = (found for found in findings if found.name == "clock")
    assert clock.level is Level.PROBLEM
    assert clock.text.startswith(("differs by 60.", "differs by 59."))
    assert "set-ntp" in clock.fix


async def test_reason_why_no_peer_answers_is_named(tmp_path: Path) -> None:
    own_id = create(tmp_path / "identity.key").peer_id
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        silent = TcpAddress("ip4", "127.0.0.1", closed.getsockname()[1], own_id)
        refused = await check_unanswered([silent])
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        other = await check_unanswered([TcpAddress("ip4", "127.0.0.1", port, own_id)])
    alone = await check_unanswered([TcpAddress("ip4", "11.0.0.2", 1, own_id)], frozenset)
    assert "refuses the connection" in refused.text
    assert f"it is not {own_id} who answers" in other.text
    assert "this machine has no network" in alone.text
    assert {found.level for found in (refused, other, alone)} == {Level.PROBLEM}


async def test_absent_peers_are_a_problem() -> None:
    absent = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
    assert levels(await check_swarm(NetworkSection(initial_peers=(absent,)))) == {"peers": Level.PROBLEM}


async def test_stored_peers_are_tried_where_no_initial_one_answers(tmp_path: Path) -> None:
    absent = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
    for backend in ("hivemind", "libp2p"):
        met, mine = tmp_path / f"{backend}-met", tmp_path / f"{backend}-mine"
        for folder in (met, mine):
            folder.mkdir()
        identity = create(met / "identity.key")
        node = HivemindTransport(NetworkSection(), identity, met)
        await node.start()
        try:
            (address,) = (TcpAddress.parse(text).transport for text in node.addresses())
            peer = StoredPeer(peer_id=identity.peer_id, addresses=(address,), last_seen=time.time())
            write_peers(mine / "peers.json", {identity.peer_id: peer})
            config = NetworkSection(backend=backend, initial_peers=(f"/ip4/127.0.0.1/tcp/1/p2p/{absent}",))
            peers, *others = await check_swarm(config, mine)
            assert peers.level is Level.WARNING
            assert f"1 of 1 stored: {identity.peer_name}" in peers.text
            assert "no peer answers (1 initial): 127.0.0.1:1 refuses" in peers.text
            assert set(levels(others)) == {"reachability", "clock", "bandwidth"}
            without = config.model_copy(update={"initial_peers": ()})
            assert levels(await check_swarm(without, mine))["peers"] is Level.OK
        finally:
            await node.stop()
        gone = (await check_swarm(config, mine))[0]
        assert gone.level is Level.PROBLEM
        assert gone.text.startswith("no peer answers (1 initial, 1 stored): 127.0.0.1:1 refuses")


async def test_what_one_machine_cannot_show_of_relays_is_not_held_against_a_node(tmp_path: Path) -> None:
    relay = HivemindTransport(NetworkSection(), create(tmp_path / "identity.key"), tmp_path)
    away = f"/ip4/192.0.2.1/tcp/1/p2p/{identity_of(1).peer_id}"
    await relay.start()
    try:
        config = NetworkSection(listen=("/ip4/0.0.0.0/tcp/0",), initial_peers=relay.addresses())
        here = {one.name: one for one in await check_swarm(config)}
        elsewhere = {one.name: one for one in await check_swarm(config.model_copy(update={"relays": (away,)}))}
    finally:
        await relay.stop()
    assert "not known before the first start" in here["reachability"].text
    assert here["relay"].level is Level.OK and "on this machine" in here["relay"].text
    assert elsewhere["relay"].level is Level.WARNING
    assert "no peer that is asked to relay answers (1)" in elsewhere["relay"].text


async def test_port_of_the_last_start_is_the_one_that_is_looked_at(tmp_path: Path) -> None:
    listen = ("/ip4/0.0.0.0/tcp/0",)
    node = HivemindTransport(NetworkSection(listen=listen), create(tmp_path / "identity.key"), tmp_path)
    await node.start()
    try:
        own = tuple(address for address in node.addresses() if address.startswith("/ip4/127."))
        config = NetworkSection(listen=listen, initial_peers=own)
        while_it_runs = {one.name: one for one in await check_swarm(config, tmp_path)}
    finally:
        await node.stop()
    assert "the port is in use" in while_it_runs["reachability"].text


def test_command_prints_json_and_ends_with_its_own_code(tmp_path: Path) -> None:
    absent = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
    ended = swarm("doctor", "--json", f"--node.dir={tmp_path}", "--network.initial_peers", json.dumps([absent]))
    assert ended.returncode == 14, ended.stderr
    assert "peers" in ended.stderr
    found = {one["name"]: one["level"] for one in json.loads(ended.stdout)["findings"]}
    assert found["peers"] == "problem"
    assert found["torch"] == "ok"


@pytest.mark.parametrize(
    ("soft", "hard", "level"),
    [
        (1024, 1 << 20, Level.OK),
        (1024, resource.RLIM_INFINITY, Level.OK),
        (1024, 1024, Level.WARNING),
        (256, 1 << 20, Level.WARNING),
    ],
)
def test_too_few_descriptors_for_node_or_daemon_are_told(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, level: Level
) -> None:
    """The daemon raises its own limit to the hard one: silent connections take one descriptor each for a while."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    assert check_descriptors().level is level
