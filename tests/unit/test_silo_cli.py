"""The commands of a silo, from founding to rotation, and the one line that each mistake ends in."""

import json
import shutil
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.config import parse
from swarm.errors import ConfigError, IdentityError, ManifestError, PolicyError, SiloError
from swarm.machine.node_folder import NodeFolder
from swarm.manifest.files import read_manifest
from swarm.manifest.joining import check_base_at_hand, compose
from swarm.network.index_entry import UNSIGNED
from swarm.records.identity import create, load, peer_name
from swarm.silo.silo_files import SiloFiles
from swarm.silo.silo_transport import SiloTransport, node_transport, open_membership
from tests.unit.silo_factory import swarm

TASKS = '[{name = "lcm"}]'
LISTEN = "/ip4/10.0.0.1/tcp/28000"


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """The folder of a founded silo."""
    swarm("silo", "init", "lab", "--dir", tmp_path / "lab", "--address", LISTEN, "--tasks.sources", TASKS)
    return tmp_path / "lab"


def invited(lab: Path, folder: Path, *options: str | Path) -> str:
    return swarm("silo", "invite", swarm("silo", "request", "--dir", folder), "--dir", lab, *options)


def epoch_in(folder: Path, key: Path | None = None) -> int:
    manifest, files = read_manifest(str(folder / "manifest.toml")), NodeFolder(folder, key)
    membership = open_membership(manifest.founder, manifest.id, load(files.identity), files)
    membership.seen.save()  # as the node does once it runs
    return membership.keys.epoch


def test_founding_makes_owner_manifest_and_first_member(lab: Path) -> None:
    manifest = read_manifest(str(lab / "manifest.toml"))
    node, owner = load(lab / "identity.key"), load(lab / "silo-owner.key")
    assert manifest.silo and manifest.founder == owner.peer_id
    assert manifest.bootstrap == (f"{LISTEN}/p2p/{node.peer_id}",)
    listed = json.loads(swarm("silo", "members", "--dir", lab, "--json"))
    assert [one["peer_id"] for one in listed["members"]] == [node.peer_id]
    assert (listed["silo"], listed["owner"], listed["epoch"]) == ("lab", owner.peer_id, 1)
    for name in ("identity.key", "silo-owner.key", "silo.roll"):
        assert stat.S_IMODE((lab / name).stat().st_mode) == 0o600
    assert epoch_in(lab) == 1


def test_members_are_listed_with_whole_peer_ids_on_a_narrow_screen(lab: Path, tmp_path: Path) -> None:
    invited(lab, tmp_path / "b", "--days", "30")
    told = swarm("silo", "members", "--dir", lab)
    for folder, until in (
        (lab, "–"),
        (tmp_path / "b", f"{datetime.fromtimestamp(time.time() + 30 * 86400, UTC):%Y-%m-%d}"),
    ):
        (line,) = [line for line in told.splitlines() if load(folder / "identity.key").peer_id in line]
        assert line.split()[-2] == until


def test_a_member_who_wants_to_revoke_is_told_who_can(lab: Path) -> None:
    (lab / "silo-owner.key").unlink()
    with pytest.raises(IdentityError, match=r"only its owner .* got no key at .*--dir, or that key with --key"):
        swarm("silo", "revoke", "somebody", "--dir", lab)


def test_fresh_start_keeps_the_membership(lab: Path, tmp_path: Path) -> None:
    swarm("silo", "join", invited(lab, tmp_path / "b"), "--dir", tmp_path / "b")
    for folder in (lab, tmp_path / "b"):
        (folder / "metrics.jsonl").touch()
        assert NodeFolder(folder).set_aside() is not None
        assert epoch_in(folder) == 1 and (folder / "manifest.toml").exists()
    assert (lab / "silo-owner.key").exists()


