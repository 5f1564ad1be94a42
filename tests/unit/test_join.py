"""Creating and joining from the command line, and the configuration that a manifest makes of a machine and its user."""

import http.server
import json
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from swarm.cli.swarm.create import create as create_command
from swarm.cli.swarm.preflight import machine_findings
from swarm.config import DEMO_TASKS, LOCAL_SETTINGS, load, parse
from swarm.diagnostics.check_result import CheckResult, Level
from swarm.errors import ConfigError, ManifestError, TaskError
from swarm.machine.hardware import Hardware, choose_policy
from swarm.manifest.files import read_manifest
from swarm.manifest.joining import choose, compose, file_sha256, needs_lineage
from swarm.manifest.manifest import Manifest, create, dump
from swarm.manifest.newcomer import Newcomer
from swarm.records import codec
from swarm.records.codec import PROTOCOL_VERSION
from swarm.records.identity import Identity, load_or_create
from tests import swarm_process

FOUNDER = Identity(b"f" * 32)
PEER = Identity(b"p" * 32).peer_id
ADDRESS = f"/ip4/127.0.0.1/tcp/30009/p2p/{PEER}"
LAPTOP, GAMER = Hardware(4, 16.0, "", 0.0), Hardware(8, 32.0, "RTX", 8.0)
LINES = [json.dumps({"prompt": f"say {number}", "answer": str(number)}) for number in range(20)]


def make(**content: Any) -> Manifest:
    tasks = [DEMO_TASKS[0].model_dump(exclude=LOCAL_SETTINGS)]
    return create(FOUNDER, "friends", PROTOCOL_VERSION, 1.8e9, **({"tasks": tasks, "bases": ["bundled"]} | content))


def composed(manifest: Manifest, user: dict[str, Any] | None = None, **task_files: Path) -> Any:
    return compose(manifest, {}, user or {}, task_files)


