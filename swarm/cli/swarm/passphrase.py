"""Reads passphrases from a file, the environment or the terminal. Never from the command line, which every user can read."""

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.errors import IdentityError

if TYPE_CHECKING:
    from swarm.records.identity import Identity

FILE_VARIABLE = "SWARM_PASSPHRASE_FILE"
VARIABLE = "SWARM_PASSPHRASE"
_MAX_PASSPHRASE_BYTES = 1024


def ask_passphrase(file: Path | None = None, *, is_new: bool = False) -> str:
    """The first there is: `file`, the file that SWARM_PASSPHRASE_FILE names, SWARM_PASSPHRASE, the terminal.

    The variable is taken out of the environment, so that no child process inherits it. Raises IdentityError.
    """
    named = os.environ.get(FILE_VARIABLE, "")
    if file is not None or named:
        return _passphrase_of(file or Path(named))
    if passphrase := os.environ.pop(VARIABLE, ""):
        return passphrase
    if not sys.stdin.isatty():
        raise IdentityError(
            "a passphrase must come from a terminal, got none; "
            f"name a file with --passphrase-file or {FILE_VARIABLE}, or set {VARIABLE}"
        )
    return typer.prompt("Passphrase", hide_input=True, confirmation_prompt=is_new)


def unlock(data: bytes) -> "Identity":
    """The identity in a key file that is encrypted, with the passphrase for it. Raises IdentityError."""
    from swarm.records.identity_moves import open_export, parse_export

    content = parse_export(data, "the identity's file")
    return open_export(content, ask_passphrase())


def _passphrase_of(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            line = opened.readline(_MAX_PASSPHRASE_BYTES + 1)
    except OSError as error:
        raise IdentityError(f"a passphrase file must be readable, got {error}; check {file}") from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise IdentityError(f"a passphrase file must be closed to other users; chmod 600 {file}")
    try:
        passphrase = line.decode().rstrip("\r\n")
    except ValueError:
        passphrase = ""
    if not passphrase or len(line) > _MAX_PASSPHRASE_BYTES:
        raise IdentityError(f"a passphrase file must begin with a line of text, got none in {file}; write one")
    return passphrase
