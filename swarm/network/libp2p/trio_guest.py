"""Runs trio inside the node's asyncio loop (trio's guest mode), since py-libp2p works only on trio.

    asyncio coroutine ── await guest.run(async_fn, ...) ──> trio task ── result or exception ──> asyncio

Both loops share one thread, so trio code may call plain functions of asyncio objects and the other way round; only
`await` has to go through `run`. A thread can hold one run of trio, so all users of one asyncio loop share one guest,
which starts with the first user and ends with the last.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

from swarm.errors import NetworkError
from swarm.network.libp2p.parts import trio

Result = TypeVar("Result")

_STOP_GRACE_S = 3.0


class TrioGuest:
    """One run of trio. Every `enter` needs its `leave`."""

    _by_loop: ClassVar["dict[asyncio.AbstractEventLoop, TrioGuest]"] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._num_users = 0
        self._ready: asyncio.Future[tuple[trio.Nursery, trio.lowlevel.TrioToken]] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._cause = "it was stopped"

    @classmethod
    async def enter(cls) -> "TrioGuest":
        """Return the guest of the running loop. Raises NetworkError where trio cannot start."""
        loop = asyncio.get_running_loop()
        guest = cls._by_loop.get(loop)
        if guest is None or guest._ended.done():
            guest = cls._by_loop[loop] = cls(loop)
            guest._start()
        guest._num_users += 1
        try:
            await asyncio.wait([guest._ready, guest._ended], return_when=asyncio.FIRST_COMPLETED)
            if not guest._ready.done():
                raise NetworkError(f"trio must start inside the node's loop, got {guest._cause}")
        except BaseException:
            await guest.leave()
            raise
        return guest

    async def leave(self) -> None:
        """Leave the guest; the last user ends the run. Returns when it has ended, or after a grace time."""
        self._num_users -= 1
        if self._num_users > 0:
            return
        if self._by_loop.get(self._loop) is self:
            del self._by_loop[self._loop]
        if self._ready.done() and not self._ended.done():
            nursery, _ = self._ready.result()
            self.call_soon(nursery.cancel_scope.cancel)
        await asyncio.wait([self._ended], timeout=_STOP_GRACE_S)

    async def run(self, function: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
        """Await a trio coroutine from asyncio. Cancelling one cancels the other. Raises what the coroutine raises.

        Raises NetworkError where the run of trio ends before the coroutine.
        """
        future: asyncio.Future[Result] = self._loop.create_future()
        scope = trio.CancelScope()  # pyright: ignore[reportCallIssue]

        async def task() -> None:
            try:
                with scope:
                    result = await function(*arguments)
                    _complete(future, lambda: future.set_result(result))
            except Exception as error:  # it belongs to the caller; here it would end all of trio
                _complete(future, lambda error=error: future.set_exception(error))
            finally:
                _complete(future, lambda: future.set_exception(self._gone()))

        self._spawn(task, future)
        try:
            return await future
        except asyncio.CancelledError:
            self.call_soon(scope.cancel)
            raise

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a plain function inside trio, unless the run has ended."""
        _, token = self._ready.result()
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(function)

    def _spawn(self, task: Callable[[], Awaitable[None]], future: "asyncio.Future[Any]") -> None:
        nursery, token = self._ready.result()

        def start() -> None:
            try:
                nursery.start_soon(task)
            except RuntimeError:  # the nursery has closed
                _complete(future, lambda: future.set_exception(self._gone()))

        try:
            token.run_sync_soon(start)
        except trio.RunFinishedError:
            raise self._gone() from None

    def _gone(self) -> NetworkError:
        return NetworkError(f"py-libp2p has ended: {self._cause}")

    def _start(self) -> None:
        trio.lowlevel.start_guest_run(
            self._root,
            run_sync_soon_threadsafe=lambda callback: _discard(self._loop.call_soon_threadsafe(callback)),
            run_sync_soon_not_threadsafe=lambda callback: _discard(self._loop.call_soon(callback)),
            done_callback=self._on_end,
            host_uses_signal_set_wakeup_fd=True,
            restrict_keyboard_interrupt_to_checkpoints=True,
        )

    async def _root(self) -> None:
        async with trio.open_nursery() as nursery:
            self._ready.set_result((nursery, trio.lowlevel.current_trio_token()))
            await trio.sleep_forever()

    def _on_end(self, outcome: Any) -> None:
        with contextlib.suppress(trio.Cancelled):
            try:
                outcome.unwrap()
            except Exception as error:  # whatever broke inside py-libp2p; later callers are given the cause
                self._cause = f"{type(error).__name__}: {error}"
        if not self._ended.done():
            self._ended.set_result(None)


def _complete(future: "asyncio.Future[Any]", set_outcome: Callable[[], None]) -> None:
    """Set the first outcome only; a cancelled caller does not wait for one."""
    if not future.done():
        set_outcome()


def _discard(handle: asyncio.Handle) -> None:
    """Return nothing, as trio expects of callbacks."""
