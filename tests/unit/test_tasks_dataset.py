"""Data sets as task sources, read by the real library in its confined process, and from a hub on loopback."""

import csv
import gzip
import hashlib
import json
import logging
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.sandbox import line_process
from swarm.tasks.data_sets import reader as dataset_reader
from swarm.tasks.data_sets import source as dataset_source
from swarm.tasks.data_sets.source import DatasetSource, is_at_hand
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import EVALUATION_SEED, score
from swarm.types import PLAIN, PromptContext
from tests.unit.local_http import Received, local_http

pytestmark = pytest.mark.extra("datasets")

ROWS = [{"question": f"{number} + {number}?", "answer": str(2 * number), "id": number} for number in range(25)]
COLUMNS = {"prompt": "question"}
SHA256 = "ae860bc3be3ad801"
"""Beginning of the SHA-256 of "train" and of {"answer":"0","prompt":"0 + 0?","verifier":"exact"}, …, a line each."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(dataset_source, "_cache", lambda: folder)
    return folder


class _InThisProcess:
    """The reader without a process of its own, whose start takes a second or more."""

    def __init__(self, module: str, opening: dict[str, str], confinement: object) -> None:
        import datasets

        assert module == dataset_reader.__name__
        datasets.disable_progress_bars()
        path, scratch = Path(opening["path"]), Path(opening["scratch"])
        self._service = dataset_reader._Service(path, opening["subset"], scratch, "")

    def ask(self, question: list[Any], time_budget_s: float) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(json.dumps(self._service.answer(question)))
        return reply

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_source, "LineProcess", _InThisProcess)


@pytest.fixture
def confined(in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real process."""
    monkeypatch.setattr(dataset_source, "LineProcess", line_process.LineProcess)


def section(path: Path | None = None, /, **settings: Any) -> TaskSourceSection:
    return TaskSourceSection.model_validate(
        {"kind": "dataset", "name": "sums", "path": path, "columns": COLUMNS} | settings
    )


def source(path: Path | None = None, /, **settings: Any) -> DatasetSource:
    return DatasetSource(section(path, **settings), TasksSection())


