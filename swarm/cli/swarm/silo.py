"""`swarm silo`: founds and manages a private swarm, where everything that leaves a node is encrypted for its members."""

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.cli.arguments import take_first
from swarm.cli.swarm.passphrase import unlock
from swarm.errors import IdentityError, ManifestError, SiloError
from swarm.machine.safe_files import locked, replace_file
from swarm.observability.plain_text import counted

if TYPE_CHECKING:
    from swarm.cli.swarm.create import FilesToSend
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.manifest import Manifest
    from swarm.records.identity import Identity
    from swarm.silo.owner import Owner
    from swarm.silo.roll import Roll
    from swarm.silo.silo_files import SeenRolls


OWN_NODE_S = 100 * 365 * 86_400.0
"""Membership of the owner's first node: it does not end by itself."""


def found(
    name: str,
    settings: list[str],
    folder: Path,
    key: Path,
    addresses: list[str],
    bases: list[str],
    description: str,
    options: tuple[str, ...],
) -> "tuple[Manifest, FilesToSend]":
    """Write all of it into `folder`. Returns the files that members need beside an invitation, too.

    Raises SwarmError: a folder that has a swarm already, settings that do not hold.
    """
    from swarm.cli.swarm.create import base_content, checked_config, files_to_send, manifest_content, own_base
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest import manifest as manifests
    from swarm.manifest.files import write_text
    from swarm.records import identity as identities
    from swarm.records.codec import PROTOCOL_VERSION
    from swarm.silo.grant import make_request, read_request
    from swarm.silo.owner import Owner
    from swarm.silo.silo_files import SeenRolls, SiloFiles

    files, silo_files = NodeFolder(folder), SiloFiles(folder)
    if files.manifest.exists() or silo_files.is_membership:
        raise ManifestError(f"a folder must have one swarm, got one in {folder} already; set another --dir")
    files.create()
    identity = identities.load_or_create(files.identity, unlock)
    bootstrap = [one if "/p2p/" in one else f"{one}/p2p/{identity.peer_id}" for one in addresses]
    config = checked_config(name, settings, bootstrap, options)
    owner_key = identities.load_or_create(key, unlock)
    if owner_key.peer_id == identity.peer_id:
        raise SiloError(f"the owner's key must not be a node's, got {key}; set another --key")
    named = bases or [own_base(config)]
    content = manifest_content(config) | base_content(config, named, [])
    content |= {"bootstrap": bootstrap, "description": description, "silo": True}
    now = time.time()
    manifest = manifests.create(owner_key, name, PROTOCOL_VERSION, now, **content)
    text = manifests.dump(manifest, owner_key)
    owner = Owner.found(owner_key, manifest.id, now)
    owner.invite(read_request(make_request(identity)), now + OWN_NODE_S, now, text)
    write_text(files.manifest, text)
    silo_files.write_roll(owner.data)
    seen = SeenRolls(manifest.id, key)
    seen.note(owner.roll, owner.data)
    seen.save()
    return manifest, files_to_send(config, named)


app = typer.Typer(
    help="Private swarms, encrypted and for members only: found one, request membership, invite, revoke.",
    no_args_is_help=True,
)

OWNER_KEY = "silo-owner.key"
NEW_FOLDER = Path("runs/silo")
_FOLDER = typer.Option(NEW_FOLDER, "--dir", metavar="DIR", help="The node's folder.")
_KEY = typer.Option(None, "--key", metavar="FILE", help=f"The owner's key. Default: {OWNER_KEY} in the folder.")
_NODE_KEY = typer.Option(
    None, "--key", metavar="FILE", help="The node's key, where node.identity names one outside DIR."
)
_DAY_S = 86_400.0
_OPTIONS = ("--dir", "--key", "--address", "--base", "--description")


