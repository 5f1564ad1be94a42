"""The files of a silo in a node's folder: the newest roll, the token, and what is known of earlier rolls.

Roll and token contain no plain secret: the group's key is wrapped for keys derived from the identity. So a member's
only secret on disk is its identity, and encrypting that protects everything.

The newest roll that an identity has seen is noted in a file beside its key:

    identity.key → identity.silo = JSON {silo's id: {"version", "epoch", "sha256"}}

A restored backup may contain a roll that still lists a member who was revoked since. The note shows that a newer roll
was known, unless it was restored, too. It also detects two rolls of one version, which an honest owner does not sign.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.errors import SiloError
from swarm.machine.safe_files import read_file, read_json, replace_file
from swarm.manifest.manifest import Manifest
from swarm.silo.grant import MAX_TOKEN_BYTES
from swarm.silo.roll import MAX_ROLL_BYTES, Roll

logger = logging.getLogger(__name__)


SUFFIX = ".silo"
_MAX_SILOS = 64
_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class SeenRoll:
    """What is noted of one roll."""

    version: int = 0
    epoch: int = 0
    sha256: str = ""


class SeenRolls:
    """What one identity has seen of one silo. Without the path of a key it is in memory only."""

    def __init__(self, swarm_id: str, key: Path | None = None) -> None:
        """Raises SiloError for a file that cannot be read."""
        self._swarm_id = swarm_id
        self._path = None if key is None else _beside(key)
        self._all = {} if self._path is None else _read_seen(self._path)
        self.newest = self._all.get(swarm_id, SeenRoll())

    def check(self, roll: Roll, data: bytes) -> None:
        """Raises SiloError for a roll older than the newest one, and for a different one of the same version."""
        newest = self.newest
        if roll.version < newest.version or roll.epoch < newest.epoch:
            raise SiloError(
                f"a silo's roll must be of version >= {newest.version} and epoch >= {newest.epoch}, which this identity "
                f"has seen, got version {roll.version} and epoch {roll.epoch}, as in a restored backup; copy silo.roll "
                "from the folder of another member",
                "old",
            )
        if roll.version == newest.version and _digest(data) != newest.sha256:
            raise SiloError(
                f"a silo must have one roll of version {roll.version}, got a second one that its owner has signed too; "
                "the owner's key is used in two places: its owner must rotate from the folder with the right roll",
                "two_rolls",
            )

    def note(self, roll: Roll, data: bytes) -> None:
        """Note this roll as the newest one."""
        self.newest = SeenRoll(roll.version, roll.epoch, _digest(data))

    def save(self) -> None:
        """Write the note, after the roll itself. A failure is only logged, since the new roll counts all the same."""
        if self._path is None or self._all.get(self._swarm_id) == self.newest:
            return
        others = [one for one in self._all if one != self._swarm_id][-_MAX_SILOS:]
        self._all = {one: self._all[one] for one in others} | {self._swarm_id: self.newest}
        try:
            replace_file(
                self._path, json.dumps({one: asdict(seen) for one, seen in self._all.items()}), is_durable=True
            )
        except OSError as error:
            logger.warning("could not note the newest roll of the silo in %s: %s", self._path, error)


def _beside(key: Path) -> Path:
    """Return the path of the note. It differs for every key and is never the key itself, whatever the key's name."""
    return key.with_suffix(SUFFIX) if key.suffix == ".key" else key.with_name(key.name + SUFFIX)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_seen(path: Path) -> dict[str, SeenRoll]:
    try:
        found = read_json(path, _MAX_BYTES)
        return {swarm_id: _seen(fields) for swarm_id, fields in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SiloError(
            f"what a node has seen of its silo must be readable, got {type(error).__name__} for {path}; remove the file if "
            "the silo.roll of the node's folder is the newest one",
            "malformed",
        ) from None


def _seen(fields: dict[str, object]) -> SeenRoll:
    version, epoch, sha256 = fields["version"], fields["epoch"], fields["sha256"]
    if type(version) is not int or type(epoch) is not int or type(sha256) is not str:
        raise ValueError("expected two numbers and a digest")
    return SeenRoll(version, epoch, sha256)


ROLL_FILE = "silo.roll"
INVITE_FILE = "silo.invite"


class SiloFiles:
    """The files of one node's folder, all with mode 0600."""

    def __init__(self, folder: Path) -> None:
        self.roll = folder / ROLL_FILE
        self.token = folder / INVITE_FILE
        self._seen: tuple[int, int] | None = None

    @property
    def is_membership(self) -> bool:
        return self.roll.exists() or self.token.exists()

    def read_roll(self) -> bytes | None:
        """Return the bytes on disk, None where there are none. Raises SiloError."""
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
        """Return whether the roll on disk has changed since the last look, for example by the owner's command."""
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


def folder_to_join(manifest: Manifest, source: str) -> Path:
    """Return the folder of a new node by the manifest in file `source`: of a silo the one that has the membership."""
    parent = Path(source).parent
    return parent if manifest.silo is not None and SiloFiles(parent).is_membership else Path("runs") / manifest.name
