"""Checkpoints that survive kill -9, a full disk and damaged files.

    checkpoints/
      round-000025/   adapter.safetensors  optimizer.safetensors  state.json  manifest.json
      .saving-…       an unfinished save; removed at the next save
      .replaced-…     the older checkpoint of a round that was saved twice, while the newer one takes its place
      aside-…         a damaged checkpoint that was newer than one saved later, or one after the best to which the run went back
      best.json       which one did best on held-out tasks; it is kept until another one does

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
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from swarm.errors import CheckpointError
from swarm.machine.safe_files import is_bare_name, new_file, parse_json, read_file, read_json, replace_file, sync_folder
from swarm.observability.tracing import traced

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_STATE = "state.json"
_BEST = "best.json"
_SAVING = ".saving-"
_MAX_STATE_BYTES = 256 << 20
_MAX_TENSORS_BYTES = 64 << 30
_MAX_BEST_BYTES = 1 << 20
_REPLACED = ".replaced-"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
"""What reading a damaged checkpoint raises."""
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


@dataclass(frozen=True, slots=True)
class BestRound:
    """The round whose checkpoint did best on held-out tasks."""

    round: int
    reward: float
    """Mean over task sources."""
    measured_on: str
    """Tasks and temperature. Rewards that were measured on others do not compare."""


class CheckpointStore:
    """The checkpoints of one node, of which it stores the newest `keep` and the best one."""

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
        best = self.best()
        for old in self._newest_first()[self._keep :]:
            if best is None or _round_of(old) != best.round:
                shutil.rmtree(old, ignore_errors=True)
        return target

    def mark_best(self, best: BestRound) -> None:
        """Note which checkpoint did best, so that it is kept. Raises CheckpointError if the disk refuses."""
        try:
            replace_file(self._folder / _BEST, json.dumps(asdict(best)), is_durable=True)
        except OSError as error:
            raise CheckpointError(
                f"{self._folder / _BEST} must be writable, got {error}; free disk space or fix its permissions"
            ) from None

    def best(self) -> BestRound | None:
        """Return the best round, or None where no checkpoint is marked, or the marked one is gone."""
        try:
            found = read_json(self._folder / _BEST, _MAX_BEST_BYTES)
            best = BestRound(int(found["round"]), float(found["reward"]), str(found["measured_on"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            logger.warning("%s is damaged (%s); the next evaluation writes it anew", self._folder / _BEST, error)
            return None
        return best if any(_round_of(path) == best.round for path in self._newest_first()) else None

    def load_best(self) -> Checkpoint:
        """Return the best checkpoint. It only reads. Raises CheckpointError where there is none, or it is damaged."""
        path = self._path_of(self._marked().round)
        try:
            return _read(path)
        except _DAMAGE as error:
            raise CheckpointError(
                f"the best checkpoint must be intact, got {error} in {path}; take the newest one instead"
            ) from None

    def go_back_to_best(self) -> BestRound:
        """Set all checkpoints after the best one aside, so that the run goes on from it.

        Raises CheckpointError as `load_best`.
        """
        best = self._marked()
        self.load_best()
        self._set_aside_newer(best.round)
        return best

    def _marked(self) -> BestRound:
        best = self.best()
        if best is None:
            raise CheckpointError(
                f"a checkpoint must be marked as the best, got none in {self._folder}; an evaluation marks it, at the end and "
                "every evaluation.interval_rounds; take the newest one instead"
            )
        return best

    def _path_of(self, round: int) -> Path:
        return next(path for path in self._newest_first() if _round_of(path) == round)

    def load_newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None without any. Damaged ones are skipped with a warning.

        It only reads, so another process may call it while the node runs. Raises CheckpointError if all are damaged.
        """
        paths = self._newest_first()
        for path in paths:
            try:
                return _read(path)
            except _DAMAGE as error:
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
        """Rename checkpoints of later rounds, as the next start would resume from them: they are damaged, or worse."""
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

    def mark_best(self, best: BestRound) -> None:
        """Note on the thread, after the write in flight, that this round did best. Where it was not saved, nothing is noted."""
        last = self._last
        if last is not None:
            self._last = self._thread.submit(self._mark, last, best)

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

    def _mark(self, write: Future[None], best: BestRound) -> None:
        write.result()  # raises what `finish` then raises
        try:
            self._store.mark_best(best)
        except CheckpointError as error:
            self._on_failure(best.round, error)

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
