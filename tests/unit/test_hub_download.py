"""Bases from a hub: their size is known before anything is fetched. A real client, and a hub on loopback."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from swarm.cli.swarm.preflight import hub_findings
from swarm.config import PolicySection
from swarm.diagnostics.check_result import Level
from swarm.errors import PolicyError
from swarm.observability.progress import _Lines as progress_lines
from swarm.policy.base_folder import base_at_hand, locate_base
from swarm.warm_start.start_digest import ADAPTER_FILES, BASE_FACTS, hub_adapter
from tests.unit.local_http import Received, local_http

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GIB = 2**30
Files = dict[str, int]
"""{name: bytes} of a repository."""


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, files: Files) -> Iterator[Received]:
    """A hub that lists these files of owner/model and hands out none."""
    listed = [{"rfilename": name, "size": size} for name, size in files.items()]
    entries = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in files.items()]

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path.startswith("/api/models/owner/model/tree/"):
            return 200, json.dumps(entries).encode()
        if path.startswith(("/api/models/owner/model/revision/", "/api/models/owner/model?")):
            return 200, json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": listed}).encode()
        return 404, b"{}"

    with local_http(answer) as received:
        monkeypatch.setattr(constants, "ENDPOINT", received.address)
        template = received.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield received


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "cache" / "hub"


def fetched(received: Received) -> list[str]:
    return [path for _, path, _ in received.requests if "/resolve/" in path]


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": 700, "model-1.safetensors": 3 * GIB, "model-2.safetensors": 3 * GIB},
        {"config.json": 700, "model.safetensors": 10, "part/more.safetensors": 6 * GIB},
        {"config.json": 700, "pytorch_model.bin": 6 * GIB},
        {"config.json": 6 * GIB, "model.safetensors": 10},
        {"config.json": 700, "model.safetensors": 10, "words.txt": 6 * GIB},
    ],
)
def test_a_base_that_is_too_large_is_refused_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    with hub(monkeypatch, files) as received:
        with pytest.raises(PolicyError, match=r"<= 5 GiB, got 6\.0 of owner/model; .*policy\.max_download_gib"):
            locate_base("owner/model", None, 5.0)
        assert received.requests and not fetched(received)


def test_a_base_larger_than_the_disk_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, {"config.json": 700, "model.safetensors": 2**60}) as received:
        with pytest.raises(PolicyError, match="must fit on the disk"):
            locate_base("owner/model", None)
        assert not fetched(received)


def test_a_base_of_very_many_files_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(
        monkeypatch, {"config.json": 7, "model.safetensors": 7} | {f"{n}.txt": 1 for n in range(2000)}
    ) as received:
        with pytest.raises(PolicyError, match="<= 2000 files, got 2002"):
            locate_base("owner/model", None)
        assert not fetched(received)


def test_what_is_not_used_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "config.json": 700,
        "model.safetensors": 10,
        "pytorch_model.bin": 9 * GIB,
        "onnx/model.bin": 9 * GIB,
        "a.gguf": GIB,
    }
    with hub(monkeypatch, files) as received:
        with pytest.raises(PolicyError, match="the hub cannot be reached"):  # this one hands out nothing
            locate_base("owner/model", None, 5.0)
        assert {path.rpartition("/")[2] for path in fetched(received)} <= {"config.json", "model.safetensors"}
        assert fetched(received)


def test_the_size_is_told_before_a_node_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, {"config.json": 700, "model.safetensors": 3 * GIB}) as received:
        (small,) = hub_findings(PolicySection(base="owner/model"))
        (large,) = hub_findings(PolicySection(base="owner/model", max_download_gib=2.0))
        assert (small.level, large.level) == (Level.OK, Level.PROBLEM)
        assert "3.0 GiB" in small.text and "3.0 of owner/model" in large.text
        assert not list(hub_findings(PolicySection(base="bundled")))
        assert not fetched(received)


def test_a_base_in_the_cache_needs_no_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    folder = cache / "models--owner--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate_base("owner/model", None, 1e-9) == folder == base_at_hand("owner/model", None)


def test_a_base_that_is_nowhere_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, {}), pytest.raises(PolicyError, match="must be downloadable"):
        locate_base("owner/other", None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(PolicyError, match="the hub cannot be reached"):
        locate_base("owner/model", None)


@contextmanager
def adapter_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, sizes: Files | None = None) -> Iterator[Received]:
    """A hub that has the files of a folder as owner/adapter; `sizes` are what it claims instead."""
    claimed = sizes or {file.name: file.stat().st_size for file in folder.iterdir()}

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path.startswith("/api/models/owner/adapter"):
            listed = [{"rfilename": name, "size": size} for name, size in claimed.items()]
            return 200, json.dumps({"id": "owner/adapter", "sha": COMMIT, "siblings": listed}).encode()
        return 404, b"{}"

    def download(name: str, file: str, *, revision: str, local_dir: Path) -> None:
        """In place of the library's transfer of one file, whose headers a simple server does not give."""
        assert (name, revision) == ("owner/adapter", COMMIT)
        local_dir.mkdir(exist_ok=True)
        shutil.copy(folder / file, local_dir / file)

    with local_http(answer) as received:
        monkeypatch.setattr(constants, "ENDPOINT", received.address)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        yield received


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"factors")
    (folder / "train.py").write_text("raise SystemExit")
    return folder


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets"


