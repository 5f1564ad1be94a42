"""Rewards and data sets of a program become task sources with files in the node's folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import swarm
from swarm.config import TasksSection
from swarm.errors import ConfigError, SwarmError, TaskError
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import EVALUATION_SEED

ROWS = [{"prompt": f"{a} + 1 = ", "answer": a + 1, "level": str(a % 3)} for a in range(12)]


def right(task: Any, answer: str) -> float:
    return float(answer == task.answer)


def short(task: Any, answer: str) -> float:
    return 1 / max(1, len(answer))


def levels(prompts: list[str], completions: list[str], level: list[str], **columns: list[Any]) -> list[float]:
    return [0.25 * int(one) if text in ("", *prompts) else 0.0 for text, one in zip(completions, level, strict=True)]


def talking(completions: list[Any], answer: list[str], prompts: list[Any]) -> list[float]:
    return [0.5 * (said[0]["content"] == right) + 0.5 * (asked[-1]["role"] == "user")
            for said, right, asked in zip(completions, answer, prompts, strict=True)]  # fmt: skip


def node(tmp_path: Path, **given: Any) -> swarm.Node:
    return swarm.Node.from_config(node={"dir": str(tmp_path / "node")}, **given)


def rewards(node: swarm.Node, *answers: str) -> list[float]:
    """Of the first held-out task, by the real functions in their sandboxes."""
    node._tasks.write(node.folder)
    mixture = TaskMixture(TasksSection(sources=node.config.tasks.sources))
    try:
        assert not mixture.broken, mixture.broken
        task = next(iter(mixture.sources.values())).task(EVALUATION_SEED, 0)
        return [sum(weight * task.verify(answer)[name] for name, weight in task.weights) for answer in answers]  # type: ignore[index]
    finally:
        mixture.close()


def test_to_make_a_node_writes_nothing_and_files_are_named_by_their_content(tmp_path: Path) -> None:
    one, other = (node(tmp_path, reward=right, dataset=ROWS) for _ in range(2))
    assert one.config == other.config and not one.folder.exists()
    (source,) = one.config.tasks.sources
    assert source.kind == "jsonl" and source.path is not None and source.path.is_relative_to(one.folder / "tasks")
    changed = node(tmp_path, reward=right, dataset=ROWS[1:]).config.tasks.sources[0]
    assert changed.path != source.path and changed.signals == source.signals
    one._tasks.write(one.folder)
    assert [json.loads(line) for line in source.path.read_text().splitlines()] == ROWS
    assert (source.path.parent.parent.stat().st_mode & 0o777) == 0o700
    assert (source.path.stat().st_mode & 0o777, one.folder.stat().st_mode & 0o777) == (0o600, 0o700)


def test_functions_of_both_forms_score_together_by_their_weights(tmp_path: Path) -> None:
    both = node(tmp_path, reward={"right": (right, 3), "brief": short}, dataset=ROWS)
    assert [(one.name, one.weight) for one in both.config.tasks.sources[0].signals] == [("right", 3), ("brief", 1)]
    assert rewards(both, "1", "12") == [1.0, 0.125]
    of_trl = node(tmp_path, reward=[levels, "correct"], dataset=[row | {"level": "2"} for row in ROWS])
    assert rewards(of_trl, "0 + 1 = ", "1", "2") == [0.25, 0.5, 0.0]


def test_rows_may_be_frames_data_sets_conversations_and_files(tmp_path: Path) -> None:
    import pandas
    from datasets import Dataset

    for rows in (pandas.DataFrame(ROWS), Dataset.from_list(ROWS), iter(ROWS), tuple(ROWS)):
        assert node(tmp_path, dataset=rows).config == node(tmp_path, dataset=ROWS).config
    table = pandas.DataFrame(
        {"prompt": ["a", "b"], "answer": ["x", "y"], "hint": [1.5, float("nan")], "n": np.arange(2)}
    )
    (text,) = (
        text for name, text in node(tmp_path, dataset=table, reward=right)._tasks.files.items() if "rows" in name
    )
    (tmp_path / "mine.jsonl").write_text(text)
    assert [json.loads(line) for line in text.splitlines()] == [
        {"prompt": "a", "answer": "x", "hint": 1.5, "n": 0}, {"prompt": "b", "answer": "y", "hint": None, "n": 1},
    ]  # fmt: skip
    (only_read,) = node(tmp_path, dataset=table, task={"prompt_template": "{prompt} {n}"})._tasks.files.values()
    assert json.loads(only_read.splitlines()[0]) == {"prompt": "a", "answer": "x", "n": 0}
    talk = [
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["prompt"]}],
            "answer": "1",
        }
        for row in ROWS
    ]
    asked = node(tmp_path, dataset=talk, reward=talking)
    assert asked.config.tasks.sources[0].system == "Be brief."
    assert rewards(asked, "1", "2") == [1.0, 0.5]
    (tmp_path / "mine.csv").write_text("prompt,answer\na,b\n")
    by_path = [node(tmp_path, dataset=tmp_path / name).config.tasks.sources[0] for name in ("mine.csv", "mine.jsonl")]
    assert [(one.kind, one.path) for one in by_path] == [
        ("dataset", tmp_path / "mine.csv"), ("jsonl", tmp_path / "mine.jsonl")
    ]  # fmt: skip


def test_functions_alone_need_no_answers_and_columns_are_renamed(tmp_path: Path) -> None:
    prompts = [{"prompt": row["prompt"]} for row in ROWS]
    assert rewards(node(tmp_path, dataset=prompts, reward=short), "ab") == [0.5]
    asked = [{"question": row["prompt"], "solution": row["answer"]} for row in ROWS]
    task = {"columns": {"prompt": "question", "answer": "solution"}, "verifier": "numeric", "name": "mine"}
    assert rewards(node(tmp_path, dataset=asked, task=task, reward="correct"), "1.0") == [1.0]
    every = swarm.Node.from_config(reward=right).config.tasks.sources
    assert len(every) > 3 and all([one.name for one in source.signals] == ["right"] for source in every)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dataset": []}, "must have rows, got none"),
    ({"dataset": [{"question": "a", "solution": "b"}]}, r'task=\{"columns": \{"prompt": "question", "answer": "solution"\}\}'),
    (
        {"dataset": [{"question": "a", "solution": "b"}], "task": {"columns": {"prompt": "question"}}},
        r'task=\{"columns": \{"prompt": "question", "answer": "solution"\}\}',
    ),
    ({"dataset": [{"prompt": "a"}]}, "a row must have answer, got prompt in row 0"),
    ({"dataset": [{"prompt": "a"}], "reward": "correct"}, "a row must have answer"),
    ({"dataset": [*ROWS, {"prompt": None, "answer": "b"}]}, "column prompt must have a value, got none in row 12"),
    ({"dataset": ["a", "b"]}, "a row must be a dict of columns, got str in row 0"),
    ({"dataset": {"train": ROWS}}, "one list of rows, got a dict of train; choose one"),
    ({"dataset": 5}, "got int; convert it to a list of dicts"),
    ({"dataset": "none.csv"}, "a file or folder that exists, got none.csv"),
    ({"dataset": [{"prompt": "a", "answer": "b", "at": object()}]}, "got object in column at of row 0"),
    ({"dataset": [{"prompt": "a", "answer": float("inf")}]}, "finite, got inf in column answer of row 0"),
    ({"dataset": ROWS, "task": {"columns": {"prompt": "asked"}}}, "columns must name columns, got asked"),
    ({"dataset": ROWS, "task": {"colums": {}}}, "unknown setting .*colums.*did you mean .*columns"),
    ({"task": {"answer": "tag"}}, "task says how a dataset is read, got .* and no dataset"),
    ({"dataset": ROWS, "reward": []}, "reward must be a function or several, got none"),
    ({"dataset": ROWS, "reward": 5}, "it is a int, not a function"),
    ({"dataset": ROWS, "reward": {"a": (right, 0)}}, r"\(function, weight > 0\), got .* for a"),
    ({"dataset": ROWS, "reward": [right, right]}, "different names"),
    ({"rewards": right}, "unknown keyword rewards; did you mean reward?"),
    ({"trainig": {"lr": 1}}, "unknown keyword trainig; did you mean training?"),
    ({"lr": 1e-5}, "did you mean training.lr?"),
    ({"training": 5}, "training is a section, got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_bad_input_names_rule_value_and_fix(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, TaskError), match=message):
        node(tmp_path, **given)
    assert not (tmp_path / "node").exists()


def too_many(prompts: list[str], completions: list[str]) -> list[float]:
    return [1.0, 0.0]


def no_list(prompts: list[str], completions: list[str]) -> float:
    return 1.0


def other_column(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    return [float(one == text) for one, text in zip(completions, solution, strict=True)]


def negative(task: Any, answer: str) -> float:
    return -1.0


def raising(task: Any, answer: str) -> float:
    return 1 / int("0")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (too_many, "one number per completion, got 2 for 1"),
        (no_list, "a list of numbers, one per completion, got 1.0"),
        (other_column, "solution: columns of this task are answer, level"),
        (negative, "gave -1.0"),
        (raising, r"raising.py:\d+: ZeroDivisionError"),
    ],
)
def test_a_reward_that_fails_says_so_before_the_first_round(tmp_path: Path, reward: Any, message: str) -> None:
    made = node(tmp_path, reward=reward, dataset=ROWS)
    made._tasks.write(made.folder)
    with pytest.raises(TaskError, match=message):
        TaskMixture(TasksSection(sources=made.config.tasks.sources))


def test_wrong_testbeds_and_trainings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    place = tmp_path / "bed"
    for call, message in (
        (lambda: swarm.testbed(0, folder=place), "nodes of a testbed must be at least 1, got 0; set nodes"),
        (lambda: swarm.testbed(2, folder=place).run(rounds=0), "rounds of a testbed must be at least 1, got 0"),
        (lambda: swarm.testbed(2, folder=place, node={"dir": "x"}), "node.dir is chosen per node here"),
        (lambda: swarm.testbed(2, folder=place, node_count=2), "unknown"),
        (lambda: swarm.train(rounds=0), "rounds must be at least 1, got 0"),
        (lambda: swarm.train(swarm={"name": "x"}), "swarm must be the file or address of a manifest"),
        (lambda: swarm.train(swarm="none.toml", node={"dir": str(place)}), "none.toml"),
        (lambda: swarm.train(rouns=3), "unknown keyword rouns; did you mean rounds?"),
    ):
        with pytest.raises(SwarmError, match=message):
            call()
    assert not place.exists()


def test_a_frame_without_pandas_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node(tmp_path).frame().empty
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(
        SwarmError, match=r"needs the package pandas, got none; use metrics\(\), or .* -m pip install pandas"
    ):
        node(tmp_path).frame()
