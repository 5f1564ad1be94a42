"""Takes the files of the operator away from a process that works with what strangers chose.

    Landlock       the kernel refuses, whatever the process does (Linux from 5.13 on)
    audit hook     Python refuses; native code of a library is not held (elsewhere)

What stays readable are Python's own library, the folders of installed packages, this package, and the time zones.
"""

import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

if sys.platform == "linux":
    from swarm.sandbox.inside import landlock

LANDLOCK, AUDIT_HOOK = "landlock", "audit hook"
_ALLOWED_ELSEWHERE = ("/usr/share/zoneinfo",)
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_FILE_EVENTS = ("open", "os.listdir", "os.scandir")
_REFUSED_EVENTS = ("socket.", "subprocess.", "ctypes.", "shutil.", "os.", "pty.", "webbrowser.", "urllib.")
_HARMLESS = ("os.fwalk", "os.walk", "os.getxattr", "os.listxattr", "os.putenv", "os.unsetenv")


def close_files() -> str:
    """From here on this process reads files of Python and of installed packages only. Returns what sees to that."""
    folders = readable_folders()
    if sys.platform == "linux":
        try:
            landlock.read_only_beneath(folders)
            return LANDLOCK
        except OSError:  # an old kernel, or one that was built or started without it
            pass
    _refuse_in_python(folders)
    return AUDIT_HOOK


def readable_folders() -> tuple[Path, ...]:
    """Those of Python's library, of installed packages on its path, and of this package. No current or home folder."""
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
    if isinstance(path, int):  # a file that is open already
        return
    shown = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    if not f"{os.path.realpath(shown)}{os.sep}".startswith(beneath):
        raise PermissionError(f"{event} is for files of installed packages only")
