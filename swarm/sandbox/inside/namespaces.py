"""Namespaces and a file system of nothing but Python's own library and one small empty folder."""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from swarm.sandbox.inside import libc

_NOBODY = 65534
_NEW_ROOT = "/tmp"  # noqa: S108  any folder that is there: the mount on it is seen by this process alone  # nosec B108
WORK_FOLDER = "/work"
_ROOT_OPTIONS = "size=64k,nr_inodes=64,mode=0755"
_KEPT_FLAGS = 1 | 2 | 4 | 8 | 1024 | 2048  # of a mount, as statvfs tells them; they must stay when it is mounted again


def leave_root() -> None:
    """Be nobody: limits on processes do not hold for root, and nothing of root's may be readable.

    A root that may not become another (in a container) stays; the namespaces and the filter hold for it as well.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        libc.prctl(libc.PR_SET_DUMPABLE, 1)  # else the maps below belong to root


def enter_namespaces() -> None:
    """New user, mount, network, IPC and host name for this process; a new process tree for its children."""
    uid, gid = os.geteuid(), os.getegid()
    libc.unshare(
        libc.CLONE_NEWUSER
        | libc.CLONE_NEWNS
        | libc.CLONE_NEWPID
        | libc.CLONE_NEWNET
        | libc.CLONE_NEWIPC
        | libc.CLONE_NEWUTS
    )
    for name, text in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {uid} 1"), ("gid_map", f"{_NOBODY} {gid} 1")):
        Path("/proc/self", name).write_text(text)
    libc.set_host_name("sandbox")


def build_root(library: str, work_bytes: int) -> None:
    """Leave all files but Python's library, read-only and without what was installed there, and WORK_FOLDER.

    `library` is the current folder already: the way to it may be closed to nobody.
    """
    kept = os.statvfs(".").f_flag & _KEPT_FLAGS
    libc.mount("none", "/", "", libc.MS_REC | libc.MS_PRIVATE)
    libc.mount("tmpfs", _NEW_ROOT, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, _ROOT_OPTIONS)
    place = _NEW_ROOT + library
    Path(place).mkdir(parents=True)
    libc.mount(".", place, "", libc.MS_BIND | libc.MS_REC)
    flags = libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV | kept
    libc.mount("none", place, "", flags | (0 if kept & 1024 else libc.MS_RELATIME))
    for name in ("site-packages", "dist-packages"):
        if Path(place, name).is_dir():
            libc.mount("tmpfs", f"{place}/{name}", "tmpfs", libc.MS_RDONLY, "size=4k,nr_inodes=2,mode=0555")
    work = _NEW_ROOT + WORK_FOLDER
    Path(work).mkdir()
    options = f"size={work_bytes},nr_inodes=64,mode=0700"
    libc.mount("tmpfs", work, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC, options)
    _enter_root()
    os.chdir(WORK_FOLDER)


def build_view(paths: Iterable[str], temporary_bytes: int) -> None:
    """Leave all files but those under the absolute `paths` that exist, read-only, and an empty /tmp of so many bytes."""
    handles = _opened(paths)  # before /tmp is covered
    libc.mount("none", "/", "", libc.MS_REC | libc.MS_PRIVATE)
    libc.mount("tmpfs", _NEW_ROOT, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, "size=1m,nr_inodes=4096,mode=0755")
    temporary = _NEW_ROOT + "/tmp"  # noqa: S108  # nosec B108
    Path(temporary).mkdir(exist_ok=True)
    if temporary_bytes:
        options = f"size={temporary_bytes},nr_inodes=1024,mode=0700"
        libc.mount("tmpfs", temporary, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC, options)
    for path, handle in handles.items():
        place = Path(_NEW_ROOT + path)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        libc.mount(f"/proc/self/fd/{handle}", str(place), "", libc.MS_BIND | libc.MS_REC)
        libc.set_read_only(str(place))
        os.close(handle)
    _enter_root()


def _enter_root() -> None:
    """Make _NEW_ROOT the root, read-only, and let go of the old one."""
    os.chdir(_NEW_ROOT)
    libc.pivot_root(".", ".")  # the old root is stacked on the new one, and taken off it
    libc.detach(".")
    libc.mount("none", "/", "", libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV)


def _opened(paths: Iterable[str]) -> dict[str, int]:
    """A handle for each path that exists and is not inside another one."""
    kept: dict[str, int] = {}
    for path in sorted({os.path.normpath(path) for path in paths if Path(path).is_absolute() and Path(path).exists()}):
        if path != "/" and not any(Path(path).is_relative_to(other) for other in kept):
            kept[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
    return kept
