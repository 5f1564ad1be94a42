"""What survives: interruption at any write, damage, a full disk."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.adapters import checkpoint as checkpoint_module
from swarm.adapters.checkpoint import BestRound, CheckpointStore, CheckpointWriter
from swarm.errors import CheckpointError


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "adapter": {"layer.lora_A": torch.full((2, 3), value), "layer.lora_B": torch.arange(4.0)},
        "optimizer": {"step:layer.lora_A": torch.tensor(value)},
    }


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_loaded(store: CheckpointStore):
    state = {"cursor": {"rng": [3, [1, 2], None]}, "round": 25, "text": "naïve"}
    path = store.save(25, tensors(1.5), state)
    assert names(path) == ["adapter.safetensors", "manifest.json", "optimizer.safetensors", "state.json"]
    assert path.name == "round-000025"
    loaded = store.load_newest()
    assert loaded is not None
    assert (loaded.round, loaded.path, loaded.state) == (25, path, state)
    assert loaded.tensors.keys() == {"adapter", "optimizer"}
    for group, named in tensors(1.5).items():
        assert all(torch.equal(loaded.tensors[group][name], value) for name, value in named.items())


def test_a_new_node_has_no_checkpoint(store: CheckpointStore):
    assert store.load_newest() is None


def test_an_optimizer_that_has_not_stepped_yet_is_saved(store: CheckpointStore):
    store.save(0, {"adapter": tensors(1.0)["adapter"], "optimizer": {}}, {})
    loaded = store.load_newest()
    assert loaded is not None and loaded.tensors["optimizer"] == {}


def test_the_newest_k_are_kept(store: CheckpointStore, tmp_path: Path):
    for round_number in (5, 10, 15, 100):
        store.save(round_number, tensors(round_number), {})
    assert names(tmp_path / "checkpoints") == ["round-000010", "round-000015", "round-000100"]


def test_the_best_is_kept_until_another_is(store: CheckpointStore, tmp_path: Path):
    with pytest.raises(CheckpointError, match="marked as the best, got none"):
        store.load_best()
    for round_number in range(1, 9):
        store.save(round_number, tensors(round_number), {})
        if round_number in (2, 4):
            store.mark_best(BestRound(round_number, 0.5, "tasks"))
    assert names(tmp_path / "checkpoints") == ["best.json", *(f"round-00000{n}" for n in (4, 6, 7, 8))]
    assert store.best() == BestRound(4, 0.5, "tasks") and store.load_best().round == 4
    newest = store.load_newest()
    assert newest is not None and newest.round == 8


def test_a_run_goes_back_to_its_best_and_loses_nothing(store: CheckpointStore, tmp_path: Path):
    for round_number in range(1, 5):
        store.save(round_number, tensors(round_number), {})
    store.mark_best(BestRound(2, 0.5, "tasks"))
    assert store.go_back_to_best().round == 2 and store.newest_round() == 2
    store.save(3, tensors(30.0), {})
    assert names(tmp_path / "checkpoints") == [
        "aside-round-000003", "aside-round-000004", "best.json", "round-000002", "round-000003",
    ]  # fmt: skip


def test_a_best_one_that_is_gone_damaged_or_misnamed_is_an_error_and_ends_no_run(store: CheckpointStore):
    for round_number in (1, 2):
        store.save(round_number, tensors(round_number), {})
    store.mark_best(BestRound(2, 0.5, "tasks"))
    best = store.load_best().path
    (best / "state.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must be intact"):
        store.go_back_to_best()
    assert best.is_dir(), "nothing was set aside"
    shutil.rmtree(best)
    assert store.best() is None
    for damaged in (
        '{"round": 1}',
        "[]",
        "nonsense",
        '{"round": "x", "reward": 1, "measured_on": ""}',
        '{"round": 1e999, "reward": 1, "measured_on": ""}',
    ):
        (best.parent / "best.json").write_text(damaged)
        assert store.best() is None
        store.save(3, tensors(3.0), {})


@pytest.mark.parametrize("file", ["adapter.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_newest_falls_back_to_the_one_before(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, file: str, damage: str
):
    store.save(10, tensors(1.0), {"round": 10})
    path = store.save(20, tensors(2.0), {"round": 20}) / file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with caplog.at_level(logging.WARNING):
        loaded = store.load_newest()
    assert loaded is not None and loaded.state == {"round": 10}
    assert "round-000020 is damaged" in caplog.text and "falling back" in caplog.text


def test_a_damaged_one_is_kept_for_inspection_but_never_pushes_out_a_good_one(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(10, tensors(1.0), {})
    (shutil.copytree(tmp_path / "round-000010", tmp_path / "round-000030") / "state.json").write_text("[]")
    assert store.load_newest() is not None
    store.save(11, tensors(1.1), {"round": 11})
    assert names(tmp_path) == ["aside-round-000030", "round-000011"]


def test_loading_only_reads(store: CheckpointStore, tmp_path: Path):
    """`swarm eval` and `swarm export` read the folder of a node that may be in the middle of a save."""
    store.save(10, tensors(1.0), {"round": 10})
    (store.save(20, tensors(2.0), {}) / "state.json").unlink()
    (tmp_path / "checkpoints" / ".saving-round-000030-1").mkdir()
    (tmp_path / "checkpoints" / "round-000010").rename(tmp_path / "checkpoints" / ".replaced-round-000010")
    before = names(tmp_path / "checkpoints")
    loaded = store.load_newest()
    assert loaded is not None and loaded.state == {"round": 10}
    assert names(tmp_path / "checkpoints") == before


def test_nothing_intact_is_an_error_and_not_a_fresh_start(store: CheckpointStore):
    for round_number in (1, 2):
        (store.save(round_number, tensors(1.0), {}) / "state.json").unlink()
    with pytest.raises(CheckpointError, match="got 2 damaged ones"):
        store.load_newest()


def test_a_pickle_in_place_of_tensors_is_damage_and_is_not_loaded(store: CheckpointStore):
    store.save(1, tensors(1.0), {"round": 1})
    path = store.save(2, tensors(2.0), {})
    torch.save(tensors(2.0), path / "adapter.safetensors")
    loaded = store.load_newest()
    assert loaded is not None and loaded.round == 1


class PowerCut(BaseException):
    """Ends the process in the middle of a save."""


def interrupt_at(call: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Raise at the `call`-th write to disk: files, folder syncs and renames alike."""
    count = 0

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            nonlocal count
            count += 1
            if count == call:
                raise error
            return original(*arguments)

        return run

    monkeypatch.setattr(checkpoint_module, "_write_tensors", counted(checkpoint_module._write_tensors))
    monkeypatch.setattr(checkpoint_module, "_write_synced", counted(checkpoint_module._write_synced))
    monkeypatch.setattr(checkpoint_module, "sync_folder", counted(checkpoint_module.sync_folder))
    monkeypatch.setattr(Path, "replace", counted(Path.replace))


