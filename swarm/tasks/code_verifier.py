"""Runs an answer's code in the sandbox and compares what it returns, here, with what it should.

Processor time differs from machine to machine, so that no node may blame another for what the clock decided:

    up to a quarter of the limit, and ended by itself   its results decide
    beyond a quarter, ended by itself, or waiting       TaskFailure: the group is dropped, nobody is blamed
    stopped at the limit                                wrong
"""

import hashlib
import json
import threading
from collections import OrderedDict
from typing import Any

from swarm.sandbox.runner import RunLimits, Sandbox, SandboxError
from swarm.tasks.code_problems import CodeProblem
from swarm.tasks.task_source import CORRECT, TaskFailure

MAX_CODE_CHARS = 16_384
"""Longer code is wrong."""
SURE_FRACTION = 0.25
_MAX_KNOWN = 4096
_RELATIVE_TOLERANCE = 1e-6
_FENCE = "```"


class CodeVerifier:
    """Verifier of one source, used by several threads; remembers verdicts, since answers of others are looked at twice."""

    def __init__(self, source: str, sandbox: Sandbox, limits: RunLimits) -> None:
        self._source = source
        self._sandbox = sandbox
        self._limits = limits
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, float] = OrderedDict()

    def verify(self, problem: CodeProblem, text: str) -> dict[str, float]:
        """`tests`: share of the tests passed; `correct`: 1 if all are. Raises TaskFailure where that is not sure."""
        code = code_of(text)
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


def code_of(text: str) -> str:
    """The last block between fences, else the whole text."""
    parts = text.split(_FENCE)
    if len(parts) < 3:
        return text
    block = parts[len(parts) - 2 - (len(parts) + 1) % 2]  # of an odd number of fences the last one is left open
    first, newline, rest = block.partition("\n")
    return rest if newline and first.strip().isalnum() else block


def _signals(share: float) -> dict[str, float]:
    return {CORRECT: float(share == 1), "tests": share}


_NOTHING = object()


def _parsed(line: bytes) -> Any:
    """Anything that a stranger wrote there."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return _NOTHING


def _is_equal(expected: Any, got: Any) -> bool:
    """Of the same kind and value; as deep as `expected`. Numbers with a fraction are equal within 1e-6 relative."""
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
