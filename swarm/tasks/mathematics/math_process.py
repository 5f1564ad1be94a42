"""Compares mathematical answers with math-verify, as the service in a sandboxed process (`line_process`).

opening:  nothing
question: [expected LaTeX, LaTeX of an answer]
reply:    {"equal": true or false, "cpu_s": seconds}, or {"late": true} after `CPU_S` seconds of processor time

LaTeX alone is read. math-verify can also read Python expressions, which it evaluates; that part is not used.
"""

import random
import signal
import time
from collections.abc import Callable
from typing import Any

from swarm.sandbox.inside.file_guard import close_files

CPU_S = 2.0
"""Processor time for one comparison, where milliseconds are usual."""
_AGAIN_S = 0.1
"""Time after which the interruption is repeated, where a library has swallowed it."""


class _OutOfTime(BaseException):
    """The processor time of a question is used up. No library that catches Exception catches it."""


def start(opening: None) -> Callable[[list[str]], dict[str, Any]]:
    """Load the libraries, then give up access to all files but those of installed packages."""
    from math_verify.grader import verify
    from math_verify.parser import LatexExtractionConfig, parse
    from sympy.core import random as sympy_random

    latex = (LatexExtractionConfig(),)

    def parsed(text: str) -> Any:
        return parse(
            f"${text}$", latex, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=0
        )  # fmt: skip

    def answer(question: list[str]) -> dict[str, Any]:
        random.seed(0)
        sympy_random.seed(0)
        started_at = time.process_time()
        try:
            signal.setitimer(signal.ITIMER_PROF, CPU_S, _AGAIN_S)
            expected, given = map(parsed, question)
            is_equal = bool(expected and given) and bool(verify(expected, given, timeout_seconds=0))
        except _OutOfTime:
            return {"late": True}
        except (Exception, MemoryError):  # libraries fail over odd texts in any way
            is_equal = False
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return {"equal": is_equal, "cpu_s": time.process_time() - started_at}

    signal.signal(signal.SIGPROF, _interrupt)
    answer([r"\frac{1}{2}", "x^2"])  # tables that the first question builds
    close_files()
    return answer


def _interrupt(number: int, frame: object) -> None:
    raise _OutOfTime
