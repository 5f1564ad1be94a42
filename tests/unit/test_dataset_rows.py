"""Rows of a data set as tasks: which column is what, what a conversation asks, and what a row says that is no task."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import TaskSourceSection
from swarm.errors import ConfigError, TaskError
from swarm.tasks.data_sets.row_store import RowStore, RowWriter
from swarm.tasks.data_sets.rows import InvalidRow, Row, RowMapping, conversation_of, suggested_columns


def mapping(known: Sequence[str], /, **settings: Any) -> RowMapping:
    section = TaskSourceSection(kind="dataset", name="mine", path=Path("x"), **settings)
    return RowMapping(section, known, "split train")


def row(values: dict[str, Any], /, **settings: Any) -> Row:
    return mapping(list(values), **settings).row(values)


def refused(values: dict[str, Any], /, **settings: Any) -> str:
    with pytest.raises((InvalidRow, TaskError)) as caught:
        row(values, **settings)
    assert "\n" not in str(caught.value)
    return f"{caught.value}; {caught.value.fix}" if isinstance(caught.value, InvalidRow) else str(caught.value)


# --- columns


def test_columns_of_the_usual_names_need_no_setting() -> None:
    assert row({"prompt": "2 + 2?", "answer": 4}) == Row("2 + 2?", "4", "exact")


def test_other_names_are_mapped() -> None:
    values = {"problem": "2 + 2?", "solution": "4", "grading": "numeric", "more": None}
    columns = {"prompt": "problem", "answer": "solution", "verifier": "grading"}
    assert mapping(list(values), columns=columns).needed == ["grading", "problem", "solution"]
    assert row(values, columns=columns) == Row("2 + 2?", "4", "numeric")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("info.question", "inner"),
        ("info.choices.1", "b"),
        ("info.choices.-1", "c"),
        ("a.b", "a column whose name has a dot"),
        ("{info.question}: {info.choices.0} or {n}?", "inner: a or 7?"),
    ],
)
def test_values_inside_of_columns_and_templates_are_mapped(path: str, text: str) -> None:
    values = {
        "info": {"question": "inner", "choices": ["a", "b", "c"]},
        "a": {"b": "a value"},
        "a.b": "a column whose name has a dot",
        "n": 7,
        "answer": "x",
    }
    assert row(values, columns={"prompt": path}).prompt == text


def test_prompt_template_takes_columns_and_mapped_fields() -> None:
    values = {"question": "2 + 2?", "hints": ["add", "count"], "answer": "4"}
    settings = {"prompt_template": "{question} Hint: {hint} {{question}}", "columns": {"hint": "hints.0"}}
    assert row(values, **settings).prompt == "2 + 2? Hint: add {question}"


@pytest.mark.parametrize(
    ("columns", "missing", "setting"),
    [
        (["question", "answer"], ["prompt"], 'columns = {prompt = "question"}'),
        (["Problem", "solution"], ["prompt", "answer"], 'columns = {prompt = "Problem", answer = "solution"}'),
        (["promt", "anwser"], ["prompt", "answer"], 'columns = {prompt = "promt", answer = "anwser"}'),
        (["the_question", "target"], ["prompt", "answer"], 'columns = {prompt = "the_question", answer = "target"}'),
        (["x", "y"], ["prompt"], 'columns = {prompt = "COLUMN"}'),
        (["text"], ["prompt", "answer"], 'columns = {prompt = "text", answer = "COLUMN"}'),
    ],
)  # fmt: skip
def test_missing_columns_are_met_with_the_mapping_that_fixes_it(
    columns: list[str], missing: list[str], setting: str
) -> None:
    assert suggested_columns(columns, missing) == setting
    values = dict.fromkeys(columns, "text") | ({} if "answer" in missing else {"answer": "4"})
    assert f"set {setting} for source 'mine'" in refused(values)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"columns": {"prompt": "qestion"}}, "got 'qestion': split train has question, answer; did you mean question?"),
        ({"columns": {"prompt": "{question} {other}"}}, "got 'other'"),
        ({"columns": {"prompt": "question", "level": "levl"}}, "got 'levl'"),
        ({"prompt_template": "{question} {hint}"}, 'got none for "hint"'),
        ({"prompt_template": "{answer}"}, "fields that a policy may see"),
        ({"columns": {"prompt": "answer"}}, "must not show the answer"),
        ({"columns": {"prompt": "{question} {answer}"}}, "must not show the answer"),
    ],
)  # fmt: skip
def test_a_wrong_mapping_is_named(settings: dict[str, Any], rule: str) -> None:
    assert rule in refused({"question": "2 + 2?", "answer": "4"}, **settings)


@pytest.mark.parametrize(
    ("settings", "mapping"),
    [
        ({"columns": {"prompt": "question"}}, 'columns = {prompt = "question", answer = "solution"}'),
        ({"columns": {"answer": "solution"}}, 'columns = {answer = "solution", prompt = "question"}'),
        (
            {"columns": {"prompt": "question", "level": "level"}},
            'columns = {prompt = "question", level = "level", answer = "solution"}',
        ),
    ],
)
def test_the_suggested_mapping_keeps_what_is_set(settings: dict[str, Any], mapping: str) -> None:
    values = {"question": "2 + 2?", "solution": "4", "level": 1}
    assert f"; set {mapping}" in refused(values, **settings)
    kept = dict(pair.split(" = ") for pair in mapping.removeprefix("columns = {").removesuffix("}").split(", "))
    assert row(values, columns={name: json.loads(column) for name, column in kept.items()}).answer == "4"


def test_other_columns_are_facts_for_reward_functions() -> None:
    columns = {"level": "level", "first": "steps.0"}
    mapped = row({"prompt": "2 + 2?", "answer": "4", "level": 3, "steps": ["add"], "other": "x"}, columns=columns)
    assert mapped == Row("2 + 2?", "4", "exact", facts={"level": 3, "first": "add"})


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ({"": "date or time"}, "got a value of type date or time"),
        (["x" * 40_000] * 2, "further columns must have at most"),
    ],
)
def test_a_fact_is_a_bounded_value_of_json(value: Any, rule: str) -> None:
    with pytest.raises(InvalidRow, match=rule):
        row({"prompt": "2 + 2?", "answer": "4", "level": value}, columns={"level": "level"})


# --- values


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (-2.5, "-2.5"), (True, "true"), (False, "false"), (" a ", " a ")]
)
def test_numbers_and_booleans_are_text(value: Any, text: str) -> None:
    assert row({"prompt": value, "answer": value}) == Row(text, text, "exact")


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (None, "got null"),
        (" ", "got an empty text"),
        ([1, 2], "a list of 2; name one of its items, as in COLUMN.0"),
        ({"a": 1}, "a table with a; name one of them, as in COLUMN.a"),
        ({"": "date or time"}, "a value of type date or time"),
        ({}, "a table with "),
        ("x" * 65_537, "at most 65536 characters"),
    ],
)
def test_a_value_that_is_no_text_is_named(value: Any, rule: str) -> None:
    assert rule in refused({"prompt": value, "answer": "4"})
    if not isinstance(value, str) or len(value) < 9:
        assert rule in refused({"prompt": "2 + 2?", "answer": value})


@pytest.mark.parametrize(
    ("values", "settings", "rule"),
    [
        ({"answer": "many"}, {"verifier": "numeric"}, "must have a number"),
        ({"answer": r"(a)\1"}, {"verifier": "regex"}, "valid pattern of RE2"),
        ({"answer": "4", "grading": "fuzzy"}, {"columns": {"verifier": "grading"}}, "exact, numeric, regex"),
        ({"answer": "so it is 4"}, {"expected": "boxed"}, "a part that expected = boxed finds, got 'so it is 4'"),
        ({"answer": "4", "q": {"z": 1}}, {"columns": {"prompt": "q.a"}}, "a row must have q.a, got none"),
        ({"answer": "4", "q": "long " * 9}, {"prompt_template": "{q}" * 2000, "columns": {"q": "q"}}, "at most 65536"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(values: dict[str, Any], settings: dict[str, Any], rule: str) -> None:
    assert rule in refused({"prompt": "2 + 2?"} | values, **settings)


def test_the_expected_answer_is_taken_out_of_a_worked_solution() -> None:
    values = {"question": "2 + 2?", "answer": "Two and two.\n#### 4"}
    settings = {
        "expected": "pattern",
        "expected_parameters": {"pattern": "#### (.+)"},
        "columns": {"prompt": "question"},
    }
    assert row(values, **settings).answer == "4"
    assert row({"prompt": "p", "answer": r"so \boxed{\frac{1}{2}}"}, expected="boxed").answer == r"\frac{1}{2}"


# --- conversations

SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}
SAY = {"role": "assistant", "content": "4"}


def test_a_conversation_gives_prompt_answer_system_and_earlier_turns() -> None:
    again = {"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"}
    for column in ("messages", "conversations"):
        assert row({column: [SYSTEM, ASK, SAY, *again]}) == Row("3 + 3?", "6", "exact", "Be brief.", (("2 + 2?", "4"),))
    assert row({"messages": [ASK, SAY]}) == Row("2 + 2?", "4", "exact")


def test_an_answer_of_its_own_comes_before_that_of_the_conversation() -> None:
    settings = {"columns": {"answer": "reward_model.ground_truth"}}
    values = {"prompt": [SYSTEM, ASK], "reward_model": {"ground_truth": "four"}}
    assert row(values, **settings) == Row("2 + 2?", "four", "exact", "Be brief.")
    assert row({"messages": [ASK, SAY], "answer": "four"}).answer == "four"


def test_other_forms_of_messages_are_read() -> None:
    shared = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    assert row({"conversations": shared}) == Row("2 + 2?", "4", "exact")
    parts = [{"role": "user", "content": [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2?"}]}, SAY]
    assert row({"messages": parts}).prompt == "2 + 2?"


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ([ASK, ASK], "in turn"),
        ([SAY], "in turn"),
        ([SYSTEM], "in turn"),
        ([ASK, SYSTEM, SAY], "got user, system, assistant"),
        ([ASK, {"role": "tool", "content": "4"}], "got user, tool"),
        ([ASK, {"role": "assistant", "content": "", "tool_calls": [{}]}], "no calls of tools"),
        ([ASK, {"role": "assistant", "content": None}], "got null"),
        ([ASK], "no conversation ends with one"),
        ([], "no conversation ends with one"),
        ("2 + 2?", 'set columns = {prompt = "messages", answer = "COLUMN"}'),
        ([{"role": "user", "content": [{"type": "image"}]}, SAY], "content of a message"),
    ],
)
def test_a_conversation_that_asks_nothing_is_named(messages: Any, rule: str) -> None:
    assert rule in refused({"messages": messages})


def test_what_stands_before_the_question_can_be_text() -> None:
    found = Row("3 + 3?", "6", "exact", "Be brief.", (("2 + 2?", "4"),))
    assert found.text(with_system=True, with_turns=True) == "Be brief.\n\nUser: 2 + 2?\n\nAssistant: 4\n\nUser: 3 + 3?"
    assert found.text(with_system=False, with_turns=False) == "3 + 3?"
    long = {"role": "user", "content": "x" * 60_000}
    assert "at most 65536 characters" in refused({"messages": [long, SAY, long, SAY]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON, JSON)
def test_any_values_are_a_task_or_a_named_mistake(prompt: Any, answer: Any) -> None:
    try:
        found = row({"messages": prompt, "answer": answer})
        assert found.prompt.strip() and found.answer.strip()
        conversation_of(prompt)
    except InvalidRow as error:
        assert str(error)


# --- settings


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        ({"kind": "dataset"}, "needs a path or a hub"),
        (
            {"kind": "jsonl", "path": "x", "columns": {"prompt": "q"}},
            'columns belongs to dataset sources, got kind jsonl; set kind = "dataset"',
        ),
        ({"kind": "code", "split": "train"}, "split belongs to dataset sources"),
        ({"kind": "jsonl", "path": "x", "sha256": "ab" * 32}, "sha256 belongs to dataset sources"),
        ({"kind": "dataset", "path": "x", "revision": "main"}, "revision belongs to hub"),
        ({"kind": "dataset", "hub": "../../etc"}, "hub"),
        ({"kind": "dataset", "hub": "a/b/c"}, "hub"),
        ({"kind": "dataset", "hub": "a/b", "revision": "../x"}, "revision"),
        ({"kind": "dataset", "path": "x", "split": "train[:10%]"}, "split"),
        ({"kind": "dataset", "path": "x", "columns": {"a b": "x"}}, "columns"),
        ({"kind": "dataset", "path": "x", "columns": {f"c{n}": "x" for n in range(17)}}, "columns"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(facts: dict[str, Any], rule: str) -> None:
    from swarm.config import parse

    with pytest.raises(ConfigError) as caught:
        parse({"tasks": {"sources": [{"name": "mine"} | facts]}})
    assert rule in str(caught.value)


# --- the prepared file


def written(path: Path, rows: int, text: str = "x") -> str:
    with RowWriter(path, 1 << 30) as writer:
        writer.begin("train")
        for number in range(rows):
            writer.add({"prompt": f"{text}{number}"})
        writer.finish({"sha256": writer.sha256})
        return writer.sha256


def test_rows_are_read_by_number_in_any_order(tmp_path: Path) -> None:
    digest = written(tmp_path / "r", 1000, "größer ")
    rows = RowStore(tmp_path / "r")
    assert [rows.row(number)["prompt"] for number in (999, 0, 500)] == ["größer 999", "größer 0", "größer 500"]
    assert (len(rows), rows.facts["sha256"]) == (1000, digest)
    for number in (-1, 1000, 10**12):
        with pytest.raises(ValueError, match="damaged"):
            rows.row(number)
    assert list(tmp_path.iterdir()) == [tmp_path / "r"], "nothing else is left"


def test_the_hash_covers_each_row_their_order_and_their_part(tmp_path: Path) -> None:
    digests = {written(tmp_path / "r", 3), written(tmp_path / "r", 4), written(tmp_path / "r", 3, "y")}
    with RowWriter(tmp_path / "r", 1 << 30) as writer:
        writer.begin("held out")
        for number in range(3):
            writer.add({"prompt": f"x{number}"})
        digests.add(writer.sha256)
    assert len(digests) == 4
    # printf 'train\n{"prompt":"x0"}\n{"prompt":"x1"}\n{"prompt":"x2"}\n' | sha256sum
    assert written(tmp_path / "r", 3) == "81f66a9383b6e62dee4c263842cfdb0993d139e5dc627b6435169fe60f9fcd8f"


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for rows in (1000, 30_000):
        tracemalloc.start()
        written(tmp_path / "r", rows, "some words that make a row longer " * 3)
        store = RowStore(tmp_path / "r")
        for number in range(0, rows, rows // 100):
            store.row(number)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        store.close()
    assert peaks[1] < peaks[0] + 100_000, peaks
    assert (tmp_path / "r").stat().st_size > 3_000_000


def test_a_writer_that_fails_leaves_the_file_that_there_was(tmp_path: Path) -> None:
    written(tmp_path / "r", 2)
    reader = RowStore(tmp_path / "r")
    told = pytest.raises(TaskError, match=r"at most 9\.31e-08 GiB, got more; set tasks\.max_data_gib")
    with told, RowWriter(tmp_path / "r", 100) as writer:
        for _ in range(9):
            writer.add({"prompt": "x" * 20})
    assert len(RowStore(tmp_path / "r")) == 2
    written(tmp_path / "r", 7)
    assert (len(RowStore(tmp_path / "r")), len(reader)) == (7, 2), "an open file stays what it was"
    assert reader.row(1) == {"prompt": "x1"}


@pytest.mark.parametrize("damage", [b"", b"x", b"\0" * 24, b"\xff" * 16 + b"swrows-1", json.dumps({}).encode() * 99])
def test_another_file_is_no_file_of_rows(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "r").write_bytes(damage)
    with pytest.raises(ValueError, match="no file of rows"):
        RowStore(tmp_path / "r")