def refused(path: Path | None = None, /, **settings: Any) -> str:
    with pytest.raises(TaskError) as caught:
        source(path, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def table(path: Path, rows: list[dict[str, Any]], separator: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    return path


def packed(path: Path) -> Path:
    result = path.with_name(f"{path.name}.gz")
    result.write_bytes(gzip.compress(path.read_bytes()))
    return result


def saved(path: Path, rows: list[dict[str, Any]], *, splits: bool) -> Path:
    import datasets

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list(rows)
    (datasets.DatasetDict(train=made, test=made.select(range(5))) if splits else made).save_to_disk(str(path))
    return path


CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: other
  data_files: other/*
---
# A card
"""


def hub_layout(path: Path, card: str = CARD) -> Path:
    parquet(path / "main" / "train-00000-of-00001.parquet", ROWS)
    parquet(path / "main" / "test-00000-of-00001.parquet", ROWS[:5])
    parquet(path / "other" / "train-00000-of-00001.parquet", ROWS[5:])
    if card:
        (path / "README.md").write_text(card)
    return path


# --- formats

FORMATS: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda folder: jsonl(folder / "a.jsonl", ROWS),
    "jsonl.gz": lambda folder: packed(jsonl(folder / "a.jsonl", ROWS)),
    "csv": lambda folder: table(folder / "größer 1.csv", ROWS),
    "tsv": lambda folder: table(folder / "a.tsv", ROWS, "\t"),
    "parquet": lambda folder: parquet(folder / "a.parquet", ROWS, compression="zstd", row_group_size=7),
    "saved": lambda folder: saved(folder / "saved", ROWS, splits=False),
    "saved splits": lambda folder: saved(folder / "saved", ROWS, splits=True),
}


@pytest.mark.parametrize("name", ["jsonl.gz", "csv", "parquet", "saved splits"])
def test_formats_are_read_in_the_confined_process(name: str, tmp_path: Path, confined: None) -> None:
    assert source(FORMATS[name](tmp_path)).sha256.startswith(SHA256)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_tasks_and_the_same_hash(name: str, tmp_path: Path) -> None:
    sums = source(FORMATS[name](tmp_path))
    assert sums.sha256.startswith(SHA256)
    assert [sums.task(EVALUATION_SEED, index).prompt for index in range(4)] == [
        "0 + 0?",
        "10 + 10?",
        "20 + 20?",
        "0 + 0?",
    ]
    walked = [sums.task(16, index).prompt for index in range(22)]
    assert walked[:5] == ["13 + 13?", "7 + 7?", "2 + 2?", "21 + 21?", "15 + 15?"], "in the order of a JSONL file"
    assert sorted(walked) == sorted(f"{n} + {n}?" for n in range(25) if n % 10)
    task = sums.task(16, 0)
    assert (score(task, "26"), score(task, "27"), task.context) == (1.0, 0.0, PLAIN)


def test_a_folder_in_the_layout_of_a_hub_has_subsets_and_splits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = hub_layout(tmp_path / "hub")
    caplog.set_level(logging.INFO)
    sums = source(folder, subset="main", held_out_split="test")
    assert (sums.num_held_out, sums.task(EVALUATION_SEED, 4).prompt) == (5, "4 + 4?")
    assert len({sums.task(16, index).prompt for index in range(25)}) == 25, "no row of the training split is held out"
    assert "25 rows of split train for training, split test held out (5 rows)" in caplog.text
    unsplit = source(folder, subset="main")
    assert unsplit.config_digest != sums.config_digest
    assert "every tenth row held out (3 rows) (there is also test: set held_out_split)" in caplog.text
    assert "needs one of main, other, got none; set subset" in refused(folder)
    assert "must be one of main, other, got mian; set subset" in refused(folder, subset="mian")
    assert "split must be one of train, test, got valid, which is none of them; set split" in refused(
        folder, subset="main", split="valid"
    )
    assert "held_out_split must be one of train, test" in refused(folder, subset="main", held_out_split="tset")
    assert "another than split" in refused(folder, subset="main", held_out_split="train")


def test_a_folder_without_a_card_is_read_by_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    parquet(folder / "data" / "train-00000-of-00002.parquet", ROWS[:13])
    parquet(folder / "data" / "train-00001-of-00002.parquet", ROWS[13:])
    parquet(folder / "data" / "test-00000-of-00001.parquet", ROWS[:5])
    assert source(folder).sha256.startswith(SHA256)
    (folder / "data" / "train-00000-of-00002.parquet").unlink()
    (folder / "data" / "train-00001-of-00002.parquet").unlink()
    assert source(folder).num_held_out == 1, "test is the only split"


def test_splits_may_have_their_answer_in_different_places(tmp_path: Path) -> None:
    def said(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}"}]

    parquet(tmp_path / "set" / "train.parquet", [{"messages": said(number)} for number in range(9)])
    parquet(tmp_path / "set" / "test.parquet", [{"messages": said(number), "answer": "7"} for number in range(3)])
    both = source(tmp_path / "set", columns={}, held_out_split="test")
    assert (both.answer(EVALUATION_SEED, 0), both.answer(16, 0)) == ("7", both.task(16, 0).prompt[:-1])


def test_values_of_a_csv_file_stay_what_they_are(tmp_path: Path) -> None:
    rows = [
        {"prompt": text, "answer": text} for text in ("007", "1e3", "NA", "1,000", 'a "quoted"\nline', "true", "größer")
    ]
    odd = source(table(tmp_path / "a.csv", rows), columns={})
    assert sorted(odd.answer(16, index) for index in range(6)) == sorted(row["answer"] for row in rows[1:])


def test_a_conversation_asks_its_last_question(tmp_path: Path) -> None:
    def rows(*heads: list[dict[str, str]]) -> list[dict[str, Any]]:
        said = ({"role": "user", "content": f"{n}?"} for n in range(12))
        return [
            {"messages": [*heads[n % len(heads)], ask, {"role": "assistant", "content": f"{n}"}]}
            for n, ask in enumerate(said)
        ]

    system = {"role": "system", "content": "Be brief."}
    turn = [{"role": "user", "content": "0?"}, {"role": "assistant", "content": "0"}]
    shared = source(parquet(tmp_path / "a.parquet", rows([system, *turn])), columns={})
    task = shared.task(EVALUATION_SEED, 1)
    assert (task.prompt, shared.answer(EVALUATION_SEED, 1)) == ("10?", "10")
    assert task.context == PromptContext("Be brief.", (("0?", "0"),))
    own = source(jsonl(tmp_path / "b.jsonl", rows([system, *turn], [system])), columns={})
    first, second = own.task(EVALUATION_SEED, 0), own.task(16, 0)
    assert first.context == second.context == PromptContext("Be brief."), "all rows have it"
    assert first.prompt == "User: 0?\n\nAssistant: 0\n\nUser: 0?"
    settings = {"columns": {}, "system": "Be kind.", "examples": [{"prompt": "1?", "answer": "1"}]}
    mixture = TaskMixture(TasksSection(sources=(section(tmp_path / "a.parquet", **settings),)))
    told = mixture.sources["sums"].task(16, 0)
    assert told.context == PromptContext("Be kind.", (("1?", "1"), ("0?", "0"))), "settings come first"
    assert score(told, mixture.sources["sums"].answer(16, 0)) == 1.0


# --- what is kept


def test_a_prepared_set_is_read_once_until_a_file_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    first = source(path)
    with monkeypatch.context() as patch:
        patch.setattr(dataset_source, "_Reader", None)  # whoever reads the files again now fails
        assert source(path).config_digest == first.config_digest
    jsonl(path, ROWS[:20])
    assert source(path).config_digest != first.config_digest
    assert first.task(EVALUATION_SEED, 2).prompt == "20 + 20?", "a node that runs keeps its rows"
    (damaged,) = cache.glob("*.rows")
    damaged.write_bytes(b"damaged")
    assert source(path).num_held_out == 2


def test_nodes_of_one_machine_prepare_a_set_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, started = jsonl(tmp_path / "a.jsonl", ROWS), []
    real = dataset_source._Reader

    def counted(*facts: Any) -> Any:
        started.append(facts)
        return real(*facts)

    monkeypatch.setattr(dataset_source, "_Reader", counted)
    digests: list[str] = []
    threads = [threading.Thread(target=lambda: digests.append(source(path).config_digest)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 4 and len(set(digests)) == 1
    assert len(started) == 1


def test_further_columns_are_facts_of_the_task(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = DatasetSource(section(path, columns=COLUMNS | {"number": "id"}), TasksSection())
    task = source.task(EVALUATION_SEED, 1)
    assert (task.prompt, task.facts) == ("10 + 10?", {"number": 10})
    assert source.config_digest != DatasetSource(section(path), TasksSection()).config_digest


def test_the_digest_covers_rows_verifier_and_mapping_but_not_the_name(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    digests = [
        source(path, **more).config_digest
        for more in ({}, {"label": "other"}, {"verifier": "numeric"}, {"prompt_template": "{prompt}!"})
    ]
    assert digests[0] == digests[1] == "e597bcafbf5af9a7"
    assert len(set(digests)) == 3


def test_other_rows_than_those_of_the_pin_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    pinned = source(path).sha256
    assert source(path, sha256=pinned).sha256 == pinned
    jsonl(path, ROWS[:-1])
    told = refused(path, sha256=pinned)
    assert f"must have SHA-256 {pinned}, got " in told
    assert f"of {path} (21 + 3 rows); get the files that the founder has" in told
    mixture_error = "no task source works: the tasks of 'sums' must have SHA-256"
    with pytest.raises(TaskError, match=mixture_error):
        TaskMixture(TasksSection(sources=(section(path, sha256=pinned),)))


# --- bad input


@pytest.mark.parametrize(
    ("rows", "settings", "rule"),
    [
        (
            [{"question": "a", "solution": "b"}] * 3,
            {"columns": {}},
            'set columns = {prompt = "question", answer = "solution"}',
        ),
        (
            [{"question": "a", "solution": "b"}] * 3,
            {"columns": {"prompt": "question"}},
            'no conversation ends with one in row 0 of split train; set columns = {prompt = "question", answer = "solution"}, '
            "or set skip_invalid = true for source",
        ),
        (
            [*ROWS[:3], {"question": "a", "answer": None}],
            {},
            "got null in row 3 of split train; correct it, or set skip_invalid = true",
        ),
        (
            [*ROWS[:3], {"question": "a", "answer": "b"}],
            {"verifier": "numeric"},
            "such as 12, -2.5 or 3/4, got 'b' in row 3",
        ),
        (
            [*ROWS[:3], {"question": "x" * 65_537, "answer": "b"}],
            {},
            "prompt must have at most 65536 characters, got more in row 3",
        ),
        (
            [*ROWS[:3], {"question": ["x" * 65_000] * 20, "answer": "b"}],
            {"columns": {"prompt": "question.0"}},
            "in row 0 of split train",
        ),
        (ROWS[:1], {}, "at least one row to train on and one to hold out, got 0 and 1; add rows"),
        (
            [{"question": "a", "answer": None}] * 3,
            {"skip_invalid": True},
            "left 3 out, the first because answer must be",
        ),
        (ROWS, {"subset": "main"}, "a subset belongs to a folder"),
        (ROWS, {"split": "test"}, "split must be one of train, got test, which is none of them; set split"),
        (ROWS, {"parameters": {"split": "test"}}, "takes no parameters, got split; remove them"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_rows_that_are_no_tasks_are_named(tmp_path: Path, rows: Any, settings: dict[str, Any], rule: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows)
    if "question.0" in str(settings):
        path = parquet(tmp_path / "a.parquet", [{"question": ["x"], "answer": "b"}, rows[-1]])
        rule = "a row must be smaller, got one that holds"
    assert rule in refused(path, **settings)


def test_rows_that_are_no_tasks_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rows = [*ROWS[:3], {"question": "a", "answer": None}, *ROWS[3:]]
    whole, part = (
        source(jsonl(tmp_path / "a.jsonl", ROWS)),
        source(jsonl(tmp_path / "b.jsonl", rows), skip_invalid=True),
    )
    assert whole.sha256 == part.sha256
    assert "1 row left out (answer must be a text or a number, got null in row 3 of split train)" in caplog.text


def read(path: Path, subset: str = "", question: str = "open") -> str:
    """What the reader says of files."""
    scratch = path.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    opening = {"path": str(path), "subset": subset, "scratch": str(scratch)}
    process = _InThisProcess(dataset_reader.__name__, opening, None)
    reply = process.ask(["open"], 1.0)
    if question == "rows" and "error" not in reply:
        ((split, columns),) = reply["splits"].items()
        reply = process.ask(["rows", split, columns], 1.0)
    assert "\n" not in str(reply.get("error"))
    return str(reply.get("error") or reply)


def test_files_that_are_damaged_are_named(tmp_path: Path, confined: None) -> None:
    whole = parquet(tmp_path / "a.parquet", ROWS).read_bytes()
    for content in (b"", b"PAR1", whole[:-20], whole[:100] + whole[120:]):
        (tmp_path / "cut.parquet").write_bytes(content)
        assert "a data set must be readable, got " in (told := read(tmp_path / "cut.parquet", question="rows"))
        assert f"in {tmp_path / 'cut.parquet'}; check or replace that file" in told
    wrong = {
        "a.jsonl": b'{"a": \n',
        "b.csv": b'a,b\n"1,2\n',
        "c.arrow": b"ARROW1",
        "d.jsonl.gz": b"\x1f\x8b\0",
        "e.csv": b"",
        "f.json": b"7",
    }
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
        assert "a data set must be readable" in read(tmp_path / name, question="rows"), name
    assert "must be readable" in refused(tmp_path / "cut.parquet"), "and so from the confined process"


def test_nothing_but_data_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(ROWS))
    (tmp_path / "a.txt").write_text("text")
    for name in ("a.pkl", "a.txt"):
        assert "must end in one of .parquet, .csv" in read(tmp_path / name)
    script = tmp_path / "scripted"
    script.mkdir()
    (script / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "convert the data of a loading script, which is not run, to Parquet" in read(script)
    assert not (tmp_path / "ran").exists()
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "train.txt").write_text("text")
    assert "must be one of parquet, csv, json, arrow, got the format text" in read(lines)


def test_a_part_of_a_folder_says_what_is_missing(tmp_path: Path) -> None:
    folder = hub_layout(tmp_path / "hub")
    shutil.rmtree(folder / "main")
    assert "and the files that its README.md names, got none of them" in read(folder, "other")


def test_a_missing_place_is_named(tmp_path: Path) -> None:
    assert f"an existing file or folder of at most 10000 files, got {tmp_path / 'none'}: No such file" in refused(
        tmp_path / "none"
    )
    assert "must have none of * ? [ in it" in read(jsonl(tmp_path / "a[1].jsonl", ROWS))
    (tmp_path / "empty").mkdir()
    assert "must hold *.parquet, *.csv" in refused(tmp_path / "empty")


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_source.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'datasets>=5.0'" in refused(jsonl(tmp_path / "a.jsonl", ROWS))


def test_a_set_that_is_larger_than_allowed_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(TaskError, match=r"at most 9\.99e-07 GiB, got more; set tasks\.max_data_gib"):
        DatasetSource(section(path), TasksSection(max_data_gib=1e-6))
    assert not list(cache.glob("*.rows")) and not list(cache.glob(".*.new"))


# --- a stranger's data set

SECRET = "the passphrase of my wallet"


@pytest.mark.parametrize(
    "place",
    [
        "{outside}/secret.csv",
        "../outside/secret.csv",
        "file://{outside}/secret.csv",
        "https://127.0.0.1:1/a.csv",
        "zip://a.csv::{outside}/a.zip",
    ],
)
def test_a_card_leads_to_no_file_and_no_address_outside_of_its_folder(
    tmp_path: Path, place: str, confined: None
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "set"
    outside.mkdir()
    table(outside / "secret.csv", [{"question": SECRET, "answer": SECRET}] * 3)
    parquet(folder / "a.parquet", ROWS)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: {place.format(outside=outside)}\n---\n"
    )
    told = refused(folder)
    assert SECRET not in told and ("must lie in" in told or "must hold" in told or "readable" in told)


def test_without_namespaces_the_files_are_closed_too(
    tmp_path: Path, confined: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(memory: int, files: int, namespaces: str, readable: tuple[str, ...]) -> line_process.Confinement:
        assert namespaces == "if possible"
        return line_process.Confinement(memory, files, "none", readable)

    monkeypatch.setattr(dataset_source, "Confinement", without)
    assert source(parquet(tmp_path / "a.parquet", ROWS)).sha256.startswith(SHA256)
    folder, secret = tmp_path / "set", table(tmp_path / "secret.csv", [{"question": SECRET, "answer": SECRET}] * 3)
    folder.mkdir()
    (folder / "train.csv").symlink_to(secret)
    assert SECRET not in (told := refused(folder))
    assert "PermissionError" in told


def test_a_link_leads_to_no_file_outside_of_its_folder(tmp_path: Path, confined: None) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    secret = table(tmp_path / "secret.csv", [{"question": SECRET, "answer": SECRET}] * 3)
    (folder / "train.csv").symlink_to(secret)
    assert SECRET not in refused(folder)
    saved_set = saved(tmp_path / "saved", ROWS, splits=False)
    state = json.loads((saved_set / "state.json").read_text())
    (saved_set / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": "../secret.arrow"}]}))
    assert "must name files in its folder, got '../secret.arrow'" in refused(saved_set)


def test_a_reader_that_was_started_again_does_not_end_the_set_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _InThisProcess.ask

    def restarted(self: _InThisProcess, question: list[Any], time_budget_s: float) -> dict[str, Any]:
        if question == ["more"]:
            self._service = dataset_reader._Service(tmp_path / "a.jsonl", "", tmp_path, "")
        return real(self, question, time_budget_s)

    monkeypatch.setattr(_InThisProcess, "ask", restarted)
    monkeypatch.setattr(dataset_reader, "_MAX_REPLY_CHARS", 100)
    assert "must be read by one process" in refused(jsonl(tmp_path / "a.jsonl", ROWS))
    monkeypatch.setattr(_InThisProcess, "ask", real)
    assert source(tmp_path / "a.jsonl").sha256.startswith(SHA256), "in many small replies"


def test_dates_are_refused_with_the_way_out(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": "2020-01-01"} for n in range(3)]
    assert "got a value of type date or time; store it as text in row 0" in refused(jsonl(tmp_path / "a.jsonl", rows))
    assert source(table(tmp_path / "a.csv", rows)).answer(16, 0) == "2020-01-01"


def test_a_file_that_ends_or_holds_up_its_process_costs_that_source_alone(
    tmp_path: Path, confined: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    monkeypatch.setattr(dataset_source, "_REPLY_BUDGET_S", 0.0)
    told = refused(path)
    assert "must be readable within 4 GiB of memory and 0 s per part, got: took longer than 0 s" in told
    monkeypatch.setattr(dataset_source, "_REPLY_BUDGET_S", 60.0)
    monkeypatch.setattr(dataset_source, "_MEMORY_BYTES", 64 << 20)
    assert "convert them to Parquet with small row groups" in refused(path)


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"splits": {"train": "question"}},
        {"splits": [1]},
        {"rows": 7},
        {"splits": {"train": ["question", "answer"]}, "rows": [7]},
    ],
)
def test_a_reader_that_answers_anything_is_not_believed(
    tmp_path: Path, confined: None, monkeypatch: pytest.MonkeyPatch, reply: Any
) -> None:
    monkeypatch.setattr(line_process.LineProcess, "ask", lambda *_: reply)
    assert "a reply without" in refused(jsonl(tmp_path / "a.jsonl", ROWS))


# --- hubs

COMMIT, LATER = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return tmp_path / "hub-cache"


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, folder: Path, sizes: dict[str, int] | None = None) -> Iterator[Received]:
    """A hub that has the files of a folder as owner/sums at commit COMMIT; `sizes` are those that it claims."""
    from huggingface_hub import constants

    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    claimed = {name: path.stat().st_size for name, path in files.items()} | (sizes or {})

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        path = path.partition("?")[0]
        if path.startswith(f"/api/datasets/owner/sums/tree/{COMMIT}"):
            entries = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in claimed.items()]
            return 200, json.dumps(entries).encode(), {}
        if path in (
            "/api/datasets/owner/sums",
            "/api/datasets/owner/sums/revision/main",
            f"/api/datasets/owner/sums/revision/{COMMIT}",
        ):
            listed = [{"rfilename": name, "size": size} for name, size in claimed.items()]
            return 200, json.dumps({"id": "owner/sums", "sha": COMMIT, "siblings": listed}).encode(), {}
        _, _, name = path.partition(f"/resolve/{COMMIT}/")
        if path.startswith("/datasets/owner/sums/resolve/") and name in files:
            etag = hashlib.sha1(name.encode()).hexdigest()
            return 200, files[name].read_bytes(), {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        missing = "RevisionNotFound" if "/owner/sums/" in path else "RepoNotFound"
        return 404, b"{}", {"X-Error-Code": missing}

    with local_http(answer) as received:
        monkeypatch.setattr(constants, "ENDPOINT", received.address)
        template = received.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield received


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_set_of_a_hub_is_downloaded_pinned_and_then_needs_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_cache: Path, confined: None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = hub_layout(tmp_path / "set")
    (folder / "sums.py").write_text("raise SystemExit")
    caplog.set_level(logging.INFO)
    settings: dict[str, Any] = {"hub": "owner/sums", "subset": "main", "held_out_split": "test"}
    pinned = section(**settings, revision=COMMIT)
    with hub(monkeypatch, folder) as received:
        assert not is_at_hand(pinned)
        newest = source(**settings)
        assert (newest.commit, newest.num_held_out) == (COMMIT, 5)
        assert f"revision main of data set owner/sums is commit {COMMIT}" in caplog.text
        fetched = {path.rpartition("/")[2] for _, path, _ in received.requests if "/resolve/" in path}
        assert "sums.py" not in fetched and "README.md" in fetched
        assert newest.sha256 == source(folder, subset="main", held_out_split="test").sha256
        assert DatasetSource(pinned, TasksSection()).config_digest == newest.config_digest
    assert is_at_hand(pinned)
    offline(monkeypatch)
    shutil.rmtree(hub_cache)
    assert DatasetSource(pinned, TasksSection()).sha256 == newest.sha256, "it is prepared already"


def test_what_a_hub_has_not_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_cache: Path) -> None:
    folder = hub_layout(tmp_path / "set")
    with hub(monkeypatch, folder):
        assert "hub must name a data set of the hub, got owner/other" in refused(hub="owner/other")
        assert "got owner/other" in refused(hub="owner/other", revision=COMMIT)
        told = refused(hub="owner/sums", revision=LATER)
        assert LATER in told and "owner/sums" in told
        moved = refused(hub="owner/sums", subset="main", sha256="ab" * 32)
        assert f"of owner/sums at {COMMIT}" in moved and "main of the hub may have moved: set revision" in moved
    offline(monkeypatch)
    for settings in ({}, {"revision": COMMIT}):
        told = refused(hub="owner/none", **settings)
        assert "at hand or on a hub that can be reached, got no copy of owner/none" in told
        assert "unset HF_HUB_OFFLINE, or set path to a copy" in told


def test_a_set_that_is_too_large_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_cache: Path
) -> None:
    folder = hub_layout(tmp_path / "set")
    for sizes, rule in (
        (
            {"main/train-00000-of-00001.parquet": 6 << 30},
            r"<= 5 GiB, got 4 files and 6\.0 GiB of owner/sums; set tasks\.max_data_gib",
        ),
        ({f"{n}.parquet": 1 for n in range(2001)}, "at most 2000 files"),
    ):
        with hub(monkeypatch, folder, sizes) as received, pytest.raises(TaskError, match=rule):
            source(hub="owner/sums", revision=COMMIT)
        assert not [path for _, path, _ in received.requests if "/resolve/" in path]
    two = tuple(section(hub="owner/sums", revision=COMMIT, label=label) for label in ("one", "other"))
    told = pytest.raises(TaskError, match=r"<= 2\.5 GiB, got 4 files and 3\.0 GiB")
    with hub(monkeypatch, folder, {"main/train-00000-of-00001.parquet": 3 << 30}), told:
        DatasetSource(two[0], TasksSection(sources=two))
    with (
        hub(monkeypatch, folder, {"main/train-00000-of-00001.parquet": 1 << 60}),
        pytest.raises(TaskError, match="must fit on the disk"),
    ):
        DatasetSource(section(hub="owner/sums", revision=COMMIT), TasksSection(max_data_gib=1e12))


def test_a_name_of_a_hub_is_no_folder_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_cache: Path) -> None:
    parquet(tmp_path / "owner" / "sums" / "train.parquet", ROWS)
    monkeypatch.chdir(tmp_path)
    offline(monkeypatch)
    assert "got no copy of owner/sums" in refused(hub="owner/sums", revision=COMMIT)
    assert source(Path("owner/sums")).sha256.startswith(SHA256), "but as a path it is"
