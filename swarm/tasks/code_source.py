"""Code tasks ask for a function or a program, which the sandbox runs on inputs whose expected results only the node knows.

Without a path the functions are made up (`list_functions`): a chain of steps over a list of integers, drawn from a seed. Each
step is a function, for the expected results, and source text, for a right answer. A file has one line per task:

    {"prompt": "...", "entry": "add", "tests": [{"args": [1, 2], "expected": 3}, ...], "answer": "def add(a, b): ..."}

With a language (Agnostics, 2508.04865) its lines ask for whole programs, which read text and write text:

    {"prompt": "...", "tests": [{"stdin": "1 2\\n", "stdout": "3\\n"}, ...], "answer": "..."}

`answer` is optional. As with JSONL tasks every tenth line is held out, and the config digest is a hash of the file's content.

Processor time differs between machines, so no node blames another for what the clock decided:

    ended by itself within a quarter of the limit       its results decide
    ended by itself later, or waited                    TaskFailure: the group is dropped, nobody is blamed
    stopped at the limit                                wrong
"""

import hashlib
import json
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from swarm.config import LANGUAGE, Section, TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.registry import Isolation, first_mistake, valid_parameters
from swarm.machine.safe_files import parse_json_text
from swarm.sandbox.program_runner import COMPILER, LANGUAGES, ProgramRun, ProgramRunner
from swarm.sandbox.runner import SURE_FRACTION, RunLimits, Sandbox, SandboxError
from swarm.tasks.jsonl_source import held_out_and_training, numbered_lines, shuffled_position
from swarm.tasks.prompted_source import PROMPT, PromptTemplate
from swarm.tasks.task_source import CORRECT, EVALUATION_SEED, INDEX_SPAN, MAX_TEXT_CHARS, TaskFailure
from swarm.types import Task, TaskRef

S = TypeVar("S", bound=Section)

ENTRY = "solve"
_MAX_ITEMS = 8
_ITEMS = range(-20, 21)
_FACTORS = range(2, 6)
_MIN_DIFFERENT = 3
"""Least number of different expected results, so that no constant passes many tests."""


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A function to write. `tests` stay in the node: the sandbox gets only the arguments."""

    prompt: str
    entry: str
    """Name of the function; empty for a program."""
    tests: tuple[tuple[Any, Any], ...]
    """(arguments, expected result), or (input, expected output) of a program."""
    answer: str
    """Source text of a right answer; empty where none is known."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a made-up function; `k` stands for a small number that is drawn for every problem."""

    words: str
    source: str
    apply: Callable[[list[int], int], Any]


_STEPS = (
    _Step("keep the even numbers only", "xs = [x for x in xs if x % 2 == 0]", lambda xs, k: [x for x in xs if x % 2 == 0]),
    _Step("keep the odd numbers only", "xs = [x for x in xs if x % 2 == 1]", lambda xs, k: [x for x in xs if x % 2 == 1]),
    _Step("keep the numbers greater than {k}", "xs = [x for x in xs if x > {k}]", lambda xs, k: [x for x in xs if x > k]),
    _Step("multiply each number by {k}", "xs = [x * {k} for x in xs]", lambda xs, k: [x * k for x in xs]),
    _Step("add {k} to each number", "xs = [x + {k} for x in xs]", lambda xs, k: [x + k for x in xs]),
    _Step("take the absolute value of each number", "xs = [abs(x) for x in xs]", lambda xs, k: [abs(x) for x in xs]),
    _Step("reverse the order", "xs = xs[::-1]", lambda xs, k: xs[::-1]),
    _Step("sort in ascending order", "xs = sorted(xs)", lambda xs, k: sorted(xs)),
    _Step("drop the first {k} numbers", "xs = xs[{k}:]", lambda xs, k: xs[k:]),
    _Step("drop repeated numbers but the first of each", "xs = list(dict.fromkeys(xs))", lambda xs, k: list(dict.fromkeys(xs))),
)  # fmt: skip
_ENDS = (
    _Step("return the list", "return xs", lambda xs, k: xs),
    _Step("return the sum", "return sum(xs)", lambda xs, k: sum(xs)),
    _Step("return how many numbers are left", "return len(xs)", lambda xs, k: len(xs)),
    _Step("return the largest number, or 0 if none is left", "return max(xs, default=0)", lambda xs, k: max(xs, default=0)),
)  # fmt: skip


