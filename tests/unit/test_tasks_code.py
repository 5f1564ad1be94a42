"""Code tasks: made-up functions and those of a file, and verdicts that an answer cannot fake."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from swarm.admission.reward_verifier import RewardVerifier
from swarm.config import TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.sandbox.runner import RunLimits, RunResult, Sandbox, SandboxError
from swarm.tasks.code_source import CodeProblem, CodeSource, CodeVerifier, code_of, list_function
from swarm.tasks.task_mixture import TaskMixture
from swarm.tasks.task_source import EVALUATION_SEED, TaskFailure, assess, prompt_digest, score
from swarm.types import Lineage, Rollout, RolloutGroup

ADD = {
    "prompt": "Add.",
    "entry": "add",
    "tests": [{"args": [1, 2], "expected": 3}, {"args": [5, 70604], "expected": 70609}],
}


def source_of(path: Path, rows: list[Any], **parameters: int) -> CodeSource:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    section = TaskSourceSection(kind="code", name="mine", path=path, parameters=parameters)
    return CodeSource(section, TasksSection())


@pytest.fixture
def source(tmp_path: Path) -> CodeSource:
    return source_of(tmp_path / "t.jsonl", [ADD] * 12)


@pytest.fixture(scope="module")
def made_up() -> CodeSource:
    return CodeSource(TaskSourceSection(kind="code", name="list_functions"), TasksSection())


def test_right_answers_of_made_up_functions_pass_in_the_sandbox(made_up: CodeSource) -> None:
    for index in range(6):
        task = made_up.task(20, index)
        assert score(task, f"Here:\n```python\n{made_up.answer(20, index)}```\n") == 1.0
        assert score(task, "def solve(xs):\n    return None\n") == 0.0
    assert made_up.task(20, 0).prompt != made_up.task(20, 1).prompt
    assert made_up.task(EVALUATION_SEED, 0).prompt == made_up.task(EVALUATION_SEED, 0).prompt


def test_made_up_functions_are_the_same_everywhere_and_no_constant_passes() -> None:
    for seed in range(300):
        problem = list_function(seed, num_steps=2, num_tests=6)
        assert problem == list_function(seed, num_steps=2, num_tests=6)
        assert len({repr(expected) for _, expected in problem.tests}) >= 3
    golden = list_function(7, num_steps=2, num_tests=3)
    assert (golden.prompt, golden.tests) == GOLDEN


GOLDEN = (
    "Write a Python function solve(xs) that takes a list of integers. In this order: take the absolute value of each number; "
    "keep the numbers greater than 2; return the largest number, or 0 if none is left. "
    "For example, solve([6, -16, -5, -15, 15, 7, -17]) is 17. Answer with the code alone.",
    (([[]], 0), ([[17, -17, 12, -7, -18, -15]], 18), ([[6, -16, -5, -15, 15, 7, -17]], 17)),
)


def test_a_program_that_draws_numbers_has_the_same_reward_on_every_node(tmp_path: Path) -> None:
    """Author and reader run it in sandboxes of their own; a claim that does not hold would ban an honest author."""
    tests = [{"args": [number], "expected": 0} for number in range(1, 7)]
    row = {"prompt": "Zero.", "entry": "zero", "tests": tests}
    code = "import random\ndef zero(n):\n    return random.Random(random.random()).randrange(2)\n"
    first, *others = [source_of(tmp_path / "t.jsonl", [row] * 12).task(16, 0).verify(code) for _ in range(4)]
    assert all(verdict == first for verdict in others)


def test_partial_answers_pass_some_tests(source: CodeSource) -> None:
    task = source.task(16, 0)
    assert task.verify("def add(a, b): return a + b") == {"correct": 1.0, "tests": 1.0}
    assert task.verify("def add(a, b): return 3") == {"correct": 0.0, "tests": 0.5}
    assert task.verify("def add(a, b): return 1 / (a - 5)") == {"correct": 0.0, "tests": 0.0}
    assert task.verify("no function here") == {"correct": 0.0, "tests": 0.0}
    assert task.verify("# add\n" + "x" * 20000) == {"correct": 0.0, "tests": 0.0}


@pytest.mark.parametrize(
    "code",
    [
        "print('passed')\nimport os\nos.write(3, b'3\\n70608\\n')\nos._exit(0)\ndef add(a, b): pass",
        "import sys\nclass Equal(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Equal(1)",
        "import json\njson.dumps = lambda value: 'true'\ndef add(a, b): return 0",
        "import sys, gc\n"
        "def add(a, b):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for v in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            if '70609' in repr(v): return 70609\n"
        "        frame = frame.f_back\n"
        "    for v in gc.get_objects():\n"
        "        if type(v) in (dict, list) and 'expected' in v: return v['expected']\n"
        "    return 3",
        "def add(a, b): return 3.0000001 if a == 1 else '70609'",
        "def add(a, b): return float('nan')",
        "def add(a, b): return True",
        "import os\nos.close(3)\ndef add(a, b): return a + b",
    ],
)
def test_success_cannot_be_faked(source: CodeSource, code: str) -> None:
    found = source.task(16, 0).verify(code)
    assert isinstance(found, dict) and found["correct"] == 0.0


@pytest.mark.parametrize(
    ("expected", "line", "is_right"),
    [
        (3, b"3", True), (3, b"3.0", True), (3, b"true", False), (True, b"1", False), (True, b"true", True),
        (0.1, b"0.10000000001", True), (0.1, b"0.11", False), (0.5, b"1" + b"0" * 400, False),
        ("a", b'"a"', True), ("a", b"[]", False), (None, b"null", True), (None, b"", False),
        ([1, [2]], b"[1, [2]]", True), ([1], b"[1, 2]", False), ([], b"null", False),
        ({"a": 1}, b'{"a": 1}', True), ({"a": 1}, b'{"a": 1, "b": 2}', False),
        (3, b"1" * 5000, False), (3, b"[" * 60000, False), (3, b"\xff\xfe", False), (3, b"NaN", False),
    ],
)  # fmt: skip
def test_results_are_compared_by_kind_and_value(expected: object, line: bytes, is_right: bool) -> None:
    found = verdict(RunResult((line,), "exit", 0.01), CodeProblem("", "f", (([], expected),), ""))
    assert found["correct"] == float(is_right)


class Told(Sandbox):
    """Gives the result it was told: what a sandbox says on a faster or a slower machine."""

    def __init__(self, result: RunResult | SandboxError) -> None:
        super().__init__(RunLimits())
        self.result = result
        self.num_runs = 0

    def run(self, code: str, entry: str, inputs: object) -> RunResult:
        self.num_runs += 1
        if isinstance(self.result, SandboxError):
            raise self.result
        return self.result


PROBLEM = CodeProblem("", "f", (([], 1),), "")


def verdict(result: RunResult | SandboxError, problem: CodeProblem = PROBLEM) -> dict[str, float]:
    return CodeVerifier("mine", Told(result), RunLimits(cpu_s=2)).verify(problem, "def f(): ...")


def test_what_the_clock_decides_is_nobodys_fault() -> None:
    assert verdict(RunResult((b"1",), "exit", 0.49))["correct"] == 1.0
    assert verdict(RunResult((b"1",), "signal", 2.0))["correct"] == 0.0
    for unsure in (RunResult((b"1",), "exit", 0.51), RunResult((b"1",), "wall", 0.1), SandboxError("no")):
        with pytest.raises(TaskFailure):
            verdict(unsure)


def test_answers_are_run_once() -> None:
    sandbox = Told(RunResult((b"1",), "exit", 0.01))
    verifier = CodeVerifier("mine", sandbox, RunLimits())
    assert [verifier.verify(PROBLEM, "def f(): ...")["correct"] for _ in range(3)] == [1.0] * 3
    verifier.verify(PROBLEM, "def f(): 2")
    assert sandbox.num_runs == 2


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"), ("```python\nx\n```", "x\n"), ("a ```\nx\n``` b ```py\ny\n``` c", "y\n"),
        ("```\nx = 1\n``` and ```open", "\nx = 1\n"), ("``` one", "``` one"), ("```x```", "x"),
    ],
)  # fmt: skip
def test_code_is_the_last_fenced_block(text: str, code: str) -> None:
    assert code_of(text).strip() == code.strip()


@pytest.mark.parametrize(
    "row",
    [
        [], 5, {**ADD, "entry": "a b"}, {**ADD, "tests": []}, {**ADD, "tests": [{"args": 1, "expected": 1}]},
        {**ADD, "tests": [{"args": []}]}, {**ADD, "prompt": " "}, {**ADD, "more": 1}, {"prompt": "p"},
        {**ADD, "prompt": "half a \ud800 pair"},
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(tmp_path: Path, row: object) -> None:
    with pytest.raises(TaskError, match=r"t.jsonl:2; fix that line"):
        source_of(tmp_path / "t.jsonl", [ADD, row])


def test_digest_depends_on_file_and_limits(tmp_path: Path) -> None:
    digests = {
        source_of(tmp_path / "t", [ADD] * 2).config_digest,
        source_of(tmp_path / "t", [ADD] * 3).config_digest,
        source_of(tmp_path / "t", [ADD] * 3, cpu_s=3).config_digest,
        source_of(tmp_path / "t", [ADD] * 3, memory_mib=128).config_digest,
    }
    assert len(digests) == 4
    assert source_of(tmp_path / "u", [ADD] * 2).config_digest in digests


@pytest.mark.parametrize("parameters", [{"cpu_s": 0}, {"cpu_s": 0.5}, {"memory_mib": 1}, {"num_step": 1}])
def test_wrong_parameters_are_told(parameters: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=r"tasks.sources.parameters of 'list_functions'"):
        CodeSource(TaskSourceSection(kind="code", name="list_functions", parameters=parameters), TasksSection())


def test_an_unknown_family_is_told() -> None:
    with pytest.raises(TaskError, match="must be list_functions, got 'sorting'"):
        CodeSource(TaskSourceSection(kind="code", name="sorting"), TasksSection())


def test_share_of_tests_is_a_signal_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("\n".join([json.dumps(ADD)] * 2))
    signals = [{"name": "correct", "weight": 3}, {"name": "tests", "weight": 1}]
    section = TaskSourceSection.model_validate(
        {"kind": "code", "name": "mine", "path": tmp_path / "t", "signals": signals}
    )
    task = TaskMixture(TasksSection(sources=(section,))).sources["mine"].task(16, 0)
    assert assess(task, "def add(a, b): return 3").reward == pytest.approx(0.125)


def test_without_a_sandbox_code_is_refused_unless_the_operator_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system that forbids user namespaces: the check of a fenced sandbox fails."""
    check = Sandbox.check

    def forbidden(self: Sandbox) -> None:
        if self._use_namespaces:
            raise SandboxError("unshare: Operation not permitted")
        check(self)

    monkeypatch.setattr(Sandbox, "check", forbidden)
    section = TaskSourceSection(kind="code", name="list_functions")
    with pytest.raises(TaskError, match="run_code_unsandboxed"):
        TaskMixture(TasksSection(sources=(section,)))
    allowed = TaskMixture(TasksSection(sources=(section,), run_code_unsandboxed=True)).sources["list_functions"]
    assert score(allowed.task(20, 0), allowed.answer(20, 0)) == 1.0