def swarm(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return swarm_process.swarm(*arguments, cwd=cwd, COLUMNS="200")


def told(ended: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of an error."""
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    return last


def test_manifest_decides_tasks_name_id_and_limits_and_the_user_the_rest() -> None:
    manifest = make(bootstrap=[ADDRESS], limits={"time_to_live_s": 60.0}, gossip="daemon")
    own_peer = ADDRESS.replace("/tcp/30009/", "/tcp/10/")
    user = {"training": {"lr": 0.5}, "network": {"initial_peers": [own_peer, ADDRESS]}, "sharing": {"swarm_groups": 3}}
    config = compose(manifest, {"training": {"lr": 0.1}, "rollouts": {"group_size": 4}}, user, {})
    assert (config.swarm.name, config.swarm_id) == ("friends", manifest.id)
    assert config.network.initial_peers == (ADDRESS, own_peer), "own peers come on top"
    assert config.network.gossip == "daemon"
    assert [source.source_name for source in config.tasks.sources] == ["sums"]
    assert (config.training.lr, config.rollouts.group_size) == (0.5, 4)
    assert (config.sharing.time_to_live_s, config.sharing.swarm_groups) == (60.0, 3)


@pytest.mark.parametrize(
    ("silo", "merging", "user", "merges"),
    [
        (True, True, None, True),
        (True, True, False, False),
        (True, None, None, False),
        (True, None, True, True),
        (None, True, None, False),  # partners are strangers
        (None, True, True, True),
    ],
)
def test_members_of_a_silo_merge_where_its_owner_says_so_and_they_do_not(
    silo: bool | None, merging: bool | None, user: bool | None, merges: bool
) -> None:
    manifest = make(silo=silo, merging=merging)
    own = {} if user is None else {"merging": {"enabled": user}}
    config = composed(manifest, own)
    assert config.merging.enabled == merges
    said = Newcomer(manifest, Path("mine"), []).said_of_merging(config)
    assert bool(said) == bool(merging and user is None), "who has decided is told nothing"
    assert not said or ("--merging.enabled false" if silo else "also with strangers") in said


def test_settings_that_need_merging_rest_on_what_the_owner_of_a_silo_says() -> None:
    final = {"merging": {"final": True}}
    assert composed(make(silo=True, merging=True), final).merging.final
    with pytest.raises(ConfigError, match=r"merging\.final needs merging\.enabled"):
        composed(make(merging=True), final)


@pytest.mark.parametrize(
    ("user", "names"),
    [
        ({"swarm": {"name": "foes"}}, ["swarm.name", "friends", "foes"]),
        ({"swarm": {"id": "00" * 16}}, ["swarm.id", "00" * 16]),
        ({"sharing": {"time_to_live_s": 61}}, ["sharing.time_to_live_s", "60.0", "61.0"]),
        ({"tasks": {"sources": [{"name": "lcm"}]}}, ["tasks.sources", "sums", "lcm"]),
        ({"policy": {"base": "Qwen/Qwen2.5-0.5B"}}, ["policy.base", "bundled", "Qwen/Qwen2.5-0.5B"]),
        ({"rollouts": {"group_size": 9}}, ["rollouts.group_size", "<= 6", "9"]),
        ({"network": {"gossip": "daemon"}}, ["network.gossip", "libp2p", "daemon"]),
        ({"network": {"backend": "off"}, "sharing": {"swarm_groups": 0}}, ["network.backend", "off"]),
    ],
)
def test_setting_that_contradicts_the_manifest_is_an_error_naming_both(user: dict[str, Any], names: list[str]) -> None:
    manifest = make(limits={"time_to_live_s": 60.0, "max_group_size": 6}, gossip="libp2p")
    with pytest.raises(ConfigError) as caught:
        composed(manifest, user)
    assert all(name in str(caught.value) for name in names), caught.value


def test_setting_that_agrees_is_no_contradiction_and_defaults_are_lowered() -> None:
    manifest = make(limits={"time_to_live_s": 60.0, "max_group_size": 6, "max_answer_tokens": 20})
    agreeing = {
        "swarm": {"name": "friends", "id": manifest.id},
        "sharing": {"time_to_live_s": 60},
        "tasks": {"sources": [DEMO_TASKS[0].model_dump()]},
    }
    config = composed(manifest, agreeing)
    assert (config.rollouts.group_size, config.rollouts.max_new_tokens) == (6, 20)
    assert parse(tomllib.loads("")).rollouts.group_size == 8


def test_pinned_revision_is_taken_and_another_refused() -> None:
    manifest = make(bases=["bundled", "a/b@v1", "a/b@v2", "c/d"])
    assert composed(manifest, {"policy": {"base": "a/b"}}).policy.revision == "v1"
    assert composed(manifest, {"policy": {"base": "a/b", "revision": "v2"}}).policy.revision == "v2"
    assert composed(manifest, {"policy": {"base": "c/d", "revision": "main"}}).policy.revision == "main"
    with pytest.raises(ConfigError, match="one of v1, v2, got v3"):
        composed(manifest, {"policy": {"base": "a/b", "revision": "v3"}})


def test_lineage_decides_only_for_bases_that_are_not_named() -> None:
    named, other = {"policy": {"base": "bundled"}}, {"policy": {"base": "/my/model"}}
    for manifest, expected in [
        (make(), (False, None)),
        (make(lineages=["ab" * 16]), (False, True)),
        (make(bases=[], lineages=["ab" * 16]), (True, True)),
        (make(bases=[]), (False, False)),
    ]:
        assert needs_lineage(manifest, composed(manifest, named)) is expected[0]
        if expected[1] is not None:
            assert needs_lineage(manifest, composed(manifest, other)) is expected[1]


def test_policy_is_the_largest_allowed_one_that_fits() -> None:
    small, middle, large = (f"Qwen/Qwen2.5-{size}B-Instruct" for size in ("0.5", "1.5", "7"))
    assert choose_policy(GAMER).base == middle
    assert choose_policy(LAPTOP).base == "bundled"
    for hardware, bases, expected in [
        (GAMER, [small, middle, large], middle),
        (GAMER, ["bundled", small], small),
        (LAPTOP, [large, "bundled"], "bundled"),
        (LAPTOP, [large, small], large),  # neither is known to fit: the founder's first
        (GAMER, ["someone/else"], "someone/else"),
        (LAPTOP, [], "bundled"),
    ]:
        manifest = make(bases=[f"{base}@main" if base == middle else base for base in bases])
        assert choose(manifest, {}, hardware).base == expected
    assert choose(make(), {"policy": {"base": small}}, GAMER).base == small


def test_task_file_is_asked_for_and_must_have_the_founders_content(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(LINES))
    manifest = make(tasks=[{"kind": "jsonl", "name": "own", "sha256": file_sha256(path)}])
    (source,) = composed(manifest, own=path).tasks.sources
    assert source.path == path
    with pytest.raises(TaskError, match="--task-file own=PATH"):
        composed(manifest)
    with pytest.raises(ConfigError, match="must name a jsonl or dataset task of friends, got 'wrong'"):
        composed(manifest, own=path, wrong=path)
    path.write_text("\n".join(LINES[1:]))
    with pytest.raises(TaskError, match="must have SHA-256"):
        composed(manifest, own=path)
    with pytest.raises(TaskError, match="must be readable"):
        composed(manifest, own=tmp_path / "none")


def test_create_then_join_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("\n".join(LINES))
    sources = '[{name = "lcm"}, {kind = "jsonl", name = "own", path = "own.jsonl"}]'
    made = swarm(
        "create", "friends", "--tasks.sources", sources, "--sharing.max_group_size", "6", "--key", "f/key", cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "f" / "key").stat().st_mode & 0o777 == 0o600
    path = tmp_path / "friends.swarm.toml"
    first = read_manifest(str(path))
    assert "--force" in told(swarm("create", "friends", cwd=tmp_path), 12)
    updated = swarm("create", "--update", str(path), "--key", "f/key", "--bootstrap", ADDRESS, cwd=tmp_path)
    assert updated.returncode == 0, updated.stderr
    second = read_manifest(str(path), first.founder)
    assert (second.id, second.bootstrap, second.edition) == (first.id, (ADDRESS,), 2)
    file = ("--task-file", "own=own.jsonl")
    dry = swarm("join", "--training.lr", "1e-5", *file, str(path), "--dry-run", cwd=tmp_path)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dry.stdout)
    config = load([resolved])
    assert (config.swarm_id, config.training.lr, config.network.initial_peers) == (first.id, 1e-5, (ADDRESS,))
    assert config.rollouts.group_size == 6
    assert config.node.dir == Path("runs/friends")
    assert not (tmp_path / "runs").exists(), "a dry run writes nothing"
    assert first.founder in dry.stderr, "who the founder is is told"
    assert "ask the founder" in dry.stderr
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "manifest.toml").write_text(path.read_text())
    known = swarm("join", str(path), *file, "--dry-run", "--node.dir", "known", cwd=tmp_path)
    assert first.founder in known.stderr and "ask the founder" not in known.stderr
    checked = swarm("join", str(path), *file, "--check", "--network.listen", '["/ip4/127.0.0.1/tcp/0"]', cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.strip().endswith("can join")
    assert f"jsonl own, sha256 {file_sha256(tmp_path / 'own.jsonl')}, verifier exact" in checked.stdout
    assert not (tmp_path / "runs").exists(), "nor does a preflight"


def test_an_update_by_a_later_release_takes_the_swarm_to_its_protocol_and_one_by_an_older_release_never_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, path = tmp_path / "key", tmp_path / "friends.swarm.toml"
    founder = load_or_create(key)
    tasks = [DEMO_TASKS[0].model_dump(exclude=LOCAL_SETTINGS)]
    path.write_text(dump(create(founder, "friends", 2, 1e9, tasks=tasks, bases=["bundled"]), founder))
    given: dict[str, Any] = {name: [] for name in ("bootstrap", "base", "lineage", "arguments")}
    given |= {"key": key, "any_base": False, "description": "later", "update": path, "force": False}
    with pytest.raises(ManifestError, match="protocol version 1, got 2; update this software"):
        create_command(**given)
    assert read_manifest(str(path)).edition == 1
    monkeypatch.setattr(codec, "PROTOCOL_VERSION", 3)
    create_command(**given)
    assert (read_manifest(str(path)).protocol, read_manifest(str(path)).edition) == (3, 2)
    assert "it is for protocol version 3, was 2: members need this release" in capsys.readouterr().out


def test_an_update_changes_what_is_given_and_prints_what_members_must_agree_to(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("\n".join(LINES))
    sources = '[{name = "lcm"}, {kind = "jsonl", name = "own", path = "own.jsonl"}]'
    limit = ("--sharing.max_group_size", "6")
    assert (
        swarm("create", "friends", "--tasks.sources", sources, *limit, "--key", "f/key", cwd=tmp_path).returncode == 0
    )
    path = tmp_path / "friends.swarm.toml"
    first = read_manifest(str(path))
    (tmp_path / "own.jsonl").unlink()  # tasks that stay need no file

    def update(*arguments: str, code: int = 0) -> list[str]:
        ended = swarm("create", "--update", "friends.swarm.toml", "--key", "f/key", *arguments, cwd=tmp_path)
        assert ended.returncode == code, ended.stderr
        return ended.stdout.splitlines()[1:] if code == 0 else [told(ended, code)]

    lines = update("--sharing.time_to_live_s", "60", "--tasks.held_out_share", "0.125", "--network.gossip", "off")
    assert lines == [
        "it changes:", "  gossip: libp2p → off", "  held_out_share: 0.0625 → 0.125", "  limit time_to_live_s: 600.0 → 60.0",
        "members must agree to that: swarm join friends.swarm.toml --accept-edition 2",
    ]  # fmt: skip
    second = read_manifest(str(path))
    assert (second.tasks, second.bases, second.limits.max_group_size) == (first.tasks, first.bases, 6)
    lines = update(
        "--tasks.sources", '[{name = "lcm", parameters = {max_value = 9}}]', "--base", "bundled", "--base", "a/b"
    )
    assert "  task own is removed" in lines and "  bases: bundled → bundled, a/b" in lines
    assert "  task lcm: reasoning_gym lcm, weight 1 → reasoning_gym lcm, max_value=9, weight 1" in lines
    third = read_manifest(str(path), first.founder)
    assert (third.limits, third.gossip, third.edition, third.id) == (second.limits, "off", 3, first.id)
    assert update("--any-base") == ["it changes:", "  bases: bundled, a/b → any", lines[-1].replace("3", "4")]
    assert update("--merging.enabled", "true")[1] == "  merging: not set → True"
    assert update("--merging.enabled", "false")[1] == "  merging: True → not set"
    assert update("--description", "later") == ["it changes nothing that members must agree to"]
    assert "it knows" in update("--tasks.sources", '[{name = "lcm", parameters = {x = 1}}]', code=6)[0]
    assert read_manifest(str(path)).edition == 7, "a mistake signs nothing"


def test_preflight_imports_neither_torch_nor_the_network(founded: Path) -> None:
    arguments = ["swarm", "join", "friends.swarm.toml", "--check"]
    script = (
        f"import sys\nfrom swarm.cli.main import _run\nsys.argv = {arguments}\ncode = _run()\n"
        "sys.exit(str({'torch', 'transformers', 'hivemind', 'libp2p'} & set(sys.modules) or '') or code)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=founded, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("founded")
    made = swarm("create", "friends", "--bootstrap", ADDRESS, cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["join"], 3, "needs a manifest"),
        (["join", "nowhere.toml"], 12, "must be an existing file or an http(s) address, got nowhere.toml; check"),
        (["join", "."], 12, "got .: it must be a regular file, got a folder; check the path"),
        (["bootstrap", "--listen", "nonsense"], 3, "error: --listen must hold"),
        (["bootstrap", "--name", "a b"], 3, "--name"),
        (["create", "y", "--bootstrap", "/ip4/1.2.3.4/tcp/1"], 3, "error: --bootstrap must end"),
        (["join", "friends.swarm.toml", "--dial"], 3, "--check"),
        (["join", "friends.swarm.toml", "--founder", PEER], 12, "must be of founder"),
        (["join", "friends.swarm.toml", "--swarm.name", "foes"], 3, "decided by the manifest"),
        (["join", "friends.swarm.toml", "--task-file", "x"], 3, "NAME=PATH"),
        (["join", "friends.swarm.toml", "own.toml"], 3, "unknown setting training.lrr in own.toml; did you mean training.lr?"),
        (["join", "friends.swarm.toml", "--chek"], 3, "did you mean --check?"),
        (["create"], 3, "needs a name"),
        (["create", "../up"], 3, "swarm.name"),
        (["create", "x", "--update", "friends.swarm.toml"], 3, "needs a name"),
        (["create", "x", "--bootstrap", "/ip4/1.2.3.4/tcp/1"], 3, "/p2p/"),
        (["create", "x", "--policy.base", "/my/model"], 5, "must be an existing folder, got /my/model"),
        (["create", "x", "--tasks.sources", '[{name = "no_such"}]'], 6, "no_such"),
        (["create", "--update", "friends.swarm.toml", "--key", "none"], 4, "name the founder's key with --key"),
        (["bootstrap", "--manifest", "nowhere.toml"], 12, "must be an existing file"),
        (["bootstrap", "--manifest", "friends.swarm.toml", "--founder", PEER], 12, "must be of founder"),
    ],
)  # fmt: skip
def test_mistake_ends_in_one_line_and_its_exit_code(founded: Path, arguments: list[str], code: int, said: str) -> None:
    (founded / "own.toml").write_text("[training]\nlrr = 1\n")
    assert said in told(swarm(*arguments, cwd=founded), code)


def test_preflight_tells_the_memory_of_a_small_base_in_small_units() -> None:
    config = load([], {"network.listen": '["/ip4/127.0.0.1/tcp/0"]'})
    (memory,) = [one.text for one in machine_findings(config, LAPTOP) if one.name == "memory"]
    assert re.match(r"about [\d.]+ MiB for 0\.\d+ M parameters, ", memory)


@pytest.mark.parametrize("named", [("Linux", "aarch64"), ("Darwin", "arm64"), ("Linux", "riscv64")])
def test_a_machine_is_judged_by_its_daemon_and_not_by_its_name(
    named: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load([], {"network.listen": '["/ip4/127.0.0.1/tcp/0"]'})
    monkeypatch.setattr("platform.system", lambda: named[0])
    monkeypatch.setattr("platform.machine", lambda: named[1])

    def daemon() -> CheckResult:
        return next(one for one in machine_findings(config, LAPTOP) if one.name == "daemon")

    assert daemon().level is Level.OK, "hivemind's wheel for this machine has the right one, whatever its name"
    binary = tmp_path / "hivemind_cli" / "p2pd"
    binary.parent.mkdir()
    binary.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xf3\x00")  # for a machine of another kind
    binary.chmod(0o755)
    elsewhere = ModuleSpec("hivemind", None, is_package=True)
    elsewhere.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("swarm.diagnostics.machine.importlib.util.find_spec", lambda name: elsewhere)
    assert daemon().level is Level.PROBLEM and "set network.backend to libp2p" in daemon().fix


def test_preflight_names_every_problem_and_ends_with_its_own_exit_code(founded: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = json.dumps([f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"])
        ended = swarm(
            "join",
            "friends.swarm.toml",
            "--check",
            "--network.listen",
            listen,
            "--policy.quantization",
            "4bit",
            cwd=founded,
        )
    assert "problems with listen; see the table" in told(ended, 13)
    assert "already in use" in ended.stdout
    contradicting = swarm("join", "friends.swarm.toml", "--check", "--swarm.name", "foes", cwd=founded)
    assert "problems with settings" in told(contradicting, 13)


def test_preflight_finds_a_folder_that_cannot_be_made_and_leaves_nothing_behind(founded: Path) -> None:
    (founded / "file").touch()
    before = sorted(founded.rglob("*"))
    refused = swarm("join", "friends.swarm.toml", "--check", "--node.dir", "file/n", cwd=founded)
    assert "problems with folder; see the table" in told(refused, 13)
    assert "Not a directory" in refused.stdout
    swarm("join", "friends.swarm.toml", "--check", "--node.dir", "deep/er/n", cwd=founded)
    assert sorted(founded.rglob("*")) == before


@contextmanager
def web(pages: dict[str, bytes], redirects: dict[str, str] | None = None) -> Iterator[str]:
    """A server on loopback; a page that is not there is never answered."""
    done = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if (target := (redirects or {}).get(self.path)) is not None:
                self.send_response(302)
                self.send_header("Location", target)
                self.end_headers()
            elif self.path in pages:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(pages[self.path])
            else:
                done.wait(30)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        done.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_manifest_from_the_web_is_bounded_in_size_time_and_place(founded: Path, tmp_path: Path) -> None:
    data = (founded / "friends.swarm.toml").read_bytes()
    pages = {"/m": data, "/big": data + b"#" * 70_000, "/html": b"<html>"}
    redirects = {"/moved": "/m", "/loop": "/loop", "/file": f"file://{founded}/friends.swarm.toml", "/ftp": "ftp://x/y"}
    with web(pages, redirects) as site:
        assert (
            read_manifest(f"{site}/m")
            == read_manifest(f"{site}/moved")
            == read_manifest(str(founded / "friends.swarm.toml"))
        )
        for page, said in {
            "big": "<= 65536 bytes", "html": "TOML", "loop": "readable", "file": "readable", "ftp": "elsewhere"
        }.items():  # fmt: skip
            with pytest.raises(ManifestError, match=said):
                read_manifest(f"{site}/{page}")
        with pytest.raises(ManifestError, match=r"within 0\.2 s|timed out"):
            read_manifest(f"{site}/silent", timeout_s=0.2)
    with pytest.raises(ManifestError, match="readable"):
        read_manifest(f"{site}/m")
