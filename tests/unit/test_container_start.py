"""docker/start.py: replicas that share a volume keep folders apart, and its command lines are understood."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from swarm.records.identity import is_encrypted

SOURCE = Path(__file__).parents[2] / "docker" / "start.py"


@pytest.fixture(scope="module")
def start() -> ModuleType:
    spec = importlib.util.spec_from_file_location("container_start", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Replicas:
    """Containers on one volume; `claim` keeps the lock as a running node does."""

    def __init__(self, start: ModuleType, data: Path) -> None:
        self._start, self._data = start, data
        self._held: dict[str, int] = {}

    def claim(self, container: str, numbered: int | None = None) -> int:
        number, self._held[container] = self._start.claim_folder(self._data, container, numbered)
        return number

    def end(self, *containers: str) -> None:
        for container in containers or [*self._held]:
            os.close(self._held.pop(container))


@pytest.fixture
def replicas(start: ModuleType, tmp_path: Path) -> Iterator[Replicas]:
    replicas = Replicas(start, tmp_path)
    yield replicas
    replicas.end()


def test_replicas_take_the_numbers_that_compose_gave_them(replicas: Replicas) -> None:
    assert [replicas.claim("c", 3), replicas.claim("a", 1), replicas.claim("b", 2)] == [3, 1, 2]


def test_replicas_without_a_number_take_folders_of_their_own(replicas: Replicas) -> None:
    assert [replicas.claim(name) for name in "abc"] == [1, 2, 3]


def test_a_container_that_restarts_without_network_has_its_folder_again(replicas: Replicas) -> None:
    replicas.claim("a", 1)
    replicas.claim("b", 2)
    replicas.claim("c", 3)
    replicas.end("a", "b")
    assert replicas.claim("b", None) == 2
    assert replicas.claim("a", None) == 1


def test_a_new_container_goes_on_where_another_ended(replicas: Replicas) -> None:
    replicas.claim("a", 1)
    replicas.claim("b", 2)
    replicas.end("a", "b")
    assert replicas.claim("new b", 2) == 2
    assert replicas.claim("new a", 1) == 1


def test_nobody_is_put_into_a_folder_in_use(replicas: Replicas) -> None:
    replicas.claim("a", 1)
    assert replicas.claim("of another project on this volume", 1) == 2


def test_the_lock_outlives_the_start_and_dies_with_the_node(replicas: Replicas, tmp_path: Path) -> None:
    claim = f"""
