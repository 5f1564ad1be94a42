"""Sharing that a person has paused: steps of an exchange that are under way are broken off, and none begins."""

import asyncio
import functools
from collections.abc import Awaitable, Callable


class SharingPause:
    """Of one exchange; on its loop."""

    def __init__(self) -> None:
        self._is_on = asyncio.Event()
        self._is_paused = asyncio.Event()
        self._is_on.set()

    @property
    def is_paused(self) -> bool:
        return self._is_paused.is_set()

    def pause(self) -> None:
        self._is_on.clear()
        self._is_paused.set()

    def resume(self) -> None:
        self._is_paused.clear()
        self._is_on.set()

    def held(self, step: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """`step`, which waits while sharing is paused, and is cancelled when that begins."""

        @functools.wraps(step)
        async def run() -> None:
            await self._is_on.wait()
            working = asyncio.ensure_future(step())
            pausing = asyncio.ensure_future(self._is_paused.wait())
            try:
                await asyncio.wait({working, pausing}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                for task in (working, pausing):
                    task.cancel()
                await asyncio.gather(working, pausing, return_exceptions=True)

        return run
