"""JSONL task files: split, streams, digests, and what a malformed line says."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import RewardSignalSection, TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.tasks.jsonl_source import JsonlSource, shuffled_position
from swarm.tasks.task_source import EVALUATION_SEED, INDEX_SPAN, MAX_SEED, SUPERVISED_SEED, score

NUM_LINES = 25


def write(path: Path, rows: list[Any]) -> TaskSourceSection:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return TaskSourceSection(kind="jsonl", name="mine", path=path)


@pytest.fixture
def source(tmp_path: Path) -> JsonlSource:
    return JsonlSource(
        write(tmp_path / "t.jsonl", [{"prompt": f"p{i}", "answer": i} for i in range(NUM_LINES)]), TasksSection()
    )


def prompts(source: JsonlSource, seed: int, count: int) -> list[str]:
    return [source.task(seed, index).prompt for index in range(count)]


def test_every_tenth_line_is_held_out_and_nothing_else(source: JsonlSource) -> None:
    assert source.num_held_out == 3
    assert prompts(source, EVALUATION_SEED, 3) == ["p0", "p10", "p20"]
    assert not set(prompts(source, EVALUATION_SEED, 100)) & set(prompts(source, 16, 100))


@pytest.mark.parametrize("seed", [SUPERVISED_SEED, 16, 17, MAX_SEED])
def test_a_stream_visits_every_training_line_once_per_pass(source: JsonlSource, seed: int) -> None:
    num_training = NUM_LINES - 3
    first, second = prompts(source, seed, num_training), prompts(source, seed, 2 * num_training)[num_training:]
    assert len(set(first)) == num_training
    assert first == second


def test_streams_differ_in_order(source: JsonlSource) -> None:
    assert len({tuple(prompts(source, seed, 22)) for seed in range(16, 26)}) > 5


def test_the_order_of_a_stream_is_golden(source: JsonlSource) -> None:
    assert prompts(source, 16, 5) == ["p13", "p7", "p2", "p21", "p15"]


@given(st.integers(0, MAX_SEED), st.integers(1, 300))
def test_positions_are_a_permutation(seed: int, count: int) -> None:
    assert sorted(shuffled_position(seed, index, count) for index in range(count)) == list(range(count))


def test_the_last_reference_of_the_last_stream_is_cheap_and_valid(source: JsonlSource) -> None:
    task = source.task(MAX_SEED, INDEX_SPAN - 1)
    assert score(task, source.answer(MAX_SEED, INDEX_SPAN - 1)) == 1.0


def test_the_digest_covers_content_and_default_verifier_but_not_the_name(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    section = write(tmp_path / "t.jsonl", rows)
    moved = write(tmp_path / "u.jsonl", rows).model_copy(update={"label": "other"})
    numeric = section.model_copy(update={"verifier": "numeric"})
    changed = write(tmp_path / "v.jsonl", [*rows[:1], {"prompt": "b", "answer": "3"}])
    digests = [JsonlSource(item, TasksSection()).config_digest for item in (section, moved, numeric, changed)]
    assert digests[0] == digests[1] == "790643251366d340"
    assert len(set(digests)) == 3


def test_a_line_may_name_its_own_verifier(tmp_path: Path) -> None:
    rows = [{"prompt": "held", "answer": "x"}, {"prompt": "q", "answer": "1000", "verifier": "numeric"}]
    task = JsonlSource(write(tmp_path / "t.jsonl", rows), TasksSection()).task(16, 0)
    assert score(task, "it is 1,000") == 1.0
    assert score(task, "it is 1,001") == 0.0


def test_unusual_line_ends_inside_texts_do_not_split_a_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b", "answer": "1"}\r\n\r\n{"prompt": "c", "answer": "2"}'.encode())
    source = JsonlSource(TaskSourceSection(kind="jsonl", name="mine", path=path), TasksSection())
    assert prompts(source, EVALUATION_SEED, 1) == ["a\u2028b"]
    assert prompts(source, 16, 1) == ["c"]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b"{", "one JSON object"),
        (b"\xff\xfe", "one JSON object"),
        (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", "one JSON object"),
        (b"[" * 100_000, "one JSON object"),
        (b"[1]", 'text "prompt"'),
        (b'{"prompt": "a \\ud800 b", "answer": 1}', "one JSON object"),
        (b'{"prompt": "a", "answer": "\\uDFFF"}', "one JSON object"),
        (b'{"prompt": " ", "answer": 1}', 'text "prompt"'),
        (b'{"prompt": 1, "answer": 1}', 'text "prompt"'),
        (b'{"prompt": "' + b"a" * 65_537 + b'", "answer": 1}', "at most 65536 characters, got 65537"),
        (b'{"prompt": "a"}', '"answer"'),
        (b'{"prompt": "a", "answer": true}', '"answer"'),
        (b'{"prompt": "a", "answer": ""}', '"answer"'),
        (b'{"prompt": "a", "answer": 1, "verifer": "exact"}', "verifer"),
        (b'{"prompt": "a", "answer": 1, "verifier": "fuzzy"}', "exact, numeric, regex"),
        (b'{"prompt": "a", "answer": 1, "verifier": []}', "exact, numeric, regex"),
        (rb'{"prompt": "a", "answer": "(a)\\1", "verifier": "regex"}', "valid pattern of RE2"),
        (b'{"prompt": "a", "answer": "many", "verifier": "numeric"}', "must have a number"),
    ],
)
def test_a_malformed_line_is_named_with_its_number_and_rule(tmp_path: Path, line: bytes, rule: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": 1}\n' + line + b"\n")
    with pytest.raises(TaskError) as caught:
        JsonlSource(TaskSourceSection(kind="jsonl", name="mine", path=path), TasksSection())
    assert f"{path}:2" in str(caught.value)
    assert rule in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_too_short_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="readable file"):
        JsonlSource(TaskSourceSection(kind="jsonl", name="mine", path=tmp_path / "none.jsonl"), TasksSection())
    with pytest.raises(TaskError, match="at least 2 lines, got 1"):
        JsonlSource(write(tmp_path / "t.jsonl", [{"prompt": "a", "answer": "1"}]), TasksSection())


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": "a", "answer": 1}, """a text "prompt", got ['question'] in {path}:1; set kind = "dataset" and """),
        ({"question": "a", "answer": 1}, """set kind = "dataset" and columns = {{prompt = "question"}}"""),
        ({"problem": "a", "solution": 1}, """columns = {{prompt = "problem", answer = "solution"}} for source 'mine', or"""),
        ({"prompt": "a", "target": 1}, """have an "answer", got ['target'] in {path}:1; set kind"""),
        ({"prompt": "a", "target": 1}, """columns = {{answer = "target"}}"""),
    ],
)  # fmt: skip
def test_other_names_are_met_with_the_mapping_that_fixes_them(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    section = write(tmp_path / "t.jsonl", [row, row])
    with pytest.raises(TaskError) as caught:
        JsonlSource(section, TasksSection())
    assert told.format(path=section.path) in str(caught.value)


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        ({"question": "a", "solution": 1, "level": 2}, 'columns = {prompt = "question", answer = "solution"}'),
        ({"messages": "a", "level": 2}, 'columns = {prompt = "messages"}'),  # the conversation has the answer
        ({"question": "a", "level": 2}, 'columns = {prompt = "question", answer = "COLUMN"}'),
    ],
)
def test_where_functions_decide_the_mapping_also_names_the_answer_that_a_data_set_needs(
    tmp_path: Path, row: dict[str, Any], mapping: str
) -> None:
    section = write(tmp_path / "t.jsonl", [row, row])
    with pytest.raises(TaskError) as caught:
        JsonlSource(
            section.model_copy(update={"signals": (RewardSignalSection(function="reward.py:score"),)}), TasksSection()
        )
    assert f"set kind = \"dataset\" and {mapping} for source 'mine', or rename them" in str(caught.value)


def test_what_is_held_out_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    JsonlSource(write(tmp_path / "t.jsonl", [{"prompt": "a", "answer": 1}] * 25), TasksSection())
    assert "tasks of mine: 22 lines for training, every tenth line held out (3)" in caplog.text
