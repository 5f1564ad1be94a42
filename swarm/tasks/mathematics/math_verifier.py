r"""The verifier `math`: an answer and the expected one are the same in mathematics, such as `\frac{1}{2}` and `0.5`.

It reads LaTeX and plain arithmetic with math-verify, in a sandboxed process (`math_process`), since parsing and comparing texts
of strangers may take any time and memory. The whole text must be one expression, in `$…$`, `\(…\)`, `\[…\]` and `\boxed{…}` or
without: rules for final answers take it out of a longer text.

Nodes must agree although their processors differ, so texts are bounded first, and then processor time decides as for code tasks:

    within a quarter of the limit      the result decides
    later                              TaskFailure: the group is dropped, nobody is blamed
    stopped at the limit               wrong
"""

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from swarm.errors import TaskError
from swarm.extensions.registry import Isolation
from swarm.sandbox.line_process import Confinement, LineProcess, LineProcessError
from swarm.tasks.mathematics.math_process import CPU_S
from swarm.tasks.task_source import TaskFailure
from swarm.tasks.verifiers import Verifier

MAX_CHARS = 500
"""Longer answers are wrong."""
MAX_DEPTH = 10
"""Answers with deeper brackets are wrong."""
SURE_S = CPU_S / 4
TIME_BUDGET_S = 30.0
"""Wall time for one comparison; a machine that needs longer is overloaded."""
_CONFINEMENT = Confinement(memory_bytes=1 << 30, file_bytes=0, namespaces="if possible")
_PACKAGES = ("math-verify", "latex2sympy2-extended", "sympy")
_KNOWN = 4_096
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"))
_OPENING, _CLOSING = "([{", ")]}"


class MathComparison:
    """Compares expressions in one process, which starts with the first comparison. It is safe from any thread."""

    def __init__(self) -> None:
        self._process = LineProcess("swarm.tasks.mathematics.math_process", None, _CONFINEMENT)
        self._compare = lru_cache(_KNOWN)(self._ask)

    def rules(self) -> str:
        """Packages and versions that decide about equality. Raises TaskError where one is missing, or no process can start."""
        try:
            self._process.start()
            return " ".join(f"{name}=={version(name)}" for name in _PACKAGES)
        except PackageNotFoundError as error:
            raise TaskError(f"verifier math needs the package {error.name}; `pip install math-verify`") from None
        except LineProcessError as error:
            raise TaskError(
                f"verifier math must run in a process of its own, got {error}; use another verifier, or fix that"
            ) from None

    def score(self, expected: str, text: str) -> float:
        """1 where both are equal, else 0. Raises TaskFailure where another machine may differ, and without a process."""
        if len(text) > MAX_CHARS:
            return 0.0
        wanted, given = expression(expected), expression(text)
        if not given or not is_bounded(given):
            return 0.0
        return 1.0 if wanted == given else self._compare(wanted, given)

    def _ask(self, expected: str, given: str) -> float:
        try:
            reply = self._process.ask([expected, given], TIME_BUDGET_S)
            if reply.get("late") is True:
                self._process.renew()  # an interrupted library may be in any state
                return 0.0
        except LineProcessError as error:
            if error.by_question and not error.is_late:  # it ended over the text: out of memory, or a crash
                return 0.0
            raise TaskFailure("math", f"comparison: {error}") from None
        is_equal, cpu_s = reply.get("equal"), reply.get("cpu_s")
        if not isinstance(is_equal, bool) or not isinstance(cpu_s, float):  # it reads texts of strangers
            raise TaskFailure("math", "comparison: a reply must have a boolean and a time")
        if not cpu_s <= SURE_S:
            raise TaskFailure("math", f"the comparison took {cpu_s:.2f} s; only up to {SURE_S:g} s is sure")
        return float(is_equal)


def expression(text: str) -> str:
    """The expression without white space, a full stop and marks of LaTeX around it; empty where there is other mathematics."""
    text = text.strip().removesuffix(".").strip()
    for opening, closing in _WRAPPERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            inner = text[len(opening) : -len(closing)]
            if opening != "\\boxed{" or _depth(inner) is not None:
                text = inner.strip()
    return "" if "$" in text else text


def is_bounded(text: str) -> bool:
    """Whether brackets do not nest deeper than `MAX_DEPTH`."""
    depth = deepest = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        deepest = max(deepest, depth)
    return deepest <= MAX_DEPTH


def _depth(text: str) -> int | None:
    """The depth of braces, or None where one closes that was not opened."""
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return None
    return depth


def check_expression(expected: str) -> None:
    """Raise ValueError for an expected answer that nothing can equal."""
    if len(expected) > MAX_CHARS or not expression(expected) or not is_bounded(expression(expected)):
        raise ValueError(
            f"a math answer must be one expression of LaTeX with at most {MAX_CHARS} characters and brackets at most {MAX_DEPTH} "
            f"deep, got {expected[:80]!r}"
        )


_COMPARISON = MathComparison()
MATH = Verifier(_COMPARISON.score, check_expression, Isolation.OWN_SANDBOX, _COMPARISON.rules)
