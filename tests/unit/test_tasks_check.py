"""`swarm tasks check`: what it shows of a source that works, and what it finds in one that does not."""

import json
import subprocess
from pathlib import Path

import pytest

from swarm.cli.tasks import near_misses
from tests.swarm_process import swarm

ROWS = [{"prompt": f"{a} + 2 = ", "answer": str(a + 2)} for a in range(30)]
RIGHT = "def score(task, answer):\n    return float(answer.strip() == task.answer)\n"


def checked(folder: Path, reward: str, *more: str) -> "subprocess.CompletedProcess[str]":
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (folder / "mine.py").write_text(reward)
    signals = '[{function = "mine.py:score"}]'
    text = f'[[tasks.sources]]\nkind = "jsonl"\nname = "mine"\npath = "rows.jsonl"\nsignals = {signals}\n'
    (folder / "mine.toml").write_text(text)
    return swarm("tasks", "check", "mine.toml", *more, cwd=folder)


def test_a_source_that_works_is_shown_with_what_its_verifier_says(tmp_path: Path) -> None:
    ended = checked(tmp_path, RIGHT)
    assert ended.returncode == 0, ended.stderr
    assert "── mine: 3 of 3 tasks built" in ended.stdout and " + 2 = " in ended.stdout
    rewards = [line.split()[0] for line in ended.stdout.splitlines() if "(score" in line]
    assert rewards[0] == "1.00" and "expected" in ended.stdout and "0.00" in rewards
    assert "a second process computes the same" in ended.stdout


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("def score(task, answer):\n    return float(answer == '')\n", "3 expected answers earn less than another try"),
        ("import time\ndef score(task, answer):\n    return time.time_ns() % 997 / 997\n", "mine: "),
        ("def score(task, answer):\n    return 1 / len(answer)\n", "ZeroDivisionError"),
    ],
)
def test_a_wrong_reward_function_is_found(tmp_path: Path, reward: str, told: str) -> None:
    ended = checked(tmp_path, reward)
    assert ended.returncode == 6, ended.stdout
    assert told in ended.stderr


def test_the_number_of_tasks_is_chosen(tmp_path: Path) -> None:
    assert len(json.loads(checked(tmp_path, RIGHT, "--tasks", "5", "--json").stdout.splitlines()[-1])["mine"]) == 5


def test_near_misses_begin_with_the_expected_answer_and_differ_from_each_other() -> None:
    assert near_misses("41") == ["41", " 41\n", "41.", "4", "42", "", "no such answer"]
    assert near_misses("a") == ["a", " a\n", "a.", "A", "", "no such answer"]
    assert near_misses(None) == ["", "no such answer"]
