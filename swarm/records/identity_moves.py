"""Moves an identity to another machine, and changes the identity of a node.

An export is a small JSON file, encrypted with a passphrase:

    {"format": "swarm-identity", "version": 1, "peer_id": …, "salt": …, "nonce": …, "sealed": …}     bytes in hex
    key    = scrypt(passphrase, salt, N = 2^17, r = 8, p = 1)            RFC 7914; 128 MiB and about half a second
    sealed = ChaCha20-Poly1305(key, nonce, seed, bound to the peer id)   RFC 8439

The parameters belong to the version, so that no file can ask for more memory. An unencrypted file holds "seed" in place
of the last three fields.

A rotation replaces a node's identity, and both keys sign the change, so no third party can claim it:

    identity.key ──set aside──> identity.key.<readable name>       identity.rotation.json: who became whom, signed twice
"""

import json
import os
from pathlib import Path
from typing import Any, TypeGuard

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from swarm.errors import IdentityError
from swarm.machine.safe_files import parse_json, read_file, read_json, replace_file
from swarm.records.identity import KEY_FILE, SEED_BYTES, Identity, is_encrypted, is_peer_id, load, verify, write_seed
from swarm.types import is_list, is_table

ROTATION_FILE = "identity.rotation.json"
"""File of a folder's signed rotations, oldest first."""
NEXT_KEY_FILE = "identity.key.next"
"""File of the new seed until it replaces the old one."""
MAX_STATEMENTS_BYTES = 1 << 20
_DOMAIN = b"swarm/rotation/1\x00"

Statement = dict[str, str]
"""{"old": peer id, "new": peer id, "at": seconds since the epoch, "old_signature", "new_signature": hex}"""


def make_statement(old: Identity, new: Identity, at: float) -> Statement:
    """Make the statement that both keys sign. `at` is in seconds since the epoch."""
    fields = {"old": old.peer_id, "new": new.peer_id, "at": f"{at:.0f}"}
    signed = _signed_bytes(fields)
    return fields | {"old_signature": old.sign(signed).hex(), "new_signature": new.sign(signed).hex()}


def statement_is_valid(statement: object) -> TypeGuard[Statement]:
    """Return whether both keys signed the statement. Never raises."""
    names = ("old", "new", "at", "old_signature", "new_signature")
    if not is_table(statement) or not all(isinstance(statement.get(name), str) for name in names):
        return False
    if not all(statement[name].isascii() for name in names):
        return False
    try:
        signatures = [bytes.fromhex(statement[name]) for name in ("old_signature", "new_signature")]
    except ValueError:
        return False
    signed = _signed_bytes(statement)
    return all(
        verify(statement[name], signed, signature) for name, signature in zip(("old", "new"), signatures, strict=True)
    )


