"""Task sources from Python objects: functions become files, data sets become JSONL, both in the node's folder.

    reward ─ reward_file ─▶ NAME.py ─┐
                                     ├─▶ [[tasks.sources]] as in a configuration
    dataset ─ data_rows ─▶ rows.jsonl ┘

Each file is in a folder of tasks/ that is named by the SHA-256 of its content. So a run that is resumed has the files that it
began with, a fresh start overwrites none, and others can be sent the files that a manifest names by their SHA-256.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from swarm.api.data_rows import data_rows
from swarm.api.reward_file import refusal, reward_file
from swarm.config import TaskSourceSection, resolve_paths
from swarm.errors import ConfigError, TaskError
from swarm.machine.node_folder import TASKS
from swarm.machine.safe_files import check_no_links, replace_file

_REFERENCE = re.compile(r".+:[A-Za-z_]\w*")
_FIELD = re.compile(r"\{(\w+)\}")
_PLAIN = (".jsonl", ".ndjson")


@dataclass(slots=True)
class OwnTasks:
    """Sources with rewards and data of Python. It writes nothing before `write`."""

    sources: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """As in a configuration; paths begin with `tasks/` where they are of `files`. Empty: nothing was given."""
    files: dict[str, str] = field(default_factory=dict[str, str])
    """{path relative to the node's folder: text}"""

    def section(self, folder: Path) -> dict[str, Any]:
        """The section `tasks`, where the files are or will be in `folder`."""
        if not self.sources:
            return {}
        data = {"tasks": {"sources": [source | _in_place(source, folder, self.files) for source in self.sources]}}
        resolve_paths(data, Path.cwd())
        return data

    def write(self, folder: Path) -> None:
        """Write the files that are not there, private as all of a node. Raises ConfigError where that fails."""
        try:
            for path, text in ((folder / name, text) for name, text in self.files.items()):
                for one in (folder, path.parent.parent, path.parent):
                    one.mkdir(parents=True, exist_ok=True, mode=0o700)
                check_no_links(folder, {TASKS})
                if not path.is_file() or path.read_bytes() != text.encode():
                    replace_file(path, text)
        except OSError as error:
            raise ConfigError(
                f"node.dir must be a folder that can be written, got {folder}: {error.strerror}; set node.dir"
            ) from None

    def add(self, name: str, text: str) -> str:
        """Keep a file under a name that its content decides; returns the path relative to the node's folder."""
        path = f"{TASKS}/{hashlib.sha256(text.encode()).hexdigest()[:16]}/{name}"
        self.files[path] = text
        return path


def _in_place(source: Mapping[str, Any], folder: Path, files: Mapping[str, str]) -> dict[str, Any]:
    placed: dict[str, Any] = {}
    if source.get("path") in files:
        placed["path"] = str(folder / source["path"])
    if "signals" in source:
        placed["signals"] = [
            signal | ({"function": str(folder / function)} if function.rpartition(":")[0] in files else {})
            for signal in source["signals"]
            for function in [signal.get("function", "")]
        ]
    return placed


def own_tasks(
    reward: Any, dataset: Any, task: Mapping[str, Any] | None, known: Sequence[TaskSourceSection]
) -> OwnTasks:
    """Sources of `dataset`, or those that are `known`, with `reward`. Raises TaskError or ConfigError.

    `reward`: a function, "FILE.py:NAME", the name of a signal, a list of those, or {name: one of those, or (it, weight)}.
    `dataset`: rows, or a path. `task`: further settings of its source, as in a configuration, such as {"answer": "tag"}.
    """
    tasks = OwnTasks()
    signals = None if reward is None else _signals(tasks, reward)
    if dataset is None:
        if task is not None:
            raise ConfigError(
                f"task says how a dataset is read, got {dict(task)} and no dataset; give dataset, or tasks={{}}"
            )
        if signals is not None:
            shown = [one.model_dump(mode="json", exclude_unset=True) for one in known]
            tasks.sources = [source | {"signals": signals} for source in shown]
        return tasks
    given = {"name": "dataset", **(task or {})} | ({} if signals is None else {"signals": signals})
    has_path = isinstance(dataset, str | PathLike)
    tasks.sources = [_of_path(Path(dataset), given) if has_path else _of_rows(tasks, dataset, given)]
    return tasks


def _of_path(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        raise TaskError(
            f"a dataset must be rows, or a file or folder that exists, got {path}; for one of a hub set "
            'tasks={"sources": [{"kind": "dataset", "name": "mine", "hub": "ORG/NAME"}]}'
        )
    kind = "jsonl" if path.suffix in _PLAIN and not given.get("columns") else "dataset"
    return {"kind": kind, "path": str(path.absolute()), **given}


def _of_rows(tasks: OwnTasks, dataset: Any, given: dict[str, Any]) -> dict[str, Any]:
    columns = given.pop("columns", {})
    if not isinstance(columns, Mapping) or not all(isinstance(one, str) for one in columns.values()):
        raise ConfigError(f'columns must be names by field, got {columns}; write {{"prompt": "question"}}')
    functions = ["function" in one for one in given.get("signals", [])]
    asked = _FIELD.findall(str(given.get("prompt_template", "")))
    read = None if any(functions) else {"prompt", "answer", "verifier", *asked}  # only functions read further fields
    text, system = data_rows(dataset, columns, needs_answer=not (functions and all(functions)), read=read)
    if system:
        given.setdefault("system", system)
    return {"kind": "jsonl", "path": tasks.add("rows.jsonl", text), **given}


def _signals(tasks: OwnTasks, reward: Any) -> list[dict[str, Any]]:
    """As in a configuration."""
    if isinstance(reward, Mapping):
        named = [(str(name), *_weighted(str(name), item)) for name, item in reward.items()]
    else:
        items = reward if isinstance(reward, list | tuple) else [reward]
        named = [(None, item, None) for item in items]
    if not named:
        raise ConfigError("reward must be a function or several, got none; leave it out for the verifier's reward")
    return [_signal(tasks, name, item, weight) for name, item, weight in named]


def _weighted(name: str, item: Any) -> tuple[Any, float | None]:
    if not isinstance(item, tuple):
        return item, None
    if len(item) != 2 or isinstance(item[1], bool) or not isinstance(item[1], int | float) or not item[1] > 0:
        raise ConfigError(f"a reward with a weight must be (function, weight > 0), got {item!r} for {name}; correct it")
    return item[0], float(item[1])


def _signal(tasks: OwnTasks, name: str | None, item: Any, weight: float | None) -> dict[str, Any]:
    signal: dict[str, Any] = {} if weight is None else {"weight": weight}
    if name is not None:
        signal["name"] = name
    if isinstance(item, str):
        if _REFERENCE.fullmatch(item):
            return signal | {"function": item}
        if name not in (None, item):
            raise ConfigError(
                f"a built-in signal has its own name, got {item} for {name}; write {{{item!r}: {item!r}}}"
            )
        return signal | {"name": item}
    if not callable(item):
        raise refusal(name or "reward", f"it is a {type(item).__name__}, not a function")
    path = tasks.add(f"{getattr(item, '__name__', 'reward')}.py", reward_file(item))
    return signal | {"function": f"{path}:{item.__name__}"}
