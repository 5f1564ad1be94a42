"""Runs programs of any language in the sandbox, with text as input and output; and how known languages are run.

    text of a program, inputs ─▶ launcher ─▶ compiler, once ─▶ program, once per input
    outputs, how each ended ◀──── bounded in bytes and time ────────────┘

Which programs of this machine compile and run a language is the operator's decision (`tasks.languages`); tasks name a language
only. Programs see the system's programs and libraries, read-only, and a /tmp of their own. They have no network.
"""

import base64
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from swarm.config import LanguageSection
from swarm.sandbox.runner import SURE_FRACTION, RunLimits, Sandbox, SandboxError
from swarm.types import is_table

_PATH = "/usr/local/bin:/usr/bin:/bin"
_SYSTEM = (
    "/bin", "/lib", "/lib64", "/usr/bin", "/usr/include", "/usr/lib", "/usr/lib64", "/usr/libexec", "/etc/alternatives",
    "/etc/ld.so.cache", "/usr/share/awk", "/usr/share/perl", "/usr/share/perl5",
)  # fmt: skip
"""What a program may read, as far as it exists."""
_ENVIRONMENT = {"PATH": _PATH, "HOME": "/tmp", "TMPDIR": "/tmp", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}  # noqa: S108  # nosec B108
_FILE_BYTES = 32 << 20
"""Size of /tmp, with the compiled program."""
_OPEN_FILES = 64
COMPILER = RunLimits(cpu_s=10, wall_s=50.0, memory_bytes=1 << 30, file_bytes=_FILE_BYTES, open_files=_OPEN_FILES)
"""Limits of a compiler; `wall_s` bounds its time in all."""
_COMPILER_PROCESSES = 8
_COUNTED_PROCESSES = 3
"""Launcher, first process and program, which the kernel counts, too."""
_LINE_BYTES = 256
"""Size of a report about one run, without its output."""

LANGUAGES: Mapping[str, LanguageSection] = {
    "awk": LanguageSection(run=("awk", "-f", "main.awk"), file="main.awk"),
    "bash": LanguageSection(run=("bash", "main.sh"), file="main.sh", max_processes=8),
    "c": LanguageSection(run=("./main",), file="main.c", compile=("gcc", "-std=c17", "-O1", "-o", "main", "main.c", "-lm")),
    "cpp": LanguageSection(run=("./main",), file="main.cpp", compile=("g++", "-std=c++17", "-O1", "-o", "main", "main.cpp")),
    "fortran": LanguageSection(run=("./main",), file="main.f90", compile=("gfortran", "-O1", "-o", "main", "main.f90")),
    "javascript": LanguageSection(
        run=("node", "--single-threaded", "main.js"), file="main.js", max_processes=16, extra_memory_mib=1024
    ),
    "lua": LanguageSection(run=("lua", "main.lua"), file="main.lua"),
    "perl": LanguageSection(run=("perl", "main.pl"), file="main.pl"),
    "python": LanguageSection(
        run=(f"{sys.base_prefix}/bin/python3", "-s", "-P", "-S", "main.py"), file="main.py", home=Path(sys.base_prefix)
    ),
    "ruby": LanguageSection(run=("ruby", "--disable-gems", "main.rb"), file="main.rb", max_processes=4, extra_memory_mib=256),
}  # fmt: skip
"""Known languages. Each is run where its programs are installed."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """How the compiler, or the program with one input, ended."""

    end: str
    """exit; limit: stopped after its processor time; output: stopped after too much output; wall: stopped after its time."""
    code: int
    """Exit code; below 0 the signal that ended it."""
    cpu_s: float
    """Processor time, with that of processes that it waited for."""
    output: bytes


@dataclass(frozen=True, slots=True)
class ProgramRuns:
    """What became of a program."""

    compiled: ProgramRun | None
    """None for a language without a compiler."""
    runs: tuple[ProgramRun, ...]
    """One per input, in order; fewer where it did not compile. The first that took too long to be sure of is the last."""


class ProgramRunner:
    """Runs programs of one language. It is safe from any thread; each call has processes of its own."""

    def __init__(self, language: LanguageSection, limits: RunLimits) -> None:
        """`limits`: of one run; `wall_s` is for all runs of a program together.

        Raises SandboxError where a program of the language is not installed.
        """
        memory_bytes = limits.memory_bytes + (language.extra_memory_mib << 20)
        limits = replace(limits, memory_bytes=memory_bytes, file_bytes=_FILE_BYTES, open_files=_OPEN_FILES)
        self._output_bytes = limits.output_bytes
        self._request = {
            "file": language.file,
            "compile": _command(language.compile) if language.compile else None,
            "compile_limits": {**asdict(COMPILER), "processes": _counted(_COMPILER_PROCESSES)},
            "compile_wall_s": COMPILER.wall_s,
            "run": _command(language.run),
            "limits": {**asdict(limits), "processes": _counted(language.max_processes)},
            "wall_s": limits.wall_s,
            "sure_s": SURE_FRACTION * limits.cpu_s,
            "total_wall_s": limits.wall_s + (COMPILER.wall_s if language.compile else 0.0),
            "home": str(language.home or ""),
            "readable": _SYSTEM,
        }

    def run(self, code: str, inputs: Sequence[str]) -> ProgramRuns:
        """Compile the program, and run it once with each input. Raises SandboxError where the sandbox fails."""
        max_bytes = (len(inputs) + 1) * (_LINE_BYTES + self._output_bytes * 4 // 3)
        result = Sandbox.exchange(
            {**self._request, "code": code, "inputs": list(inputs)}, float(self._request["total_wall_s"]), max_bytes
        )
        if result.end == "wall":
            late = ProgramRun("wall", 0, 0.0, b"")
            return ProgramRuns(None, (late,))
        runs = [_run_of(line) for line in result.lines]
        if not runs:
            raise SandboxError(f"a program must be run, got no report, and the end {result.end}")
        has_compiler = self._request["compile"] is not None
        return ProgramRuns(runs[0] if has_compiler else None, tuple(runs[1:] if has_compiler else runs))


def _counted(more: int) -> int:
    """The limit that lets a program have so many further processes; 0 where it is to have none."""
    return more + _COUNTED_PROCESSES if more else 0


def _command(words: Sequence[str]) -> dict[str, Any]:
    """What the sandbox starts: the program's own path, as links may lead out of what is to be seen there."""
    name, *arguments = words
    if name.startswith("./"):
        return {"binary": name, "arguments": [name, *arguments], "environment": _ENVIRONMENT}
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise SandboxError(
            f"{name} must be installed in one of {_PATH.replace(':', ', ')}, or named by its path, got none"
        )
    return {"binary": os.path.realpath(found), "arguments": [name, *arguments], "environment": _ENVIRONMENT}


def _run_of(line: bytes) -> ProgramRun:
    try:
        report = json.loads(line)
    except ValueError:
        report = None
    if not is_table(report):
        raise SandboxError(f"the first process must report how a program ended, got {line[:100]!r}")
    return ProgramRun(report["end"], report["code"], report["cpu_s"], base64.b64decode(report["output"]))
