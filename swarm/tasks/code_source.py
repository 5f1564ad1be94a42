"""Code tasks: write a function, which is run in the sandbox on inputs whose results only the node knows.

Without a path the functions are made up (`list_functions`). A file has one line per task:

    {"prompt": "...", "entry": "add", "tests": [{"args": [1, 2], "expected": 3}, ...], "answer": "def add(a, b): ..."}

`answer` is optional. As with JSONL tasks every tenth line is held out, and the file's content is the config digest.
"""

import hashlib
from functools import partial
from typing import Annotated, Any

from pydantic import Field, ValidationError

from swarm.config import Section, TaskSourceSection
from swarm.errors import TaskError
from swarm.safe_files import parse_json_text
from swarm.sandbox.runner import RunLimits, Sandbox, SandboxError
from swarm.tasks.code_problems import CodeProblem, list_function
from swarm.tasks.code_verifier import CodeVerifier
from swarm.tasks.jsonl_source import held_out_and_training, numbered_lines, shuffled_position
from swarm.tasks.signals import explain
from swarm.tasks.task_source import EVALUATION_SEED, INDEX_SPAN, MAX_TEXT_CHARS
from swarm.types import Task, TaskRef

MADE_UP = "list_functions"
_WALL_PER_CPU = 5


class CodeParameters(Section):
    """`parameters` of a code source."""

    cpu_s: Annotated[int, Field(ge=1, le=60)] = 2
    """Processor time of one answer."""
    memory_mib: Annotated[int, Field(ge=64, le=4096)] = 256
    """Address space of one answer."""
    num_steps: Annotated[int, Field(ge=1, le=6)] = 2
    """Of made-up functions."""
    num_tests: Annotated[int, Field(ge=2, le=32)] = 6
    """Of made-up functions."""


class _Test(Section):
    args: list[Any]
    expected: Any


class _Line(Section):
    prompt: Annotated[str, Field(pattern=r"\S", max_length=MAX_TEXT_CHARS)]
    entry: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
    tests: Annotated[tuple[_Test, ...], Field(min_length=1, max_length=64)]
    answer: str = ""


class CodeSource:
    """Made-up functions, or those of one file."""

    def __init__(self, config: TaskSourceSection, *, may_be_unfenced: bool) -> None:
        """Raises TaskError for a file or parameters that are not valid, and where no sandbox can be set up."""
        self.name = config.source_name
        self._parameters = _parameters(config)
        self._held_out: list[CodeProblem] = []
        self._training: list[CodeProblem] = []
        content = b""
        if config.path is not None:
            content, lines = numbered_lines(config.path)
            problems = [_problem(text, where) for text, where in lines]
            self._held_out, self._training = held_out_and_training(problems, config.path)
        elif config.name != MADE_UP:
            raise TaskError(
                f"a code source without a path must be {MADE_UP}, got {config.name!r}; set its path or name"
            )
        facts = f"code:{config.name}:{self._parameters.model_dump_json()}:"
        self.config_digest = hashlib.sha256(facts.encode() + content).hexdigest()[:16]
        cpu_s, memory_bytes = self._parameters.cpu_s, self._parameters.memory_mib << 20
        limits = RunLimits(cpu_s=cpu_s, wall_s=float(_WALL_PER_CPU * cpu_s), memory_bytes=memory_bytes)
        self._verifier = CodeVerifier(self.name, _sandbox(limits, self.name, may_be_unfenced), limits)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out) or INDEX_SPAN

    def task(self, seed: int, index: int) -> Task:
        problem = self._problem(seed, index)
        ref = TaskRef(self.name, self.config_digest, seed, index)
        return Task(ref, problem.prompt, partial(self._verifier.verify, problem))

    def answer(self, seed: int, index: int) -> str:
        return self._problem(seed, index).answer

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
        return Sandbox.strongest(limits, may_be_unfenced=may_be_unfenced)
    except SandboxError as error:
        raise TaskError(
            f"code tasks must run in a sandbox (Linux with user namespaces), got {error}; allow user namespaces, remove "
            f"source {name!r}, or set tasks.run_code_unfenced = true and let code of strangers read your files"
        ) from None


def _parameters(config: TaskSourceSection) -> CodeParameters:
    try:
        return CodeParameters.model_validate(config.parameters)
    except ValidationError as error:
        raise TaskError(
            f"parameters of code tasks must be valid, got {config.parameters}: {explain(error)}; "
            f"set tasks.sources.parameters of {config.source_name!r}"
        ) from None


def _problem(text: bytes, where: str) -> CodeProblem:
    try:
        line = _Line.model_validate(parse_json_text(text))
    except ValueError as error:  # pydantic's are ValueErrors
        raise TaskError(
            f"a code task must be one JSON object, got {explain(error)} in {where}; mend that line"
        ) from None
    tests = tuple((test.args, test.expected) for test in line.tests)
    return CodeProblem(line.prompt, line.entry, tests, line.answer)
