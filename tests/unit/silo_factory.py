"""A small silo for tests: its owner, some members, their requests and the files they end up with."""

from pathlib import Path

from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.errors import SwarmError
from swarm.manifest import manifest as manifests
from swarm.records.identity import Identity
from swarm.silo.grant import make_request, read_request
from swarm.silo.membership import Membership
from swarm.silo.owner import Owner
from swarm.silo.silo_files import SeenRolls

NOW = 1_800_000_000.0
DAY_S = 86_400.0
NAME = "secret-lab"
OWNER = Identity(b"o" * 32)
SILO_ID = manifests.manifest_id(OWNER.peer_id, NAME)
MANIFEST = manifests.create(OWNER, NAME, 1, NOW, silo=True, tasks=[{"kind": "reasoning_gym", "name": "lcm"}])
MANIFEST_TEXT = manifests.dump(MANIFEST, OWNER)


def identity_of(number: int) -> Identity:
    return Identity(bytes([number + 1]) * 32)


def found(*members: Identity, until: float = NOW + DAY_S) -> Owner:
    """A silo of these members."""
    owner = Owner.found(OWNER, SILO_ID, NOW)
    for member in members:
        invite(owner, member, until)
    return owner


def invite(owner: Owner, member: Identity, until: float = NOW + DAY_S) -> str:
    """The token for a new member."""
    return owner.invite(read_request(make_request(member)), until, NOW, MANIFEST_TEXT)


def membership_of(member: Identity, roll: bytes | None = None, now: float = NOW) -> Membership:
    """As of one node that has this roll; its clock stands still."""
    membership = Membership(SILO_ID, OWNER.peer_id, member, lambda: now, SeenRolls(SILO_ID))
    if roll is not None:
        membership.accept_roll(roll)
    return membership


def folder_of(path: Path, owner: Owner) -> Path:
    """A node's folder with the silo's roll."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    (path / "silo.roll").write_bytes(owner.data)
    return path


def swarm(*arguments: str | Path) -> str:
    """What a command prints, run in this process. Raises what it raises, as the command line would tell in one line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, SwarmError):
        raise result.exception
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout.strip()
