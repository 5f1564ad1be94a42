"""The identity of a node: an Ed25519 key whose public half is its libp2p peer id.

    identity.key (32-byte seed) → key pair → peer id (12D3KooW…) → signatures that anyone checks with the peer id alone

The same key signs records and authenticates every libp2p connection, so the author of a record and the peer on a
connection are the same. Peer ids are hard to tell apart, so each has a readable name, too.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Self, TypeGuard

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import ConfigError, IdentityError
from swarm.machine.safe_files import open_to_read, remove_leftovers, replace_file

logger = logging.getLogger(__name__)


_ADJECTIVES = (
    "amber", "bold", "brave", "breezy", "bright", "brisk", "calm", "candid", "cheerful", "clever", "cosmic", "cosy",
    "curious", "daring", "dapper", "eager", "early", "earnest", "fabled", "fair", "fearless", "festive", "fleet",
    "fond", "frank", "gentle", "gifted", "glad", "golden", "graceful", "happy", "hardy", "honest", "humble", "jolly",
    "keen", "kind", "lively", "loyal", "lucid", "lucky", "mellow", "merry", "mighty", "modest", "neat", "nimble",
    "noble", "patient", "placid", "plucky", "polite", "proud", "quick", "quiet", "ready", "serene", "silver",
    "sincere", "spry", "steady", "sunny", "swift", "wise",
)  # fmt: skip
_ANIMALS = (
    "alpaca", "badger", "beaver", "bee", "bison", "bobcat", "camel", "caribou", "cheetah", "condor", "coyote", "crane",
    "cricket", "dolphin", "dove", "eagle", "egret", "elk", "falcon", "ferret", "finch", "firefly", "fox", "gazelle",
    "gecko", "gibbon", "hare", "hawk", "heron", "hummingbird", "ibex", "ibis", "jackdaw", "jaguar", "kestrel", "kiwi",
    "koala", "lark", "lemur", "lynx", "magpie", "manatee", "marmot", "marten", "meerkat", "mole", "moose", "newt",
    "octopus", "osprey", "otter", "owl", "panda", "pelican", "penguin", "puffin", "quail", "raven", "robin", "salmon",
    "seal", "sparrow", "turtle", "walrus",
)  # fmt: skip


def peer_name(peer_id: str) -> str:
    """Return a readable name such as `brave-otter-3f`: one of 2**20, the same everywhere. For display, never for trust."""
    digest = hashlib.sha256(b"peer-name:" + peer_id.encode()).digest()
    return f"{_ADJECTIVES[digest[0] % len(_ADJECTIVES)]}-{_ANIMALS[digest[1] % len(_ANIMALS)]}-{digest[2]:02x}"


SEED_BYTES = 32
SIGNATURE_BYTES = 64
KEY_FILE = "identity.key"
"""Name of the seed's file in a node's folder."""
LOCK_FILE = "lock"
MAX_KEY_FILE_BYTES = 4096
"""Largest key file. An encrypted one is an export (`identity_moves`)."""

# libp2p, peer-ids.md: identity multihash (00, 36 bytes) of the protobuf PublicKey {Type = 1: Ed25519, Data = 32 bytes}.
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
# The protobuf PrivateKey {Type = 1, Data = 64 bytes: seed, public key}.
_LIBP2P_KEY_PREFIX = bytes.fromhex("08011240")
# The base58 of prefix and key always has this length, and one spelling of it. Decoding takes quadratic time, so the
# length is checked first.
_PEER_ID_CHARACTERS = 52


class Identity:
    """A key pair and the names derived from it. It never prints its secret."""

    def __init__(self, seed: bytes) -> None:
        """`seed` holds 32 random bytes. Raises ValueError for another length."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.public_key = self._key.public_key().public_bytes_raw()
        """32 bytes."""
        self.peer_id = base58.b58encode(_PEER_ID_PREFIX + self.public_key).decode()
        self.peer_name = peer_name(self.peer_id)

    def sign(self, data: bytes) -> bytes:
        """Return the Ed25519 signature, 64 bytes; it is deterministic."""
        return self._key.sign(data)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id}, {self.peer_name})"


def verify(peer_id: object, data: object, signature: object) -> bool:
    """Return whether the owner of `peer_id` signed `data`. Malformed arguments give False."""
    key = _public_key(peer_id)
    if key is None or not isinstance(data, bytes) or not isinstance(signature, bytes):
        return False
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def is_peer_id(text: object) -> TypeGuard[str]:
    """Return whether `text` is the one canonical spelling of an Ed25519 peer id."""
    return _public_key(text) is not None


def _public_key(peer_id: object) -> Ed25519PublicKey | None:
    return _decoded_key(peer_id) if isinstance(peer_id, str) and len(peer_id) == _PEER_ID_CHARACTERS else None


@lru_cache(maxsize=4096)
def _decoded_key(peer_id: str) -> Ed25519PublicKey | None:
    try:
        decoded = base58.b58decode(peer_id)
        key = decoded.removeprefix(_PEER_ID_PREFIX)
        return Ed25519PublicKey.from_public_bytes(key) if decoded.startswith(_PEER_ID_PREFIX) else None
    except ValueError:
        return None


def create(path: Path) -> Identity:
    """Create a random identity and write its seed to `path` (mode 0600, in a folder made with mode 0700).

    Raises IdentityError where one exists already, or the file cannot be written.
    """
    if os.path.lexists(path):
        raise IdentityError(f"an identity must not be overwritten, got one at {path}; move it away for a new one")
    identity = Identity(os.urandom(SEED_BYTES))
    write_seed(identity, path)
    return identity


