"""A sink receives metrics rows besides the node's own files, on its own thread.

`scalars` gives the numbers of a row under flat names, for tools that draw curves.
"""

import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

logger = logging.getLogger(__name__)


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, value) of every finite number: `area/name` as it is, counts by reason as `area/name/reason`.

    Evaluations become `evaluation/…`, so that they stand beside the curves of rounds.
    """
    is_evaluation = row.get("kind") == "evaluation"
    for name, value in row.items():
        for full_name, number in _numbers(name, value):
            if is_evaluation and name not in ("round", "policy_version"):
                full_name = f"evaluation/{full_name}"
            if "/" in full_name and math.isfinite(number):
                yield full_name, number


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if isinstance(part, int | float):
                yield f"{name}/{key}", float(part)


_MAX_ROWS = 256
"""That may wait; a node of quick rounds makes some ten of them in a second."""
_CLOSE_S = 15.0


class Sink(Protocol):
    """Takes rows in order, from one thread. May block and may raise: `QueuedSink` stands before it."""

    def write(self, row: dict[str, Any]) -> None:
        """`row`: as in metrics.jsonl, without its time. Not to be changed."""
        ...

    def close(self) -> None: ...


class QueuedSink:
    """A sink behind a bounded queue. Nothing here blocks or raises, but `close`, which waits for a while."""

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        """`open_sink` is called on the sink's own thread, at the first row: it may take its time."""
        self.num_lost = 0
        """Rows that the sink did not get, as it was slow or had failed."""
        self._name = name
        self._open_sink = open_sink
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(_MAX_ROWS)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._is_over = False

    def write(self, row: dict[str, Any]) -> None:
        if not self._is_over and not self._thread.is_alive():
            self._thread.start()
        try:
            if self._is_over:
                raise queue.Full
            self._rows.put_nowait(row)
        except queue.Full:
            self.num_lost += 1

    def close(self) -> None:
        """Let it take what waits, for at most some seconds."""
        if self._thread.is_alive():
            try:
                self._rows.put(None, timeout=_CLOSE_S)
            except queue.Full:
                self.num_lost += self._rows.qsize()
            self._thread.join(_CLOSE_S)
        if self.num_lost or self._thread.is_alive():
            logger.warning("%s did not get %d rows", self._name, self.num_lost + self._rows.qsize())

    def _work(self) -> None:
        try:
            sink = self._open_sink()
            while (row := self._rows.get()) is not None:
                sink.write(row)
            sink.close()
        except Exception as error:  # the thread's edge: whatever a tool of others raises, the node goes on without it
            self.num_lost += 1
            logger.error(
                "%s failed and is left alone; the node goes on: %s: %s", self._name, type(error).__name__, error
            )
        finally:
            self._is_over = True
