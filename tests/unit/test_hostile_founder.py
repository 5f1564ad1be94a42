"""What a founder can make a joiner do: read its files, hang, eat memory, dial its network, or change the tasks unseen."""

import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swarm.config import TaskSourceSection, TasksSection, parse
from swarm.errors import ConfigError, ManifestError, TaskError
from swarm.manifest import manifest as manifests
from swarm.manifest.files import check_joined, fetch
from swarm.manifest.joining import compose
from swarm.manifest.manifest import Manifest, changed, changes, create, dump
from swarm.records.codec import PROTOCOL_VERSION
from swarm.records.identity import Identity
from swarm.tasks.reasoning_gym_source import ReasoningGymSource, base_digest
from swarm.tasks.sandboxed_verifier import SandboxedVerifier
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import assess, score
from swarm.types import TaskRef
from tests import swarm_process
from tests.unit.test_manifest import signed_by

FOUNDER = Identity(b"f" * 32)
SPELLING = {"kind": "reasoning_gym", "name": "spell_backward", "label": "spelling", "parameters": {"min_word_len": 3}}
SUMS = {"kind": "reasoning_gym", "name": "chain_sum", "label": "sums", "parameters": {"max_terms": 2}}
SECRET = "the passphrase of my wallet"
SPOILED = """
import os, time
from swarm.tasks.reasoning_gym_source import import_library
reasoning_gym = import_library()
import reasoning_gym.arithmetic.chain_sum as sums

class Spoiled(sums.ChainSumDataset):
    def __init__(self, config):
        super().__init__(config)
        if config.max_terms == 7:
            time.sleep(60)
        if config.max_terms == 8:
            self.eaten = bytearray(64 << 30)

    def __getitem__(self, index):
        item = super().__getitem__(index)
        secrets = os.path.join(os.path.dirname(os.path.dirname(__file__)), "secrets.txt")
        for name in (secrets, "/proc/self/environ", "/dev/zero"):
            try:
                with open(name, "rb") as file:
                    item["question"] += file.read(64).decode(errors="replace")
            except OSError as error:
                item["question"] += f" <{type(error).__name__}>"
        return item

reasoning_gym.factory.DATASETS["chain_sum"] = (Spoiled, sums.ChainSumConfig)
"""
"""A library that opens what it must not, and data sets that hang or eat memory. Python runs it from its path."""


def make(**content: Any) -> Manifest:
    content = {"tasks": [SPELLING], "bases": ["bundled"]} | content
    return create(FOUNDER, "friends", PROTOCOL_VERSION, 1.8e9, **content)


def hostile(**parameters: Any) -> bytes:
    """A well signed manifest with a task that `create` would refuse."""
    plain = manifests._content(make())
    return signed_by(FOUNDER, plain | {"tasks": [{**SPELLING, "parameters": parameters}]})


def swarm(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return swarm_process.swarm(*arguments, cwd=cwd, COLUMNS="240")


@pytest.mark.parametrize("arguments", [("--check",), ()])
def test_a_founder_reads_no_file_of_a_joiner(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "secrets.txt").write_text(f"{SECRET}\n")
    path = tmp_path / "friends.swarm.toml"
    path.write_bytes(hostile(data_file="/proc/self/cwd/secrets.txt"))
    ended = swarm("join", str(path), *arguments, cwd=tmp_path)
    assert ended.returncode == 12, ended.stdout + ended.stderr
    assert "parameter data_file must be" in ended.stderr
    assert "/proc/self/cwd/secrets.txt" in ended.stderr
    assert SECRET not in ended.stdout + ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"data_file": "/dev/zero"}, "names no file"),
        ({"data_file": "../secrets"}, "names no file"),
        ({"data_file": ["secrets.txt"]}, "names no file"),
        ({"max_word_len": 10**18}, "within"),
        ({"a b": 1}, "letters, digits"),
        ({"table": {"data_file": "x"}}, "numbers, booleans and words"),
        ({"many": list(range(65))}, "shorten it"),
    ],
)
def test_a_manifest_with_other_parameters_is_none(parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(ManifestError, match=told):
        manifests.parse(hostile(**parameters))


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({"kind": "code", "name": "list_functions", "parameters": {"cpu_s": "x"}}, "number or boolean"),
        ({"kind": "jsonl", "name": "own", "sha256": "ab" * 32, "parameters": {"path": 1}}, "no parameters"),
        ({**SUMS, "signals": [{"name": "politeness", "parameters": {"word": "/etc/passwd"}}]}, "names no file"),
        ({**SUMS, "signals": [{"name": f"s{number}"} for number in range(9)]}, "signals"),
        ({**SUMS, "weight": 1e300}, "weight"),
    ],
)
def test_other_kinds_of_tasks_and_signals_are_bounded_too(task: dict[str, Any], told: str) -> None:
    with pytest.raises(ManifestError, match=told):
        make(tasks=[task])