def read_statements(folder: Path) -> list[Statement]:
    """Return the valid statements of a folder, oldest first; [] where it never rotated. Raises IdentityError if
    damaged.
    """
    path = folder / ROTATION_FILE
    try:
        statements = read_json(path, MAX_STATEMENTS_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise IdentityError(f"the rotations of a node must be readable, got {error}; check {path}") from None
    except ValueError:
        statements = None
    if not is_list(statements) or not all(map(statement_is_valid, statements)):
        raise IdentityError(f"the rotations of a node must be signed statements, got a damaged {path}; move it away")
    return statements


def rotate(folder: Path, new: Identity, at: float) -> Identity:
    """Make `new` the identity of a folder whose lock is held. Returns the old one.

    If it is killed at any point, the folder holds one of the two identities, and calling it again completes the change.
    Raises IdentityError.
    """
    old = load(folder / KEY_FILE)
    statements = [*read_statements(folder), make_statement(old, new, at)]
    # Statements of an interrupted rotation name an identity that was never used; they are dropped.
    chain = [one for one in statements if one["old"] != old.peer_id] + [statements[-1]]
    write_seed(new, folder / NEXT_KEY_FILE)
    set_aside(folder, old)
    try:
        replace_file(folder / ROTATION_FILE, json.dumps(chain, indent=2) + "\n", is_durable=True)
        (folder / NEXT_KEY_FILE).replace(folder / KEY_FILE)
    except OSError as error:
        raise IdentityError(f"a node's folder must be writable, got {error}; check {folder}") from None
    return old


def set_aside(folder: Path, old: Identity) -> Path:
    """Store a copy of `old` beside the identity of a folder, encrypted if it was. Returns its path.

    Raises IdentityError.
    """
    number, key_file = 1, folder / KEY_FILE
    copied = read_file(key_file, MAX_STATEMENTS_BYTES) if is_encrypted(key_file) else old.seed
    path = folder / f"{KEY_FILE}.{old.peer_name}"
    while os.path.lexists(path):
        if path.lstat().st_size == len(copied) and read_file(path, len(copied)) == copied:
            return path
        number += 1  # two identities may share a readable name
        path = folder / f"{KEY_FILE}.{old.peer_name}-{number}"
    try:
        replace_file(path, copied, is_durable=True)
    except OSError as error:
        raise IdentityError(f"an identity must be writable, got {error}; check the folder {folder}") from None
    return path


def _signed_bytes(fields: dict[str, str]) -> bytes:
    return _DOMAIN + "\0".join((fields["old"], fields["new"], fields["at"])).encode("ascii")


MIN_PASSPHRASE_CHARACTERS = 8
MAX_FILE_BYTES = 4096
_FORMAT = "swarm-identity"
_VERSION = 1
_SALT_BYTES = 16
_NONCE_BYTES = 12
_TAG_BYTES = 16
_SCRYPT_N = 2**17


def write_export(identity: Identity, path: Path, passphrase: str | None) -> None:
    """Write `identity` to a new file of mode 0600, encrypted unless `passphrase` is None.

    Raises IdentityError: the file exists already, it cannot be written, or the passphrase is too short.
    """
    if os.path.lexists(path):
        raise IdentityError(f"an export must not overwrite anything, got {path} that exists; name a new file")
    _write(identity, path, {"seed": identity.seed.hex()} if passphrase is None else _sealed(identity, passphrase))


def write_sealed(identity: Identity, path: Path, passphrase: str) -> None:
    """Replace the file at `path` by the encrypted identity: the key file of a node that is encrypted on disk."""
    _write(identity, path, _sealed(identity, passphrase))


def read_export(path: Path) -> dict[str, Any]:
    """Return the fields of an exported identity. Raises IdentityError for any other file."""
    try:
        data = read_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise IdentityError(f"an exported identity must be readable, got {error}; check {path}") from None
    return parse_export(data, str(path))


def parse_export(data: bytes, where: str) -> dict[str, Any]:
    """Return the fields of an export from its bytes. `where` names their source in errors."""
    try:
        content = parse_json(data) if len(data) <= MAX_FILE_BYTES else None
    except ValueError:
        content = None
    if not is_table(content) or content.get("format") != _FORMAT:
        raise IdentityError(f"an exported identity must be a file of `swarm identity export`, got another in {where}")
    if content.get("version") != _VERSION:
        raise IdentityError(
            f"an exported identity must be of version {_VERSION}, got {content.get('version')!r} in {where}; "
            "import it with a newer release"
        )
    if not is_peer_id(content.get("peer_id", "")):
        raise IdentityError(f"an exported identity must name its peer id, got none in {where}; export it again")
    return content


def is_sealed(content: dict[str, Any]) -> bool:
    """Return whether a passphrase is needed to open what `read_export` returned."""
    return "seed" not in content


def open_export(content: dict[str, Any], passphrase: str | None) -> Identity:
    """Return the identity in an export. Raises IdentityError: wrong passphrase, or damaged file."""
    is_open = not is_sealed(content)
    seed = _field(content, "seed", SEED_BYTES) if is_open else _unsealed(content, passphrase or "")
    identity, peer_id = Identity(seed), content["peer_id"]
    if identity.peer_id != peer_id:
        raise IdentityError(f"an exported identity must hold the key of its peer id, got another than {peer_id}")
    return identity


def _write(identity: Identity, path: Path, fields: dict[str, str]) -> None:
    content = {"format": _FORMAT, "version": _VERSION, "peer_id": identity.peer_id, **fields}
    try:
        replace_file(path, json.dumps(content, indent=2) + "\n", is_durable=True)
    except OSError as error:
        raise IdentityError(f"an export must be writable, got {error}; name a file in a folder of yours") from None


def _sealed(identity: Identity, passphrase: str) -> dict[str, str]:
    if len(passphrase) < MIN_PASSPHRASE_CHARACTERS:
        raise IdentityError(
            f"a passphrase must have at least {MIN_PASSPHRASE_CHARACTERS} characters, got {len(passphrase)}; "
            "take several words"
        )
    salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
    cipher = ChaCha20Poly1305(_key(passphrase, salt))
    sealed = cipher.encrypt(nonce, identity.seed, _bound(identity.peer_id))
    return {"salt": salt.hex(), "nonce": nonce.hex(), "sealed": sealed.hex()}


def _unsealed(content: dict[str, Any], passphrase: str) -> bytes:
    salt, nonce = _field(content, "salt", _SALT_BYTES), _field(content, "nonce", _NONCE_BYTES)
    sealed = _field(content, "sealed", SEED_BYTES + _TAG_BYTES)
    try:
        return ChaCha20Poly1305(_key(passphrase, salt)).decrypt(nonce, sealed, _bound(content["peer_id"]))
    except InvalidTag:
        raise IdentityError(
            "the passphrase must be the one of the export, got another, or a damaged file; type it again"
        ) from None


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=_SCRYPT_N, r=8, p=1).derive(passphrase.encode(errors="surrogateescape"))


def _bound(peer_id: str) -> bytes:
    return f"swarm/identity-export/{_VERSION}\0{peer_id}".encode()


def _field(content: dict[str, Any], name: str, num_bytes: int) -> bytes:
    text = content.get(name)
    try:
        data = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        data = b""
    if len(data) != num_bytes:
        raise IdentityError(
            f"an exported identity must hold {num_bytes} bytes of {name} in hex, got another length; export it again"
        )
    return data
