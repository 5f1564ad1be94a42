"""Gives memory that this process has freed back to the system, where its C library is glibc; elsewhere nothing happens.

A body of half a megabyte becomes a few megabytes of text and numbers for a moment, on several threads. glibc keeps a heap
per thread and gives back only what lies at the end of one, so the holes stay with the process. Fewer heaps share their
holes, and a trim after a burst of bodies returns them in 2 ms. Its threshold for memory that is mapped and unmapped by itself
would do the same, but every tensor of the compute thread would have to pay for it.
"""

import asyncio
import ctypes

TRIM_DELAY_S = 1.0
_LARGE_BYTES = 64 * 1024
_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
_NUM_ARENAS = 2


class HeapTrimmer:
    """Trims the heap a moment after large data came in, however much of it came."""

    def __init__(self, delay_s: float = TRIM_DELAY_S) -> None:
        self._delay_s = delay_s
        self._glibc = _glibc()
        self._timer: asyncio.TimerHandle | None = None
        self.num_trims = 0

    def note(self, num_bytes: int) -> None:
        """So much came in. To be called on the loop."""
        if self._glibc is not None and self._timer is None and num_bytes > _LARGE_BYTES:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._trim, self._glibc)

    def stop(self) -> None:
        """Forget what was noted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _trim(self, glibc: ctypes.CDLL) -> None:
        self._timer = None
        glibc.malloc_trim(0)
        self.num_trims += 1


def bound_arenas() -> None:
    """At most two heaps in this process in place of eight per core. To be called before there are threads."""
    glibc = _glibc()
    if glibc is not None:
        glibc.mallopt(_ARENA_MAX, _NUM_ARENAS)


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # TypeError: what Windows says to None
        return None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
