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
        _, *arguments = start.node_command(number, tmp_path, manifest, ["--node.threads", "1"])
        told = subprocess.run([*run, *arguments, "--dry-run"], capture_output=True, text=True, timeout=60)
        assert told.returncode == 0, told.stderr
        resolved.append(tomllib.loads(told.stdout))
    plain, slow = resolved
    assert plain["observability"]["http_port"] == slow["observability"]["http_port"] == 9100
    assert slow["node"]["duty_cycle"] < plain["node"].get("duty_cycle", 1.0)
    assert slow["node"]["dir"] == str(tmp_path / "node-3")


def test_the_bootstrap_command_names_options_that_exist(start: ModuleType, tmp_path: Path) -> None:
    _, name, *arguments = start.bootstrap_command(tmp_path, tmp_path / "m.toml", "/dns4/bootstrap", [])
    told = subprocess.run(
        [sys.executable, "-m", "swarm.cli.main", name, "--help"], capture_output=True, text=True, timeout=60
    )
    assert all(word in told.stdout for word in arguments if word.startswith("--"))