def test_tasks_of_a_manifest_are_fenced_whoever_writes_the_configuration() -> None:
    assert compose(make(), {}, {}, {}).tasks.sandboxed
    with pytest.raises(ConfigError, match=r"tasks\.sandboxed is decided by the manifest"):
        compose(make(), {}, {"tasks": {"sandboxed": False}}, {})
    old = {"swarm": {"name": "friends", "id": make().id}, "tasks": {"sources": [SPELLING]}}
    assert parse(old).tasks.sandboxed, "one that an earlier version wrote"
    with pytest.raises(ConfigError, match="must be true in a swarm with a manifest"):
        parse(old | {"tasks": {"sandboxed": False}})
    assert not parse({}).tasks.sandboxed


def fenced(*sources: dict[str, Any]) -> TasksSection:
    return TasksSection.model_validate({"sources": sources, "sandboxed": True})


@pytest.fixture(scope="module")
def mixture() -> Iterator[TaskMixture]:
    """Sources that work, and two as if they had come past the manifest, in a configuration that somebody else wrote."""
    signals = {
        **SUMS,
        "label": "short",
        "signals": [{"name": "correct"}, {"name": "length", "parameters": {"max_chars": 9}}],
    }
    device, word = ({**SPELLING, "label": name, "parameters": {"data_file": name}} for name in ("/dev/zero", "secrets"))
    made = TaskMixture(fenced(SUMS, SPELLING, signals, {**device, "label": "device"}, word))
    yield made
    made.close()


def test_a_source_is_refused_where_it_is_built_too(mixture: TaskMixture) -> None:
    assert "names no file" in mixture.broken["device"]
    assert "must be one of words3to10.txt" in mixture.broken["secrets"]


def test_fenced_tasks_are_those_that_the_node_itself_would_build(mixture: TaskMixture) -> None:
    in_the_node = {
        "sums": ReasoningGymSource(TaskSourceSection.model_validate(SUMS), TasksSection(sandboxed=True)),
        "spelling": ReasoningGymSource(TaskSourceSection.model_validate(SPELLING), TasksSection(sandboxed=True)),
    }
    for name, own in in_the_node.items():
        source = mixture.sources[name]
        for seed, index in [(16, 0), (16, 1), (16, 2), (99, 40), (16, 3), (1, 0), (16, 2**20 - 1)]:
            task, same = source.task(seed, index), own.task(seed, index)
            assert (task.ref, task.prompt, task.weights) == (same.ref, same.prompt, same.weights)
            answer = source.answer(seed, index)
            assert answer == own.answer(seed, index)
            assert [score(task, text) for text in (answer, "7", "")] == [
                score(same, text) for text in (answer, "7", "")
            ]
    short = mixture.sources["short"].task(16, 0)
    assert short.prompt == in_the_node["sums"].task(16, 0).prompt
    assert dict(assess(short, "0123456789").signals) == {"correct": 0.0, "length": 0.0}