def list_function(seed: int, *, num_steps: int, num_tests: int) -> CodeProblem:
    """The made-up problem of a seed; the same on every node."""
    rng = random.Random(seed)
    while True:
        chain = [(step, rng.choice(_FACTORS)) for step in [*rng.sample(_STEPS, num_steps), rng.choice(_ENDS)]]
        inputs: list[list[int]] = [[]] + [_numbers(rng) for _ in range(num_tests - 1)]
        tests = tuple(([xs], _apply(chain, xs)) for xs in inputs)
        if len({repr(expected) for _, expected in tests}) >= min(
            num_tests, _MIN_DIFFERENT
        ):  # odd, then even: always []
            break
    words = "; ".join(step.words.format(k=k) for step, k in chain)
    body = "".join(f"    {step.source.format(k=k)}\n" for step, k in chain)
    example = tests[-1]
    prompt = (
        f"Write a Python function {ENTRY}(xs) that takes a list of integers. In this order: {words}. "
        f"For example, {ENTRY}({example[0][0]}) is {example[1]}. Answer with the code alone."
    )
    return CodeProblem(prompt, ENTRY, tests, f"def {ENTRY}(xs):\n{body}")


def _numbers(rng: random.Random) -> list[int]:
    return [rng.choice(_ITEMS) for _ in range(rng.randint(1, _MAX_ITEMS))]


def _apply(chain: list[tuple[_Step, int]], xs: list[int]) -> Any:
    value: Any = xs
    for step, k in chain:
        value = step.apply(value, k)
    return value


MAX_CODE_CHARS = 16_384
"""Longer code is wrong."""
_MAX_KNOWN = 4096
_RELATIVE_TOLERANCE = 1e-6
_FENCE = "```"


class CodeVerifier:
    """The verifier of one source. It is safe from any thread and remembers results, since answers of others are scored twice."""

    def __init__(self, source: str, sandbox: Sandbox, limits: RunLimits) -> None:
        self._source = source
        self._sandbox = sandbox
        self._limits = limits
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, float] = OrderedDict()

    def verify(self, problem: CodeProblem, text: str) -> dict[str, float]:
        """`tests`: share of the tests passed; `correct`: 1 if all are. Raises TaskFailure where another machine may differ."""
        code = self._code_of(text)
        if len(code) > MAX_CODE_CHARS or problem.entry not in code:
            return _signals(0.0)
        key = hashlib.sha256(json.dumps([problem.entry, problem.tests, code]).encode()).digest()
        with self._lock:
            share = self._known.get(key)
        if share is None:
            share = self._share_passed(problem, code)
            with self._lock:
                self._known[key] = share
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        return _signals(share)

    def _code_of(self, text: str) -> str:
        return code_of(text)

    def _share_passed(self, problem: CodeProblem, code: str) -> float:
        try:
            result = self._sandbox.run(code, problem.entry, [arguments for arguments, _ in problem.tests])
        except SandboxError as error:
            raise TaskFailure(self._source, f"sandbox: {error}") from None
        if result.end == "wall":
            raise TaskFailure(self._source, f"the program had not ended after {self._limits.wall_s:g} s")
        sure_s = SURE_FRACTION * self._limits.cpu_s
        if result.end == "exit" and result.cpu_s > sure_s:
            raise TaskFailure(self._source, f"the program took {result.cpu_s:.2f} s; only up to {sure_s:g} s is sure")
        if result.end != "exit" or len(result.lines) != len(problem.tests):
            return 0.0
        passed = [
            _is_equal(expected, _parsed(line))
            for (_, expected), line in zip(problem.tests, result.lines, strict=True)
        ]  # fmt: skip
        return sum(passed) / len(passed)


class ProgramVerifier(CodeVerifier):
    """The verifier of a source of programs in one language. Lines of outputs are equal where their words are."""

    def __init__(self, source: str, runner: ProgramRunner, limits: RunLimits) -> None:
        super().__init__(source, Sandbox(limits), limits)
        self._runner = runner

    def _code_of(self, text: str) -> str:
        return code_of(text, is_python=False)

    def _share_passed(self, problem: CodeProblem, code: str) -> float:
        try:
            result = self._runner.run(code, [text for text, _ in problem.tests])
        except SandboxError as error:
            raise TaskFailure(self._source, f"sandbox: {error}") from None
        if result.compiled is not None:
            self._check_sure(result.compiled, COMPILER.cpu_s, "the compiler")
            if result.compiled.end != "exit" or result.compiled.code:
                return 0.0
        passed = 0
        for run, (_, expected) in zip(result.runs, problem.tests, strict=False):  # none after one that was stopped
            self._check_sure(run, self._limits.cpu_s, "the program")
            passed += run.end == "exit" and run.code == 0 and _has_lines(expected, run.output)
        return passed / len(problem.tests)

    def _check_sure(self, run: ProgramRun, limit_s: float, what: str) -> None:
        """Raises TaskFailure where another machine may find something else."""
        if run.end == "wall":
            raise TaskFailure(self._source, f"{what} had not ended in its time")
        sure_s = SURE_FRACTION * limit_s
        if run.end != "limit" and run.cpu_s > sure_s:
            raise TaskFailure(self._source, f"{what} took {run.cpu_s:.2f} s; only up to {sure_s:g} s is sure")