NUM_WRITES = 8  # adapter, optimizer, state, manifest, sync, old one aside, rename, sync


@pytest.mark.parametrize("call", range(1, NUM_WRITES + 1))
def test_a_power_cut_during_a_save_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int):
    """The hardest case: the same round is saved again and no other checkpoint exists."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(7, tensors(1.0), {"try": 1})
    with monkeypatch.context() as patched:
        interrupt_at(call, patched, PowerCut())
        with pytest.raises(PowerCut):
            store.save(7, tensors(2.0), {"try": 2})
    loaded = CheckpointStore(tmp_path, keep=1).load_newest()
    assert loaded is not None
    assert loaded.state["try"] in (1, 2)
    assert loaded.tensors["adapter"]["layer.lora_A"][0, 0].item() == loaded.state["try"]
    store.save(8, tensors(3.0), {"try": 3})
    assert names(tmp_path) == ["round-000008"]


@pytest.mark.parametrize("call", range(1, NUM_WRITES + 1))
def test_a_full_disk_is_an_error_that_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(7, tensors(1.0), {"try": 1})
    with monkeypatch.context() as patched:
        interrupt_at(call, patched, OSError(28, "No space left on device"))
        with pytest.raises(CheckpointError, match="No space left on device"):
            store.save(7, tensors(2.0), {"try": 2})
    loaded = store.load_newest()
    assert loaded is not None and loaded.state["try"] in (1, 2)
    store.save(8, tensors(3.0), {"try": 3})
    assert names(tmp_path) == ["round-000008"]


def test_state_that_is_not_finite_is_a_bug_and_not_written(store: CheckpointStore, tmp_path: Path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.save(1, tensors(1.0), {"loss": float("nan")})
    assert store.load_newest() is None


def test_the_manifest_lists_every_file(store: CheckpointStore):
    path = store.save(3, tensors(1.0), {})
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["round"] == 3
    assert sorted(manifest["sha256"]) == ["adapter.safetensors", "optimizer.safetensors", "state.json"]


@pytest.mark.parametrize("state", [{}, {"a": []}, {"a": [[1, [2.5, None]], {"b": "ü\n"}], "c": {"d": [1]}, "e": None}])
def test_a_state_that_is_written_in_parts_is_the_same_json(state: dict[str, Any]):
    assert json.loads(b"".join(checkpoint_module._json_parts(state))) == state


def test_files_are_private(store: CheckpointStore):
    path = store.save(3, tensors(1.0), {})
    assert {oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {"0o600"}


class SlowStore(CheckpointStore):
    """Writes each checkpoint when it is let to."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        super().__init__(folder, keep)
        self.begun: list[int] = []
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def save(self, round: int, tensors: dict[str, dict[str, torch.Tensor]], state: dict[str, Any]) -> Path:
        self.begun.append(round)
        self.has_begun.set()
        assert self.may_go_on.wait(10)
        return super().save(round, tensors, state)


class Failures(list[str]):
    def note(self, round: int, error: CheckpointError) -> None:
        self.append(f"{round}: {error}")


