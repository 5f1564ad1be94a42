"""Reads the files of a data set with the library `datasets`, as the service in a sandboxed process (`line_process`).

opening:  {"path": file or folder, "root": what may be opened, "subset": name or "", "scratch": an empty folder}
question: ["open"]                     {"splits": {split: [column, …]}, "files": what keeps the operator's files closed}
          ["rows", split, [column, …]] the first rows of a split, as {"rows": [{column: value}, …], "is_last": boolean}
          ["more"]                     the rows after those

or, in place of an answer, {"error": text}. A row that is too large for a reply is a text that says so.

Parquet, Arrow and CSV are read by native code, and a data set may be a stranger's. So the files are read here, where only they
and the installed packages can be opened. The node gets plain values, and checks them as those of a stranger. Only formats of data
are read: no loading script, no pickle, no archive of other formats. Rows are streamed, so memory does not grow with their number.
"""

import glob
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from pathlib import Path
from typing import Any

from swarm.sandbox.inside.file_guard import close_files
from swarm.tasks.task_source import MAX_TEXT_CHARS

MAX_MESSAGE_CHARS = 400
_MAX_REPLY_CHARS = 1 << 18
_MAX_ROW_CHARS = 700_000
_REPLY_S = 1.0
_MAX_ITEMS = 1000
_MAX_DEPTH = 8
_MAX_COLUMNS = 1000
_BATCH_ROWS = 256
_FORMATS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".arrow": "arrow",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
Reply = dict[str, Any]


class Unreadable(Exception):
    """The files are no data set that can be read here. The message says rule, value and fix."""


def start(opening: dict[str, str]) -> Callable[[list[Any]], Reply]:
    """Import the library, then close all files but those of packages and of the data set. Raises ImportError."""
    inherited = Path(opening["scratch"])
    scratch = inherited if inherited.is_dir() else Path(tempfile.mkdtemp())  # in namespaces /tmp is another one
    os.environ |= {
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # the others reserve more address space than the process may have
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "USE_TORCH": "0",
    }
    import datasets.packaged_modules.csv.csv  # all that is loaded later is loaded before the system's folders are closed
    import pyarrow.dataset

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    datasets.disable_progress_bars()
    files = close_files([Path(opening["root"])], [scratch])
    return _Service(Path(opening["path"]), opening["subset"], scratch, files).answer


class _Service:
    """One data set. A reader goes through one split at a time."""

    def __init__(self, path: Path, subset: str, scratch: Path, files: str) -> None:
        self._path = path
        self._subset = subset
        self._scratch = scratch
        self._files = files
        self._builder: Any = None
        self._data_files: Any = None
        self._features: Any = None
        self._rows: Iterator[dict[str, Any]] | None = None
        self._num_read = 0

    def answer(self, question: list[Any]) -> Reply:
        name, *facts = question
        try:
            return {"open": self._open, "rows": self._first_rows, "more": self._next_rows}[name](*facts)
        except Unreadable as error:
            return {"error": str(error)[:MAX_MESSAGE_CHARS]}
        except Exception as error:  # the library and its parsers fail in many ways over a damaged file
            where = f"{self._path} after {self._num_read} rows" if self._num_read else f"{self._path}"
            return {
                "error": f"a data set must be readable, got {_reason(error)} in {where}; check or replace that file"[
                    :MAX_MESSAGE_CHARS
                ]
            }

    def _open(self) -> Reply:
        self._builder = _builder(self._path, self._subset, self._scratch)
        self._data_files = self._builder.config.data_files
        self._features = self._builder.info.features  # of the card, if it has any
        splits = {str(split): self._columns(str(split)) for split in self._data_files}
        return {"splits": splits, "files": self._files}

    def _columns(self, split: str) -> list[str]:
        rows = self._stream(split)
        columns = rows.column_names
        if columns is None:  # a JSON file that is one list
            columns = list(next(iter(rows), {}))
        if len(columns) > _MAX_COLUMNS:
            raise Unreadable(f"a data set must have at most {_MAX_COLUMNS} columns, got {len(columns)}; drop some")
        return [str(column)[:MAX_MESSAGE_CHARS] for column in columns]

    def _stream(self, split: str) -> Any:
        """The rows of a split, by the columns that it has itself: the library takes those of the first split for all."""
        files = self._data_files[split]
        self._builder.config.data_files = type(self._data_files)({split: files})
        self._builder.info.features = self._features
        if _format_of(self._builder) == "csv":
            _read_as_text(self._builder, str(files[0]))
        return self._builder.as_streaming_dataset(split)

    def _first_rows(self, split: str, columns: Sequence[str]) -> Reply:
        config = self._builder.config
        if _format_of(self._builder) == "parquet":
            config.columns, config.batch_size = list(columns), _BATCH_ROWS
        rows = self._stream(split).select_columns(list(columns))
        self._num_read = 0
        self._rows = _single_rows(rows.iter(_BATCH_ROWS))
        return self._next_rows()

    def _next_rows(self) -> Reply:
        """Read rows for about one second, or until they fill a reply."""
        if self._rows is None:  # a new process in place of one that ended: what it had read is lost
            raise Unreadable(f"a data set must be read by one process, got another for {self._path}; try again")
        found: list[dict[str, Any] | str] = []
        num_chars, ends_at = 0, time.monotonic() + _REPLY_S
        for row in self._rows:
            self._num_read += 1
            row_chars = len(json.dumps(row))
            is_large = row_chars > _MAX_ROW_CHARS
            found.append(f"holds {row_chars} characters in the columns that are read" if is_large else row)
            num_chars += 0 if is_large else row_chars
            if num_chars > _MAX_REPLY_CHARS or time.monotonic() > ends_at:
                return {"rows": found, "is_last": False}
        return {"rows": found, "is_last": True}


