"""Cells of an experiment: one arm with one seed each, computed once, in processes of their own.

    cells ─ digest ─▶ result there? ──yes──▶ read
                            └──no──▶ worker process ─▶ result file (all of it or nothing)

A cell is plain data, so what it was computed from is stored with what came out. Ctrl-C ends the workers; the same command goes
on with the cells that are missing.
"""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError, SwarmError
from swarm.machine import tethered
from swarm.machine.child_python import module_command
from swarm.machine.safe_files import SHARED, open_to_append, read_file, read_json, replace_file
from swarm.observability.plain_text import counted
from swarm.observability.progress import progress

Result = dict[str, Any]
Say = Callable[[str], None]
_LOOK_INTERVAL_S = 0.1
_MAX_RESULT_BYTES = 256 << 20


def chosen_names(text: str, known: Iterable[str], what: str, separator: str = ",") -> list[str]:
    """Each name of a text once, in its order. `what`: the names in plural, which is also the option of the command line.

    Raises ConfigError for a name that is not known, and where there is none.
    """
    names = [name.strip() for name in text.split(separator) if name.strip()]
    valid = list(known)
    unknown = [name for name in names if name not in valid]
    if unknown or not names:
        listed, wrong = (f"{separator} ".join(some) for some in (valid, unknown))
        raise ConfigError(
            f"{what} must be among {listed}, got {wrong or 'none'}; set --{what} with '{separator}' between names"
        )
    return list(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Cell:
    """What one worker computes."""

    kind: str
    """Which experiment: a key of `cell_process.KINDS`."""
    name: str
    """For people and file names: arm and seed."""
    settings: Mapping[str, Any]
    """JSON-able arguments."""

    @property
    def digest(self) -> str:
        """8 hex digits over everything that the result depends on but the code."""
        text = json.dumps([self.kind, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def slug(self) -> str:
        """Unique name of its files."""
        plain = "".join(c if c.isalnum() or c in "+-." else "-" for c in self.name)
        return f"{plain}-{self.digest}"


class CellStore:
    """Results in one folder, a file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def result_path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.slug}.json"

    def read(self, cell: Cell) -> Result | None:
        """None where it was not computed yet, or the file is damaged."""
        try:
            stored = read_json(self.result_path(cell), _MAX_RESULT_BYTES)
        except (FileNotFoundError, ValueError):
            return None
        return stored["result"] if isinstance(stored, dict) and "result" in stored else None

    def read_all(self, cells: Sequence[Cell]) -> list[Result]:
        """Those that are there, in the order of `cells`."""
        return [result for cell in cells if (result := self.read(cell)) is not None]

    def write(self, cell: Cell, result: Result) -> None:
        """All of it or nothing."""
        path = self.result_path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {"kind": cell.kind, "name": cell.name, "settings": dict(cell.settings), "result": result}
        replace_file(path, json.dumps(stored) + "\n", SHARED)


def compute(cells: Sequence[Cell], store: CellStore, num_workers: int, say: Say) -> list[Result]:
    """Results in the order of `cells`; `num_workers` at a time, and only those that are not there.

    Raises SwarmError for a cell whose process failed. Whatever happens, no process is left.
    """
    waiting = [cell for cell in cells if store.read(cell) is None]
    if len(waiting) < len(cells):
        say(f"{len(cells) - len(waiting)} of {len(cells)} cells were finished earlier")
    started_s, running, num_cells = time.monotonic(), list[_Worker](), len(waiting)
    num_left = num_cells
    with progress("cells", num_cells) as add, _killing(running):
        while waiting or running:
            while waiting and len(running) < num_workers:
                running.append(_Worker(waiting.pop(0), store))
            for worker in [worker for worker in running if worker.has_ended()]:
                running.remove(worker)
                worker.check()
                num_left -= 1
                add(1)
                minutes = (time.monotonic() - started_s) / 60
                left = counted(num_left, "cell") + " left"
                if num_left:
                    left += f", about {minutes / (num_cells - num_left) * num_left:.0f} min"
                say(f"{worker.cell.name} finished after {minutes:.1f} min, {left}")
            time.sleep(_LOOK_INTERVAL_S)
    return store.read_all(cells)


@contextmanager
def _killing(workers: "list[_Worker]") -> Iterator[None]:
    """Leave none of the workers running, however this context ends."""
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()


class _Worker:
    """One process that computes one cell and writes its result."""

    def __init__(self, cell: Cell, store: CellStore) -> None:
        store.folder.mkdir(parents=True, exist_ok=True)
        self.cell = cell
        self._result = store.result_path(cell)
        self._log = store.folder / f"{cell.slug}.log"
        spec = store.folder / f"{cell.slug}.cell"
        replace_file(spec, json.dumps([cell.kind, cell.name, dict(cell.settings)]))
        command = module_command("swarm.experiments.cell_process", str(spec), str(store.folder))
        with open_to_append(self._log) as output:
            self._process = subprocess.Popen(
                tethered.command(os.getpid(), command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it through the parent only
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def check(self) -> None:
        """Raises SwarmError where it ended without a result."""
        if self._process.returncode or not self._result.exists():
            said = read_file(self._log, _MAX_RESULT_BYTES).decode(errors="replace").strip().splitlines()
            raise SwarmError(
                f"a cell must end in good order, got {said[-1][:200] if said else self._process.returncode} in "
                f"{self.cell.name}; see {self._log}, then run again: finished cells are kept"
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
