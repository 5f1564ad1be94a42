"""Tasks of a data set: a file or folder of JSONL, CSV, Parquet or Arrow, or a data set of a hub.

    files ─▶ confined process (`reader`) ─▶ tasks (`rows`) ─▶ one file (`row_store`)

Files are read once, in a confined process, since their formats are parsed by native code and may be a stranger's. What comes
back is text. It is checked here and written to a file in the cache (`assets/swarm` in the folder of HF_HOME). Tasks are read from
that file by row number, so a set need not fit into memory. It is prepared again when settings change, or when a file of the data
set has another name, size or time of change.

SHA-256 over the tasks, as text, is a part of the config digest: two nodes share tasks only if they have the same rows, in any
format. A manifest holds it beside the commit of the hub, and a node with other rows is told so before it trains. A manifest names
no file: its operator says where a copy is.

Every tenth row is held out for evaluation, or the split `held_out_split`. Streams go through the others as those of JSONL do.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.points import VERIFIERS
from swarm.extensions.registry import Isolation
from swarm.machine.safe_files import locked
from swarm.observability.plain_text import counted, plain
from swarm.sandbox.inside.file_guard import AUDIT_HOOK
from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError
from swarm.tasks.data_sets.hub import commit_of, fetched, is_commit
from swarm.tasks.data_sets.row_store import MAX_FILES, RowStore, RowWriter, files_identity, opened
from swarm.tasks.data_sets.rows import InvalidRow, Row, RowMapping
from swarm.tasks.jsonl_source import HELD_OUT_EVERY, shuffled_position
from swarm.tasks.task_source import EVALUATION_SEED, INDEX_SPAN, TaskFailure
from swarm.tasks.verifiers import rules_of
from swarm.types import PLAIN, PromptContext, Task, TaskRef

logger = logging.getLogger(__name__)

_RULES = "dataset-1"
"""Changes whenever the same files give other tasks, or answers are judged differently."""
_MEMORY_BYTES = 4 << 30
"""Address space of the process that reads the files."""
_SCRATCH_BYTES = 1 << 20
_REPLY_BUDGET_S = 60.0
_BUDGET_S = 3600.0
"""Longest time for preparing one data set."""
_REPORT_S = 10.0
_MAX_SHARED_CHARS = 32_768
_MAX_SHARED_TURNS = 32
_TRAINING, _HELD_OUT = "train", "held out"


class DatasetSource:
    """A task source of one data set. Tasks are read from its prepared file."""

    isolation: ClassVar[Isolation] = Isolation.OWN_SANDBOX

    def __init__(self, config: TaskSourceSection, tasks: TasksSection) -> None:
        """Prepare the data set if needed. Raises TaskError if it is missing, damaged, too large or not the pinned one."""
        if config.parameters:
            raise _error(config, f"a data set takes no parameters, got {', '.join(config.parameters)}", "remove them")
        self.name = config.source_name
        self._rows = prepared(config, tasks)
        facts = self._rows.facts
        self.sha256: str = facts["sha256"]
        """Over all tasks, 64 hex digits."""
        self.commit: str = facts["commit"]
        """Commit of the hub; empty for a data set of this machine."""
        _check_content(config, facts)
        self._num_training: int = facts["num_training"]
        self._num_held_out: int = facts["num_held_out"]
        self._is_split = bool(config.held_out_split)
        self._shared_system: bool = facts["shared_system"]
        self._shared_turns: bool = facts["shared_turns"]
        digest = f"{_RULES}:{config.verifier}:{rules_of(facts['verifiers'])}:{self.sha256}"
        self.config_digest = hashlib.sha256(digest.encode()).hexdigest()[:16]
        logger.info("tasks of %s: %s", self.name, summary(config, facts))

    @property
    def num_held_out(self) -> int:
        return min(self._num_held_out, INDEX_SPAN)

    def task(self, seed: int, index: int) -> Task:
        row = self._row(seed, index)
        system = row.system if self._shared_system else ""
        turns = row.turns if self._shared_turns else ()
        context = PromptContext(system, turns) if system or turns else PLAIN
        prompt = row.text(with_system=not self._shared_system, with_turns=not self._shared_turns)
        verify = partial(VERIFIERS.load(row.verifier).score, row.answer)
        ref = TaskRef(self.name, self.config_digest, seed, index)
        return Task(ref, prompt, verify, context=context, facts=row.facts)

    def answer(self, seed: int, index: int) -> str:
        return self._row(seed, index).answer

    def _row(self, seed: int, index: int) -> Row:
        if seed == EVALUATION_SEED:
            position = index % self._num_held_out
            number = self._num_training + position if self._is_split else position * HELD_OUT_EVERY
        else:
            position = shuffled_position(seed, index, self._num_training)
            number = position if self._is_split else position + position // (HELD_OUT_EVERY - 1) + 1
        try:
            stored = self._rows.row(number)
            return Row(**{**stored, "turns": tuple((one, other) for one, other in stored.get("turns", ()))})
        except (OSError, ValueError, TypeError) as error:
            raise TaskFailure(self.name, f"row {number} of the prepared data set: {error}; delete {_cache()}") from None


def summary(config: TaskSourceSection, facts: Mapping[str, Any]) -> str:
    """What is trained on and what is held out, in one line for people."""
    held_out = f"split {facts['held_out_split']}" if config.held_out_split else "every tenth row"
    skipped = f", {counted(facts['num_skipped'], 'row')} left out ({facts['skipped']})" if facts["num_skipped"] else ""
    others = [] if config.held_out_split else facts["other_splits"]
    unused = f" (there is also {', '.join(others)}: set held_out_split)" if others else ""
    return (
        f"{counted(facts['num_training'], 'row')} of split {facts['split']} for training, {held_out} held out "
        f"({counted(facts['num_held_out'], 'row')}){unused}{skipped}; SHA-256 {facts['sha256']}"
    )


def prepared(config: TaskSourceSection, tasks: TasksSection) -> RowStore:
    """The tasks of a data set as an open file, prepared first where needed. Raises TaskError.

    Processes of this machine wait for each other here, so that they prepare a data set once.
    """
    identity, commit = _identity(config)
    try:
        store = _cache() / f"{_key(config)}.rows"
        with locked(store.with_suffix(".lock")):
            if (ready := opened(store, identity)) is not None:
                return ready
            folder = fetched(config.hub, commit, _allowed_gib(tasks)) if config.path is None else config.path.resolve()
            _prepare(config, tasks, folder, store, facts={"identity": identity, "commit": commit})
            return RowStore(store)
    except OSError as error:
        raise TaskError(
            f"a data set must be prepared in a folder that can be written, got {error.strerror or error} for "
            f"{config.source_name!r}; set HF_HOME to one with space"
        ) from None


def content(config: TaskSourceSection, tasks: TasksSection) -> dict[str, str]:
    """What a manifest says of a data set's content: SHA-256 of its tasks, and the commit of its hub. Raises TaskError."""
    rows = prepared(config, tasks)
    rows.close()
    commit = rows.facts["commit"] or (config.hub and commit_of(config.hub, config.revision))
    return {"sha256": rows.facts["sha256"]} | ({"revision": commit} if commit else {})


