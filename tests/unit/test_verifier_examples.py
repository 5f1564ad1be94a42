"""The examples of right and wrong answers in docs/rewards.md are what the verifiers find."""

import json
import re
from pathlib import Path

import pytest

from swarm.config import TaskSourceSection, TasksSection
from swarm.extensions.points import VERIFIERS
from swarm.tasks.code_source import CodeSource
from swarm.tasks.reasoning_gym_source import import_library, score_once

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def rows(head: str) -> list[list[list[str]]]:
    """The texts in code font of each cell of the table with this head."""
    table = PAGE.split(f"| {head} | expected | right | wrong |\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split(" | ")] for row in table]


FILES = [(row[0][0], row[1][0], *row[2:]) for row in rows("verifier")]


def test_every_verifier_of_files_has_examples_of_both() -> None:
    assert {name for name, *_ in FILES} == set(VERIFIERS.names)
    assert all(right and wrong for *_, right, wrong in FILES)


@pytest.mark.parametrize(("name", "expected", "right", "wrong"), FILES)
def test_examples_of_verifiers_of_files(name: str, expected: str, right: list[str], wrong: list[str]) -> None:
    verifier = VERIFIERS.load(name)
    verifier.check(expected)
    assert {text: verifier.score(expected, text) for text in right} == dict.fromkeys(right, 1.0)
    assert {text: verifier.score(expected, text) for text in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(("cells"), rows("data set"))
def test_examples_of_data_sets(cells: list[list[str]]) -> None:
    reasoning_gym = import_library()
    (name,), (expected,), right, wrong = cells
    data_set = reasoning_gym.create_dataset(name, seed=0, size=1)
    entry = {**data_set[0], "answer": expected}
    values = {text: score_once(name, data_set.score_answer, entry, text) for text in (*right, *wrong)}
    assert all(values[text] == 1 for text in right), values
    assert all(values[text] < 1 for text in wrong), values


@pytest.mark.parametrize("cells", rows("test"))
def test_examples_of_code_tasks(cells: list[list[str]], tmp_path: Path) -> None:
    (arguments,), (expected,), right, wrong = cells
    test = {"args": json.loads(arguments), "expected": json.loads(expected)}
    line = json.dumps({"prompt": "p", "entry": "f", "tests": [test]})
    (tmp_path / "tasks.jsonl").write_text(f"{line}\n{line}\n")
    section = TaskSourceSection(kind="code", name="mine", path=tmp_path / "tasks.jsonl")
    task = CodeSource(section, TasksSection()).task(16, 0)
    for body, value in [*((body, 1.0) for body in right), *((body, 0.0) for body in wrong)]:
        given = task.verify(f"def f(x):\n    {body}\n")
        assert isinstance(given, dict) and given["correct"] == value, body