import importlib.util, os, pathlib, sys
spec = importlib.util.spec_from_file_location("start", {str(SOURCE)!r})
start = importlib.util.module_from_spec(spec)
spec.loader.exec_module(start)
start.claim_folder(pathlib.Path({str(tmp_path)!r}), "a", 1)
os.execv(sys.executable, [sys.executable, "-c", "print('runs', flush=True); input()"])
"""
    with subprocess.Popen([sys.executable, "-c", claim], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"runs\n"
        assert replicas.claim("b", 1) == 2
        node.kill()
        node.wait()
        assert replicas.claim("c", 1) == 1


def test_the_container_of_a_folder_is_known(start: ModuleType, replicas: Replicas, tmp_path: Path) -> None:
    replicas.claim("a", 1)
    replicas.claim("b", 2)
    assert start.own_numbers(tmp_path, "b") == [2]
    assert start.own_numbers(tmp_path, "stranger") == []


def test_command_lines_are_understood(start: ModuleType, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "swarm.cli.main"]
    peer_id = "12D3KooWC4vLuGPA6LSBqAtuPpY6gmRifkBymHHxrBinQsWpUpd7"
    create = [
        *run,
        "create",
        "boxes",
        "--key",
        "founder.key",
        "--bootstrap",
        f"/dns4/bootstrap/tcp/38000/p2p/{peer_id}",
    ]
    subprocess.run(create, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    manifest = tmp_path / "boxes.swarm.toml"
    resolved = []
    for number in (1, 3):
        _, *arguments = start.node_command(number, tmp_path, str(manifest), ["--node.threads", "1"], {})
        told = subprocess.run([*run, *arguments, "--dry-run"], capture_output=True, text=True, timeout=60)
        assert told.returncode == 0, told.stderr
        resolved.append(tomllib.loads(told.stdout))
    plain, slow = resolved
    assert plain["observability"]["http_port"] == slow["observability"]["http_port"] == 9100
    assert slow["node"]["duty_cycle"] < plain["node"].get("duty_cycle", 1.0)
    assert slow["node"]["dir"] == str(tmp_path / "node-3")


def test_the_bootstrap_command_names_options_that_exist(start: ModuleType, tmp_path: Path) -> None:
    _, name, *arguments = start.bootstrap_command(tmp_path, "m.toml", "/dns4/bootstrap", [])
    told = subprocess.run(
        [sys.executable, "-m", "swarm.cli.main", name, "--help"], capture_output=True, text=True, timeout=60
    )
    assert all(word in told.stdout for word in arguments if word.startswith("--"))


def overrides(command: list[str]) -> dict[str, str]:
    return dict(zip(command[3::2], command[4::2], strict=False))


def test_a_variable_wins_over_the_profile_of_a_replica(start: ModuleType, tmp_path: Path) -> None:
    plain = overrides(start.node_command(3, tmp_path, "m.toml", [], {}))
    assert plain["--node.duty_cycle"] == "0.5"
    given = overrides(start.node_command(3, tmp_path, "m.toml", [], {"SWARM_NODE__DUTY_CYCLE": "0.9"}))
    assert "--node.duty_cycle" not in given and given["--rollouts.group_size"] == "6"


@pytest.mark.parametrize("environment", [{"SWARM_POLICY__BASE": "a/b"}, {"SWARM_MANIFEST": "https://x/y.toml"}])
def test_nodes_that_train_for_real_are_all_alike(
    start: ModuleType, tmp_path: Path, environment: dict[str, str]
) -> None:
    commands = [overrides(start.node_command(number, tmp_path, "m.toml", [], environment)) for number in (1, 3)]
    assert [command.pop("--node.dir") for command in commands] == [f'"{tmp_path}/node-{n}"' for n in (1, 3)]
    assert commands[0] == commands[1]


def test_the_swarm_and_its_founder_come_from_variables(start: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (start.manifest(), start.founder()) == ("/swarm/compose.swarm.toml", [])
    monkeypatch.setenv("SWARM_MANIFEST", "https://example.org/friends.swarm.toml")
    monkeypatch.setenv("SWARM_FOUNDER", "12D3x")
    assert start.manifest() == "https://example.org/friends.swarm.toml"
    assert start.founder() == ["--founder", "12D3x"]


def test_only_a_code_that_another_start_may_change_is_started_again(
    start: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    again = {1, 7, 9, 14, 15, 16, 18}
    final = {0, 2, 3, 4, 5, 6, 8, 10, 11, 12, 13, 17, 130}
    assert {code for code in again | final if start.ending(code)} == again
    assert {start.ending(code) for code in again} == again
    assert start.ending(-9) == 137, "killed, such as for its memory"
    assert start.ending(-15, is_stopping=True) == 0
    assert "ended with code 3, which another start does not change" in capfd.readouterr().err


def serve(script: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, str(SOURCE), "serve", sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize(("ends_with", "code"), [("exit(3)", 0), ("exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_a_service_ends_with_what_compose_is_to_make_of_it(ends_with: str, code: int) -> None:
    with serve(f"import os; {ends_with}") as process:
        assert process.wait(30) == code


def test_a_stop_reaches_the_service_and_is_no_failure() -> None:
    script = "import signal, time; signal.signal(15, lambda *_: exit(7)); print('up', flush=True); time.sleep(60)"
    with serve(script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(30) == 0


def test_an_empty_secret_is_no_passphrase(start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "passphrase"
    monkeypatch.setattr(start, "PASSPHRASE", secret)
    for content, expected in [(None, {}), ("", {}), ("word\n", {"SWARM_PASSPHRASE_FILE": str(secret)})]:
        if content is not None:
            secret.write_text(content)
        environment: dict[str, str] = {}
        start.name_passphrase(environment)
        assert environment == expected


def test_identities_are_encrypted_where_there_is_a_passphrase(
    start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("a long word\n")
    secret.chmod(0o600)
    plain = start.identity_in(tmp_path / "node-1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SWARM_PASSPHRASE_FILE", str(secret))
    assert start.identity_in(tmp_path / "node-1") == start.identity_in(tmp_path / "node-1") == plain
    assert is_encrypted(tmp_path / "node-1" / "identity.key")


def test_a_wrong_variable_ends_a_container_for_good_with_one_line(tmp_path: Path) -> None:
    script = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("start", {str(SOURCE)!r})
start = importlib.util.module_from_spec(spec)
spec.loader.exec_module(start)
start.command_of(lambda words: start.node_command(1, start.DATA, "m.toml", words), [])
"""
    environment = os.environ | {"SWARM_TRAINNG__LR": "1"}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 0
    assert ended.stderr.splitlines()[0].endswith("got SWARM_TRAINNG__LR; did you mean SWARM_TRAINING__LR?")
