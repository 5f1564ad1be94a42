"""`swarm identity`: shows, backs up, moves, encrypts or replaces the key that identifies a node."""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.cli.swarm.passphrase import ask_passphrase, unlock
from swarm.errors import IdentityError

if TYPE_CHECKING:
    from swarm.records.identity import Identity

app = typer.Typer(
    help="Show, back up, move or replace the key that identifies a node.",
    no_args_is_help=True,
)

_FOLDER = typer.Option(Path("runs/node"), "--dir", metavar="DIR", help="The node's folder.")
_PASSPHRASE_FILE = typer.Option(
    None,
    "--passphrase-file",
    metavar="FILE",
    help="Take the passphrase from the first line of this file instead of asking for it.",
)
_KEY = typer.Option(
    None, "--key", metavar="FILE", help="Another key than the folder's, such as that of a silo's owner."
)


@app.command()
def show(
    folder: Path = _FOLDER,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Print peer id, readable name and folder. Never the key.

    Reads: the key in DIR.
    Writes: nothing.

    Examples:
      swarm identity show --dir runs/mine --json

    Exit codes: 0 done, 4 identity.
    """
    from swarm.records.identity import KEY_FILE, load
    from swarm.records.identity_moves import read_statements

    identity = load(folder / KEY_FILE, unlock)
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
    """Write the encrypted identity to a file, as a backup or to move it.

    Reads: the key in DIR.
    Writes: FILE, which must be new.

    Examples:
      swarm identity export backup.json --dir runs/mine

    Exit codes: 0 done, 4 identity.
    """
    from swarm.records.identity import KEY_FILE, load
    from swarm.records.identity_moves import write_export

    if plain and not is_sure:
        raise IdentityError(
            "an export must be encrypted, got --plain; leave it out, or add --i-know-this-is-my-key: "
            "whoever reads the file can speak in this node's name"
        )
    identity = load(folder / KEY_FILE, unlock)
    passphrase = None if plain else ask_passphrase(passphrase_file, is_new=True)
    write_export(identity, file, passphrase)
    print(f"{identity.peer_name} ({identity.peer_id}) written to {file}{', not encrypted' if plain else ''}")


@app.command("import")
def import_(
    file: Path = typer.Argument(..., help="A file of `swarm identity export`."),
    folder: Path = _FOLDER,
    passphrase_file: Path = _PASSPHRASE_FILE,
    force: bool = typer.Option(False, "--force", help="Replace the identity of the folder; the old key is set aside."),
) -> None:
    """Store an exported identity in a node's folder. Use only one copy at a time.

    Reads: FILE.
    Writes: the key in DIR.

    Examples:
      swarm identity import backup.json --dir runs/mine

    Exit codes: 0 done, 4 identity.
    """
    from swarm.machine.node_folder import NodeFolder
    from swarm.records.identity import IdentityLock
    from swarm.records.identity_moves import is_sealed, open_export, read_export

    content = read_export(file)
    identity = open_export(content, ask_passphrase(passphrase_file) if is_sealed(content) else None)
    NodeFolder(folder).create()
    with IdentityLock(folder):
        _put(identity, folder, force)
    print(f"{folder} is now {identity.peer_name} ({identity.peer_id})")


@app.command()
def rotate(folder: Path = _FOLDER) -> None:
    """Give the node a new identity.

    The old key is kept beside it, and a statement signed by both says so.

    Reads: the key in DIR.
    Writes: a new one, the old one beside it, identity.rotation.json.

    Examples:
      swarm identity rotate --dir runs/mine

    Exit codes: 0 done, 4 identity.
    """
    from swarm.records.identity import SEED_BYTES, Identity, IdentityLock
    from swarm.records.identity_moves import ROTATION_FILE
    from swarm.records.identity_moves import rotate as rotate_identity

    if not folder.is_dir():
        raise IdentityError(f"an identity must exist, got no folder {folder}; name the node's folder with --dir")
    with IdentityLock(folder):
        new = Identity(os.urandom(SEED_BYTES))
        old = rotate_identity(folder, new, time.time())
    print(f"{old.peer_name} ({old.peer_id})\nis now {new.peer_name} ({new.peer_id}); statement in {ROTATION_FILE}")


@app.command()
def lock(
    folder: Path = _FOLDER,
    key: Path = _KEY,
    passphrase_file: Path = _PASSPHRASE_FILE,
) -> None:
    """Encrypt the key on disk. Every later start needs the passphrase.

    Reads: the key in DIR, or --key.
    Writes: it, encrypted.

    Examples:
      swarm identity lock --dir runs/mine
      swarm identity lock --key runs/silo/silo-owner.key

    Exit codes: 0 done, 4 identity.
    """
    from swarm.records.identity import load
    from swarm.records.identity_moves import write_sealed

    path = _key_path(folder, key)
    identity = load(path)
    write_sealed(identity, path, ask_passphrase(passphrase_file, is_new=True))
    print(f"{path} is encrypted; there is no way to the key without its passphrase")
    for kept in sorted(path.parent.glob(f"{path.name}.*")):
        print(f"not encrypted: {kept}; delete it if it is of no more use")


@app.command("unlock")
def unlock_(
    folder: Path = _FOLDER,
    key: Path = _KEY,
    passphrase_file: Path = _PASSPHRASE_FILE,
) -> None:
    """Store the key unencrypted again, readable by its owner only.

    Reads: the key in DIR, or --key.
    Writes: it, in the clear.

    Examples:
      swarm identity unlock --dir runs/mine

    Exit codes: 0 done, 4 identity.
    """
    from swarm.records.identity import load, write_seed
    from swarm.records.identity_moves import open_export, parse_export

    path = _key_path(folder, key)
    opened = load(path, lambda data: open_export(parse_export(data, str(path)), ask_passphrase(passphrase_file)))
    write_seed(opened, path)
    print(f"{path} is not encrypted any more")


def _key_path(folder: Path, key: Path | None) -> Path:
    from swarm.records.identity import KEY_FILE

    return key or folder / KEY_FILE


def _put(identity: "Identity", folder: Path, force: bool) -> None:
    from swarm.records.identity import KEY_FILE, load, write_seed
    from swarm.records.identity_moves import set_aside

    path = folder / KEY_FILE
    if path.exists():
        old = load(path, unlock)
        if old.peer_id == identity.peer_id:
            return
        if not force:
            raise IdentityError(
                f"an identity must not be overwritten, got {old.peer_name} in {folder}; "
                "name another --dir, or set the old key aside with --force"
            )
        print(f"the key of {old.peer_name} is kept in {set_aside(folder, old)}")
    write_seed(identity, path)
