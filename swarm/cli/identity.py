"""`swarm identity`: the key that makes a node the same one tomorrow, and on another machine."""

import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.errors import IdentityError

if TYPE_CHECKING:
    from swarm.records.identity import Identity

app = typer.Typer(
    help="Show, back up, move or renew the key that a node is known by.",
    no_args_is_help=True,
)

_FOLDER = typer.Option(Path("runs/node"), "--dir", help="The node's folder.")
_PASSPHRASE_FILE = typer.Option(
    None, "--passphrase-file", help="Take the passphrase from the first line of this file instead of asking for it."
)
_MAX_PASSPHRASE_BYTES = 1024


@app.command()
def show(
    folder: Path = _FOLDER,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Print peer id, readable name and folder. Never the key."""
    from swarm.records.identity import KEY_FILE, load
    from swarm.records.rotation import read_statements

    identity = load(folder / KEY_FILE)
    earlier = [statement["old"] for statement in read_statements(folder) if statement["old"] != identity.peer_id]
    if as_json:
        fields = {"peer_id": identity.peer_id, "peer_name": identity.peer_name, "dir": str(folder), "earlier": earlier}
        print(json.dumps(fields))
        return
    print(f"peer id  {identity.peer_id}\nname     {identity.peer_name}\nfolder   {folder.resolve()}")
    for peer_id in earlier:
        print(f"earlier  {peer_id}")


@app.command()
def export(
    file: Path = typer.Argument(..., help="New file to write."),
    folder: Path = _FOLDER,
    passphrase_file: Path = _PASSPHRASE_FILE,
    plain: bool = typer.Option(False, "--plain", help="Do not encrypt. Needs --i-know-this-is-my-key as well."),
    is_sure: bool = typer.Option(
        False, "--i-know-this-is-my-key", help="Whoever reads a plain export can speak in this node's name."
    ),
) -> None:
    """Write the identity to a file, encrypted with a passphrase, as a backup or for another machine."""
    from swarm.records.identity import KEY_FILE, load
    from swarm.records.identity_export import write_export

    if plain and not is_sure:
        raise IdentityError(
            "an export must be encrypted, got --plain; leave it out, or add --i-know-this-is-my-key: "
            "whoever reads the file can speak in this node's name"
        )
    identity = load(folder / KEY_FILE)
    passphrase = None if plain else _passphrase(passphrase_file, is_new=True)
    write_export(identity, file, passphrase)
    print(f"{identity.peer_name} ({identity.peer_id}) written to {file}{', not encrypted' if plain else ''}")


@app.command("import")
def import_(
    file: Path = typer.Argument(..., help="A file of `swarm identity export`."),
    folder: Path = _FOLDER,
    passphrase_file: Path = _PASSPHRASE_FILE,
    force: bool = typer.Option(False, "--force", help="Replace the identity of the folder; the old key is set aside."),
) -> None:
    """Make an exported identity the one of a node's folder. Use one copy at a time."""
    from swarm.node_folder import NodeFolder
    from swarm.records.identity import IdentityLock
    from swarm.records.identity_export import is_sealed, open_export, read_export

    content = read_export(file)
    identity = open_export(content, _passphrase(passphrase_file, is_new=False) if is_sealed(content) else None)
    NodeFolder(folder).create()
    with IdentityLock(folder):
        _put(identity, folder, force)
    print(f"{folder} is now {identity.peer_name} ({identity.peer_id})")


@app.command()
def rotate(folder: Path = _FOLDER) -> None:
    """Give the node a new identity. The old key is kept beside it, and a statement signed by both says so."""
    from swarm.records.identity import SEED_BYTES, Identity, IdentityLock
    from swarm.records.rotation import ROTATION_FILE
    from swarm.records.rotation import rotate as rotate_identity

    if not folder.is_dir():
        raise IdentityError(f"an identity must exist, got no folder {folder}; name the node's folder with --dir")
    with IdentityLock(folder):
        new = Identity(os.urandom(SEED_BYTES))
        old = rotate_identity(folder, new, time.time())
    print(f"{old.peer_name} ({old.peer_id})\nis now {new.peer_name} ({new.peer_id}); statement in {ROTATION_FILE}")


def _put(identity: "Identity", folder: Path, force: bool) -> None:
    from swarm.records.identity import KEY_FILE, load, write_seed
    from swarm.records.rotation import set_aside

    path = folder / KEY_FILE
    if path.exists():
        old = load(path)
        if old.peer_id == identity.peer_id:
            return
        if not force:
            raise IdentityError(
                f"an identity must not be overwritten, got {old.peer_name} in {folder}; "
                "name another --dir, or set the old key aside with --force"
            )
        print(f"the key of {old.peer_name} is kept in {set_aside(folder, old)}")
    write_seed(identity, path)


def _passphrase(file: Path | None, *, is_new: bool) -> str:
    """From a file or the terminal, never from the command line, which every user of the machine can read."""
    if file is not None:
        return _passphrase_of(file)
    if not sys.stdin.isatty():
        raise IdentityError("a passphrase must come from a terminal, got none; name a file with --passphrase-file")
    return typer.prompt("Passphrase", hide_input=True, confirmation_prompt=is_new)


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
