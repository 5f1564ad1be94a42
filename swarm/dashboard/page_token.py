"""The secret that lets a page control its node: random per folder, in a file that only its owner can read."""

import hmac
import os
import secrets
from pathlib import Path

from swarm.errors import NodeNotRunningError

_FILE = "page.token"


def token_path(folder: Path) -> Path:
    return folder / _FILE


def make_token(folder: Path) -> str:
    """The folder's token; a new one where there is none, or where others could have read it. Raises OSError."""
    path = token_path(folder)
    if path.is_file() and path.stat().st_mode & 0o077 == 0 and (kept := path.read_text(encoding="ascii").strip()):
        return kept
    token = secrets.token_urlsafe(32)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def read_token(folder: Path) -> str:
    """Raises NodeNotRunningError where no node has made one."""
    try:
        return token_path(folder).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise NodeNotRunningError(
            f"a node's folder must hold {_FILE}, got none that can be read in {folder} ({error}); start it with `swarm run`"
        ) from None


def is_token(given: str, token: str) -> bool:
    """In a time that says nothing about how much of it was right."""
    return hmac.compare_digest(given.encode(), token.encode())