def test_a_walk_through_a_stream_asks_for_many_tasks_at_once(
    mixture: TaskMixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    prompts = SandboxedVerifier.prompts

    def counted(fence: SandboxedVerifier, ref: TaskRef, count: int) -> list[str]:
        asked.append(count)
        return prompts(fence, ref, count)

    monkeypatch.setattr(SandboxedVerifier, "prompts", counted)
    source = mixture.sources["sums"]
    walked = [source.task(200, index).prompt for index in range(33)]
    assert asked[:2] == [1, 32]
    assert len(asked) < len(walked), "one at a time only where this machine is slower than the time of a batch"
    assert walked == [mixture.sources["short"].task(200, index).prompt for index in range(33)]


@pytest.fixture
def spoiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "packages"  # apart from the current folder, from which nothing is imported
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(SPOILED, encoding="utf-8")
    (tmp_path / "secrets.txt").write_text(SECRET)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("spoiled")
def test_the_process_that_builds_tasks_opens_no_file_of_the_node() -> None:
    mixture = TaskMixture(fenced(SUMS))
    prompt = mixture.sources["sums"].task(16, 0).prompt
    assert SECRET not in prompt
    assert len(re.findall("<(?:PermissionError|FileNotFoundError)>", prompt)) == 3, "not there, or not to be opened"
    mixture.close()


@pytest.mark.usefixtures("spoiled")
def test_where_the_kernel_does_not_help_python_refuses_the_same() -> None:
    script = (
        "from swarm.sandbox.inside import file_guard\n"
        "import pathlib, reasoning_gym, socket, subprocess\n"
        "file_guard._refuse_in_python(file_guard.readable_folders())\n"
        "def told(work, *arguments):\n"
        "    try:\n        work(*arguments)\n        print('done')\n"
        "    except PermissionError as error:\n        print('refused')\n"
        "told(pathlib.Path('secrets.txt').read_text)\n"
        "told(lambda: list(pathlib.Path('.').iterdir()))\n"
        "told(subprocess.run, ['true'])\n"
        "told(socket.socket)\n"
        "told(pathlib.Path('new').touch)\n"
        "told(pathlib.Path(reasoning_gym.__file__).read_text)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert ended.stdout.split() == ["refused"] * 5 + ["done"]


@pytest.mark.usefixtures("spoiled")
def test_a_source_that_hangs_or_eats_memory_when_it_is_built_takes_no_other_with_it() -> None:
    hangs, eats = (
        {**SUMS, "label": label, "parameters": {"max_terms": terms}} for label, terms in (("hangs", 7), ("eats", 8))
    )
    fence = SandboxedVerifier(fenced(hangs, eats, SUMS), time_budget_s=1.0)
    with pytest.raises(TaskError, match="within 1 s"):
        fence.open("hangs")
    with pytest.raises(TaskError, match="MemoryError"):
        fence.open("eats")
    assert fence.open("sums")
    ref = TaskRef("sums", base_digest(TaskSourceSection.model_validate(SUMS)), 16, 0)
    assert len(fence.prompts(ref, 4)) == 4
    fence.close()


def test_later_edition_that_changes_tasks_needs_consent(tmp_path: Path) -> None:
    kept, first = tmp_path / "manifest.toml", make()
    assert check_joined(kept, first) == [], "the first is trusted"
    kept.write_text(dump(first, FOUNDER))
    alive = changed(first, bootstrap=[f"/ip4/1.2.3.4/tcp/9/p2p/{FOUNDER.peer_id}"], description="we moved")
    assert check_joined(kept, alive) == [], "addresses and description keep a swarm alive"
    harder = changed(first, tasks=[{**SPELLING, "parameters": {"min_word_len": 9}}, SUMS], bases=["someone/else"])
    found = [
        "task sums is new: reasoning_gym chain_sum, max_terms=2, weight 1",
        "task spelling: reasoning_gym spell_backward, min_word_len=3, weight 1 → "
        "reasoning_gym spell_backward, min_word_len=9, weight 1",
        "bases: bundled → someone/else",
    ]
    for accepted in (None, 1, 3):
        with pytest.raises(ManifestError) as caught:
            check_joined(kept, harder, accepted)
        assert all(line in str(caught.value) for line in (*found, "--accept-edition 2"))
    assert check_joined(kept, harder, 2) == found
    same_number = make(tasks=[SUMS])
    with pytest.raises(ManifestError, match="task spelling is removed"):
        check_joined(kept, same_number)


def test_no_number_of_changes_hides_one(tmp_path: Path) -> None:
    """All of them are told before consent, however many harmless ones come first."""
    kept, first = tmp_path / "manifest.toml", make()
    kept.write_text(dump(first, FOUNDER))
    many = [{**SPELLING, "label": f"spelling-{number}"} for number in range(63)]
    later = changed(first, tasks=[SPELLING, *many], bases=["someone/else"])
    with pytest.raises(ManifestError) as caught:
        check_joined(kept, later)
    assert "bases: bundled → someone/else" in str(caught.value)


def test_reward_functions_of_packages_are_few_in_all_tasks_together() -> None:
    """Each takes a process."""
    tasks = [
        {**SUMS, "label": f"sums-{number}", "signals": [{"name": "correct"}, {"name": "polite"}]}
        for number in range(17)
    ]
    assert len(make(tasks=tasks[:16]).tasks) == 16
    with pytest.raises(ManifestError, match="at most 16 signals of packages"):
        make(tasks=tasks)


@pytest.mark.parametrize(
    ("place", "is_dialled"),
    [
        ("/ip4/1.2.3.4/tcp/25", False),
        ("/dns4/mail.example.org/tcp/22", False),
        ("/ip4/169.254.169.254/tcp/8080", False),
        ("/ip4/224.0.0.1/tcp/8080", False),
        ("/ip4/1.2.3.4/tcp/443", True),
        ("/ip4/192.168.1.7/tcp/28000", True),
        ("/dns4/bootstrap.example.org/tcp/28000", True),
    ],
)
def test_a_founder_has_nobody_dial_the_services_of_others(place: str, is_dialled: bool) -> None:
    """Later editions change addresses without consent."""
    address = f"{place}/p2p/{FOUNDER.peer_id}"
    config = compose(make(bootstrap=[address]), {"network": {"backend": "libp2p"}}, {}, {})
    assert config.network.initial_peers == ((address,) if is_dialled else ())
    mine = {"network": {"backend": "libp2p", "initial_peers": [address]}}
    assert compose(make(), {}, mine, {}).network.initial_peers == (address,), "the operator may"


@pytest.mark.parametrize(
    "content",
    [
        {"tasks": [{**SPELLING, "weight": 2.0}]},
        {"tasks": [{**SPELLING, "signals": [{"name": "correct"}, {"name": "length", "parameters": {"max_chars": 9}}]}]},
        {"tasks": [{**SPELLING, "label": ""}]},
        {"bases": []},
        {"lineages": ["cd" * 16]},
        {"gossip": "daemon"},
        {"silo": True},
        {"limits": {"max_group_size": 9}},
        {"common_tasks": 0.5},
        {"solved_groups": True},
        {"merging": True},
    ],
)
def test_every_part_but_addresses_and_description_counts_as_a_change(content: dict[str, Any]) -> None:
    assert changes(make(), changed(make(), **content))


def test_every_field_of_a_manifest_is_compared_or_known_to_be_harmless() -> None:
    """A new field has to be put into one of the two."""
    compared = {"tasks", "bases", "lineages", "gossip", "silo", "limits", "held_out_share", "common_tasks"}
    compared |= {"merging", "solved_groups"}
    fixed = {"format", "protocol", "name", "id", "founder", "created_at", "edition"}
    assert set(Manifest.model_fields) == compared | fixed | {"description", "bootstrap"}


def test_joining_again_with_other_tasks_is_refused_until_accepted(tmp_path: Path) -> None:
    folder, path = tmp_path / "mine", tmp_path / "friends.swarm.toml"
    folder.mkdir()
    (folder / "manifest.toml").write_text(dump(make(), FOUNDER))
    path.write_text(dump(changed(make(), tasks=[SPELLING, SUMS]), FOUNDER))
    asked = ("join", str(path), "--node.dir", str(folder))
    for arguments in (asked, (*asked, "--dry-run")):
        refused = swarm(*arguments, cwd=tmp_path)
        assert refused.returncode == 12, refused.stdout + refused.stderr
        assert "task sums is new" in refused.stderr and "--accept-edition 2" in refused.stderr
    accepted = swarm(*asked, "--dry-run", "--accept-edition", "2", cwd=tmp_path)
    assert accepted.returncode == 0, accepted.stderr
    assert "task sums is new" in accepted.stderr


def test_a_name_of_the_founders_takes_up_no_run_that_joined_nothing(tmp_path: Path) -> None:
    """Its adapter, which may have learned from private tasks, would be shared."""
    (tmp_path / "friends.swarm.toml").write_text(dump(make(), FOUNDER))
    run = tmp_path / "runs" / "friends" / "checkpoints"
    run.mkdir(parents=True)
    for arguments in ((), ("--check",)):
        refused = swarm("join", "friends.swarm.toml", *arguments, cwd=tmp_path)
        assert refused.returncode == (13 if arguments else 12)
        assert "which has joined none" in refused.stderr + refused.stdout
    assert list(run.parent.iterdir()) == [run]
    assert swarm("join", "friends.swarm.toml", "--dry-run", "--node.dir", "other", cwd=tmp_path).returncode == 0


def test_a_base_that_a_founder_names_is_no_folder_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "private").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    policy = {"base": "models/private"}
    with pytest.raises(ConfigError, match="must come from the hub, got models/private"):
        compose(make(bases=["models/private"]), {"policy": policy}, {}, {})
    assert compose(make(bases=["models/private"]), {}, {"policy": policy}, {}).policy.base == "models/private"


@contextmanager
def answering(location: str) -> Iterator[int]:
    """A server on loopback that sends everyone on to `location`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", location)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """What must not be connected to."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.mark.parametrize("host", ["127.0.0.2", "[::ffff:127.0.0.2]"])
def test_no_redirect_leads_into_the_own_network(listener: socket.socket, host: str) -> None:
    with (
        answering(f"http://{host}:{listener.getsockname()[1]}/x") as port,
        pytest.raises(ManifestError, match="public"),
    ):
        fetch(f"http://127.0.0.1:{port}/m")
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_no_name_leads_into_the_own_network(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    address, port = listener.getsockname()
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)  # a name server of the attacker's
    for scheme in ("http", "https"):
        with pytest.raises(ManifestError, match=rf"public address.*manifests\.example.* at {address}"):
            fetch(f"{scheme}://manifests.example:{port}/m")
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_proxy_of_the_operators_may_be_in_the_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering("http://10.0.0.1/x") as port:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        with pytest.raises(ManifestError, match=r"public address.*10\.0\.0\.1"):
            fetch("http://manifests.example/m")


def test_a_pipe_a_device_and_a_folder_are_no_manifests(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    started_at = time.monotonic()
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(ManifestError, match="regular file"):
            fetch(str(path))
    assert time.monotonic() - started_at < 5
