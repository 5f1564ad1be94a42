"""Enters namespaces, and builds a file system with only Python's library or given folders, and one small empty folder."""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from swarm.sandbox.inside import libc

_NOBODY = 65534
_NEW_ROOT = "/tmp"  # noqa: S108  any existing folder; only this process sees the mount on it  # nosec B108
WORK_FOLDER = "/work"
_ROOT_OPTIONS = "size=64k,nr_inodes=64,mode=0755"
_PRESERVED_FLAGS = 1 | 2 | 4 | 8 | 1024 | 2048  # mount flags, as in statvfs, that a second mount must keep


def leave_root() -> None:
    """Become the user nobody: process limits do not apply to root, and root's files must not be readable.

    A root that cannot change its user (in a container) stays root; the namespaces and the filter apply to it as well.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        libc.prctl(libc.PR_SET_DUMPABLE, 1)  # otherwise the maps below belong to root


def enter_namespaces() -> None:
    """Create user, mount, network, IPC and host name namespaces for this process, and a process tree for its children."""
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
    """Replace the file system by Python's library, read-only and without packages installed there, and WORK_FOLDER.

    `library` must be the current folder: the user nobody may have no access to the folders above it.
    """
    mount_flags = os.statvfs(".").f_flag & _PRESERVED_FLAGS
    libc.mount("none", "/", "", libc.MS_REC | libc.MS_PRIVATE)
    libc.mount("tmpfs", _NEW_ROOT, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, _ROOT_OPTIONS)
    place = _NEW_ROOT + library
    Path(place).mkdir(parents=True)
    libc.mount(".", place, "", libc.MS_BIND | libc.MS_REC)
    flags = libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV | mount_flags
    libc.mount("none", place, "", flags | (0 if mount_flags & 1024 else libc.MS_RELATIME))
    for name in ("site-packages", "dist-packages"):
        if Path(place, name).is_dir():
            libc.mount("tmpfs", f"{place}/{name}", "tmpfs", libc.MS_RDONLY, "size=4k,nr_inodes=2,mode=0555")
    work = _NEW_ROOT + WORK_FOLDER
    Path(work).mkdir()
    options = f"size={work_bytes},nr_inodes=64,mode=0700"
    libc.mount("tmpfs", work, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC, options)
    _enter_root()
    os.chdir(WORK_FOLDER)


def build_view(paths: Iterable[str], temporary_bytes: int, *, has_programs: bool = False, current: str = "") -> None:
    """Replace the file system by the existing absolute `paths`, read-only, /dev/null, and an empty /tmp of `temporary_bytes`.

    With `has_programs` what is written to /tmp can be run. `current`: the path of the current folder, where that is to be seen,
    too.
    """
    handles = _opened(paths)  # before /tmp is hidden
    if current:
        handles[current] = os.open(".", os.O_PATH | os.O_CLOEXEC)
    libc.mount("none", "/", "", libc.MS_REC | libc.MS_PRIVATE)
    nowhere = os.open("/dev/null", os.O_PATH | os.O_CLOEXEC)
    libc.mount("tmpfs", _NEW_ROOT, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, "size=1m,nr_inodes=4096,mode=0755")
    temporary = _NEW_ROOT + "/tmp"  # noqa: S108  # nosec B108
    Path(temporary).mkdir(exist_ok=True)
    if temporary_bytes:
        options = f"size={temporary_bytes},nr_inodes=1024,mode=0700"
        flags = libc.MS_NOSUID | libc.MS_NODEV | (0 if has_programs else libc.MS_NOEXEC)
        libc.mount("tmpfs", temporary, "tmpfs", flags, options)
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
    Path(_NEW_ROOT + "/dev").mkdir(exist_ok=True)
    Path(_NEW_ROOT + "/dev/null").touch()
    libc.mount(f"/proc/self/fd/{nowhere}", _NEW_ROOT + "/dev/null", "", libc.MS_BIND)
    os.close(nowhere)
    _enter_root()


def _enter_root() -> None:
    """Make _NEW_ROOT the root, read-only, and detach the old one."""
    os.chdir(_NEW_ROOT)
    libc.pivot_root(".", ".")  # the old root is mounted on the new one, and then detached
    libc.detach(".")
    libc.mount("none", "/", "", libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV)


def _opened(paths: Iterable[str]) -> dict[str, int]:
    """Open a handle for each path that exists and is not inside another one."""
    handles: dict[str, int] = {}
    for path in sorted({os.path.normpath(path) for path in paths if Path(path).is_absolute() and Path(path).exists()}):
        if path != "/" and not any(Path(path).is_relative_to(other) for other in handles):
            handles[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
    return handles
