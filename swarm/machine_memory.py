"""The memory that this process may use: of the machine, or less where a control group bounds it.

A container, a systemd service with MemoryMax= or a job of a cluster is such a group. All of those that a process is in
count, from its own up to the root (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory); version 1 as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/")
_NO_LIMIT = 1 << 60
"""Version 1 writes a number beyond this where there is none."""


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes."""

    total: int
    available: int


def machine_memory(root: Path = _ROOT) -> Memory:
    """As it is now. `root`: of the file system that is asked for control groups."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _bounds(root):
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return Memory(total, available)


def _bounds(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of every group that has a limit; what only caches files is not in use."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
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
    """From the group at `path` up to the root. In a container the path is that of outside, and its own group the root."""
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