@app.command("init", context_settings={"ignore_unknown_options": True})
def init(
    arguments: list[str] = typer.Argument(
        None,
        metavar="NAME [CONFIG|--section.key VALUE]",
        help="Name of the silo; then settings as `swarm run` takes them, for tasks, base and limits.",
    ),
    folder: Path = _FOLDER,
    key: Path = _KEY,
    address: list[str] = typer.Option(
        [],
        metavar="ADDRESS",
        help="Where others can reach this node, such as /ip4/10.0.0.1/tcp/28000, or ADDRESS/p2p/PEER_ID of another.",
    ),
    base: list[str] = typer.Option(
        [], metavar="BASE", help="Base that nodes may train: a name or a folder. Default: policy.base."
    ),
    description: str = typer.Option("", help="One line about the silo."),
) -> None:
    """Found a silo: write the owner's key, the manifest and the first member.

    A base that is a folder is named by its lineage. The last lines say which
    files members need beside their invitation.

    Reads: settings for tasks, base and limits.
    Writes: owner's key, manifest, roll and a node's identity in DIR.

    Examples:
      swarm silo init lab --address /ip4/10.0.0.1/tcp/28000

    Exit codes: 0 done, 3 settings, 4 key, 5 base, 6 tasks, 12 manifest, 17 silo.
    """
    name, settings = take_first(arguments or [])
    if name is None:
        raise ManifestError("swarm silo init needs a name, got none; see --help")
    manifest, files = found(name, settings, folder, key or folder / OWNER_KEY, address, base, description, _OPTIONS)
    listen = [one.partition("/p2p/")[0] for one in address]
    listening = f" --network.listen '{json.dumps(listen)}'" if listen else ""
    print(f"silo {name}, id {manifest.id}, owner {manifest.founder_name} ({manifest.founder})")
    print(f"back up {key or folder / OWNER_KEY}: whoever has it decides who the members are")
    print(*files.notes(), "next:", sep="\n")
    print(f"  swarm join {folder / 'manifest.toml'}{listening}{files.options(of_founder=True)}   # starts this node")
    print(f"  swarm silo invite REQUEST --dir {folder}   # for each line that `swarm silo request` prints elsewhere")
    if files.names():
        print(f"  send with each invitation: {', '.join(files.names())}")
        print(f"  a member runs: swarm join {NEW_FOLDER / 'manifest.toml'}{files.options()}")


@app.command()
def request(folder: Path = _FOLDER, key: Path = _NODE_KEY) -> None:
    """Print the line that asks a silo's owner for a membership.

    It holds no secret.

    Reads: the identity in DIR, or --key.
    Writes: it, where DIR has none.

    Examples:
      swarm silo request --dir runs/silo

    Exit codes: 0 done, 4 identity.
    """
    from swarm.machine.node_folder import NodeFolder
    from swarm.records.identity import load_or_create
    from swarm.silo.grant import make_request

    files = NodeFolder(folder, key)
    files.create()
    print(make_request(load_or_create(files.identity, unlock)))


