"""Turns a data set of Python into the lines of a JSONL file: dicts, `datasets.Dataset`, or a DataFrame."""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from swarm.errors import TaskError
from swarm.tasks.data_sets.rows import InvalidRow, conversation_of, suggested_columns

_MAX_ROWS = 1_000_000
_MESSAGES = "prompt_messages"
"""The fact that holds the conversation which a prompt was."""
_MAX_DEPTH = 16
Row = dict[str, Any]


def data_rows(
    dataset: Any, columns: Mapping[str, str], *, needs_answer: bool, read: Collection[str] | None = None
) -> tuple[str, str]:
    """(the lines of a JSONL file, the system message of all conversations).

    `columns`: {field: column}, such as {"prompt": "question"}. `read`: the fields to keep; None: all, for a function.
    Raises TaskError for what is no data set, an empty one, missing columns, and values that JSON cannot hold.
    """
    rows = [_plain_row(number, row) for number, row in enumerate(_rows_of(dataset))]
    if not rows:
        raise TaskError("a data set must have rows, got none; add rows, at least two")
    is_talk = isinstance(rows[0].get(columns.get("prompt", "prompt")), list)  # it may have the answer
    answer = ["answer"] if needs_answer else []
    _check_columns(rows, columns, ["prompt", *([] if is_talk else answer)])
    systems: set[str] = set()
    for number, row in enumerate(rows):
        row |= {name: row[column] for name, column in columns.items()}
        systems.add(_use_conversation(number, row))
    _check_columns(rows, {}, answer)
    if len(systems) > 1:
        raise TaskError("system messages of all prompts must be the same, got several; make them part of the question")
    kept = [{name: value for name, value in row.items() if read is None or name in read} for row in rows]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), systems.pop()


def _rows_of(dataset: Any) -> Iterable[Any]:
    """At most a million rows. Raises TaskError for what has none."""
    for method, words in (("to_dicts", {}), ("to_dict", {"orient": "records"})):  # of polars, of pandas
        if hasattr(dataset, "columns") and hasattr(dataset, method):
            return getattr(dataset, method)(**words)
    if isinstance(dataset, Mapping):
        parts = ", ".join(map(str, islice(dataset, 5)))
        raise TaskError(f"a data set must be one list of rows, got a dict of {parts}; choose one: dataset[...]")
    if not isinstance(dataset, Iterable) or isinstance(dataset, str | bytes):
        raise TaskError(
            f"a data set must be a list of dicts, a datasets.Dataset, a DataFrame or a path, got {type(dataset).__name__}; "
            "convert it to a list of dicts"
        )
    rows = list(islice(dataset, _MAX_ROWS + 1))
    if len(rows) > _MAX_ROWS:
        raise TaskError(f"a data set of Python must have at most {_MAX_ROWS} rows, got more; save it and give its path")
    return rows


def _plain_row(number: int, row: Any) -> Row:
    if not isinstance(row, Mapping):
        raise TaskError(f"a row must be a dict of columns, got {type(row).__name__} in row {number}; convert the rows")
    return {str(name): _plain(value, f"column {name} of row {number}", _MAX_DEPTH) for name, value in row.items()}


def _plain(value: Any, where: str, depth: int) -> Any:
    """The value as JSON has it; NaN, which tables have for what is missing, as null."""
    if depth == 0:
        raise TaskError(f"values must be nested at most {_MAX_DEPTH} deep, got more in {where}; simplify it")
    if hasattr(value, "tolist") and not isinstance(value, str | bytes):  # of numpy or torch
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise TaskError(f"values must be finite, got {value} in {where}; change it")
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(name): _plain(one, where, depth - 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, where, depth - 1) for one in value]
    raise TaskError(f"values must be text, numbers, lists or dicts, got {type(value).__name__} in {where}; convert it")


def _check_columns(rows: list[Row], columns: Mapping[str, str], needed: list[str]) -> None:
    """Raises TaskError where a row lacks a column that is needed, with the mapping that would do."""
    for number, row in enumerate(rows):
        wanted = [columns.get(name, name) for name in needed] + [*columns.values()]
        missing = [name for name in wanted if row.get(name) is None]
        if not missing:
            continue
        if missing[0] in row:
            raise TaskError(f"column {missing[0]} must have a value, got none in row {number}; fill or drop that row")
        if missing[0] in columns.values():
            raise TaskError(f"columns must name columns, got {missing[0]}: there are {', '.join(row)}; correct task")
        fields = [name for name in needed if name in missing]
        mapping = suggested_columns([*row], fields, columns).removeprefix("columns = ").replace(" = ", ": ")
        for name in (*columns, *fields):
            mapping = mapping.replace(f"{name}: ", f'"{name}": ')
        raise TaskError(
            f"a row must have {' and '.join(fields)}, got {', '.join(row) or 'nothing'} in row {number}; rename columns, or give "
            f'task={{"columns": {mapping}}}'
        )


def _use_conversation(number: int, row: Row) -> str:
    """The last question is the prompt; the answer to it is the expected one unless a column is. Returns the system message."""
    try:
        talk = conversation_of(row["prompt"])
    except InvalidRow as error:
        raise TaskError(f"{error}, in row {number}; change that row") from None
    if talk is None:
        return ""
    if talk.turns:
        raise TaskError(
            f"a conversation must have one question, got {len(talk.turns) + 1} in row {number}; save the rows as JSONL and give "
            "its path: the library `datasets` reads those of several turns"
        )
    row[_MESSAGES] = row["prompt"] if talk.answer is None else row["prompt"][:-1]
    row["prompt"] = talk.prompt
    if talk.answer is not None and row.get("answer") is None:
        row["answer"] = talk.answer
    return talk.system
