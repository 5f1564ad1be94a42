"""Fixtures of several test files; torch and transformers are imported only where a model is asked for."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import invalidate_caches
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from swarm.policy.policy import Policy


@pytest.fixture
def is_durable(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Whether a file that was written since, and its name, have reached the disk, so that they survive a power failure."""
    synced, fsync = set[int](), os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", watched)
    return lambda path: {path.stat().st_ino, path.parent.stat().st_ino} <= synced


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{"llama" | "qwen2" | "gpt_neox": folder} of tiny models with a character tokenizer."""
    import torch

    from tests.unit.tiny_models import write_tiny_models

    torch.set_num_threads(1)
    return write_tiny_models(tmp_path_factory.mktemp("tiny-models"))


@pytest.fixture(scope="session")
def make_policy(tiny_models: dict[str, Path]) -> Callable[..., Policy]:
    """`make_policy("llama", trained=True, rank=4, …)`: see `tiny_models.build_policy`. A copy of the first such policy."""
    from tests.unit.tiny_models import build_policy

    built: dict[str, Policy] = {}

    def make(name: str = "llama", **settings: object) -> Policy:
        key = f"{name} {sorted(settings.items())}"
        if key not in built:  # loading one takes four times as long as copying it
            built[key] = build_policy(tiny_models[name], **settings)  # type: ignore[arg-type]
        return copy.deepcopy(built[key])

    return make


@pytest.fixture(scope="session")
def pipeline_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{architecture: folder} of models of five layers, to be cut into stages."""
    from tests.unit.pipeline_models import write_models

    return write_models(tmp_path_factory.mktemp("pipeline-models"))


@pytest.fixture(scope="session")
def _installed_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed `tests/example_extension`."""
    folder, package = tmp_path_factory.mktemp("installed"), Path(__file__).parents[1] / "example_extension"
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, str(package)], check=True, timeout=120)
    return folder


@pytest.fixture
def example_extension(_installed_example: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of `tests/example_extension`, installed and on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(_installed_example)])
    invalidate_caches()
    return _installed_example
