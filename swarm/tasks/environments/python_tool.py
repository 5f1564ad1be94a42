"""The tool `python`: runs a program of the policy in the sandbox and replies with what it prints."""

from typing import Annotated, ClassVar

from pydantic import Field

from swarm.config import Section, TaskSourceSection, TasksSection
from swarm.errors import TaskError
from swarm.extensions.registry import Isolation
from swarm.sandbox.runner import RunLimits, Sandbox, SandboxError
from swarm.tasks.environments.tool import MAX_RESULT_CHARS, ToolError
from swarm.tasks.task_source import TaskFailure

_WALL_PER_CPU = 5
_RUN = f"""
def run(source):  # a word so that the random numbers of a program are seeded: random
    import contextlib, io, json
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(source, "program.py", "exec"), {{"__name__": "__main__"}})
    except BaseException as error:
        print(f"{{type(error).__name__}}: {{error}}", file=out)
    return out.getvalue()[: {MAX_RESULT_CHARS} + 1]
"""


class PythonParameters(Section):
    """Parameters of `python`."""

    cpu_s: Annotated[int, Field(ge=1, le=60)] = 2
    """Processor time that one program may take."""
    memory_mib: Annotated[int, Field(ge=64, le=4096)] = 256
    """Address space that one program may take."""


class PythonTool:
    """A fresh interpreter for each call, without files, network or other processes."""

    Parameters = PythonParameters
    isolation: ClassVar[Isolation] = Isolation.OWN_SANDBOX
    name = "python"
    description = "Runs a Python program and returns what it prints."
    argument = "code"
    is_exact = False
    rules = "1"

    def __init__(self, parameters: PythonParameters, section: TaskSourceSection, tasks: TasksSection) -> None:
        """Raises TaskError where no sandbox can be set up."""
        self._source = section.source_name
        self._cpu_s = parameters.cpu_s
        limits = RunLimits(
            cpu_s=parameters.cpu_s,
            wall_s=float(_WALL_PER_CPU * parameters.cpu_s),
            memory_bytes=parameters.memory_mib << 20,
        )
        try:
            self._sandbox = Sandbox.strongest(limits, may_be_unsandboxed=tasks.run_code_unsandboxed)
        except SandboxError as error:
            raise TaskError(
                f"the tool python must run in a sandbox (Linux with user namespaces), got {error}; allow user namespaces, "
                f"remove the tool from {self._source!r}, or set tasks.run_code_unsandboxed = true, which lets code of "
                "strangers read your files"
            ) from None

    def run(self, text: str) -> str:
        """What the program prints, and its error where it fails. Raises ToolError where it breaks a limit."""
        try:
            result = self._sandbox.run(_RUN, "run", [[text]])
        except SandboxError as error:
            raise TaskFailure(self._source, f"sandbox: {error}") from None
        if result.end != "exit":
            raise ToolError(f"the program was stopped: at most {self._cpu_s} s and bounded memory and output")
        return _printed(result.lines)


def _printed(lines: tuple[bytes, ...]) -> str:
    """What the program printed, as its process says: it may have written anything there."""
    import json

    try:
        printed = json.loads(lines[0])
    except (IndexError, ValueError, RecursionError):
        printed = None
    if not isinstance(printed, str):
        raise ToolError("the program ended without output")
    return printed.strip() or "(nothing was printed)"
