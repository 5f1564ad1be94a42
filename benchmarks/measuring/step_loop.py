"""What the trainer processes share: commands in, replies out, one at a time. Standard library only."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from measuring.command_loop import reply, take_over_stdout


class StepLoop:
    """First a specification, then pairs for log-probs, then a line for every step; each is answered."""

    def __init__(self) -> None:
        self._replies: TextIO = take_over_stdout()

    def __iter__(self) -> "StepLoop":
        return self

    def __next__(self) -> dict[str, Any]:
        line = sys.stdin.readline()
        if not line:
            raise StopIteration
        return json.loads(line)

    def answer(self, **fields: Any) -> None:
        reply(self._replies, fields)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
