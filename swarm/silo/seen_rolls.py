"""The newest roll that an identity has seen, kept in a file beside its key.

A roll may come back from a backup on which somebody is still listed who was revoked since. What lies beside the key shows
that a newer one was known, as long as it was not restored with it. It also tells two rolls of one version apart, which
an honest owner does not sign.

    identity.key → identity.silo = JSON {silo's id: {"version", "epoch", "sha256"}}
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.errors import SiloError
from swarm.safe_files import read_json, replace_file
from swarm.silo.roll import Roll

logger = logging.getLogger(__name__)

SUFFIX = ".silo"
_MAX_SILOS = 64
_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class SeenRoll:
    """What is remembered of one roll."""

    version: int = 0
    epoch: int = 0
    sha256: str = ""


class SeenRolls:
    """What one identity has seen of one silo. Without a key's path it is kept in memory alone."""

    def __init__(self, swarm_id: str, key: Path | None = None) -> None:
        """Raises SiloError for a file that cannot be read."""
        self._swarm_id = swarm_id
        self._path = None if key is None else _beside(key)
        self._all = {} if self._path is None else _read(self._path)
        self.newest = self._all.get(swarm_id, SeenRoll())

    def check(self, roll: Roll, data: bytes) -> None:
        """Raises SiloError for a roll older than the newest one, and for another one of the same version."""
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

    def take(self, roll: Roll, data: bytes) -> None:
        """Remember this roll from now on."""
        self.newest = SeenRoll(roll.version, roll.epoch, _digest(data))

    def save(self) -> None:
        """Write it, after the roll itself. Only warns where that is not possible: a new roll counts all the same."""
        if self._path is None or self._all.get(self._swarm_id) == self.newest:
            return
        kept = [one for one in self._all if one != self._swarm_id][-_MAX_SILOS:]
        self._all = {one: self._all[one] for one in kept} | {self._swarm_id: self.newest}
        try:
            replace_file(
                self._path, json.dumps({one: asdict(seen) for one, seen in self._all.items()}), is_durable=True
            )
        except OSError as error:
            logger.warning("what was seen of the silo's roll could not be written to %s: %s", self._path, error)


def _beside(key: Path) -> Path:
    """Of every key another file, and never the key itself, whatever its operator calls it."""
    return key.with_suffix(SUFFIX) if key.suffix == ".key" else key.with_name(key.name + SUFFIX)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: Path) -> dict[str, SeenRoll]:
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