def test_two_exchanges_make_a_member(lab: Path, tmp_path: Path) -> None:
    told = swarm("silo", "join", invited(lab, tmp_path / "b"), "--dir", tmp_path / "b")
    assert f"next: swarm join {tmp_path / 'b' / 'manifest.toml'}" in told
    assert (tmp_path / "b" / "manifest.toml").read_bytes() == (lab / "manifest.toml").read_bytes()
    assert stat.S_IMODE((tmp_path / "b" / "silo.invite").stat().st_mode) == 0o600
    assert epoch_in(tmp_path / "b") == 1
    assert len(json.loads(swarm("silo", "members", "--dir", lab, "--json"))["members"]) == 2
    assert load(tmp_path / "b" / "identity.key").peer_name in swarm("silo", "members", "--dir", lab)


def test_invitation_travels_as_a_file_too(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "asked").write_text(swarm("silo", "request", "--dir", tmp_path / "b"))
    out = tmp_path / "invitation"
    fields = json.loads(
        swarm("silo", "invite", tmp_path / "asked", "--dir", lab, "--out", out, "--days", "2", "--json")
    )
    assert 1.9 < (fields["until"] - time.time()) / 86_400 < 2.1 and "invitation" not in fields
    swarm("silo", "join", out, "--dir", tmp_path / "b")
    assert epoch_in(tmp_path / "b") == 1


def test_of_two_changes_at_once_none_is_lost(lab: Path, tmp_path: Path) -> None:
    """Each command is held up after it has read the roll, as long as the others can go on."""
    requests = [swarm("silo", "request", "--dir", tmp_path / f"node-{number}") for number in range(3)]
    slow = (
        "import sys, time\nfrom swarm.silo.owner import Owner\nfrom swarm.cli.main import main\n"
        "invite = Owner.invite\nOwner.invite = lambda *of: (time.sleep(1), invite(*of))[1]\nmain()"
    )
    command = [sys.executable, "-c", slow, "silo", "invite", "--dir", str(lab)]
    running = [subprocess.Popen([*command, one.strip()], stdout=subprocess.DEVNULL) for one in requests]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    listed = json.loads(swarm("silo", "members", "--dir", lab, "--json"))
    assert len(listed["members"]) == 4


def test_a_key_whose_folder_takes_no_lock_serves_all_the_same(lab: Path) -> None:
    (lab / "silo-owner.key.lock").mkdir()
    assert "epoch 2" in swarm("silo", "rotate", "--dir", lab)
    assert epoch_in(lab) == 2


def test_revoked_by_name_is_out_and_rotation_counts_on(lab: Path, tmp_path: Path) -> None:
    swarm("silo", "join", invited(lab, tmp_path / "b"), "--dir", tmp_path / "b")
    first = (lab / "silo.roll").read_bytes()
    swarm("silo", "revoke", load(tmp_path / "b" / "identity.key").peer_name, "--dir", lab)
    assert epoch_in(lab) == 2
    swarm("silo", "rotate", "--dir", lab)
    assert epoch_in(lab) == 3
    SiloFiles(tmp_path / "b").write_roll(SiloFiles(lab).read_roll() or b"")
    with pytest.raises(SiloError, match="must be a member"):
        epoch_in(tmp_path / "b")
    swarm("silo", "join", invited(lab, tmp_path / "b"), "--dir", tmp_path / "b")
    assert epoch_in(tmp_path / "b") == 3, "who is invited again is a member again"
    (tmp_path / "b" / "silo.roll").write_bytes(first)
    assert epoch_in(tmp_path / "b") == 3, "a roll from before is passed over"