def _has_lines(expected: str, output: bytes) -> bool:
    return _words_by_line(expected) == _words_by_line(output.decode(errors="replace"))


def _words_by_line(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().split("\n")]


def code_of(text: str, *, is_python: bool = True) -> str:
    """The last block between fences, else the whole text. The word behind a fence names the language, such as `c++`."""
    parts = text.split(_FENCE)
    if len(parts) < 3:
        return text
    block = parts[len(parts) - 2 - (len(parts) + 1) % 2]  # of an odd number of fences the last one is left open
    first, newline, rest = block.partition("\n")
    is_name = first.strip().isalnum() or (not is_python and len(first.split()) <= 1)
    return rest if newline and is_name else block


def _signals(share: float) -> dict[str, float]:
    return {CORRECT: float(share == 1), "tests": share}


_NOTHING = object()


def _parsed(line: bytes) -> Any:
    """A line that a stranger's code wrote, as JSON; `_NOTHING` where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return _NOTHING


def _is_equal(expected: Any, got: Any) -> bool:
    """Whether both have the same kind and value, as deep as `expected`. Numbers with a fraction may differ by 1e-6 relative."""
    if isinstance(expected, bool) or isinstance(got, bool) or not isinstance(expected, list | dict | int | float):
        return type(expected) is type(got) and expected == got
    if isinstance(expected, list):
        return isinstance(got, list) and len(expected) == len(got) and all(map(_is_equal, expected, got))
    if isinstance(expected, dict):
        is_same_shape = isinstance(got, dict) and expected.keys() == got.keys()
        return is_same_shape and all(_is_equal(value, got[key]) for key, value in expected.items())
    if not isinstance(got, int | float):
        return False
    if isinstance(expected, int) and isinstance(got, int):
        return expected == got
    try:
        return abs(expected - got) <= _RELATIVE_TOLERANCE * max(1.0, abs(expected))
    except OverflowError:
        return False


MADE_UP = "list_functions"
_WALL_PER_CPU = 5


class CodeParameters(Section):
    """`parameters` of a code source."""

    cpu_s: Annotated[int, Field(ge=1, le=60)] = 2
    """Processor time that one answer may take."""
    memory_mib: Annotated[int, Field(ge=64, le=4096)] = 256
    """Address space that one answer may take."""
    num_steps: Annotated[int, Field(ge=1, le=6)] = 2
    """Steps of a made-up function."""
    num_tests: Annotated[int, Field(ge=2, le=32)] = 6
    """Tests of a made-up function."""
    language: Annotated[str, Field(pattern=LANGUAGE)] | None = None
    """Language of the programs that a file asks for, such as c. Unset: functions in Python."""


class _Test(Section):
    args: list[Any]
    expected: Any


class _Line(Section):
    prompt: Annotated[str, Field(pattern=r"\S", max_length=MAX_TEXT_CHARS)]
    entry: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
    tests: Annotated[tuple[_Test, ...], Field(min_length=1, max_length=64)]
    answer: str = ""


class _ProgramTest(Section):
    stdin: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] = ""
    stdout: Annotated[str, Field(max_length=MAX_TEXT_CHARS)]


class _ProgramLine(Section):
    prompt: Annotated[str, Field(pattern=r"\S", max_length=MAX_TEXT_CHARS)]
    tests: Annotated[tuple[_ProgramTest, ...], Field(min_length=1, max_length=32)]
    answer: str = ""


class CodeSource:
    """A task source of made-up functions, or of the functions or programs that one file describes."""

    Parameters = CodeParameters
    isolation: ClassVar[Isolation] = Isolation.OWN_SANDBOX
    signal_names: ClassVar[tuple[str, ...]] = (CORRECT, "tests")

    def __init__(self, config: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError for a file or parameters that are not valid, and where no sandbox can be set up."""
        self.name = config.source_name
        self._parameters = valid_parameters(
            CodeParameters, config.parameters, self.name, f"tasks.sources.parameters of {self.name!r}", TaskError
        )
        language = self._parameters.language
        self._template = PromptTemplate(config, {PROMPT, "language" if language else "entry"})
        self._held_out: list[CodeProblem] = []
        self._training: list[CodeProblem] = []
        content = b""
        if config.path is not None:
            content, lines = numbered_lines(config.path)
            problems = [(_program if language else _problem)(text, where) for text, where in lines]
            self._held_out, self._training = held_out_and_training(problems, config.path)
        elif config.name != MADE_UP:
            raise TaskError(
                f"a code source without a path must be {MADE_UP}, got {config.name!r}; set its path or name"
            )
        elif language:
            raise TaskError(
                f"programs in {language} need a file of tasks, got no path; set path of source {self.name!r}"
            )
        facts = f"code:{config.name}:{self._parameters.model_dump_json(exclude_none=True)}:"
        self.config_digest = hashlib.sha256(facts.encode() + content).hexdigest()[:16]
        cpu_s, memory_bytes = self._parameters.cpu_s, self._parameters.memory_mib << 20
        limits = RunLimits(cpu_s=cpu_s, wall_s=float(_WALL_PER_CPU * cpu_s), memory_bytes=memory_bytes)
        if language:
            self._verifier: CodeVerifier = ProgramVerifier(self.name, _runner(language, limits, tasks), limits)
            self._try_out(language)
        else:
            self._verifier = CodeVerifier(self.name, _sandbox(limits, self.name, tasks.run_code_unsandboxed), limits)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out) or INDEX_SPAN

    def task(self, seed: int, index: int) -> Task:
        problem = self._problem(seed, index)
        ref = TaskRef(self.name, self.config_digest, seed, index)
        fields = {PROMPT: problem.prompt, "entry": problem.entry, "language": self._parameters.language or ""}
        prompt = self._template.render(fields)
        return Task(ref, prompt, partial(self._verifier.verify, problem))

    def answer(self, seed: int, index: int) -> str:
        return self._problem(seed, index).answer

    def _try_out(self, language: str) -> None:
        """Run one right answer, since a language that does not work here would find every author a liar. Raises TaskError."""
        problem = next((one for one in [*self._held_out, *self._training] if one.answer), None)
        if problem is None:
            raise TaskError(
                f"one line of a file of programs must have an answer, to see that {language} works here, got none in "
                f"{self.name!r}; add it"
            )
        try:
            share = self._verifier.verify(problem, problem.answer)["tests"]
        except TaskFailure as failure:
            raise TaskError(f"a right answer in {language} must be run here, got {failure}") from None
        if share < 1:
            raise TaskError(
                f"the answer of the first line that has one must pass its tests, got {share:.0%} of them in {language} for "
                f"{problem.prompt[:80]!r}; correct it, or check that {language} works here"
            )

    def _problem(self, seed: int, index: int) -> CodeProblem:
        if not self._training:
            wanted = self._parameters
            number = seed * INDEX_SPAN + index
            return list_function(number, num_steps=wanted.num_steps, num_tests=wanted.num_tests)
        if seed == EVALUATION_SEED:
            return self._held_out[index % len(self._held_out)]
        return self._training[shuffled_position(seed, index, len(self._training))]


