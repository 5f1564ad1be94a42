"""The folder of one node: identity, configuration, pool, checkpoints, logs and metrics."""

import os
import re
import shlex
import tempfile
from collections.abc import Container
from pathlib import Path

from swarm.errors import ConfigError
from swarm.machine.safe_files import check_no_links

MAX_CONFIG_BYTES = 1 << 20
"""Of config.toml."""
TASKS = "tasks"
"""Folder of reward functions and rows that a Python program has given, each in a folder named by its content."""
_KEPT_ON_FRESH_START = {
    "lock", "manifest.toml", "bootstrap.toml", "peers.json", "ports.json", "reached.json", "reputation.json", "silo.roll",
    "silo.invite", "silo-owner.key", "silo-owner.silo", "silo-owner.key.lock", "page.token", TASKS,
}  # fmt: skip
"""What a fresh start keeps besides the files of the identity: swarm, known peers, ports, reputation, membership, task files."""
_PREVIOUS = re.compile(r"previous-([0-9]{3,9})")
_OWN_FOLDERS = frozenset({"checkpoints", "logs", "final-adapter", "tensorboard", TASKS})
"""What a node writes to by names that others can foresee."""


class NodeFolder:
    """Paths of one node's state."""

    def __init__(self, path: Path, key: Path | None = None) -> None:
        """`key`: file of the identity where that is not in the folder. Whoever names it may name a link."""
        self.path = path
        self.has_key_elsewhere = key is not None
        self.identity = path / "identity.key" if key is None else key.resolve()
        self.config = path / "config.toml"
        self.manifest = path / "manifest.toml"
        self.bootstrap = path / "bootstrap.toml"
        self.pool = path / "pool.sqlite"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.metrics = path / "metrics.jsonl"
        self.status = path / "status.json"
        self.reputation = path / "reputation.json"
        self.final_adapters = path / "final-adapter"
        self.hash_cache = path / "weight_hashes.json"

    def create(self) -> None:
        """Make the folder, readable by its owner only, and close one that an earlier version left open to others.

        Raises ConfigError where that is not possible, where other users could exchange files in it, or where `check` does.
        """
        try:
            # else it is a folder that holds more than a node
            is_own = (self.path / "identity.key").is_file() or not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if is_own and self.path.stat().st_mode & 0o077:
                self.path.chmod(0o700)
            status = self.path.stat()
        except OSError as error:
            raise self._unwritable(error) from None
        _check_closed("node.dir must be", self.path, status)
        self.check()
        if self.has_key_elsewhere:
            self._check_key()

    def check(self) -> None:
        """Raise ConfigError where the folder holds a link, a pipe or a device: what is written to it would go elsewhere.

        Somebody else may have filled it: it may be a backup, or have come with a report of a bug.
        """
        try:
            check_no_links(self.path, _OWN_FOLDERS)
        except OSError as error:
            raise ConfigError(
                f"a node's folder must hold files and folders only, got {error.filename}: {error.strerror}; "
                "remove it, or keep the whole folder elsewhere and set node.dir"
            ) from None

    def _check_key(self) -> None:
        """A key that is not there is not made anew: a disk that is not mounted must not make another node of this one."""
        try:
            self.identity.stat()
            status = self.identity.parent.stat()
        except OSError as error:
            raise ConfigError(
                f"node.identity must be the file of a key, got {self.identity}: {error.strerror}; make one with `swarm init`, "
                "or mount its disk"
            ) from None
        _check_closed("node.identity must be in", self.identity.parent, status)

    def check_writable(self) -> None:
        """Find out whether `create` would work, and leave nothing behind. Raises ConfigError.

        The system is asked rather than the permission bits, which do not bind every user or describe every disk: a
        file without a name is made in the folder, or in the nearest one above it that is there.
        """
        try:
            nearest = next(path for path in (self.path.absolute(), *self.path.absolute().parents) if path.exists())
            with tempfile.TemporaryFile(dir=nearest):
                pass
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"node.dir must be a folder that can be written, got {self.path}: {error.strerror}; set node.dir"
        )

    def run_command(self, num_rounds: int, max_rounds: int | None) -> str:
        """What a person types to go on after `num_rounds`: where these are all, with a larger number than `config.toml` has."""
        more = f" --node.max_rounds {2 * num_rounds}" if max_rounds and num_rounds >= max_rounds else ""
        return f"swarm run {shlex.quote(str(self.config))}{more}"

    def set_aside(self) -> Path | None:
        """Move the state of earlier runs to `previous-NNN/` so that a fresh start loses nothing. None if there is none."""
        if not (self.checkpoints.exists() or self.metrics.exists() or self.pool.exists()):
            return None
        return set_aside(self.path, _KEPT_ON_FRESH_START | {path.name for path in self.path.glob("identity.*")})


def _check_closed(what: str, folder: Path, status: os.stat_result) -> None:
    if status.st_mode & 0o002 or (os.geteuid() and status.st_uid not in (0, os.geteuid())):
        raise ConfigError(
            f"{what} a folder in which no other user can exchange files, got "
            f"{folder} of user {status.st_uid} with mode {status.st_mode & 0o7777:o}; name a new folder inside it"
        )


def set_aside(folder: Path, kept: Container[str]) -> Path | None:
    """Move everything but `kept` and earlier `previous-NNN/` folders into a new one. None if there is nothing to move."""
    old = [item for item in sorted(folder.iterdir()) if item.name not in kept and not item.name.startswith("previous-")]
    if not old:
        return None
    earlier = [_PREVIOUS.fullmatch(item.name) for item in folder.iterdir()]
    number = 1 + max((int(found[1]) for found in earlier if found), default=0)
    target = folder / f"previous-{number:03d}"
    target.mkdir()
    for item in old:
        item.rename(target / item.name)
    return target
