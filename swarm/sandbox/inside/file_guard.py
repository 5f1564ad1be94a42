"""Closes the operator's files to a process that works with strangers' input.

    Landlock       the kernel refuses access, whatever the process does (Linux 5.13 and newer; needs no privilege)
    audit hook     Python refuses access; native code of a library is not restricted (elsewhere)

Python's own library, the folders of installed packages, this package and the time zones stay readable. Neither can be undone.
"""

import ctypes
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from swarm.sandbox.inside import libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every processor
_VERSION = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
"""All rights on files, by version of Landlock; later versions have one more."""
_NEWEST_FILE_RIGHTS = (1 << 16) - 1
_CONNECTIONS = 3
"""Binding and connecting of TCP, from version 4 on."""
_SCOPES = 3
"""Abstract unix sockets and signals to outer processes, from version 6 on."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("connections", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def read_only_beneath(folders: Iterable[Path], writable: Iterable[Path] = ()) -> None:
    """Let this thread and its children read files below `folders`, write below `writable` and open no others, for good.

    Open files stay open. Raises OSError where the kernel has no Landlock.
    """
    version = libc.system_call(_CREATE_RULESET, None, 0, _VERSION)
    files = _FILE_RIGHTS.get(version, _NEWEST_FILE_RIGHTS)
    rules = _Ruleset(files, _CONNECTIONS if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = libc.system_call(_CREATE_RULESET, ctypes.byref(rules), size, 0)
    try:
        for folder in folders:
            _allow(ruleset, folder, _READ_FILE | _READ_DIR if folder.is_dir() else _READ_FILE)
        for folder in writable:
            _allow(ruleset, folder, files)
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        libc.system_call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, folder: Path, rights: int) -> None:
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _Beneath(rights, descriptor)
        libc.system_call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


if sys.platform == "linux":
    from swarm.sandbox.inside import file_guard as landlock

LANDLOCK, AUDIT_HOOK = "landlock", "audit hook"
_ALLOWED_ELSEWHERE = ("/usr/share/zoneinfo",)
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_FILE_EVENTS = ("open", "os.listdir", "os.scandir")
_REFUSED_EVENTS = ("socket.", "subprocess.", "ctypes.", "shutil.", "os.", "pty.", "webbrowser.", "urllib.")
_HARMLESS = ("os.fwalk", "os.walk", "os.getxattr", "os.listxattr", "os.putenv", "os.unsetenv")


def close_files(readable: Sequence[Path] = (), writable: Sequence[Path] = ()) -> str:
    """Let this process read files of Python and of installed packages only, those below `readable` and `writable`, and write
    below `writable`. Returns which mechanism enforces it.
    """
    folders = (*readable_folders(), *readable)
    if sys.platform == "linux":
        try:
            landlock.read_only_beneath(folders, writable)
            return LANDLOCK
        except OSError:  # an old kernel, or one without Landlock
            pass
    _refuse_in_python((*folders, *(folder.resolve() for folder in writable)))
    return AUDIT_HOOK


def readable_folders() -> tuple[Path, ...]:
    """Return the folders of Python's library, of installed packages and of this package; no current or home folder."""
    library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = [path for path in sys.path if Path(path).name in _PACKAGE_FOLDERS]
    own = Path(__file__).resolve().parents[2]
    wanted = [*library, *installed, site.getusersitepackages(), own, *_ALLOWED_ELSEWHERE]
    return tuple(dict.fromkeys(Path(path).resolve() for path in wanted if path and Path(path).is_dir()))


def _refuse_in_python(folders: Iterable[Path]) -> None:
    beneath = tuple(f"{folder}{os.sep}" for folder in folders)

    def judge(event: str, arguments: tuple[object, ...]) -> None:
        if event in _FILE_EVENTS:
            _check_path(event, arguments[0] if arguments else None, beneath)
        elif event.startswith(_REFUSED_EVENTS) and event not in _HARMLESS:
            raise PermissionError(f"{event} is not for tasks of a manifest")

    sys.addaudithook(judge)


def _check_path(event: str, path: object, beneath: tuple[str, ...]) -> None:
    if isinstance(path, int):  # an open file
        return
    shown = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    if not f"{os.path.realpath(shown)}{os.sep}".startswith(beneath):
        raise PermissionError(f"{event} is for files of installed packages only")
