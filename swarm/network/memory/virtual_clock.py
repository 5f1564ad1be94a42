"""An asyncio loop on which waiting takes no time: when nothing is ready, the clock jumps to the next timer.

    run(main()) → VirtualLoop → `loop.time()` starts at 0 and moves only between callbacks

Everything that waits through asyncio (sleep, timeout, call_later) becomes virtual and, with seeded randomness, the same
in every run. Work for threads (`to_thread`, `run_in_executor`) is done at once: it takes no virtual time, and the order
in which it ends is always the same. Sockets and child processes do not work on this loop.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH_S = 1_800_000_000.0
"""Swarm time, in seconds since the epoch, at which a virtual clock starts."""


class Stalled(RuntimeError):
    """All tasks wait and nothing is scheduled. On a real loop the program would hang."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time, see the docstring of the module."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        super().__init__(_JumpingSelector(self._advance))

    def time(self) -> float:
        """Return the seconds since the loop was made."""
        return self._elapsed_s

    def _advance(self, duration_s: float) -> None:
        self._elapsed_s += duration_s

    def run_in_executor(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # it belongs to whoever awaits the future, as from a thread
            future.set_exception(error)
        return future


class _JumpingSelector(selectors.SelectSelector):
    """Never polls a file: where it should wait, it moves the clock."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled("nothing is scheduled and nothing is ready; look for a future that nobody sets")
        if timeout > 0:
            self._advance(timeout)
        return []


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, in virtual time. Raises Stalled where the program would hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def virtual_now() -> float:
    """Return the swarm time of the running loop, EPOCH_S plus what has elapsed: the `clock` of a virtual network."""
    return EPOCH_S + asyncio.get_running_loop().time()
