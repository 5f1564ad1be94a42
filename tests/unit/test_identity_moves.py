"""An identity leaves its folder, arrives elsewhere, is replaced, and is used once at a time."""

import json
import logging
import os
import pty
import select
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import IdentityError
from swarm.machine.node_folder import NodeFolder
from swarm.records.identity import KEY_FILE, Identity, IdentityLock, create, load, write_seed
from swarm.records.identity_moves import (
    MAX_FILE_BYTES,
    NEXT_KEY_FILE,
    ROTATION_FILE,
    is_sealed,
    open_export,
    parse_export,
    read_export,
    read_statements,
    rotate,
    set_aside,
    statement_is_valid,
    write_export,
)
from tests import swarm_process

PHRASE = "four words of mine"
# Made once by this module: a later release must still open it.
GOLDEN = {
    "format": "swarm-identity",
    "version": 1,
    "peer_id": "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp",
    "salt": "78a24a731450a66d5012f4334cf1fa61",
    "nonce": "a81fe94ef4eb923a7a90a1fa",
    "sealed": "913fd4649b2e9540b0ac9294105d7f16306429156200dd31966f3ba35033fd2c6d4887809d8ebfb9bde04364dd19873b",
}


def swarm(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return swarm_process.swarm("identity", *arguments, cwd=cwd, stdin=stdin)


def test_sealed_export_opens_with_its_passphrase_alone(tmp_path: Path) -> None:
    identity, path = Identity(bytes(range(32))), tmp_path / "backup.json"
    write_export(identity, path, PHRASE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert identity.seed not in path.read_bytes()
    assert identity.seed.hex() not in path.read_text()
    content = read_export(path)
    assert is_sealed(content)
    assert open_export(content, PHRASE).seed == identity.seed
    with pytest.raises(IdentityError, match="passphrase must be the one of the export"):
        open_export(content, PHRASE + ".")
    with pytest.raises(IdentityError, match="must not overwrite"):
        write_export(identity, path, PHRASE)


def test_export_of_the_first_release_still_opens() -> None:
    assert open_export(dict(GOLDEN), PHRASE).seed == bytes(31) + b"\x01"


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("peer_id", Identity(bytes(32)).peer_id, "got another"),
        ("sealed", "00" * 48, "got another, or a damaged file"),
        ("sealed", "zz", "48 bytes of sealed"),
        ("salt", "00", "16 bytes of salt"),
        ("nonce", None, "12 bytes of nonce"),
    ],
)
def test_altered_export_is_refused(field: str, value: Any, told: str) -> None:
    with pytest.raises(IdentityError, match=told):
        open_export(GOLDEN | {field: value}, PHRASE)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "must be a file of"),
        (b"[" * MAX_FILE_BYTES, "must be a file of"),
        (b" " * (MAX_FILE_BYTES + 1) + b"{}", f"must have at most {MAX_FILE_BYTES} bytes"),
        (b'{"format": "other"}', "must be a file of"),
        (b'{"format": "swarm-identity", "version": 2}', "must be of version 1, got 2"),
        (b'{"format": "swarm-identity", "version": 1, "peer_id": "\\ud800"}', "must name its peer id"),
    ],
    ids=range(6),
)
def test_file_that_is_no_export_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(IdentityError, match=told):
        read_export(tmp_path / "file")


def test_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    largest = json.dumps(GOLDEN).ljust(MAX_FILE_BYTES).encode()
    (tmp_path / "file").write_bytes(largest)
    assert read_export(tmp_path / "file") == parse_export(largest, "a key file") == GOLDEN
    with pytest.raises(IdentityError, match="must be a file of"):
        parse_export(largest + b" ", "a key file")


def test_passphrase_of_the_least_length_is_enough(tmp_path: Path) -> None:
    identity = Identity(bytes(32))
    write_export(identity, tmp_path / "backup", "8 chars.")
    assert open_export(read_export(tmp_path / "backup"), "8 chars.").seed == identity.seed


def test_plain_export_must_hold_the_key_of_its_name(tmp_path: Path) -> None:
    identity = Identity(bytes(range(32)))
    write_export(identity, tmp_path / "plain", None)
    content = read_export(tmp_path / "plain")
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o600
    assert open_export(content, None).seed == identity.seed
    with pytest.raises(IdentityError, match="key of its peer id"):
        open_export(content | {"seed": bytes(32).hex()}, None)


def test_rotation_is_signed_by_both_keys_and_keeps_the_old_one(tmp_path: Path) -> None:
    old, new, third = create(tmp_path / KEY_FILE), Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
    assert read_statements(tmp_path) == []
    assert rotate(tmp_path, new, 1e9).peer_id == old.peer_id
    assert load(tmp_path / KEY_FILE).peer_id == new.peer_id
    assert load(tmp_path / f"{KEY_FILE}.{old.peer_name}").seed == old.seed
    rotate(tmp_path, third, 1e9 + 1)
    statements = read_statements(tmp_path)
    assert [(one["old"], one["new"], one["at"]) for one in statements] == [
        (old.peer_id, new.peer_id, "1000000000"),
        (new.peer_id, third.peer_id, "1000000001"),
    ]
    assert stat.S_IMODE((tmp_path / ROTATION_FILE).stat().st_mode) == 0o600
    names = sorted(item.name for item in tmp_path.iterdir())
    assert names == sorted([KEY_FILE, ROTATION_FILE, *(f"{KEY_FILE}.{one.peer_name}" for one in (old, new))])