def test_an_adapter_is_fetched_once_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, exported: Path, assets: Path
) -> None:
    with adapter_hub(monkeypatch, exported):
        folder = hub_adapter("owner/adapter", "", 5.0)
    assert {file.name for file in folder.iterdir()} == set(ADAPTER_FILES)
    assert (folder / "adapter_model.safetensors").read_bytes() == b"factors"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub_adapter("owner/adapter", "", 5.0) == folder  # without the hub


def test_what_an_adapter_says_of_its_base_is_fetched_with_it(
    monkeypatch: pytest.MonkeyPatch, exported: Path, assets: Path
) -> None:
    (exported / BASE_FACTS).write_text('{"weights": "0"}')
    with adapter_hub(monkeypatch, exported):
        folder = hub_adapter("owner/adapter", "", 5.0)
    assert {file.name for file in folder.iterdir()} == {*ADAPTER_FILES, BASE_FACTS}


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ({"adapter_config.json": 2}, "in peft format, got owner/adapter without adapter_model.safetensors"),
        (
            {"adapter_config.json": 2, "adapter_model.safetensors": 6 * GIB},
            r"policy.max_download_gib = 5 .*, got 6\.0 GiB",
        ),
    ],
)
def test_an_adapter_that_is_none_or_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch, exported: Path, assets: Path, sizes: Files, rule: str
) -> None:
    with adapter_hub(monkeypatch, exported, sizes), pytest.raises(PolicyError, match=rule):
        hub_adapter("owner/adapter", "", 5.0)


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch, assets: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PolicyError, match=r"warm_start\.adapter_hub must be an adapter on a hub that can be reached"):
        hub_adapter("owner/adapter", "main", 5.0)


def test_a_download_tells_all_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real client: what it calls its bars is not written down anywhere."""
    contents = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x" * 3_000_000}
    listed = [{"rfilename": name, "size": len(content)} for name, content in contents.items()]
    entries = [{"type": "file", "path": name, "size": len(text), "oid": "0" * 40} for name, text in contents.items()]

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes] | tuple[int, bytes, dict[str, str]]:
        if "/tree/" in path:
            return 200, json.dumps(entries).encode()
        if "/resolve/" in path:
            name = path.rpartition("/")[2]
            return 200, contents[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
        return 200, json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": listed}).encode()

    told: list[float] = []
    monkeypatch.setattr(progress_lines, "add", lambda self, amount: told.append(amount))
    with local_http(answer) as received:
        monkeypatch.setattr(constants, "ENDPOINT", received.address)
        template = received.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        folder = locate_base("owner/model", None)
    assert (folder / "model.safetensors").stat().st_size == 3_000_000
    assert sum(told) == sum(map(len, contents.values()))