def _single_rows(batches: Iterator[dict[str, list[Any]]]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for values in zip(*batch.values(), strict=True):
            yield {name: _plain(value) for name, value in zip(batch, values, strict=True)}


def _builder(path: Path, subset: str, scratch: Path) -> Any:
    """The library's builder of a file, a saved folder, or a folder in the layout of a hub. Raises Unreadable."""
    import datasets

    if glob.has_magic(str(path)):  # the library reads all paths as patterns
        raise Unreadable(f"the path of a data set must have none of * ? [ in it, got {path}; rename or move it")
    if subset and (path.is_file() or _saved_files(path)):
        raise Unreadable(f"a subset belongs to a folder in the layout of a hub, got {subset} for {path}; remove subset")
    options: dict[str, Any] = {"cache_dir": str(scratch)}
    if path.is_file():
        module, suffix = _format_of_name(path)
        options |= {"sep": "\t"} if suffix == ".tsv" else {}
        builder = datasets.load_dataset_builder(module, data_files={"train": [str(path)]}, **options)
    elif saved := _saved_files(path):
        builder = datasets.load_dataset_builder("arrow", data_files=saved, **options)
    else:
        _check_subset(path, subset)
        builder = datasets.load_dataset_builder(str(path), subset or None, **options)
    if (found := _format_of(builder)) not in _FORMATS.values():
        raise Unreadable(
            f"a data set must be one of {', '.join(dict.fromkeys(_FORMATS.values()))}, got the format {found} in {path}; "
            "convert it"
        )
    root = f"{path}{os.sep}"
    by_split: Any = builder.config.data_files
    for files in by_split.values():
        for file in files:
            if "::" in str(file) or not (str(file) == str(path) or os.path.normpath(str(file)).startswith(root)):
                raise Unreadable(
                    f"files of a data set must lie in {path}, got {str(file)[:200]!a}; correct its README.md"
                )
    return builder


def _check_subset(path: Path, subset: str) -> None:
    import datasets

    try:
        subsets = datasets.get_dataset_config_names(str(path))
        default = datasets.get_dataset_default_config_name(str(path))
    except (FileNotFoundError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "scripts" not in str(error):
            raise
        kinds = ", ".join(f"*{suffix}" for suffix in _FORMATS)
        raise Unreadable(
            f"a data set must hold {kinds} and the files that its README.md names, got none of them in {path}; complete it, or "
            "convert the data of a loading script, which is not run, to Parquet"
        ) from None
    listed = ", ".join(subsets)[:200]
    if subset and subset not in subsets:
        raise Unreadable(f"subset must be one of {listed}, got {subset}; set subset")
    if not subset and default is None and len(subsets) > 1:
        raise Unreadable(f"a data set of several subsets needs one of {listed}, got none; set subset")


def _format_of(builder: Any) -> str:
    return str(type(builder).__module__).rpartition(".")[2]


def _format_of_name(path: Path) -> tuple[str, str]:
    """(module of the library, suffix) of a file. Raises Unreadable."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    if not suffixes or suffixes[-1] not in _FORMATS:
        raise Unreadable(
            f"a file of a data set must end in one of {', '.join(_FORMATS)}, got {path}; rename or convert it"
        )
    return _FORMATS[suffixes[-1]], suffixes[-1]


def _saved_files(folder: Path) -> dict[str, list[str]]:
    """{split: Arrow files} of a folder that `save_to_disk` wrote; empty for another folder. Raises Unreadable."""
    if (folder / _SAVED_SPLITS).is_file():
        names = json.loads((folder / _SAVED_SPLITS).read_text(encoding="utf-8"))["splits"]
        return {name: files for name in names for files in _saved_files(folder / _bare(name)).values()}
    if not (folder / _SAVED).is_file():
        return {}
    state = json.loads((folder / _SAVED).read_text(encoding="utf-8"))
    files = [str(folder / _bare(entry["filename"])) for entry in state["_data_files"]]
    return {"train": files}


def _bare(name: object) -> str:
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise Unreadable(f"a saved data set must name files in its folder, got {name!a}; save it again")
    return name


def _read_as_text(builder: Any, file: str) -> None:
    """Read all columns of a CSV file as the text that stands there: `007`, `1e3`, `NA` and an empty cell stay what they are."""
    from datasets import Features, Value
    from datasets.utils.file_utils import xpandas_read_csv

    config = builder.config
    config.na_filter = config.keep_default_na = False
    config.features = None
    options = {name: value for name, value in config.pd_read_csv_kwargs.items() if name not in ("chunksize", "nrows")}
    head: Any = xpandas_read_csv(file, **options, nrows=0)
    names = [str(name) for name in head.columns]
    config.features = builder.info.features = Features({name: Value("string") for name in names})


def _plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON, texts cut just above the longest that is allowed, other types as {"": name of the type}."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value[: MAX_TEXT_CHARS + 1]
    if isinstance(value, float):
        return value if math.isfinite(value) else {"": "number that is not finite"}
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        return [_plain(item, depth + 1) for item in value[:_MAX_ITEMS]]
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        return {str(name): _plain(item, depth + 1) for name, item in list(value.items())[:_MAX_ITEMS]}
    is_time = isinstance(value, date | time_of_day | timedelta)
    return {"": "date or time" if is_time else type(value).__name__}


def _reason(error: Exception) -> str:
    """What went wrong, in one line: the library wraps what its parsers say."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
