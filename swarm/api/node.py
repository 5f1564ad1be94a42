"""A node from Python. It runs in a process of its own, exactly as `swarm run` does, and its rounds are told as they end.

    Node.from_config ─ settings, tasks/ ─▶ swarm run, or swarm join ─ metrics.jsonl ─▶ Round, Round, …
                                                 └────── checkpoints/ ──▶ SavedPolicy

So a notebook stays free while the node computes, an interrupted cell stops the node in good order, and running the cell again
goes on from the last checkpoint.
"""

import difflib
import os
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

from swarm.api.own_tasks import OwnTasks, own_tasks
from swarm.config import Config, dump_toml, merge, merged, origin_in, parse, read_layers, resolve_paths
from swarm.errors import ConfigError, SwarmError, error_of_exit_code
from swarm.machine.child_python import pip_install, swarm_command
from swarm.machine.node_folder import NodeFolder
from swarm.machine.safe_files import open_to_read
from swarm.observability.metrics import last_rows, parse_row
from swarm.report.live_table import NodeView
from swarm.report.node_history import NodeHistory, drop_from
from swarm.report.summary import summarize
from swarm.testbeds.testbed import NodeProcess, stop_all

if TYPE_CHECKING:
    from pandas import DataFrame

    from swarm.api.joining import Joining
    from swarm.api.saved_policy import SavedPolicy