async def test_answers_of_others_are_judged_in_the_sandbox_while_the_loop_goes_on(tmp_path: Path) -> None:
    """As the reader does it: in a thread, which waits for processes."""
    (tmp_path / "t").write_text("\n".join([json.dumps(ADD)] * 2))
    section = TaskSourceSection(kind="code", name="mine", path=tmp_path / "t", parameters={"cpu_s": 1})
    mixture = TaskMixture(TasksSection(sources=(section,)))
    task = mixture.sources["mine"].task(99, 0)
    texts = {
        "def add(a, b): return a + b": 1.0,
        "import os\nos.kill(os.getppid(), 9)\nwhile True: os.fork()\ndef add(a, b): return a + b": 0.0,
        "def add(a, b):\n    while True: pass": 0.0,
        f"def add(a, b): open({str(tmp_path / 'left')!r}, 'w'); return a + b": 0.0,
    }
    rollouts = tuple(Rollout(text, (5,), (-1.0,), True, reward) for text, reward in texts.items())
    group = RolloutGroup(task.ref, prompt_digest(task.prompt), rollouts, "alice", Lineage("1" * 32, "2" * 32), 1)
    judging = asyncio.create_task(asyncio.to_thread(RewardVerifier(mixture, sandboxed=None).rewards, group))
    num_turns = 0
    while not judging.done():
        await asyncio.wait({judging}, timeout=0.02)
        num_turns += 1
    assert judging.result() == tuple(texts.values())
    assert num_turns > 10  # more than a second of processor time went by
    assert not (tmp_path / "left").exists()
