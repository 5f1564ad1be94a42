"""Files in folders of somebody else: nothing is written through a link, nothing is read that is no bounded regular file."""

import ast
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.config import parse
from swarm.dashboard.static_files import make_token, read_token
from swarm.errors import ConfigError, IdentityError, NodeNotRunningError
from swarm.machine import safe_files
from swarm.machine.node_folder import NodeFolder
from swarm.machine.safe_files import (
    MAX_JSON_DEPTH,
    check_no_links,
    keep_others_from_writing,
    new_file,
    open_to_append,
    open_to_read,
    parse_json,
    read_file,
    read_json,
    remove_leftovers,
    replace_file,
)
from swarm.manifest.files import write_text
from swarm.network.own_ports import OwnPorts
from swarm.network.peers.dialling import read_peers, write_peers
from swarm.network.tcp_address import TcpAddress
from swarm.node.crash_report import CrashReports
from swarm.observability.logging_setup import last_records
from swarm.observability.metrics import MetricsLog, read_rows
from swarm.observability.status_file import NodeStatus, read_status
from swarm.pool.experience_pool import ExperiencePool
from swarm.records import identity
from swarm.records.identity import Identity
from swarm.report.node_history import NodeHistory
from swarm.report.run_report import write_report
from swarm.report.tables import write_report as write_experiment
from swarm.sharing.reputation import Reputation
from swarm.testbeds.testbed import exclusive
from tests.swarm_process import swarm