def test_a_restored_backup_does_not_bring_the_revoked_back(lab: Path, tmp_path: Path) -> None:
    node = tmp_path / "b"
    invitation = invited(lab, node)
    swarm("silo", "join", invitation, "--dir", node)
    invited(lab, tmp_path / "c")
    SiloFiles(node).write_roll(backup := SiloFiles(lab).read_roll() or b"")
    assert epoch_in(node) == 1
    swarm("silo", "revoke", load(tmp_path / "c" / "identity.key").peer_id, "--dir", lab)
    SiloFiles(node).write_roll(newest := SiloFiles(lab).read_roll() or b"")
    assert epoch_in(node) == 2 and stat.S_IMODE((node / "identity.silo").stat().st_mode) == 0o600
    SiloFiles(node).write_roll(backup)
    with pytest.raises(SiloError, match=r"version >= 5 and epoch >= 2.*got version 4 and epoch 1.*copy silo.roll"):
        epoch_in(node)
    (node / "silo.roll").unlink()
    with pytest.raises(SiloError, match="an invitation from before epoch 2"):
        epoch_in(node)
    with pytest.raises(
        SiloError, match=r"an invitation must be of epoch 2, .* got one of 1; ask the owner for a new one"
    ):
        swarm("silo", "join", invitation, "--dir", node)
    SiloFiles(node).write_roll(newest)
    assert epoch_in(node) == 2
    SiloFiles(node).write_roll(backup)
    swarm("silo", "join", invited(lab, node), "--dir", node)
    assert epoch_in(node) == 2, "with a new invitation the old roll is passed over"


def test_a_restored_folder_does_not_bring_the_revoked_back_where_the_key_is_elsewhere(
    lab: Path, tmp_path: Path
) -> None:
    node, backup, keys = tmp_path / "b", tmp_path / "backup", tmp_path / "keys"
    keys.mkdir(mode=0o700)
    create(keys / "node")
    key = tmp_path / "link"
    key.symlink_to(keys / "node")
    swarm("silo", "join", swarm("silo", "invite", swarm("silo", "request", "--dir", node, "--key", key), "--dir", lab),
          "--dir", node, "--key", key)  # fmt: skip
    assert not (node / "identity.key").exists()
    assert epoch_in(node, key) == 1
    shutil.copytree(node, backup)
    swarm("silo", "rotate", "--dir", lab)
    SiloFiles(node).write_roll(SiloFiles(lab).read_roll() or b"")
    assert epoch_in(node, key) == 2
    with pytest.raises(SiloError, match="from before epoch 2"):
        epoch_in(backup, key)
    assert stat.S_IMODE((keys / "node.silo").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["owner.silo", "owner", "silo-owner.key"])
def test_what_is_seen_of_rolls_is_never_written_over_a_key(lab: Path, name: str) -> None:
    key = (lab / "silo-owner.key").rename(lab / name)
    for _ in range(2):
        swarm("silo", "rotate", "--dir", lab, "--key", key)
    assert len(key.read_bytes()) == 32


def test_an_owner_who_works_on_a_restored_roll_is_told_before_there_are_two(lab: Path, tmp_path: Path) -> None:
    backup = SiloFiles(lab).read_roll() or b""
    invited(lab, tmp_path / "b")
    newest = SiloFiles(lab).read_roll() or b""
    SiloFiles(lab).write_roll(backup)
    with pytest.raises(SiloError, match=r"version >= 3 .*got version 2"):
        swarm("silo", "rotate", "--dir", lab)
    SiloFiles(lab).write_roll(newest)
    swarm("silo", "rotate", "--dir", lab)


def test_a_damaged_memory_of_rolls_says_what_to_do(lab: Path) -> None:
    assert epoch_in(lab) == 1
    for text in ("{", "[]", '{"x": 1}', '{"x": {"version": "1", "epoch": 1, "sha256": ""}}', '{"x": {}}'):
        (lab / "identity.silo").write_text(text)
        with pytest.raises(SiloError, match=r"must be readable, got .*identity\.silo; remove the file if"):
            epoch_in(lab)
    (lab / "identity.silo").unlink()
    assert epoch_in(lab) == 1


