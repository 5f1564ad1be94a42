"""Checkpoints that survive kill -9, a full disk and damaged files.

    checkpoints/
      round-000025/   adapter.safetensors  optimizer.safetensors  state.json  manifest.json
      .saving-…       an unfinished save; removed at the next save
      .replaced-…     the older checkpoint of a round that was saved twice, while the newer one takes its place
      aside-…         a damaged checkpoint that was newer than one saved later; stored for inspection

A checkpoint is written to a temporary folder, every file synced and the manifest (SHA-256 of each file) last, and then
renamed. A folder named `round-…` is therefore complete, or the manifest shows what the disk changed. Tensors are safetensors
and state is JSON; nothing is ever unpickled.

Training does not wait for the disk: `CheckpointWriter` writes on a thread, from copies that the compute thread has made.

    compute thread   round 25 ─ copy ─ round 26 ─ round 27 ─ …          the next save waits for the one in flight
    checkpoint thread            └─ write, sync, rename, remove old ones ─┘
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from swarm.errors import CheckpointError
from swarm.machine.safe_files import is_bare_name, new_file, parse_json, read_file, read_json, sync_folder
from swarm.observability.tracing import traced

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_STATE = "state.json"
_SAVING = ".saving-"
_MAX_STATE_BYTES = 256 << 20
_MAX_TENSORS_BYTES = 64 << 30
_REPLACED = ".replaced-"
_NAME = re.compile(r"(?:\.replaced-)?round-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of the checkpoint of one round."""

    round: int
    path: Path
    tensors: dict[str, dict[str, Tensor]]
    """Group ("adapter", "optimizer") → name → tensor on the CPU."""
    state: dict[str, Any]
    """Everything else, as JSON returns it: tuples are lists, and keys are strings."""