def test_what_a_rotation_and_an_export_write_survives_a_power_failure(
    tmp_path: Path, is_durable: Callable[[Path], bool]
) -> None:
    old = create(tmp_path / KEY_FILE)
    rotate(tmp_path, Identity(bytes(32)), 1e9)
    write_export(old, tmp_path / "backup", None)
    assert all(map(is_durable, tmp_path.iterdir()))


def test_altered_statement_is_not_valid(tmp_path: Path) -> None:
    create(tmp_path / KEY_FILE)
    rotate(tmp_path, Identity(bytes(32)), 1e9)
    (statement,) = read_statements(tmp_path)
    assert statement_is_valid(statement)
    stranger = Identity(bytes([3]) * 32).peer_id
    for field, value in [
        ("old", stranger), ("new", stranger), ("at", "1000000001"), ("at", "é"), ("old_signature", statement["new_signature"]),
        ("new_signature", "xx"), ("new_signature", 7),
    ]:  # fmt: skip
        assert not statement_is_valid(statement | {field: value}), field
    for no_statement in (None, [], "x", {}):
        assert not statement_is_valid(no_statement)
    (tmp_path / ROTATION_FILE).write_text(json.dumps([statement | {"at": "5"}]))
    with pytest.raises(IdentityError, match="got a damaged"):
        read_statements(tmp_path)


def test_rotation_that_was_cut_short_is_made_good_by_the_next(tmp_path: Path) -> None:
    old = create(tmp_path / KEY_FILE)
    rotate(tmp_path, Identity(bytes([1]) * 32), 1e9)
    write_seed(old, tmp_path / KEY_FILE)  # as if it was killed before the last of its steps
    write_seed(Identity(bytes([1]) * 32), tmp_path / NEXT_KEY_FILE)
    new = Identity(bytes([2]) * 32)
    rotate(tmp_path, new, 1e9)
    assert load(tmp_path / KEY_FILE).seed == new.seed
    assert [(one["old"], one["new"]) for one in read_statements(tmp_path)] == [(old.peer_id, new.peer_id)]
    assert not (tmp_path / NEXT_KEY_FILE).exists()


def test_key_set_aside_never_replaces_another_of_equal_name(tmp_path: Path) -> None:
    one = Identity(bytes([1]) * 32)
    write_seed(Identity(bytes([2]) * 32), tmp_path / f"{KEY_FILE}.{one.peer_name}")
    assert set_aside(tmp_path, one) == set_aside(tmp_path, one) == tmp_path / f"{KEY_FILE}.{one.peer_name}-2"
    assert load(tmp_path / f"{KEY_FILE}.{one.peer_name}").seed == bytes([2]) * 32


def test_copy_of_a_key_in_another_folder_is_noticed(tmp_path: Path) -> None:
    runtime, identity = tmp_path / "runtime", Identity(bytes(32))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with IdentityLock(tmp_path / "a", runtime) as first, IdentityLock(tmp_path / "b", runtime) as second:
        first.claim(identity)
        with pytest.raises(IdentityError, match=rf"\({identity.peer_id}\) in use by process {os.getpid()}"):
            second.claim(identity)
        second.claim(Identity(bytes([1]) * 32))
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    with IdentityLock(tmp_path / "b", runtime) as second:
        second.claim(identity)


def test_runtime_folder_that_cannot_be_used_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING), IdentityLock(tmp_path, tmp_path / "file" / "none") as lock:
        lock.claim(Identity(bytes(32)))
    assert "cannot be detected" in caplog.text


def test_fresh_start_keeps_everything_of_the_identity(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path)
    old = create(folder.identity)
    rotate(tmp_path, Identity(bytes(32)), 1e9)
    (tmp_path / "peers.json").touch()
    (tmp_path / "ports.json").touch()
    folder.metrics.touch()
    assert folder.set_aside() == tmp_path / "previous-001"
    kept = {item.name for item in tmp_path.iterdir()}
    assert kept == {KEY_FILE, f"{KEY_FILE}.{old.peer_name}", ROTATION_FILE, "peers.json", "ports.json", "previous-001"}


def test_a_node_that_ran_does_not_go_on_under_another_key_by_itself(tmp_path: Path) -> None:
    (tmp_path / "n" / "checkpoints" / "round-000010").mkdir(parents=True)
    run = ("run", "--node.dir", "n", "--network.backend", "off", "--node.max_rounds", "1")
    ended = swarm_process.swarm(*run, cwd=tmp_path)
    assert ended.returncode == IdentityError.exit_code and "restore it from your backup" in ended.stderr
    assert not (tmp_path / "n" / KEY_FILE).exists()
    assert swarm_process.swarm("init", "n", cwd=tmp_path).returncode == 0
    assert "restore it from your backup" not in swarm_process.swarm(*run, "--dry-run", cwd=tmp_path).stderr
    assert (tmp_path / "n" / KEY_FILE).exists(), "what the message says helps"


