"""A public swarm from its founding on: create, bootstrap, join, and the death of the bootstrap peers."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import tomli_w

from swarm.config import load
from swarm.manifest.files import read_manifest
from tests.e2e.node_process import NodeProcess, Process, node_settings, wait_for
from tests.swarm_process import SwarmProcess, swarm

MAX_BOOTSTRAP_MIB = 200


class Command(NodeProcess):
    """A `swarm` command that runs on, with its status file in `folder`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.output = folder.parent / f"{folder.name}.out"
        self.process = self._start(arguments)

    def _start(self, arguments: tuple[str, ...]) -> Process:
        return SwarmProcess(*arguments, cwd=self.folder.parent, output=self.output)


class WeighedCommand(Command):
    """With an interpreter of its own, so that all its memory is its own."""

    def _start(self, arguments: tuple[str, ...]) -> Process:
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "swarm.cli.main", *arguments],
                stdout=output, stderr=subprocess.STDOUT, cwd=self.folder.parent,
            )  # fmt: skip


def bootstrap(folder: Path, manifest: Path) -> Command:
    return WeighedCommand(folder, "bootstrap", "--manifest", str(manifest), "--dir", str(folder))


def joined(folder: Path, manifest: Path) -> Command:
    settings = node_settings(folder, network={"poll_interval_s": 0.2, "listen": ["/ip4/127.0.0.1/tcp/0"]})
    path = folder.with_suffix(".toml")
    path.write_text(tomli_w.dumps(settings))
    return Command(folder, "join", str(manifest), str(path))


def done(folder: Path, *arguments: str) -> str:
    """What a command prints that must succeed."""
    ended = swarm(*arguments, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def admitted(node: Command, more_than: int) -> int:
    """Records of others that `node` has admitted, once they are more than that and it has learned from some."""

    def count() -> int | None:
        row = node.last_round
        records = row.get("exchange/records_admitted", 0)
        return records if records > more_than and row["train/swarm_groups_total"] > 0 else None

    return wait_for(count, f"more than {more_than} records of others", node)


def memory_mib(node: Command) -> float:
    """Resident memory of the process and its daemon."""
    process = psutil.Process(node.process.pid)
    return sum(part.memory_info().rss for part in (process, *process.children(recursive=True))) / 2**20


@pytest.mark.essential
def test_swarm_is_founded_joined_and_outlives_its_bootstrap_peer(tmp_path: Path) -> None:
    done(tmp_path, "create", "friends")
    manifest = tmp_path / "friends.swarm.toml"
    with bootstrap(tmp_path / "entry", manifest) as entry:
        step = f"swarm create --update {manifest} --bootstrap {entry.address()}"
        assert step in entry.output.read_text(), "it prints what to type next"
        done(tmp_path, *step.split()[1:])
        status = entry.status()
        assert status and status.command == "bootstrap"
        dialled = done(tmp_path, "join", str(manifest), "--check", "--dial")
        assert "answers" in dialled
        assert dialled.strip().endswith("can join")
        with joined(tmp_path / "a", manifest) as a, joined(tmp_path / "b", manifest) as b:
            for node in (a, b):
                admitted(node, 0)
            wait_for(
                lambda: (now := entry.status()) and (now.num_connected or 0) >= 2, "both nodes in its status", entry
            )
            entry.kill_9()
            for node in (a, b):
                admitted(node, admitted(node, 0) + 5)  # more than can have been on the way
            assert read_manifest(str(tmp_path / "a" / "manifest.toml")).edition == 2


def test_what_a_bootstrap_peer_warns_of_is_in_the_log_of_its_folder(tmp_path: Path) -> None:
    absent = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
    with Command(tmp_path / "b", "bootstrap", "--dir", str(tmp_path / "b"), "--no-gossip", "--join", absent) as entry:
        address = entry.address()
        said = "the only known peer does not answer"
        log = wait_for(lambda: (tmp_path / "b/logs/run-0001.log").read_text(), "the log", entry)
        assert f"WARNING swarm.network.peers.known_peers: {said}" in log
        printed = entry.output.read_text()
        assert f"WARNING {said}" in printed and "WARNING:" not in printed
    with Command(tmp_path / "b", "bootstrap", "--dir", str(tmp_path / "b"), "--no-gossip") as again:
        assert again.address() == address, "who stored it finds it there"


def test_a_bootstrap_peer_starts_again_without_options_as_it_was(tmp_path: Path) -> None:
    done(tmp_path, "create", "friends")
    manifest, folder = tmp_path / "friends.swarm.toml", tmp_path / "entry"
    given = ("--manifest", str(manifest), "--announce", "/dns4/localhost/tcp/28000", "--no-gossip", "--no-relay")
    with Command(folder, "bootstrap", "--dir", str(folder), *given) as first:
        address, status = first.address(), first.status()
    done(tmp_path, "create", "--update", str(manifest), "--description", "later")
    manifest.rename(tmp_path / "elsewhere")
    with Command(folder, "bootstrap", "--dir", str(folder)) as again:
        assert again.address() == address
        told, now = again.output.read_text(), again.status()
    assert address.startswith("/dns4/localhost/tcp/28000/p2p/")
    assert status and now and status.addresses == now.addresses == (address,)
    assert "swarm friends, founded by" in told and f"edition 1 of {folder}/manifest.toml" in told
    options = "--announce /dns4/localhost/tcp/28000 --no-gossip --no-relay"
    assert f"as at its last start, by {folder}/bootstrap.toml: {options}\n" in told
    with Command(
        folder, "bootstrap", "--dir", str(folder), "--manifest", str(tmp_path / "elsewhere"), "--relay"
    ) as newer:
        newer.address()
    assert read_manifest(str(folder / "manifest.toml")).edition == 2
    assert load([folder / "bootstrap.toml"]).network.serve_relay


def test_bootstrap_peers_are_light_and_know_each_other(tmp_path: Path) -> None:
    done(tmp_path, "create", "friends")
    manifest = tmp_path / "friends.swarm.toml"
    with bootstrap(tmp_path / "one", manifest) as one:
        done(tmp_path, "create", "--update", str(manifest), "--bootstrap", one.address())
        with bootstrap(tmp_path / "two", manifest) as two:
            done(tmp_path, "create", "--update", str(manifest), "--bootstrap", two.address())
            one.kill_9()
            with bootstrap(tmp_path / "three", manifest) as three:
                three.address()
                for peer in (two, three):
                    loaded = (Path("/proc") / str(peer.process.pid) / "maps").read_text()
                    assert "cryptography" in loaded, "the libraries that are loaded are listed there"
                    assert "torch" not in loaded
                    assert memory_mib(peer) < MAX_BOOTSTRAP_MIB
                dialled = done(tmp_path, "join", str(manifest), "--check", "--dial")
                assert dialled.strip().endswith("can join")