class CheckpointStore:
    """The checkpoints of one node, of which it stores the newest `keep`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    @traced("checkpoint", lambda _, store, round, *__: {"round": round})
    def save(self, round: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
        """Write one checkpoint and remove those beyond `keep`.

        Raises CheckpointError if the disk refuses; the older checkpoints stay.
        """
        target = self._folder / f"round-{round:06d}"
        fresh = self._folder / f"{_SAVING}{target.name}-{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clean_up()
            fresh.mkdir()
            manifest = {
                name: _write_tensors(fresh / name, named)
                for name, named in ((f"{group}.safetensors", named) for group, named in tensors.items())
            }
            manifest[_STATE] = _write_synced(fresh / _STATE, b"".join(_json_parts(state)))
            _write_synced(fresh / _MANIFEST, json.dumps({"round": round, "sha256": manifest}).encode())
            sync_folder(fresh)
            self._put_in_place(fresh, target)
            self._set_aside_newer(round)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(fresh, ignore_errors=True)
            raise CheckpointError(
                f"a checkpoint must be writable, got {error} for {target}; free disk space or fix its permissions"
            ) from None
        for old in self._newest_first()[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def load_newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None without any. Damaged ones are skipped with a warning.

        It only reads, so another process may call it while the node runs. Raises CheckpointError if all are damaged.
        """
        paths = self._newest_first()
        for path in paths:
            try:
                return _read(path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
                logger.warning("checkpoint %s is damaged (%s); falling back to the one before", path.name, error)
        if paths:
            raise CheckpointError(
                f"a checkpoint must be intact, got {len(paths)} damaged ones in {self._folder}; "
                "remove the folder to start without them"
            )
        return None

    def newest_round(self) -> int | None:
        """Return the round of the newest complete checkpoint, which may still turn out to be damaged; None without any."""
        return next((_round_of(path) for path in self._newest_first()), None)

    def _newest_first(self) -> list[Path]:
        """Return the complete checkpoints; of a round that is being replaced, the one that exists."""
        found: dict[int, Path] = {}
        for path in sorted(self._folder.iterdir() if self._folder.is_dir() else ()):  # .replaced-… comes before round-…
            match = _NAME.fullmatch(path.name)
            if match:
                found[int(match[1])] = path
        return [found[round] for round in sorted(found, reverse=True)]

    def _clean_up(self) -> None:
        """Undo what an interrupted save left."""
        for path in self._folder.glob(f"{_REPLACED}*"):
            target = self._folder / path.name.removeprefix(_REPLACED)
            if target.exists():
                shutil.rmtree(path)
            else:
                path.replace(target)
        for path in self._folder.glob(f"{_SAVING}*"):
            shutil.rmtree(path)

    def _set_aside_newer(self, round: int) -> None:
        """Rename checkpoints of later rounds than the one just saved: they are damaged, and would replace good ones."""
        for path in self._newest_first():
            if _round_of(path) > round:
                aside = path.with_name(f"aside-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.replace(aside)

    def _put_in_place(self, fresh: Path, target: Path) -> None:
        replaced = self._folder / f"{_REPLACED}{target.name}"
        if target.exists():  # a folder cannot be renamed over another one
            target.replace(replaced)
        fresh.replace(target)
        sync_folder(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)


class CheckpointWriter:
    """Writes checkpoints of a store on a thread, one at a time. As a context manager it ends with the last one complete.

    Its methods are for one thread; `wait` is for any.
    """

    def __init__(self, store: CheckpointStore, on_failure: Callable[[int, CheckpointError], None]) -> None:
        """`on_failure` is given the round that the disk refused and why. It is called on the thread that writes."""
        self._store = store
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    def save(
        self,
        round: int,
        tensors: dict[str, dict[str, Tensor]],
        state: dict[str, Any],
        on_saved: Callable[[int], None] | None = None,
    ) -> None:
        """Begin to write one checkpoint, after the one in flight. Raises what `finish_earlier` does.

        `tensors` and `state` must not change from now on. `on_saved` is called with the round, on the thread that writes.
        """
        self.finish_earlier()
        self._last = self._thread.submit(self._write, round, tensors, state, on_saved)

    def finish_earlier(self) -> None:
        """Wait for the write in flight. Raises what ended it; that a disk refused was reported already."""
        with contextlib.suppress(CheckpointError):
            self.finish()

    def finish(self) -> None:
        """Wait for the last write. Raises what ended it, also CheckpointError."""
        if self._last is not None:
            self._last.result()

    def wait(self, timeout_s: float) -> None:
        """Wait for the last write, at most `timeout_s`."""
        if self._last is not None:
            wait([self._last], timeout_s)

    def _write(self, round: int, tensors: Any, state: Any, on_saved: Callable[[int], None] | None) -> None:
        try:
            self._store.save(round, tensors, state)
        except CheckpointError as error:
            self._on_failure(round, error)
            raise
        if on_saved is not None:
            on_saved(round)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if error is None:
            self.finish()


def _round_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _read(path: Path) -> Checkpoint:
    manifest = read_json(path / _MANIFEST, _MAX_STATE_BYTES)
    contents: dict[str, bytes] = {}
    for name, expected in manifest["sha256"].items():
        if name != _STATE and not (is_bare_name(name) and name.endswith(".safetensors")):
            raise ValueError(f"its manifest names {name[:100]!r}, which is no file of a checkpoint")
        contents[name] = read_file(path / name, _MAX_STATE_BYTES if name == _STATE else _MAX_TENSORS_BYTES)
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            raise ValueError(f"{name} does not match its hash")
    state = parse_json(contents.pop(_STATE))
    if not isinstance(manifest["round"], int) or not isinstance(state, dict):
        raise ValueError("its round or its state is of another type")
    tensors = {name.removesuffix(".safetensors"): safetensors.torch.load(content) for name, content in contents.items()}
    return Checkpoint(manifest["round"], path, tensors, state=state)


def _write_synced(path: Path, content: bytes) -> str:
    """Write a file and return its SHA-256."""
    with new_file(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def _write_tensors(path: Path, named: dict[str, Tensor]) -> str:
    """Write tensors and return the SHA-256 of the file.

    From memory to the file: a copy as bytes would hold the interpreter's lock for as long as it takes, and be a second one.
    """
    safetensors.torch.save_file(named, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_parts(state: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the JSON of `state` in parts, as one call for all of it would hold the interpreter's lock until its end."""
    for number, (name, value) in enumerate(state.items()):
        yield f"{', ' if number else '{'}{json.dumps(name)}: ".encode()
        if isinstance(value, list):  # groups with all their tokens may be many megabytes
            entries: list[Any] = value
            yield b"[" + b", ".join(json.dumps(entry, allow_nan=False).encode() for entry in entries) + b"]"
        else:
            yield json.dumps(value, allow_nan=False).encode()
    yield b"}" if state else b"{}"
