"""The verifier `math`: what it calls equal, and what hostile expressions cost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.sandbox.line_process import LineProcess, LineProcessError
from swarm.tasks.mathematics import math_process, math_verifier
from swarm.tasks.mathematics.math_verifier import MATH, MathComparison, expression
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import TaskFailure, score


@pytest.fixture(scope="module")
def comparison() -> Iterator[MathComparison]:
    made = MathComparison()
    yield made
    made._process.close()


@pytest.mark.parametrize(
    ("expected", "text", "reward"),
    [
        ("1/2", r"\frac{1}{2}", 1),
        ("1/2", "0.5", 1),
        (r"\frac12", r"$\dfrac{1}{2}$.", 1),
        ("1000", "1,000", 1),
        ("0.5", r"50\%", 1),
        (r"2\sqrt{2}", r"\sqrt{8}", 1),
        ("(x+1)^2", "x^2 + 2x + 1", 1),
        ("5", "x = 5", 1),
        ("[0, 1)", "[0,1)", 1),
        ("[0, 1)", "(0, 1)", 0),
        (r"\{1, 2\}", r"\{2, 1\}", 1),
        (r"\{1, 2\}", r"\{1\}", 0),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", 1),
        ("3", r"\boxed{3}", 1),
        ("3", r"\[\boxed{3}\]", 1),
        ("1/3", "0.333", 0),
        ("42", "so 42", 0),
        ("42", "$41$ or $42$", 0),
        ("42", r"\boxed{41}, \boxed{42}", 0),
        ("42", "", 0),
        ("42", "$$", 0),
        ("42", "\\frac{", 0),
        ("1", "__import__('os').getpid()", 0),
        ("5", "\N{SNOWMAN}\ud800", 0),
        ("not { mathematics", "not { mathematics", 1),
    ],
)
def test_equal_in_mathematics(comparison: MathComparison, expected: str, text: str, reward: float) -> None:
    assert comparison.score(expected, text) == reward


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        (r" $$ x $$. ", "x"),
        (r"\( x \)", "x"),
        (r"\boxed{a} + \boxed{b}", r"\boxed{a} + \boxed{b}"),
        ("$a$ $b$", ""),
        ("$", ""),
    ],
)
def test_marks_around_an_expression_are_removed(text: str, inner: str) -> None:
    assert expression(text) == inner


TOWER = "9^{9^{9^{9}}}"


def test_a_giant_expression_is_wrong_after_its_processor_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process is asked directly: its reply shows that the interruption came, within the limit of processor time."""
    (tmp_path / "brief_math.py").write_text(
        "from swarm.tasks.mathematics import math_process\nmath_process.CPU_S = 0.3\nstart = math_process.start\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    process = LineProcess("brief_math", None, math_verifier._CONFINEMENT)
    try:
        for hostile in (TOWER, "99999999!", "(x+1)^{100000}", r"\binom{10^{9}}{5\cdot10^8}"):
            assert process.ask(["5", hostile], 30.0) == {"late": True}
            reply = process.ask(["5", "5"], 30.0)
            assert reply["equal"] is True and reply["cpu_s"] < 0.3
    finally:
        process.close()


@pytest.mark.parametrize("text", ["(" * 11 + "5" + ")" * 11, "5" + "+0" * 250, "5" * 501, r"\frac{" * 11 + "5"])
def test_long_and_deep_answers_are_wrong_without_a_process(text: str) -> None:
    class Nobody:
        def ask(self, *_: Any) -> Any:
            raise AssertionError("asked")

    comparison = MathComparison()
    comparison._process = Nobody()  # type: ignore[assignment]
    assert comparison.score("5", text) == 0.0


class Replying:
    """A process with a fixed reply."""

    def __init__(self, reply: dict[str, Any] | LineProcessError) -> None:
        self.reply = reply
        self.num_renewed = 0

    def ask(self, question: object, time_budget_s: float) -> dict[str, Any]:
        if isinstance(self.reply, LineProcessError):
            raise self.reply
        return self.reply

    def renew(self) -> None:
        self.num_renewed += 1


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ({"equal": True, "cpu_s": math_verifier.SURE_S}, 1.0),
        ({"equal": False, "cpu_s": 0.01}, 0.0),
        ({"equal": True, "cpu_s": math_verifier.SURE_S + 0.01}, None),
        ({"equal": False, "cpu_s": float("nan")}, None),
        ({"equal": 1, "cpu_s": 0.1}, None),
        ({}, None),
        ({"late": True}, 0.0),
        (LineProcessError("ended", by_question=True), 0.0),
        (LineProcessError("late", by_question=True, is_late=True), None),
        (LineProcessError("no process"), None),
    ],
)
def test_only_what_every_machine_would_find_decides(
    reply: dict[str, Any] | LineProcessError, reward: float | None
) -> None:
    comparison, process = MathComparison(), Replying(reply)
    comparison._process = process  # type: ignore[assignment]
    if reward is None:
        with pytest.raises(TaskFailure, match="math: "):
            comparison.score("1/2", "0.5")
    else:
        assert comparison.score("1/2", "0.5") == reward
    assert process.num_renewed == (1 if reply == {"late": True} else 0)


def test_the_process_reads_latex_alone_and_no_python(comparison: MathComparison) -> None:
    for text in ("factorial(3)", "Integer(6)", "sum([1, 2, 3])", "[x for x in (6,)][0]"):
        assert comparison.score("6", text) == 0.0
    assert "ExprExtractionConfig" not in Path(math_process.__file__).read_text()


def source_of(folder: Path, lines: list[dict[str, Any]], **settings: Any) -> TaskMixture:
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    section = TaskSourceSection(kind="jsonl", name="mine", path=folder / "t.jsonl", **settings)
    return TaskMixture(TasksSection(sources=(section,)))


def test_lines_of_a_file_are_scored_with_the_final_answer(tmp_path: Path) -> None:
    lines = [{"prompt": "half?", "answer": r"\frac{1}{2}", "verifier": "math"}] * 3
    source = source_of(tmp_path, lines, answer="boxed").sources["mine"]
    task = source.task(16, 0)
    assert score(task, r"Half of one, \boxed{1}, is \boxed{0.5}.") == 1.0
    assert score(task, r"\boxed{0.5}, no, \boxed{1}") == 0.0
    assert score(task, "0.5") == 0.0


def test_versions_of_the_packages_are_part_of_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"prompt": "half?", "answer": "1/2", "verifier": "math"}] * 3
    digest = source_of(tmp_path, lines).sources["mine"].config_digest
    assert "sympy==" in MATH.rules()
    monkeypatch.setattr(math_verifier, "version", lambda name: "0.0.1")
    assert source_of(tmp_path, lines).sources["mine"].config_digest != digest


def test_what_nothing_can_equal_is_refused_with_its_line(tmp_path: Path) -> None:
    for answer in ("x" * 501, "$1$ or $2$", "(" * 11 + ")" * 11):
        with pytest.raises(TaskError, match=r"a math answer must be one expression .* in .*t.jsonl:2; fix that line"):
            source_of(tmp_path, [{"prompt": "p", "answer": 1}, {"prompt": "p", "answer": answer}], verifier="math")


def test_without_a_process_the_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = MathComparison()
    comparison._process = LineProcess("no.such.module", None, math_verifier._CONFINEMENT)
    with pytest.raises(TaskError, match="must run in a process of its own"):
        comparison.rules()
