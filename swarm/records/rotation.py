"""A node's change from one identity to the next, told by both keys.

    identity.key ──set aside──> identity.key.<readable name>       identity.rotation.json: who became whom, signed twice

The old key says where it went, the new one that it comes from there; so neither can be claimed by a third party.
"""

import json
import os
from pathlib import Path
from typing import Any

from swarm.errors import IdentityError
from swarm.records.identity import KEY_FILE, Identity, is_encrypted, load, verify, write_seed
from swarm.safe_files import read_file, read_json, replace_file

ROTATION_FILE = "identity.rotation.json"
"""Statements of a folder's rotations, oldest first."""
NEXT_KEY_FILE = "identity.key.next"
"""The new seed until it takes the place of the old one."""
MAX_FILE_BYTES = 1 << 20
_DOMAIN = b"swarm/rotation/1\x00"

Statement = dict[str, str]
"""{"old": peer id, "new": peer id, "at": seconds since the epoch, "old_signature", "new_signature": hex}"""


def make_statement(old: Identity, new: Identity, at: float) -> Statement:
    """`at`: seconds since the epoch."""
    fields = {"old": old.peer_id, "new": new.peer_id, "at": f"{at:.0f}"}
    signed = _signed_bytes(fields)
    return fields | {"old_signature": old.sign(signed).hex(), "new_signature": new.sign(signed).hex()}


def statement_is_valid(statement: Any) -> bool:
    """Whether both keys signed it. Never raises."""
    names = ("old", "new", "at", "old_signature", "new_signature")
    if not isinstance(statement, dict) or not all(isinstance(statement.get(name), str) for name in names):
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
    """Valid statements of a folder, oldest first; [] where it never rotated. Raises IdentityError for a damaged file."""
    path = folder / ROTATION_FILE
    try:
        statements = read_json(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise IdentityError(f"the rotations of a node must be readable, got {error}; check {path}") from None
    except ValueError:
        statements = None
    if not isinstance(statements, list) or not all(map(statement_is_valid, statements)):
        raise IdentityError(f"the rotations of a node must be signed statements, got a damaged {path}; move it away")
    return statements


def rotate(folder: Path, new: Identity, at: float) -> Identity:
    """Make `new` the identity of a folder whose lock is held; returns the old one.

    Killed at any point, the folder holds either identity whole, and calling it again completes the change.
    Raises IdentityError.
    """
    old = load(folder / KEY_FILE)
    statements = [*read_statements(folder), make_statement(old, new, at)]
    # Those of a rotation that was cut short end at an identity which never came to be.
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
    """Keep a copy of `old` beside the identity of a folder; where it is. One that is encrypted stays so.

    Raises IdentityError.
    """
    number, key_file = 1, folder / KEY_FILE
    kept = read_file(key_file, MAX_FILE_BYTES) if is_encrypted(key_file) else old.seed
    path = folder / f"{KEY_FILE}.{old.peer_name}"
    while os.path.lexists(path):
        if path.lstat().st_size == len(kept) and read_file(path, len(kept)) == kept:
            return path
        number += 1  # two identities may share a readable name
        path = folder / f"{KEY_FILE}.{old.peer_name}-{number}"
    try:
        replace_file(path, kept, is_durable=True)
    except OSError as error:
        raise IdentityError(f"an identity must be writable, got {error}; check the folder {folder}") from None
    return path


def _signed_bytes(fields: dict[str, str]) -> bytes:
    return _DOMAIN + "\0".join((fields["old"], fields["new"], fields["at"])).encode("ascii")