def test_mistakes_say_rule_value_and_fix(lab: Path, tmp_path: Path) -> None:
    create(tmp_path / "other.key")
    token = invited(lab, tmp_path / "b")
    for error, told, arguments in [
        (ManifestError, "must have one swarm", ["init", "lab", "--dir", lab]),
        (ManifestError, "needs a name", ["init"]),
        (
            ConfigError,
            "did you mean --address?",
            ["init", "x", "--adress=1", "--dir", tmp_path],
        ),
        (SiloError, "only its owner", ["rotate", "--dir", lab, "--key", tmp_path / "other.key"]),
        (SiloError, "who is nobody", ["revoke", "nobody", "--dir", lab]),
        (SiloError, "begins with swarm-silo-invite-", ["invite", "what", "--dir", lab]),
        (SiloError, "must begin with swarm-silo-request-", ["invite", token, "--dir", lab]),
        (SiloError, "must be for this node", ["join", token, "--dir", lab]),
        (SiloError, "got none in", ["members", "--dir", tmp_path / "b"]),
        (IdentityError, "got none at", ["join", token, "--dir", tmp_path / "new"]),
    ]:
        with pytest.raises(error) as caught:
            if arguments[0] == "members":
                swarm("silo", "join", token, "--dir", tmp_path / "b")
            swarm("silo", *arguments)
        assert told in str(caught.value), arguments
        assert "\n" not in str(caught.value)


def test_the_owner_is_told_whom_an_invitation_makes_a_member(lab: Path, tmp_path: Path) -> None:
    """A request has no date, so a member who was put out can hand in its old one again."""
    request = swarm("silo", "request", "--dir", tmp_path / "b")
    peer_id = load(tmp_path / "b" / "identity.key").peer_id
    told = CliRunner().invoke(app, ["silo", "invite", request, "--dir", str(lab)])
    assert peer_id in told.stderr and peer_name(peer_id) in told.stderr
    assert len(told.stdout.split()) == 1 and peer_id not in told.stdout, "the invitation alone, to be passed on"


@pytest.mark.parametrize("days", ["inf", "3000000"])
def test_an_end_that_no_roll_can_hold_leaves_the_roll_as_it_is(lab: Path, tmp_path: Path, days: str) -> None:
    """The owner would have signed a roll that nobody can read: not even to revoke somebody."""
    before = (lab / "silo.roll").read_bytes()
    with pytest.raises(SiloError, match="set another --days"):
        invited(lab, tmp_path / "b", "--days", days)
    assert (lab / "silo.roll").read_bytes() == before
    assert len(json.loads(swarm("silo", "members", "--dir", lab, "--json"))["members"]) == 1


def test_expired_invitation_is_refused(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "roll").write_bytes((lab / "silo.roll").read_bytes())
    token = invited(lab, tmp_path / "b", "--days", "0.001")
    later = time.time() + 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: later)
        with pytest.raises(SiloError, match="must not be expired"):
            swarm("silo", "join", token, "--dir", tmp_path / "b")


def test_join_of_a_silo_without_a_membership_ends_before_anything_is_sent(lab: Path, tmp_path: Path) -> None:
    with pytest.raises(SiloError, match=r"must be a member, got no invitation .*swarm silo request --dir"):
        swarm("join", lab / "manifest.toml", "--node.dir", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_configuration_of_a_member_names_the_owner_and_its_transport_seals(lab: Path) -> None:
    manifest, files = read_manifest(str(lab / "manifest.toml")), NodeFolder(lab)
    config = compose(manifest, {"node": {"dir": str(lab)}}, {}, {})
    assert config.swarm.silo_owner == manifest.founder
    transport = node_transport(config, load(files.identity), files, lambda *_: UNSIGNED)
    assert isinstance(transport, SiloTransport)
    outside = config.model_copy(
        update={"swarm": config.swarm.model_copy(update={"silo_owner": load(files.identity).peer_id})}
    )
    with pytest.raises(SiloError, match="signature"):
        node_transport(outside, load(files.identity), files, lambda *_: UNSIGNED)


def test_a_silo_downloads_no_base(tmp_path: Path) -> None:
    config = parse({"policy": {"base": str(tmp_path / "none" / "at" / "all")}})
    with pytest.raises(PolicyError, match="downloads nothing"):
        check_base_at_hand(config)
    check_base_at_hand(parse({}))


def test_public_manifest_says_nothing_of_silos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    swarm("create", "open", "--key", tmp_path / "founder.key", "--tasks.sources", TASKS)
    assert "silo" not in (tmp_path / "open.swarm.toml").read_text()
    assert read_manifest("open.swarm.toml").silo is None
