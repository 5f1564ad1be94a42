"""What a silo keeps in a node's folder: the newest roll, and the token by which the node became a member.

Neither holds a secret in the clear: the group's key is in both, wrapped for keys that follow from the identity. So a
member's one secret on disk is its identity, and whoever has that sealed has sealed all.
"""

from pathlib import Path

from swarm.errors import SiloError
from swarm.safe_files import read_file, replace_file
from swarm.silo.grant import MAX_TOKEN_BYTES
from swarm.silo.roll import MAX_ROLL_BYTES

ROLL_FILE = "silo.roll"
INVITE_FILE = "silo.invite"


class SiloFiles:
    """Of one node's folder. Mode 0600 all of them."""

    def __init__(self, folder: Path) -> None:
        self.roll = folder / ROLL_FILE
        self.token = folder / INVITE_FILE
        self._seen: tuple[int, int] | None = None

    @property
    def is_membership(self) -> bool:
        return self.roll.exists() or self.token.exists()

    def read_roll(self) -> bytes | None:
        """The bytes on disk, None where there are none. Raises SiloError."""
        return _read(self.roll, MAX_ROLL_BYTES)

    def read_token(self) -> str | None:
        """Raises SiloError."""
        data = _read(self.token, 2 * MAX_TOKEN_BYTES)
        return None if data is None else data.decode("ascii", errors="replace")

    def write_roll(self, data: bytes) -> None:
        """Raises SiloError."""
        _write(self.roll, data)

    def write_token(self, text: str) -> None:
        """Raises SiloError."""
        _write(self.token, text.encode())

    def roll_has_changed(self) -> bool:
        """Whether somebody, such as the owner's command, has put another roll here since the last look."""
        try:
            status = self.roll.stat()
        except OSError:
            return False
        seen, self._seen = self._seen, (status.st_mtime_ns, status.st_ino)
        return seen != self._seen


def _read(path: Path, max_bytes: int) -> bytes | None:
    try:
        return read_file(path, max_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SiloError(f"a silo's files must be readable, got {error}; check {path}") from None


def _write(path: Path, data: bytes) -> None:
    try:
        replace_file(path, data, is_durable=True)
    except OSError as error:
        raise SiloError(f"a silo's files must be writable, got {error}; check the folder {path.parent}") from None