def test_identity_moves_between_folders_by_the_commands(tmp_path: Path) -> None:
    mine, phrase = create(tmp_path / "mine" / KEY_FILE), tmp_path / "phrase"
    phrase.write_text(f"{PHRASE}\n")
    phrase.chmod(0o600)
    by_file = ("--passphrase-file", "phrase")
    shown = swarm("show", "--dir", "mine", cwd=tmp_path).stdout
    assert mine.peer_id in shown
    assert mine.peer_name in shown
    assert str(tmp_path / "mine") in shown
    exported = swarm("export", "backup", "--dir", "mine", *by_file, cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert swarm("import", "backup", "--dir", "new/node", *by_file, cwd=tmp_path).returncode == 0
    assert load(tmp_path / "new" / "node" / KEY_FILE).seed == mine.seed
    assert swarm("import", "backup", "--dir", "mine", *by_file, cwd=tmp_path).returncode == 0  # it is the same
    other = create(tmp_path / "other" / KEY_FILE)
    refused = swarm("import", "backup", "--dir", "other", *by_file, cwd=tmp_path)
    assert refused.returncode == 4
    assert "must not be overwritten" in refused.stderr
    assert swarm("import", "backup", "--dir", "other", "--force", *by_file, cwd=tmp_path).returncode == 0
    assert load(tmp_path / "other" / f"{KEY_FILE}.{other.peer_name}").seed == other.seed
    assert load(tmp_path / "other" / KEY_FILE).seed == mine.seed
    assert swarm("rotate", "--dir", "other", cwd=tmp_path).returncode == 0
    told = json.loads(swarm("show", "--dir", "other", "--json", cwd=tmp_path).stdout)
    assert told["earlier"] == [mine.peer_id]
    assert told["peer_id"] == load(tmp_path / "other" / KEY_FILE).peer_id


def test_mistakes_end_in_one_line_and_change_nothing(tmp_path: Path) -> None:
    create(tmp_path / "mine" / KEY_FILE)
    before = (tmp_path / "mine" / KEY_FILE).read_bytes()
    for name, text, mode in [("short", "1234567", 0o600), ("open", PHRASE, 0o644), ("empty", "\n", 0o600)]:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    (tmp_path / "golden").write_text(json.dumps(GOLDEN))
    with IdentityLock(tmp_path / "mine"):
        for arguments, told in [
            (["export", "x", "--plain"], "must be encrypted"),
            (["export", "x"], "must come from a terminal"),
            (["export", "x", "--passphrase-file", "short"], "at least 8 characters, got 7"),
            (["export", "x", "--passphrase-file", "open"], "chmod 600 open"),
            (["export", "x", "--passphrase-file", "empty"], "begin with a line"),
            (["export", "x", "--passphrase-file", "none"], "must be readable"),
            (["export", "golden", "--plain", "--i-know-this-is-my-key"], "must not overwrite"),
            (["import", "golden", "--passphrase-file", "short"], "passphrase must be the one"),
            (["import", "none"], "must be readable"),
            (["rotate"], f"in use by process {os.getpid()}"),
        ]:
            ended = swarm(*arguments, "--dir", "mine", cwd=tmp_path)
            assert (ended.returncode, ended.stdout) == (4, ""), arguments
            assert told in ended.stderr
            assert len(ended.stderr.strip().splitlines()) == 1
    for arguments, told in [(["rotate"], "got no folder"), (["show"], "got none at")]:
        ended = swarm(*arguments, "--dir", "nowhere", cwd=tmp_path)
        assert ended.returncode == 4
        assert told in ended.stderr
    assert (tmp_path / "mine" / KEY_FILE).read_bytes() == before
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "nowhere").exists()


def test_passphrase_is_asked_for_twice_and_not_shown(tmp_path: Path) -> None:
    identity = create(tmp_path / "mine" / KEY_FILE)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "swarm.cli.main", "identity", "export", "backup", "--dir", "mine"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as export:
        os.close(theirs)
        told = _until(ours, b"Passphrase: ")  # the space comes when echoing is off
        os.write(ours, f"{PHRASE}\n".encode())
        told += _until(ours, b"confirmation: ")
        os.write(ours, f"{PHRASE}\n".encode())
        told += _until(ours, b"written to backup")
        assert export.wait(30) == 0
    os.close(ours)
    assert PHRASE.encode() not in told
    assert open_export(read_export(tmp_path / "backup"), PHRASE).seed == identity.seed


def _until(terminal: int, words: bytes) -> bytes:
    told = b""
    while words not in told:
        assert select.select([terminal], [], [], 20)[0], told
        told += os.read(terminal, 1000)
    return told