SOURCE = Path(__file__).parents[2] / "swarm"
ALONE = ("--network.backend", "off", "--sharing.swarm_groups", "0")
STATUS = NodeStatus("12D3KooW", "name", os.getpid(), 0.0, "ended")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user, outside of all folders that a command is given."""
    path = tmp_path / "of-the-user"
    path.write_text("precious\n")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "node"
    path.mkdir()
    return path


def ports(folder: Path) -> None:
    address = TcpAddress.parse("/ip4/127.0.0.1/tcp/0")
    OwnPorts(folder / "ports.json").store("listen", [address], [TcpAddress.parse("/ip4/127.0.0.1/tcp/4001")])


def reputation(folder: Path) -> None:
    Reputation(60.0, time.time, folder / "reputation.json").save()


def pool(folder: Path) -> None:
    ExperiencePool(folder / "pool.sqlite", parse({}).sharing, time.time)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "status.json": lambda folder: STATUS.write(folder / "status.json"),
    "status.tmp": lambda folder: STATUS.write(folder / "status.json"),
    "reputation.json": reputation,
    "reputation.tmp": reputation,
    "metrics.jsonl": lambda folder: MetricsLog(folder / "metrics.jsonl").write({"kind": "round"}),
    "peers.json": lambda folder: write_peers(folder / "peers.json", {}),
    "ports.json": ports,
    "manifest.toml": lambda folder: write_text(folder / "manifest.toml", "text"),
    ".manifest.toml.new": lambda folder: write_text(folder / "manifest.toml", "text"),
    "page.token": make_token,
    "identity.key": lambda folder: identity.write_seed(Identity(bytes(32)), folder / "identity.key"),
    "report.html": lambda folder: write_experiment(folder / "report.html", "title", [], [], b""),
    "testbed.lock": lambda folder: exclusive(folder).__enter__(),
    "pool.sqlite": pool,
    "pool.sqlite-wal": pool,
    "pool.sqlite-shm": pool,
    "pool.sqlite-journal": pool,
    "logs/fatal.txt": lambda folder: CrashReports(NodeFolder(folder)).close(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_through_a_link(folder: Path, victim: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(victim)
    try:
        WRITERS[name](folder)
    except (OSError, ConfigError) as error:
        assert name.rpartition("/")[2] in str(error) or "link" in str(error)
    assert victim.read_text() == "precious\n"


@pytest.mark.parametrize("name", ["status.json", "ports.json", "pool.sqlite-wal", "metrics.jsonl"])
def test_nothing_is_made_where_a_link_leads_to(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).symlink_to(tmp_path / "new-file")
    writer = "pool.sqlite" if name.startswith("pool") else name
    try:
        WRITERS[writer](folder)
    except OSError as error:
        assert "got a link" in str(error)
    assert not (tmp_path / "new-file").exists()


@pytest.mark.parametrize(
    "name", ["report.html", "config.toml", "status.tmp", "checkpoints", "logs", "logs/run-0001.log", "x"]
)
def test_a_folder_with_a_link_in_it_is_no_nodes_folder(folder: Path, victim: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"kind": "round", "round": 1}\n')
    (folder / name).symlink_to(victim)
    for act in (NodeFolder(folder).create, lambda: write_report([folder], folder / "report.html")):
        with pytest.raises(ConfigError, match=rf"files and folders only, got .*{name}: .*got a link; remove it"):
            act()
    assert victim.read_text() == "precious\n"


def test_the_commands_refuse_such_a_folder(folder: Path, victim: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"kind": "round", "round": 1}\n')
    (folder / "report.html").symlink_to(victim)
    for command in (["report", "node"], ["run", *ALONE, "--node.dir", "node"], ["init", "node"]):
        ended = swarm(*command, cwd=folder.parent)
        assert ended.returncode == 3 and "got a link; remove it" in ended.stderr, command
    assert victim.read_text() == "precious\n"


def test_a_folder_may_be_reached_through_a_link_and_links_deep_in_other_folders_are_left_alone(folder: Path) -> None:
    (folder / "wandb").mkdir()
    (folder / "wandb" / "latest-run").symlink_to("run-1")
    (folder.parent / "there").symlink_to(folder)
    NodeFolder(folder.parent / "there").create()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "huge"])
def test_only_bounded_regular_files_are_read(folder: Path, victim: Path, kind: str) -> None:
    path = folder / "status.json"
    make: dict[str, Callable[[], Any]] = {
        "link": lambda: path.symlink_to(victim),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "huge": lambda: (path.touch(), os.truncate(path, 3 << 30)),
    }
    make[kind]()
    with pytest.raises(OSError, match=r"got a (link|pipe|folder)|at most 100 bytes"):
        read_file(path, 100)
    with pytest.raises(NodeNotRunningError, match="must be readable"):
        read_status(path)
    assert read_peers(path, 0.0) == {}
    assert OwnPorts(path).last("listen", ()) == ()
    if kind != "huge":
        for read in (lambda: list(read_rows(path)), NodeHistory(path).refresh, lambda: last_records(path, 1)):
            with pytest.raises(OSError, match="got a"):
                read()


def test_what_is_nested_without_end_is_an_error_like_others(folder: Path) -> None:
    path = folder / "status.json"
    for text in ("[" * 200_000, '{"a":' * 200_000, "[" * 200_000 + "]" * 200_000, "[" * 900 + "]" * 900):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"nested at most|Expecting"):
            read_json(path, 4 << 20)
        with pytest.raises(NodeNotRunningError, match="must be readable"):
            read_status(path)
    depth = MAX_JSON_DEPTH
    assert parse_json("[" * depth + "]" * depth) and parse_json('{"a": [1, {"b": 2}]}') == {"a": [1, {"b": 2}]}


@pytest.mark.parametrize(
    "changed", [{"pid": "1"}, {"pid": -1}, {"pid": True}, {"addresses": "text"}, {"peers": [1]}, {"last_round": []},
                {"started_at": "now"}, {"contribution": None}, {"phase": 1}, {"stuck": [{}]}],
)  # fmt: skip
def test_a_status_of_other_types_is_damaged(folder: Path, changed: dict[str, Any]) -> None:
    import json
    from dataclasses import asdict

    (folder / "status.json").write_text(json.dumps(asdict(STATUS) | changed))
    with pytest.raises(NodeNotRunningError, match="must be readable"):
        read_status(folder / "status.json")


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_files_are_private_under_any_umask(folder: Path, open_umask: None) -> None:
    replace_file(folder / "a", "text")
    new_file(folder / "b").close()
    open_to_append(folder / "c").close()
    replace_file(folder / "d", "text", safe_files.SHARED)
    assert [mode(folder / name) for name in "abcd"] == [0o600, 0o600, 0o600, 0o644]
    keep_others_from_writing()
    (folder / "e").touch()
    safe_files.close_to_others()
    (folder / "f").touch()
    assert [mode(folder / name) for name in "ef"] == [0o644, 0o600]


def test_a_nodes_files_are_closed_to_others_and_so_is_a_folder_of_an_earlier_version(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    before = os.umask(0)
    try:
        folder.mkdir()
        settings = ["--node.dir", "node", "--node.max_rounds", "1", "--evaluation.tasks_per_source", "1"]
        identity.create(folder / "identity.key")
        ended = swarm("run", *settings, *ALONE, cwd=tmp_path)
    finally:
        os.umask(before)
    assert ended.returncode == 0, ended.stderr
    assert mode(folder) == 0o700
    open_ones = [path for path in folder.rglob("*") if mode(path) & 0o077]
    assert not open_ones and (folder / "status.json").exists()


def test_a_folder_that_holds_more_than_a_node_keeps_its_mode(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "other").touch()
    NodeFolder(folder).create()
    assert mode(folder) == 0o755


def test_a_writer_that_was_killed_leaves_nothing_for_long(folder: Path) -> None:
    old, young, other = (folder / name for name in (f".a.{'0' * 16}.new", f".b.{'0' * 16}.new", ".other.new"))
    for path in (old, young, other):
        path.touch()
    os.utime(old, (0, 0))
    remove_leftovers(folder)
    assert not old.exists() and young.exists() and other.exists()


def test_a_file_is_replaced_whole_or_not_at_all(folder: Path) -> None:
    replace_file(folder / "a", "first")
    (folder / "b").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        replace_file(folder / "b", "text")
    assert str(caught.value) == f"[Errno 21] Is a directory: '{folder / 'b'}'", "and not the temporary file"
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"], "no temporary file is left"


def test_the_token_of_a_link_is_nobodys(folder: Path, victim: Path) -> None:
    victim.chmod(0o600)
    (folder / "page.token").symlink_to(victim)
    with pytest.raises(NodeNotRunningError):
        read_token(folder)
    assert make_token(folder) != "precious" and victim.read_text() == "precious\n"


def test_an_identity_is_no_link(folder: Path, tmp_path: Path) -> None:
    identity.create(tmp_path / "mine" / "identity.key")
    (folder / "identity.key").symlink_to(tmp_path / "mine" / "identity.key")
    with pytest.raises(IdentityError, match="got a link"):
        identity.load(folder / "identity.key")


def test_links_deep_in_a_folder_are_found(folder: Path, victim: Path) -> None:
    (folder / "logs" / "inner").mkdir(parents=True)
    (folder / "logs" / "inner" / "a").symlink_to(victim)
    check_no_links(folder)
    with pytest.raises(OSError, match="got a link"):
        check_no_links(folder, {"logs"})
    with pytest.raises(OSError, match="got a pipe"), open_to_read(victim):
        os.mkfifo(folder / "pipe")
        check_no_links(folder)


@pytest.mark.essential
def test_files_are_written_in_one_way_only() -> None:
    """Those that may write otherwise do it in folders that they have made themselves, or are told to fill."""
    known = {
        "machine/safe_files.py", "sandbox/inside/namespaces.py", "sandbox/inside/commands.py", "sandbox/inside/launcher.py",
        "assets/schooling.py", "adapters/checkpoint.py", "adapters/export.py", "adapters/adapter_folder.py",
        "integrations/hub.py", "network/requests/transfer.py", "records/identity.py", "network/hivemind/daemon.py",
        "tasks/data_sets/row_store.py", "warm_start/start_digest.py",
    }  # fmt: skip
    for path in SOURCE.rglob("*.py"):
        if str(path.relative_to(SOURCE)) in known:
            continue
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            told = ast.unparse(call)
            is_method = isinstance(call.func, ast.Attribute)
            assert not is_method or name not in ("write_text", "write_bytes", "copyfile", "copy2", "touch"), (
                f"{path}: {told}"
            )
            modes = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
            is_write = name == "open" and any(one.startswith(tuple("wax")) for one in modes)
            is_opened = (
                "os.open" in told.split("(")[0] and "O_PATH" not in told
            )  # such a handle reads and writes nothing
            assert not is_write and not is_opened, f"{path}: {told} must use swarm.machine.safe_files"