@app.command()
def invite(
    request: str = typer.Argument(..., metavar="REQUEST", help="The line that they sent you, or a file with it."),
    folder: Path = _FOLDER,
    key: Path = _KEY,
    days: float = typer.Option(365.0, min=0.001, help="So long they are a member; invite them again to renew it."),
    out: Path = typer.Option(None, help="Write the invitation to this file instead of printing it."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Make somebody a member.

    Send them the line that it prints. It is useless to anybody else.

    Reads: REQUEST, the owner's key, the roll in DIR.
    Writes: the new roll in DIR; with --out the invitation.

    Examples:
      swarm silo invite REQUEST --days 30
      swarm silo invite request.txt --out invitation.txt

    Exit codes: 0 done, 4 key, 12 manifest, 17 silo.
    """
    from swarm.silo.grant import read_request

    asked = read_request(_line(request))
    with _owner(folder, key) as (owner, files, seen):
        until = time.time() + days * _DAY_S
        token = owner.invite(asked, until, time.time(), files.manifest.read_text(encoding="utf-8"))
        _publish(owner, files, seen)
    if out is not None:
        _write_line(out, token)
    member = _member_fields(asked.peer_id, until)
    # a request is a line without a date: it may come from somebody who was removed
    typer.echo(f"a member until {_day(until)}: {member['name']} ({asked.peer_id})", err=True)
    if as_json:
        fields = member | ({} if out is not None else {"invitation": token})
        print(json.dumps(fields))
    else:
        print(f"invitation written to {out}" if out is not None else token)


@app.command()
def join(
    token: str = typer.Argument(..., metavar="INVITATION", help="The line that the owner sent you, or a file with it."),
    folder: Path = _FOLDER,
    key: Path = _NODE_KEY,
    accept_edition: int = typer.Option(
        None, metavar="N", help="Accept the changes of edition N of the manifest, such as its tasks."
    ),
) -> None:
    """Become a member: check the invitation, and keep it in DIR.

    Reads: INVITATION, the identity in DIR, or --key.
    Writes: membership and manifest.toml in DIR.

    Examples:
      swarm silo join INVITATION --dir runs/silo

    Exit codes: 0 done, 4 identity, 12 manifest, 17 silo.
    """
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.files import check_joined, write_text
    from swarm.manifest.manifest import check_protocol
    from swarm.records.codec import PROTOCOL_VERSION
    from swarm.records.identity import load
    from swarm.silo.grant import decode_token
    from swarm.silo.membership import Membership
    from swarm.silo.silo_files import SeenRolls, SiloFiles

    line = _line(token)
    opened, files = decode_token(line), NodeFolder(folder, key)
    manifest = opened.manifest
    check_protocol(manifest, PROTOCOL_VERSION)
    check_joined(files.manifest, manifest, accept_edition)
    identity = load(files.identity, unlock)
    seen = SeenRolls(manifest.id, files.identity)
    membership = Membership(manifest.id, manifest.founder, identity, time.time, seen=seen)
    membership.accept_own_grant(opened.grant.data, opened.wrapped)
    if opened.grant.epoch < seen.newest.epoch:
        raise SiloError(
            f"an invitation must be of epoch {seen.newest.epoch}, which this node has seen, got one of {opened.grant.epoch}; "
            "ask the owner for a new one",
            "old",
        )
    if opened.grant.until <= time.time():
        raise SiloError(f"an invitation must not be expired, got one until {_day(opened.grant.until)}; ask for another")
    SiloFiles(folder).write_token(line.strip())
    write_text(files.manifest, opened.manifest_text)
    print(f"member of {manifest.name} until {_day(opened.grant.until)}; its owner is {manifest.founder}")
    print(f"next: swarm join {files.manifest}")


@app.command()
def members(
    folder: Path = _FOLDER,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """List the members, by the newest roll in this folder.

    Works on every member's machine.

    Reads: roll and manifest in DIR.
    Writes: nothing.

    Examples:
      swarm silo members --json

    Exit codes: 0 done, 12 manifest, 17 silo.
    """
    manifest, roll = _roll(folder)
    if as_json:
        listed = [_member_fields(one.peer_id, one.until) for one in roll.members]
        facts = {"silo": manifest.name, "id": manifest.id, "owner": manifest.founder}
        print(json.dumps(facts | {"version": roll.version, "epoch": roll.epoch, "members": listed}))
        return
    print(f"{manifest.name}: roll {roll.version}, epoch {roll.epoch}")
    all_fields = [_member_fields(one.peer_id, one.until) for one in roll.members]
    width = max((len(fields["name"]) for fields in all_fields), default=0)
    for one, fields in zip(roll.members, all_fields, strict=True):
        until = "expired" if fields["expired"] else _date(one.until)
        print(f"  {fields['name']:<{width}}  {until:<10}  {one.peer_id}")  # whole, as `swarm silo revoke` takes it


@app.command()
def revoke(
    who: str = typer.Argument(..., metavar="NAME|PEER_ID", help="As `swarm silo members` shows them."),
    folder: Path = _FOLDER,
    key: Path = _KEY,
) -> None:
    """Remove a member.

    All others get a new key within seconds; what was sealed before stays
    readable to those who could read it.

    Reads: the owner's key, the roll in DIR.
    Writes: the new roll in DIR.

    Examples:
      swarm silo revoke brave-otter-3f

    Exit codes: 0 done, 4 key, 12 manifest, 17 silo.
    """
    with _owner(folder, key) as (owner, files, seen):
        peer_id = _found(owner.roll, who)
        owner.revoke(peer_id, time.time())
        _publish(owner, files, seen)
    print(f"{peer_id} is no member any more; epoch {owner.roll.epoch}")


@app.command()
def rotate(folder: Path = _FOLDER, key: Path = _KEY) -> None:
    """Give the members a new key, and remove expired members.

    Reads: the owner's key, the roll in DIR.
    Writes: the new roll in DIR.

    Examples:
      swarm silo rotate

    Exit codes: 0 done, 4 key, 12 manifest, 17 silo.
    """
    with _owner(folder, key) as (owner, files, seen):
        owner.rotate(time.time())
        _publish(owner, files, seen)
    print(f"epoch {owner.roll.epoch}, {counted(len(owner.roll.members), 'member')}")


@contextlib.contextmanager
def _owner(folder: Path, key: Path | None) -> "Iterator[tuple[Owner, NodeFolder, SeenRolls]]":
    """The owner of the newest roll. No other command changes that roll meanwhile: each waits for the one before it.

    Raises IdentityError where there is no key, SiloError where it is not the owner's or the roll is not its newest.
    """
    from swarm.machine.node_folder import NodeFolder
    from swarm.records.identity import load
    from swarm.silo.owner import Owner
    from swarm.silo.silo_files import SeenRolls

    path = key or folder / OWNER_KEY
    manifest, _ = _roll(folder)
    if not path.exists():
        raise IdentityError(
            f"only its owner {manifest.founder} can change a silo, got no key at {path}; "
            f"name the folder that has {OWNER_KEY} with --dir, or that key with --key"
        )
    identity: Identity = load(path, unlock)
    if identity.peer_id != manifest.founder:
        raise SiloError(f"only its owner {manifest.founder} can change a silo, got {path}; set --key", "stranger")
    lock = path.with_name(f"{path.name}.lock")
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(lock))
        except OSError as error:  # a key may be on a medium that is read-only
            typer.echo(f"cannot lock {lock} ({error.strerror}): change this silo by one command at a time", err=True)
        _, roll = _roll(folder)
        owner, seen = Owner(identity, roll), SeenRolls(manifest.id, path)
        seen.check(roll, owner.data)
        yield owner, NodeFolder(folder), seen


def _roll(folder: Path) -> "tuple[Manifest, Roll]":
    from swarm.machine.node_folder import NodeFolder
    from swarm.manifest.files import read_manifest
    from swarm.silo.roll import decode_roll
    from swarm.silo.silo_files import SiloFiles

    manifest = read_manifest(str(NodeFolder(folder).manifest))
    data = SiloFiles(folder).read_roll()
    if data is None:
        raise SiloError(
            f"a member's folder must hold the silo's roll, got none in {folder}; the first member that its node meets hands it "
            "over: let the node run, or set --dir; an owner whose machine is lost copies silo.roll from any member's folder"
        )
    return manifest, decode_roll(data, manifest.founder, manifest.id)


def _publish(owner: "Owner", files: "NodeFolder", seen: "SeenRolls") -> None:
    """Where the node of this folder runs, it notices within a second and tells the others."""
    from swarm.silo.silo_files import SiloFiles

    SiloFiles(files.path).write_roll(owner.data)
    seen.note(owner.roll, owner.data)
    seen.save()


def _found(roll: "Roll", who: str) -> str:
    """The peer id of a member by that or by its readable name. Raises SiloError."""
    from swarm.records.identity import peer_name

    named = [one.peer_id for one in roll.members if who in (one.peer_id, peer_name(one.peer_id))]
    if len(named) != 1:
        what = "nobody" if not named else f"{len(named)} of that name"
        raise SiloError(f"a member must be named, got {who}, who is {what}; take the peer id from `swarm silo members`")
    return named[0]


def _member_fields(peer_id: str, until: float) -> dict[str, Any]:
    from swarm.records.identity import peer_name

    return {"name": peer_name(peer_id), "peer_id": peer_id, "until": until, "expired": until <= time.time()}


def _line(text: str) -> str:
    """The text itself, or what is in the file of that name."""
    from swarm.silo.grant import INVITE_PREFIX, MAX_TOKEN_BYTES, REQUEST_PREFIX

    if text.startswith((INVITE_PREFIX, REQUEST_PREFIX)):
        return text
    try:
        with Path(text).open(encoding="utf-8", errors="replace") as file:
            return file.read(2 * MAX_TOKEN_BYTES + 1)
    except (OSError, ValueError) as error:
        raise SiloError(
            f"it must be a line that begins with {INVITE_PREFIX} or {REQUEST_PREFIX}, or a file with one, got {error}; "
            "paste the whole line"
        ) from None


def _write_line(path: Path, text: str) -> None:
    try:
        replace_file(path, text + "\n")
    except OSError as error:
        raise SiloError(f"an invitation must be writable, got {error}; name another file") from None


def _date(time_s: float) -> str:
    """Of the end of a membership; a dash for the owner's own node, whose does not end by itself."""
    if time_s - time.time() > OWN_NODE_S / 2:
        return "–"
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d}"


def _day(time_s: float) -> str:
    return f"{datetime.fromtimestamp(min(time_s, 2e11), UTC):%Y-%m-%d %H:%M} UTC"