def test_a_mark_waits_for_its_checkpoint_and_falls_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, failures = SlowStore(tmp_path), Failures()
    with CheckpointWriter(store, failures.note) as writer:
        writer.save(1, tensors(1.0), {})
        writer.mark_best(BestRound(1, 0.5, "tasks"))
        assert store.has_begun.wait(10) and store.best() is None
        store.may_go_on.set()
    assert store.best() == BestRound(1, 0.5, "tasks") and failures == []
    monkeypatch.setattr(checkpoint_module, "sync_folder", _full_disk)
    with pytest.raises(CheckpointError, match="No space left"), CheckpointWriter(store, failures.note) as writer:
        writer.save(2, tensors(2.0), {})
        writer.mark_best(BestRound(2, 0.6, "tasks"))
    assert store.best() == BestRound(1, 0.5, "tasks") and len(failures) == 1


def _full_disk(folder: Path) -> None:
    raise OSError(28, "No space left on device")


def test_nobody_waits_for_a_checkpoint_but_the_next_one_and_the_end(tmp_path: Path):
    store, failures, saved = SlowStore(tmp_path), Failures(), list[int]()
    with CheckpointWriter(store, failures.note) as writer:
        writer.save(1, tensors(1.0), {}, saved.append)
        assert store.has_begun.wait(10) and store.load_newest() is None, "training goes on while round 1 is written"
        next_one = threading.Thread(target=lambda: writer.save(2, tensors(2.0), {}, saved.append))
        next_one.start()
        next_one.join(0.1)
        assert next_one.is_alive() and store.begun == [1], "a slow disk delays the next save: one is written at a time"
        store.may_go_on.set()
        next_one.join(10)
    assert store.newest_round() == 2 and saved == [1, 2] and failures == []


def test_the_last_checkpoint_is_complete_when_training_ends_with_an_error(tmp_path: Path):
    store = SlowStore(tmp_path)
    with pytest.raises(RuntimeError, match="of training"), CheckpointWriter(store, Failures().note) as writer:
        writer.save(1, tensors(1.0), {})
        threading.Timer(0.1, store.may_go_on.set).start()
        raise RuntimeError("of training")
    assert store.newest_round() == 1


def test_a_disk_that_refuses_is_told_at_once_and_the_next_save_is_made(tmp_path: Path):
    store, failures, saved = CheckpointStore(tmp_path / "checkpoints", 3), Failures(), list[int]()
    (tmp_path / "checkpoints").write_text("a file in place of the folder")
    with CheckpointWriter(store, failures.note) as writer:
        writer.save(1, tensors(1.0), {}, saved.append)
        writer.wait(10)
        assert len(failures) == 1 and failures[0].startswith("1: a checkpoint must be writable")
        (tmp_path / "checkpoints").unlink()
        writer.save(2, tensors(2.0), {}, saved.append)
    assert store.newest_round() == 2 and saved == [2] and len(failures) == 1


def test_the_last_checkpoint_is_not_missed_in_silence(tmp_path: Path):
    store, failures = CheckpointStore(tmp_path / "checkpoints", 3), Failures()
    (tmp_path / "checkpoints").write_text("a file in place of the folder")
    with pytest.raises(CheckpointError, match="must be writable"), CheckpointWriter(store, failures.note) as writer:
        writer.save(1, tensors(1.0), {})
    assert len(failures) == 1


def test_a_bug_in_what_is_saved_ends_training_and_is_not_passed_over(tmp_path: Path):
    store, failures = CheckpointStore(tmp_path, 3), Failures()
    with CheckpointWriter(store, failures.note) as writer:
        writer.save(1, tensors(1.0), {"loss": float("nan")})
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.finish()
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.save(2, tensors(2.0), {})
        writer._last = None
    with pytest.raises(ValueError, match="not JSON compliant"), CheckpointWriter(store, failures.note) as writer:
        writer.save(3, tensors(1.0), {"loss": float("nan")})
    assert failures == [] and store.load_newest() is None


SAVES_FOR_EVER = """
import sys, torch
from pathlib import Path
from swarm.adapters.checkpoint import BestRound, CheckpointStore, CheckpointWriter
with CheckpointWriter(CheckpointStore(Path(sys.argv[1]), 2), print) as writer:
    for round in range(1, 100_000):
        named = {"a": torch.full((64, 64), float(round))}
        writer.save(round, {"adapter": named, "optimizer": named}, {"round": round}, lambda r: print(r, flush=True))
"""


def test_what_was_reported_as_saved_survives_kill_9_in_the_middle_of_later_saves(tmp_path: Path):
    last = 0
    for num_saves in (1, 2, 3, 5):
        process = subprocess.Popen([sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(num_saves):
            last = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)  # the next one is being written
        process.stdout.close()
        process.wait(10)
        loaded = CheckpointStore(tmp_path, 2).load_newest()
        assert loaded is not None and loaded.round >= last and loaded.state == {"round": loaded.round}
        assert all(
            torch.equal(named["a"], torch.full((64, 64), float(loaded.round))) for named in loaded.tensors.values()
        )
        shutil.rmtree(tmp_path)
