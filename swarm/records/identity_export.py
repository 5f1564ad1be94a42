"""An identity on its way to another machine: a small JSON file, sealed with a passphrase.

    {"format": "swarm-identity", "version": 1, "peer_id": …, "salt": …, "nonce": …, "sealed": …}     bytes in hex
    key    = scrypt(passphrase, salt, N = 2^17, r = 8, p = 1)            RFC 7914; 128 MiB and about half a second
    sealed = ChaCha20-Poly1305(key, nonce, seed, bound to the peer id)   RFC 8439

The parameters belong to the version, so that a file can ask for no more memory than this. A plain file holds "seed" in
place of the last three.
"""

import json
import os
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from swarm.errors import IdentityError
from swarm.records.identity import SEED_BYTES, Identity, is_peer_id
from swarm.safe_files import parse_json, read_file, replace_file

MIN_PASSPHRASE_CHARACTERS = 8
MAX_FILE_BYTES = 4096
_FORMAT = "swarm-identity"
_VERSION = 1
_SALT_BYTES = 16
_NONCE_BYTES = 12
_TAG_BYTES = 16
_SCRYPT_N = 2**17


def write_export(identity: Identity, path: Path, passphrase: str | None) -> None:
    """Write `identity` to a new file of mode 0600, sealed; in the clear where `passphrase` is None.

    Raises IdentityError: a file is there already, it cannot be written, or the passphrase is too short.
    """
    if os.path.lexists(path):
        raise IdentityError(f"an export must not overwrite anything, got {path} that exists; name a new file")
    _write(identity, path, {"seed": identity.seed.hex()} if passphrase is None else _sealed(identity, passphrase))


def write_sealed(identity: Identity, path: Path, passphrase: str) -> None:
    """The same, sealed, in place of what is at `path`: the key file of a node that is encrypted at rest."""
    _write(identity, path, _sealed(identity, passphrase))


def read_export(path: Path) -> dict[str, Any]:
    """The fields of an exported identity. Raises IdentityError for a file that is none."""
    try:
        data = read_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise IdentityError(f"an exported identity must be readable, got {error}; check {path}") from None
    return parse_export(data, str(path))


def parse_export(data: bytes, where: str) -> dict[str, Any]:
    """The same for its bytes; `where` they come from, for the error."""
    try:
        content = parse_json(data) if len(data) <= MAX_FILE_BYTES else None
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
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
    """Whether a passphrase is needed to open what `read_export` gave."""
    return "seed" not in content


def open_export(content: dict[str, Any], passphrase: str | None) -> Identity:
    """The identity inside. Raises IdentityError: wrong passphrase, or damaged file."""
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