def is_at_hand(config: TaskSourceSection) -> bool:
    """Whether a data set needs no download: a copy of the operator's, or one that is prepared."""
    if config.path is not None:
        return True
    with contextlib.suppress(TaskError, OSError):
        return opened(_cache() / f"{_key(config)}.rows", config.revision) is not None
    return False


def _check_content(config: TaskSourceSection, facts: Mapping[str, Any]) -> None:
    if not config.sha256 or facts["sha256"] == config.sha256:
        return
    may_have_moved = config.path is None and not is_commit(config.revision)
    fix = (
        f"{config.revision or 'main'} of the hub may have moved: set revision to the commit that was meant"
        if may_have_moved
        else "get the files that the founder has, or ask for a manifest of these"
    )
    place = config.path or f"{config.hub} at {facts['commit']}"
    raise TaskError(
        f"the tasks of {config.source_name!r} must have SHA-256 {config.sha256}, got {facts['sha256']} of {place} "
        f"({facts['num_training']} + {facts['num_held_out']} rows); {fix}"
    )


def _allowed_gib(tasks: TasksSection) -> float:
    """The share of one data set: a manifest may name many."""
    return tasks.max_data_gib / max(1, sum(source.kind == "dataset" for source in tasks.sources))


def _cache() -> Path:
    from huggingface_hub import cached_assets_path

    return cached_assets_path("swarm", "datasets", "rows")


