"""The memory that this process may use, and a trimmer that returns freed memory to the system.

A container, a systemd service with MemoryMax= or a job of a cluster runs in a control group, which may limit memory.
All groups of a process count, from its own up to the root (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory);
version 1 is supported as well.

A body of half a megabyte becomes a few megabytes of text and numbers for a moment, on several threads. glibc keeps a
heap per thread and returns only what lies at the end of one, so holes stay with the process. Fewer heaps share their
holes, and a trim after a burst of bodies returns them in 2 ms. Large tensors are mapped apart and returned at once: without
that, glibc raises its threshold to 32 MiB, and holes double the peak of a training step. Smaller ones come from a heap that
keeps some free memory at its end: returned and taken anew for every tensor, its pages cost a training step a tenth of its
time. With other C libraries nothing is done.
"""

import asyncio
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

TRIM_DELAY_S = 1.0
_LARGE_BYTES = 64 * 1024
_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
_NUM_ARENAS = 2
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD
_MAPPED_BYTES = 1 << 20
"""What is larger is mapped apart."""
_MAPPED_TENSOR_BYTES = 4 << 20
"""The same, in a process that computes."""
_KEPT_BYTES = 64 << 20
"""Free memory at the end of a heap that stays with a process that computes."""


class HeapTrimmer:
    """Trims the heap a moment after large data arrived, once for a whole burst."""

    def __init__(self, delay_s: float = TRIM_DELAY_S) -> None:
        self._delay_s = delay_s
        self._glibc = _glibc()
        self._timer: asyncio.TimerHandle | None = None
        self.num_trims = 0

    def note(self, num_bytes: int) -> None:
        """Note that this many bytes arrived. Call it on the event loop."""
        if self._glibc is not None and self._timer is None and num_bytes > _LARGE_BYTES:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._trim, self._glibc)

    def stop(self) -> None:
        """Cancel a trim that was noted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _trim(self, glibc: ctypes.CDLL) -> None:
        self._timer = None
        glibc.malloc_trim(0)
        self.num_trims += 1


def keep_heaps_small(*, computes: bool = False) -> None:
    """Limit this process to two heaps instead of eight per core, without large objects. Call it before there are threads.

    A process that `computes` with tensors keeps up to 64 MiB of each heap free for the next ones.
    """
    glibc = _glibc()
    if glibc is not None:
        glibc.mallopt(_ARENA_MAX, _NUM_ARENAS)
        glibc.mallopt(_MMAP_THRESHOLD, _MAPPED_TENSOR_BYTES if computes else _MAPPED_BYTES)
        if computes:
            glibc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # TypeError: raised on Windows for None
        return None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


_ROOT = Path("/")
_NO_LIMIT = 1 << 60
"""Version 1 writes a larger number where there is no limit."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes."""

    total: int
    available: int


def machine_memory(root: Path = _ROOT) -> Memory:
    """Return the memory as it is now. `root` is the root of the file system with the control groups."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _bounds(root):
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return Memory(total, available)


def _bounds(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) of every group that has a limit. Memory that only caches files does not count as used."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    groups = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _walk(groups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _walk(
                groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _walk(mount: Path, path: str, limit_file: str, used_file: str, cache_name: str) -> Iterator[tuple[int, int]]:
    """Visit the groups from `path` up to the root. In a container the path is that of the host, and the root its own
    group.
    """
    leaf = mount / path.lstrip("/")
    for group in (leaf, *leaf.parents):
        if group == mount.parent:
            return
        try:
            limit = int((group / limit_file).read_text())  # ValueError: "max"
            used = int((group / used_file).read_text())
            cached = next(
                int(value)
                for name, value in map(str.split, (group / "memory.stat").read_text().splitlines())
                if name == cache_name
            )
        except (OSError, ValueError, StopIteration):
            continue
        if limit < _NO_LIMIT:
            yield limit, used - cached