_LOOK_INTERVAL_S = 0.1
_STOP_GRACE_S = 15.0
"""A round in flight may end, and a checkpoint be written."""
_INTERRUPTED = 130
_KEYWORDS = ("reward", "dataset", "task")
_RUNNING: "WeakValueDictionary[Path, Generator[Round]]" = WeakValueDictionary()
"""{folder: the rounds that are being told of it}. A cell that was interrupted leaves its loop behind, with the node running."""


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

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """The round of a row of metrics.jsonl."""
        return cls(row["round"], row["rollout/reward_mean"], row["train/own_groups"], row["train/swarm_groups"], row)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward on held-out tasks, on which nobody trains. None: not evaluated yet, or not at all."""

    before: float | None
    """Before the first round."""
    after: float | None
    """At the latest evaluation."""
    by_source: Mapping[str, tuple[float | None, float | None]]
    """{task source: (before, after)}"""


class Node:
    """A node with its folder. To make one starts nothing and writes nothing."""

    def __init__(self, config: Config, tasks: OwnTasks | None = None, joining: "Joining | None" = None) -> None:
        """`config.node.dir` is the node's folder, and is taken from the current folder where it is relative.

        `tasks`: functions and rows that its sources name as files. `joining`: the swarm that it joins by a manifest.
        """
        folder = config.node.dir.absolute()
        self.config = config.model_copy(update={"node": config.node.model_copy(update={"dir": folder})})
        self.folder = folder
        self._tasks = tasks or OwnTasks()
        self._joining = joining

    @classmethod
    def from_config(
        cls,
        *files: str | Path,
        reward: Any = None,
        dataset: Any = None,
        task: Mapping[str, Any] | None = None,
        **sections: Mapping[str, Any],
    ) -> "Node":
        """From TOML files, later ones win, and sections over them: `Node.from_config("node.toml", training={"lr": 1e-5})`.

        `reward`: a function of yours, `score(task, answer)` or `reward_func(prompts, completions, **columns)` as TRL calls it, or
        several: a list, or {name: function} or {name: (function, weight)}. A text is "FILE.py:NAME" or the name of a signal.
        `dataset`: rows with `prompt` and `answer`, as a list of dicts, `datasets.Dataset` or DataFrame; or the path of a file.
        `task`: further settings of the source of `dataset`, such as {"answer": "tag", "columns": {"prompt": "question"}}.

        Paths of data and reward functions in a file are relative to it, others to the current folder. Without files and sections
        it is a node with the bundled policy and tasks. Raises ConfigError or TaskError with rule, value and fix.
        """
        settings = settings_of(files, sections, _KEYWORDS)
        origin = origin_in(read_layers(map(Path, files)))
        config = parse(settings, origin)
        tasks = own_tasks(reward, dataset, task, config.tasks.sources)
        section = tasks.section(config.node.dir.absolute())
        return cls(parse(merge(settings, section), origin) if section else config, tasks)

    @classmethod
    def join(
        cls,
        manifest: str | Path,
        *files: str | Path,
        reward: Any = None,
        dataset: Any = None,
        founder: str | None = None,
        **sections: Mapping[str, Any],
    ) -> "Node":
        """A node of the swarm that `manifest`, a file or an address on the web, describes, as by `swarm join`.

        `reward` and `dataset` are your copies of what the manifest names by SHA-256; it decides the tasks. `founder`: accept only
        a manifest that this peer id has signed. Raises the SwarmError of `swarm join`, such as ManifestError.
        """
        from swarm.api.joining import Joining

        settings = settings_of(files, sections, ("reward", "dataset", "founder"))
        tasks = own_tasks(reward, dataset, None, parse({}).tasks.sources[:1])
        joining = Joining(str(manifest), founder, settings, tasks)
        return cls(joining.config(), tasks, joining)

    def run(self, rounds: int | None = None, *, fresh: bool = False) -> Generator[Round]:
        """Run the node for `rounds` more rounds, None: until `node.max_rounds`, and yield each round when it has ended.

        `fresh`: begin a new run; what an earlier one left is moved aside. Otherwise the node goes on from its newest checkpoint.
        The node ends when the iterator is closed or interrupted, after its round in flight, and with this process. A loop of this
        program that still runs the same folder, such as that of an interrupted cell, is closed first.

        Raises the SwarmError that ended the node, such as ConfigError or PolicyError.
        """
        if rounds is not None and (isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1):
            raise SwarmError(f"rounds must be at least 1, got {rounds}; leave it out to run until node.max_rounds")
        self._end_earlier_loop()
        done = 0 if fresh else self.num_rounds
        config = self.config
        if rounds is not None:
            config = config.model_copy(update={"node": config.node.model_copy(update={"max_rounds": done + rounds})})
        told = self._run(config, _Rows(NodeFolder(self.folder).metrics, at_end=True), fresh=fresh)
        _RUNNING[self.folder] = told
        return told

    @property
    def num_rounds(self) -> int:
        """Rounds that the node has on record; after a crash it goes on from its last checkpoint, which may be earlier."""
        return max((row["round"] for row in self.metrics()), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        """The rounds so far as records, one for each; of very long runs the newest tens of thousands."""
        found: list[dict[str, Any]] = []
        for row in last_rows(NodeFolder(self.folder).metrics):
            if row.get("kind") == "round":
                drop_from(found, row["round"])  # the node was restarted from the checkpoint before it
                found.append(row)
        return found

    def frame(self) -> "DataFrame":
        """The same as a DataFrame, one row for each round. Raises SwarmError where pandas is not installed."""
        return frame_of(self.metrics())

    def evaluation(self) -> Evaluation:
        """Reward on held-out tasks before the first round and at the latest evaluation."""
        history = NodeHistory(NodeFolder(self.folder).metrics)
        history.refresh()
        found = summarize(NodeView("", "", 0, "", history))
        return Evaluation(found.held_out_start, found.held_out_end, found.held_out_by_source)

    @property
    def policy(self) -> "SavedPolicy":
        """The policy of the newest checkpoint, loaded into this process each time. Raises CheckpointError where there is none."""
        from swarm.api.saved_policy import SavedPolicy

        return SavedPolicy(self.config)

    @property
    def best_policy(self) -> "SavedPolicy":
        """As `policy`, of the checkpoint that did best on held-out tasks (evaluation.interval_rounds)."""
        from swarm.api.saved_policy import SavedPolicy

        return SavedPolicy(self.config, best=True)

    def _end_earlier_loop(self) -> None:
        earlier = _RUNNING.get(self.folder)
        try:
            if earlier is not None:
                earlier.close()
        except ValueError:  # it is executing, in another thread
            raise ConfigError(
                f"a folder must have one run at a time, got {self.folder} in use by another thread; end that, or set node.dir"
            ) from None

    def _run(self, config: Config, rows: "_Rows", *, fresh: bool) -> Generator[Round]:
        self._tasks.write(self.folder)
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".toml"))
            joining = self._joining
            file.write(dump_toml(config) if joining is None else joining.settings_for(config))
            file.flush()
            words = ["run", file.name] if joining is None else joining.words(file.name, self.folder)
            process = NodeProcess(self.folder, swarm_command(*words, *(["--fresh"] if fresh else [])), is_alone=True)
            stack.callback(stop_all, [process], _STOP_GRACE_S)
            has_ended = False
            while not has_ended:
                process.wait(time.monotonic() + _LOOK_INTERVAL_S)
                has_ended = (
                    process.exit_code is not None
                )  # before the rows are read, so that the last ones are not missed
                yield from map(Round.of, rows.new())
        if process.exit_code not in (0, _INTERRUPTED):
            raise error_of_exit_code(process.exit_code or 1, process.cause_of_death().removeprefix("error: "))


def settings_of(
    files: tuple[str | Path, ...], sections: Mapping[str, Any], keywords: tuple[str, ...]
) -> dict[str, Any]:
    """What files and sections say, before defaults. Raises ConfigError, also for a keyword that is no section."""
    for name, value in sections.items():
        close = difflib.get_close_matches(name, [*keywords, *Config.model_fields], n=1)
        if name not in Config.model_fields and close:
            raise ConfigError(f"unknown keyword {name}; did you mean {close[0]}?")
        if name in Config.model_fields and not isinstance(value, Mapping):
            raise ConfigError(f'{name} is a section, got {value!r}; write {name}={{"SETTING": VALUE}}')
    own = _with_texts(dict(sections))
    resolve_paths(own, Path.cwd())
    return merge(merged(read_layers(map(Path, files))), own)


def _with_texts(value: Any) -> Any:
    """A copy with paths as text, as a file has them."""
    if isinstance(value, Mapping):
        return {str(name): _with_texts(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def near(folder: Path) -> Path:
    """A folder as people name it: relative to the current one where it is beneath that."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def frame_of(records: list[dict[str, Any]]) -> "DataFrame":
    """A DataFrame of records. Raises SwarmError where pandas is not installed."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise SwarmError(
            f"a frame needs the package pandas, got none; use metrics(), or {pip_install('pandas')}"
        ) from None
    return DataFrame(records)


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