def _key(config: TaskSourceSection) -> str:
    """Name of the prepared file: a hash of everything but the content that decides the tasks."""
    of_tasks = {
        "subset", "split", "held_out_split", "columns", "expected", "expected_parameters", "skip_invalid", "prompt_template",
        "verifier",
    }  # fmt: skip
    place = [str(config.path.resolve())] if config.path is not None else [config.hub, config.revision]
    facts = [_RULES, place, config.model_dump(mode="json", include=of_tasks)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _identity(config: TaskSourceSection) -> tuple[str, str]:
    """(what changes when the files change, commit of the hub or nothing). Raises TaskError."""
    if config.path is None:
        commit = commit_of(config.hub, config.revision)
        return commit, commit
    path = config.path.resolve()
    try:
        return files_identity(path), ""
    except OSError as error:
        raise TaskError(
            f"a data set must be an existing file or folder of at most {MAX_FILES} files, got {path}: {error.strerror}; set path "
            f"of {config.source_name!r}"
        ) from None


def _prepare(config: TaskSourceSection, tasks: TasksSection, path: Path, store: Path, facts: dict[str, str]) -> None:
    """Read the files and write the tasks. Raises TaskError and OSError."""
    logger.info("preparing the data set of %s from %s", config.source_name, path)
    with _Reader(config, path) as reader, RowWriter(store, int(_allowed_gib(tasks) * 2**30)) as writer:
        split = _chosen(config, list(reader.splits), config.split, "split")
        mapping = RowMapping(config, reader.splits[split], f"split {split}")
        run = _Run(config, reader, mapping, writer)
        run.write(_TRAINING, split)
        num_rows = run.num_rows
        held_out_split = ""
        if config.held_out_split:
            held_out_split = _chosen(config, list(reader.splits), config.held_out_split, "held_out_split")
            if held_out_split == split:
                raise _error(config, f"held_out_split must be another than split, got {split} twice", "change one")
            run.mapping = RowMapping(config, reader.splits[held_out_split], f"split {held_out_split}")
            run.write(_HELD_OUT, held_out_split)
            num_held_out = run.num_rows - num_rows
        else:
            num_held_out = -(-num_rows // HELD_OUT_EVERY)
            num_rows -= num_held_out
        run.check_enough(num_rows, num_held_out)
        found = {
            "split": split,
            "other_splits": [plain(name)[:64] for name in reader.splits if name != split][:16],
            "held_out_split": held_out_split,
            "num_training": num_rows,
            "num_held_out": num_held_out,
        }
        writer.finish(facts | found | run.facts())


def _chosen(config: TaskSourceSection, splits: Sequence[str], wanted: str, setting: str) -> str:
    """The split of a setting; without one train, or the only one. Raises TaskError."""
    if wanted in splits or (not wanted and (len(splits) == 1 or "train" in splits)):
        return wanted or ("train" if "train" in splits else splits[0])
    got = f"{wanted}, which is none of them" if wanted else "none"
    raise _error(config, f"{setting} must be one of {', '.join(splits)[:200]}, got {got}", f"set {setting}")


def _error(config: TaskSourceSection, rule: str, fix: str) -> TaskError:
    return TaskError(f"{rule}; {fix} for source {config.source_name!r}")


class _Run:
    """One pass over the splits of a data set, row by row."""

    def __init__(self, config: TaskSourceSection, reader: "_Reader", mapping: RowMapping, writer: RowWriter) -> None:
        self.mapping = mapping
        self.num_rows = 0
        self._config = config
        self._reader = reader
        self._writer = writer
        self._num_skipped = 0
        self._skipped = ""
        self._verifiers: set[str] = set()
        self._systems: set[str] = set()
        self._turns: set[tuple[tuple[str, str], ...]] = set()
        """Of all rows, two at most: more is known to be no longer the same."""

    def write(self, part: str, split: str) -> None:
        """Write the tasks of a split. Raises TaskError for a row that is none, unless such rows are left out."""
        self._writer.begin(part)
        reported_at = time.monotonic()
        for number, values in enumerate(self._reader.rows(split, self.mapping.needed)):
            try:
                if isinstance(values, str):
                    raise InvalidRow(f"a row must be smaller, got one that {values}")
                self._add(self.mapping.row(values))
            except InvalidRow as error:
                self._skip(error, f"row {number} of split {split}")
            if time.monotonic() - reported_at > _REPORT_S:
                reported_at = time.monotonic()
                logger.info("prepared %d rows of %s", self.num_rows, self._config.source_name)

    def check_enough(self, num_training: int, num_held_out: int) -> None:
        if num_training < 1 or num_held_out < 1:
            reason = (
                f", and left {self._num_skipped} out, the first because {self._skipped}" if self._num_skipped else ""
            )
            raise _error(
                self._config,
                f"a data set must have at least one row to train on and one to hold out, got {num_training} and "
                f"{num_held_out}{reason}",
                "add rows",
            )

    def facts(self) -> dict[str, Any]:
        turns = next(iter(self._turns), ())
        system = next(iter(self._systems), "")
        is_short = len(turns) <= _MAX_SHARED_TURNS
        num_chars = len(system) + sum(len(one) + len(other) for one, other in turns)
        may_be_shared = is_short and num_chars <= _MAX_SHARED_CHARS and len(self._systems) == 1
        return {
            "sha256": self._writer.sha256,
            "verifiers": sorted(self._verifiers),
            "shared_system": may_be_shared,
            "shared_turns": may_be_shared and len(self._turns) == 1,
            "num_skipped": self._num_skipped,
            "skipped": self._skipped,
        }

    def _add(self, row: Row) -> None:
        stored: dict[str, Any] = {"prompt": row.prompt, "answer": row.answer, "verifier": row.verifier}
        stored |= ({"system": row.system} if row.system else {}) | ({"turns": row.turns} if row.turns else {})
        stored |= {"facts": dict(row.facts)} if row.facts else {}
        self._writer.add(stored)
        self.num_rows += 1
        self._verifiers.add(row.verifier)
        if len(self._systems) < 2:
            self._systems.add(row.system)
        if len(self._turns) < 2:
            self._turns.add(row.turns)

    def _skip(self, error: InvalidRow, where: str) -> None:
        reason = plain(str(error))
        if not self._config.skip_invalid:
            raise _error(self._config, f"{reason} in {where}", f"{plain(error.fix)}, or set skip_invalid = true")
        self._num_skipped += 1
        self._skipped = self._skipped or f"{reason[:200]} in {where}"


class _Reader:
    """The confined process that reads one data set."""

    def __init__(self, config: TaskSourceSection, path: Path) -> None:
        if importlib.util.find_spec("datasets") is None:
            raise TaskError("a dataset source needs the package datasets, got none; pip install 'datasets>=5.0'")
        self._config = config
        self._scratch = tempfile.TemporaryDirectory(prefix="swarm-data-")
        self._ends_at = time.monotonic() + _BUDGET_S
        # A snapshot of the hub's cache consists of links into the folder of its repository.
        root = path.parents[1] if config.path is None else path
        confinement = Confinement(_MEMORY_BYTES, _SCRATCH_BYTES, "if possible", (str(root),))
        opening = {"path": str(path), "root": str(root), "subset": config.subset, "scratch": self._scratch.name}
        self._process = LineProcess("swarm.tasks.data_sets.reader", opening, confinement)
        self.splits: dict[str, list[str]] = {}
        """{split: its columns}"""

    def __enter__(self) -> "_Reader":
        try:
            self.splits = self._opened_splits()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()
        self._scratch.cleanup()

    def rows(self, split: str, columns: Sequence[str]) -> Iterator[dict[str, Any] | str]:
        """All rows of a split. A text in place of a row says why it cannot be read. Raises TaskError."""
        reply = self._ask(["rows", split, list(columns)])
        while True:
            rows = reply.get("rows")
            if not isinstance(rows, list) or not all(isinstance(row, dict | str) for row in rows):
                raise self._failure("a reply without rows")
            yield from rows
            if reply.get("is_last") is True:
                return
            if time.monotonic() > self._ends_at:
                raise _error(
                    self._config,
                    f"a data set must be read within {_BUDGET_S / 60:g} minutes, got more",
                    "take a smaller one",
                )
            reply = self._ask(["more"])

    def _opened_splits(self) -> dict[str, list[str]]:
        opened = self._ask(["open"])
        splits = opened.get("splits")
        if not isinstance(splits, dict) or not all(
            isinstance(columns, list) and all(isinstance(column, str) for column in columns)
            for columns in splits.values()
        ):
            raise self._failure("a reply without splits")
        if opened.get("files") == AUDIT_HOOK:
            logger.warning("the data set of %s is kept from other files by Python alone", self._config.source_name)
        return splits

    def _ask(self, question: list[Any]) -> dict[str, Any]:
        try:
            reply = self._process.ask(question, _REPLY_BUDGET_S)
        except LineProcessError as error:
            raise self._failure(plain(str(error))) from None
        if "error" in reply:
            raise TaskError(f"{plain(str(reply['error']))} (source {self._config.source_name!r})")
        return reply

    def _failure(self, reason: str) -> TaskError:
        return _error(
            self._config,
            f"a data set must be readable within {_MEMORY_BYTES >> 30} GiB of memory and {_REPLY_BUDGET_S:g} s per part, got: "
            f"{reason}",
            "check its files, or convert them to Parquet with small row groups",
        )
