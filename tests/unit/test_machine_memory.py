"""What a container or a service is allowed counts, not what its machine has."""

from pathlib import Path

import psutil
import pytest

from swarm.machine.memory import machine_memory

GIB = 1 << 30


def group(folder: Path, files: tuple[str, str], limit: object, used: int, cache: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cache} {64 << 20}\nslab 7\n")


def member_of(root: Path, line: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"{line}\n")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize(
    ("line", "folder", "files", "cache"),
    [
        ("0::/", "sys/fs/cgroup", V2, "inactive_file"),  # a container with its own view
        ("0::/system.slice/swarm-node.service", "sys/fs/cgroup/system.slice/swarm-node.service", V2, "inactive_file"),
        ("0::/system.slice/swarm-node.service", "sys/fs/cgroup/system.slice", V2, "inactive_file"),  # of all services
        ("4:memory:/docker/abc", "sys/fs/cgroup/memory/docker/abc", V1, "total_inactive_file"),
        ("4:cpu,memory:/docker/abc", "sys/fs/cgroup/memory", V1, "total_inactive_file"),  # a container's view of it
    ],
)
def test_the_limit_of_a_control_group_bounds_both(
    tmp_path: Path, line: str, folder: str, files: tuple[str, str], cache: str
) -> None:
    member_of(tmp_path, line)
    group(tmp_path / folder, files, GIB, GIB // 2, cache)
    told = machine_memory(tmp_path)
    assert told.total == GIB
    assert told.available == GIB - (GIB // 2 - (64 << 20)), "what caches files is given back when it is needed"


@pytest.mark.parametrize("limit", ["max", 9223372036854771712, 1 << 59, "damaged"])
def test_no_limit_is_that_of_the_machine(tmp_path: Path, limit: object) -> None:
    member_of(tmp_path, "0::/\n4:memory:/")
    group(tmp_path / "sys/fs/cgroup", V2, limit, GIB, "inactive_file")
    group(tmp_path / "sys/fs/cgroup/memory", V1, limit, GIB, "total_inactive_file")
    assert machine_memory(tmp_path).total == psutil.virtual_memory().total


def test_a_system_without_control_groups_has_its_memory(tmp_path: Path) -> None:
    assert machine_memory(tmp_path).total == psutil.virtual_memory().total


def test_a_group_beyond_its_limit_has_nothing_left(tmp_path: Path) -> None:
    member_of(tmp_path, "0::/")
    group(tmp_path / "sys/fs/cgroup", V2, GIB, 2 * GIB, "inactive_file")
    assert machine_memory(tmp_path).available == 0
