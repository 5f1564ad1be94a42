"""A node from Python. It runs in a process of its own, exactly as `swarm run` does, and its rounds are told as they end.

    Node.from_config ─ settings ─▶ swarm run ─ metrics.jsonl ─▶ Round, Round, …
                                       └────── checkpoints/ ──▶ SavedPolicy

So a notebook stays free while the node computes, an interrupted cell stops the node in good order, and running the cell again
goes on from the last checkpoint.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.config import Config, dump_toml, merge, merged, origin_in, parse, read_layers, resolve_paths
from swarm.errors import SwarmError, error_of_exit_code
from swarm.machine.child_python import swarm_command
from swarm.machine.node_folder import NodeFolder
from swarm.machine.safe_files import open_to_read
from swarm.observability.metrics import last_rows, parse_row
from swarm.report.node_history import drop_from
from swarm.testbed.testbed import NodeProcess, stop_all

if TYPE_CHECKING:
    from swarm.api.saved_policy import SavedPolicy

_LOOK_INTERVAL_S = 0.1
_STOP_GRACE_S = 15.0
"""A round in flight may end, and a checkpoint be written."""
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a node."""

    number: int
    """From 1 on."""
    reward: float
    """Mean reward of the answers that were sampled in it."""
    own_groups: int
    """Own groups that were trained on."""
    swarm_groups: int
    """Groups of others that were trained on."""
    metrics: Mapping[str, Any]
    """All that metrics.jsonl has of it."""


class Node:
    """A node with its folder. To make one starts nothing."""

    def __init__(self, config: Config) -> None:
        """`config.node.dir` is the node's folder, and is taken from the current folder where it is relative."""
        folder = config.node.dir.absolute()
        self.config = config.model_copy(update={"node": config.node.model_copy(update={"dir": folder})})
        self.folder = folder

    @classmethod
    def from_config(cls, *files: str | Path, **sections: Mapping[str, Any]) -> "Node":
        """From TOML files, later ones win, and sections over them: `Node.from_config("node.toml", training={"lr": 1e-5})`.

        Paths of data and reward functions in a file are relative to it, those in sections to the current folder. Without files
        and sections it is a node with the bundled policy and tasks. Raises ConfigError with rule, value and fix.
        """
        paths, own = [Path(file) for file in files], deepcopy(dict(sections))
        resolve_paths(own, Path.cwd())
        layers = read_layers(paths)
        return cls(parse(merge(merged(layers), own), origin_in(layers)))

    def run(self, rounds: int | None = None, *, fresh: bool = False) -> Iterator[Round]:
        """Run the node for `rounds` more rounds, None: until `node.max_rounds`, and yield each round when it has ended.

        `fresh`: begin a new run; what an earlier one left is moved aside. Otherwise the node goes on from its newest checkpoint.
        The node ends when the iterator is closed or interrupted, after its round in flight, and with this process.

        Raises the SwarmError that ended the node, such as ConfigError or PolicyError.
        """
        if rounds is not None and rounds < 1:
            raise SwarmError(f"rounds must be at least 1, got {rounds}; leave it out to run until node.max_rounds")
        done = 0 if fresh else self.num_rounds
        config = self.config
        if rounds is not None:
            config = config.model_copy(update={"node": config.node.model_copy(update={"max_rounds": done + rounds})})
        return self._run(config, _Rows(NodeFolder(self.folder).metrics, at_end=True), done, fresh=fresh)

    @property
    def num_rounds(self) -> int:
        """Rounds that the node has on record; after a crash it goes on from its last checkpoint, which may be earlier."""
        return max((row["round"] for row in self.metrics()), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        """The rounds so far as records, for example for `pandas.DataFrame`; of very long runs the newest tens of thousands."""
        found: list[dict[str, Any]] = []
        for row in last_rows(NodeFolder(self.folder).metrics):
            if row.get("kind") == "round":
                drop_from(found, row["round"])  # the node was restarted from the checkpoint before it
                found.append(row)
        return found

    @property
    def policy(self) -> "SavedPolicy":
        """The policy of the newest checkpoint, loaded into this process each time. Raises CheckpointError where there is none."""
        from swarm.api.saved_policy import SavedPolicy

        return SavedPolicy(self.config)

    def _run(self, config: Config, rows: "_Rows", done: int, *, fresh: bool) -> Iterator[Round]:
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".toml"))
            file.write(dump_toml(config))
            file.flush()
            command = swarm_command("run", file.name, *(["--fresh"] if fresh else []))
            process = NodeProcess(self.folder, command, is_alone=True)
            stack.callback(stop_all, [process], _STOP_GRACE_S)
            has_ended = False
            while not has_ended:
                process.wait(time.monotonic() + _LOOK_INTERVAL_S)
                has_ended = (
                    process.exit_code is not None
                )  # before the rows are read, so that the last ones are not missed
                for row in rows.new():
                    yield Round(
                        row["round"],
                        row["rollout/reward_mean"],
                        row["train/own_groups"],
                        row["train/swarm_groups"],
                        row,
                    )
        if process.exit_code not in (0, _INTERRUPTED):
            raise error_of_exit_code(process.exit_code or 1, process.cause_of_death().removeprefix("error: "))


class _Rows:
    """The rows of rounds that are appended to a metrics.jsonl."""

    def __init__(self, path: Path, *, at_end: bool) -> None:
        """`at_end`: leave out what the file has by now."""
        self._path = path
        known = path.stat() if at_end and path.exists() else None
        self._offset, self._inode = (known.st_size, known.st_ino) if known else (0, None)

    def new(self) -> Iterator[dict[str, Any]]:
        """Those since the last call; a line that is still being written comes with the next one."""
        try:
            file = open_to_read(self._path)
        except FileNotFoundError:
            return
        with file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._inode or now.st_size < self._offset:  # a new file
                self._offset, self._inode = 0, now.st_ino
            file.seek(self._offset)
            lines = file.read().split(b"\n")[:-1]
        self._offset += sum(len(line) + 1 for line in lines)
        for line in lines:
            row = parse_row(line)
            if row.get("kind") == "round":
                yield row