def _sandbox(limits: RunLimits, name: str, may_be_unfenced: bool) -> Sandbox:
    try:
        return Sandbox.strongest(limits, may_be_unsandboxed=may_be_unfenced)
    except SandboxError as error:
        raise TaskError(
            f"code tasks must run in a sandbox (Linux with user namespaces), got {error}; allow user namespaces, remove "
            f"source {name!r}, or set tasks.run_code_unsandboxed = true, which lets code of strangers read your files"
        ) from None


def _runner(language: str, limits: RunLimits, tasks: TasksSection) -> ProgramRunner:
    known = {**LANGUAGES, **tasks.languages}
    if language not in known:
        raise TaskError(
            f"language must be one of {', '.join(sorted(known))}, got {language}; describe it in tasks.languages"
        )
    try:
        Sandbox(RunLimits()).check()
        return ProgramRunner(known[language], limits)
    except SandboxError as error:
        raise TaskError(
            f"programs in {language} must run in a sandbox (Linux with user namespaces), got {error}; install what is missing, "
            f"or set tasks.languages.{language}"
        ) from None


def _valid_line(section: type[S], text: bytes, where: str) -> S:
    try:
        return section.model_validate(parse_json_text(text))
    except ValueError as error:  # pydantic's are ValueErrors
        raise TaskError(
            f"a code task must be one JSON object, got {first_mistake(error)} in {where}; fix that line"
        ) from None


def _program(text: bytes, where: str) -> CodeProblem:
    line = _valid_line(_ProgramLine, text, where)
    return CodeProblem(line.prompt, "", tuple((test.stdin, test.stdout) for test in line.tests), line.answer)


def _problem(text: bytes, where: str) -> CodeProblem:
    line = _valid_line(_Line, text, where)
    tests = tuple((test.args, test.expected) for test in line.tests)
    return CodeProblem(line.prompt, line.entry, tests, line.answer)
