"""The folder of a session's sockets in /tmp, removed by the next session where its owner was killed.

The owner holds a lock on the file `owner` in it. The kernel drops that with the process, however it dies, whatever new
process gets its number, and across containers that share /tmp.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "swarm-"
OWNER_FILE = "owner"


class RuntimeFolder:
    """A new folder that is closed to others. To be removed by `remove`."""

    def __init__(self, parent: Path = Path("/tmp")) -> None:  # noqa: S108 - a socket's path has at most 107 bytes  # nosec B108
        """Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Renamed when it is locked: nobody finds the file of a live owner unlocked.
        unlocked = self.path / f".{OWNER_FILE}"
        self._descriptor = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        os.write(self._descriptor, str(os.getpid()).encode())
        unlocked.rename(self.path / OWNER_FILE)

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_abandoned(parent: Path = Path("/tmp")) -> int:  # noqa: S108  # nosec B108
    """Remove this user's folders whose owner is dead; how many. Others, and those without an owner file, are left."""
    return sum(_remove_if_abandoned(folder) for folder in parent.glob(f"{PREFIX}*"))


def _remove_if_abandoned(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        descriptor = os.open(folder / OWNER_FILE, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone in the meantime, or never owned
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
