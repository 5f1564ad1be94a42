"""`swarm export` as a command: what leaves the machine, where to, and what stays when something fails."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarm.records import identity as identities
from tests.swarm_process import swarm
from tests.unit.local_http import local_http
from tests.unit.test_integrations import FORMATS, Hub

TOKEN = "hf_secretOfNobody0123456789"


class FullHub(Hub):
    """A hub that also knows whose token it is and which files a repository has."""

    def __init__(
        self, held: tuple[str, ...] | None = None, commit_status: int = 200, licence: str = "apache-2.0"
    ) -> None:
        """`held`: files of the repository; None: there is none. `commit_status`: what the last step of an upload gets."""
        super().__init__()
        self._held = held
        self._commit_status = commit_status
        self._licence = licence

    def __call__(self, method: str, path: str, body: bytes) -> Any:
        if self.status != 200:
            return self.status, b'{"error": "no"}'
        if path == "/api/whoami-v2":
            return 200, b'{"type": "user", "name": "me", "auth": {}}'
        if path.startswith("/api/models/acme/base"):
            told = {"id": "acme/base", "sha": "0" * 40, "siblings": [], "cardData": {"license": self._licence}}
            return 200, json.dumps(told).encode()
        if method == "GET" and path.startswith("/api/models/me/adapter"):
            if self._held is None:
                return 404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}
            if "/tree/" in path:
                return 200, json.dumps(
                    [{"type": "file", "path": p, "size": 1, "oid": "0" * 40} for p in self._held]
                ).encode()
        if "/commit/" in path and self._commit_status != 200:
            return self._commit_status, b'{"error": "cut"}'
        return super().__call__(method, path, body)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The folder of a node of the bundled policy with two rounds behind it, and an identity."""
    folder = tmp_path / "node"
    shutil.copytree(FORMATS, folder)
    folder.chmod(0o700)
    (folder / "identity.key").chmod(0o600)
    return folder


def export(node: Path, out: Path, address: str, *more: str) -> subprocess.CompletedProcess[str]:
    arguments = ["export", str(out), "--dir", str(node), f"--integrations.hub_endpoint={address}", *more]
    return swarm(*arguments, cwd=node.parent, HF_TOKEN=TOKEN)


def test_an_upload_is_what_the_folder_holds_with_a_card(node: Path, tmp_path: Path) -> None:
    hub = FullHub()
    with local_http(hub) as server:
        ended = export(node, tmp_path / "out", server.address, "--format", "adapter", "--push", "me/adapter")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        f"adapter of round 2 written to {tmp_path / 'out'}",
        f"uploaded to {server.address}/me/adapter",
    ]
    assert hub.created.get("visibility") == "private" or hub.created.get("private") is True
    assert hub.messages == ["Round 2"]
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    front = yaml.safe_load(hub.files["README.md"].decode().split("---\n")[1])
    assert front["library_name"] == "peft"


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_nothing_of_this_machine_is_in_an_export(node: Path, tmp_path: Path, form: str) -> None:
    ended = export(node, tmp_path / "out", "http://127.0.0.1:9", "--format", form)
    assert ended.returncode == 0, ended.stderr
    identity = identities.load(node / "identity.key", None)
    secrets = [str(tmp_path), str(Path.home()) + "/", str(Path(__file__).parents[2]), TOKEN,
               identity.seed.hex(), identity.peer_id, identity.peer_name]  # fmt: skip
    for path in (tmp_path / "out").rglob("*"):
        content = path.read_bytes()
        assert identity.seed not in content
        assert not [secret for secret in secrets if secret.encode() in content], path
        if path.suffix != ".safetensors":
            assert not re.search(rb'"/[a-z]+/', content), f"a path in {path}"
            assert socket.gethostname() not in re.findall(r"[\w.-]+", content.decode())


@pytest.mark.parametrize(
    ("hub", "told"),
    [
        ({"status": 401}, "a push needs a token that the hub knows, got me/adapter.*hf auth login"),
        ({"status": 403}, "a push needs a token that may write"),
        ({"status": 500}, "the hub must take the upload.*try again later"),
        (
            {"held": ("model.safetensors", "README.md")},
            "same kind of export, got model.safetensors in me/adapter; name another",
        ),
        (None, "the hub must be reachable, got me/adapter.*HF_ENDPOINT"),
    ],
)
def test_what_cannot_be_pushed_is_told_before_anything_is_written(
    node: Path, tmp_path: Path, hub: dict[str, Any] | None, told: str
) -> None:
    answers = FullHub(held=hub.get("held") if hub else None)
    answers.status = hub.get("status", 200) if hub else 200
    with local_http(answers) as server:
        address = server.address if hub else "http://127.0.0.1:9"
        ended = export(node, tmp_path / "out", address, "--format", "adapter", "--push", "me/adapter")
    assert ended.returncode == 7, ended.stderr
    assert re.search(f"^error: .*{told}", ended.stderr, re.M), ended.stderr
    assert TOKEN not in ended.stdout + ended.stderr
    assert not (tmp_path / "out").exists()
    assert not answers.files and not answers.created


def test_an_upload_that_breaks_off_changes_nothing_on_the_hub_and_the_folder_is_complete(
    node: Path, tmp_path: Path
) -> None:
    hub = FullHub(held=("adapter_model.safetensors",), commit_status=400)
    with local_http(hub) as server:
        ended = export(node, tmp_path / "out", server.address, "--format", "adapter", "--push", "me/adapter")
    assert ended.returncode == 7
    assert (
        f"{tmp_path / 'out'} is complete, and `hf upload me/adapter {tmp_path / 'out'}` uploads it later"
        in ended.stderr
    )
    assert not hub.files and not hub.messages
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    again = export(node, tmp_path / "out", "http://127.0.0.1:9")
    assert again.returncode == 5 and "new or empty folder" in again.stderr


@pytest.mark.parametrize(("name", "told"), [("me", "OWNER/NAME"), ("../x", "OWNER/NAME"), ("a/b/c", "OWNER/NAME")])
def test_a_name_that_is_none_is_refused(node: Path, tmp_path: Path, name: str, told: str) -> None:
    with local_http(FullHub()) as server:
        ended = export(node, tmp_path / "out", server.address, "--push", name)
    assert ended.returncode in (3, 7) and told in ended.stderr, ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_silo_uploads_nothing(node: Path, tmp_path: Path) -> None:
    owner = "12D3KooWNYMUbCVu5oBRjVT2nfG7AryH7KhAdRMhfZ7F8NPgkF41"
    with local_http(FullHub()) as server:
        ended = export(node, tmp_path / "out", server.address, "--push", "me/adapter", f"--swarm.silo_owner={owner}")
    assert ended.returncode == 3 and "stays with its members, got --push" in ended.stderr
    assert not server.requests and not (tmp_path / "out").exists()


def test_the_hub_of_the_environment_is_asked(node: Path, tmp_path: Path) -> None:
    """In a process of its own, as the client reads HF_ENDPOINT when it is imported."""
    hub = FullHub()
    hub.status = 401
    with local_http(hub) as server:
        ended = subprocess.run(
            [sys.executable, "-m", "swarm", "export", str(tmp_path / "out"), "--dir", str(node), "--push", "me/adapter"],
            env={**os.environ, "HF_ENDPOINT": server.address, "HF_TOKEN": TOKEN}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert ended.returncode == 7 and "hf auth login" in ended.stderr, ended.stderr
    assert "/api/whoami-v2" in [path for _, path, _ in server.requests]