def write_seed(identity: Identity, path: Path) -> None:
    """Replace the file at `path` by the seed, completely or not at all. Raises IdentityError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, identity.seed, is_durable=True)
    except OSError as error:
        raise IdentityError(f"an identity must be writable, got {error}; check the folder {path.parent}") from None


Unlock = Callable[[bytes], Identity]
"""Returns the identity in the bytes of an encrypted key file. Raises IdentityError."""


def load(path: Path, unlock: Unlock | None = None) -> Identity:
    """Read the identity at `path`; `unlock` opens an encrypted one.

    Raises IdentityError: missing, damaged, readable by other users, or encrypted without `unlock`.
    """
    try:
        with open_to_read(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            seed = file.read(MAX_KEY_FILE_BYTES)
    except FileNotFoundError:
        raise IdentityError(f"an identity must exist, got none at {path}; make one with `swarm init`") from None
    except OSError as error:
        raise IdentityError(f"an identity must be readable, got {error}; check {path}") from None
    if mode & 0o077:
        raise IdentityError(f"an identity must be closed to other users, got mode {mode:04o}; chmod 600 {path}")
    if _is_sealed(seed):
        if unlock is None:
            raise IdentityError(
                f"an identity must be readable here, got an encrypted one at {path}; first run `swarm identity unlock`"
            )
        return unlock(seed)
    if len(seed) != SEED_BYTES:
        raise IdentityError(
            f"an identity must hold {SEED_BYTES} bytes, got {'more' if len(seed) > SEED_BYTES else len(seed)} in {path}; "
            "restore it from a copy, or move it away for a new one"
        )
    return Identity(seed)


def is_encrypted(path: Path) -> bool:
    """Return whether the identity at `path` needs a passphrase. False where there is none, or it cannot be read."""
    try:
        with open_to_read(path) as file:
            return _is_sealed(file.read(SEED_BYTES + 1))
    except OSError:
        return False


def _is_sealed(data: bytes) -> bool:
    return len(data) > SEED_BYTES and data.startswith(b"{")


def load_or_create(path: Path, unlock: Unlock | None = None) -> Identity:
    """Return the identity at `path`, created at the first call. Raises IdentityError as `load` and `create` do."""
    return load(path, unlock) if os.path.lexists(path) else create(path)


def write_libp2p_key(identity: Identity, path: Path) -> None:
    """Write the private key as the protobuf file that the libp2p daemon reads (mode 0600). Raises IdentityError."""
    try:
        replace_file(path, _LIBP2P_KEY_PREFIX + identity.seed + identity.public_key)
    except OSError as error:
        raise IdentityError(f"the daemon's key must be writable, got {error}; check the folder {path.parent}") from None


class IdentityLock:
    """A context manager that lets only one process at a time use the identity of a folder.

    Two daemons with one peer id start without an error and then take each other's connections. The kernel releases the
    lock with the process, however it dies. The file stays and names the last holder.
    """

    def __init__(self, folder: Path, runtime_folder: Path | None = None) -> None:
        """`runtime_folder` is where this user's processes list the peer ids they use; by default the user's own."""
        self._folder = folder
        self._runtime_folder = runtime_folder
        self._descriptors: list[int] = []
        self._claimed: Path | None = None

    def __enter__(self) -> Self:
        """Raises IdentityError that names the process holding the lock, ConfigError for a folder that cannot be written."""
        try:
            self._lock(self._folder / LOCK_FILE, str(self._folder), "or give this node another node.dir")
            remove_leftovers(self._folder)
        except OSError as error:
            raise ConfigError(
                f"a node's folder must be writable, got {self._folder}: {error.strerror}; mount it writable, change its "
                "permissions, make room on its disk, or set another node.dir"
            ) from None
        return self

    def claim(self, identity: Identity) -> None:
        """Also lock the peer id, for other folders of this user on this machine that hold a copy of the key.

        Raises IdentityError that names the process using it. Only logs a warning where the runtime folder cannot be
        used.
        """
        folder = self._runtime_folder or _runtime_folder()
        fix = "or make this node an identity of its own with `swarm identity rotate`"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.geteuid():
                raise PermissionError(f"{folder} belongs to another user")
            path = folder / f"{identity.peer_id}.lock"
            self._lock(path, f"{identity.peer_name} ({identity.peer_id})", fix)
            self._claimed = path
        except OSError as error:
            logger.warning("a second process with this identity on this machine cannot be detected: %s", error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._claimed is not None:  # several nodes share that folder, so nothing is left in it
            with contextlib.suppress(OSError):
                self._claimed.unlink()
            self._claimed = None
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _lock(self, path: Path, what: str, fix: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise IdentityError(
                f"an identity must be used by one process, got {what} in use by {holder}; stop that process, {fix}"
            ) from None
        if not _is_at(path, descriptor):  # its last holder has just removed it
            os.close(descriptor)
            self._lock(path, what, fix)
            return
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the open file is the one that others find at `path`."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _runtime_folder() -> Path:
    """Return the folder of this user on this machine. It need not survive a restart of the machine."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime, "swarm") if runtime else Path(tempfile.gettempdir(), f"swarm-{os.geteuid()}")


def _holder(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        pid = os.pread(descriptor, 20, 0)
        if pid.isdigit():
            return f"process {pid.decode()}"
    return "another process"
