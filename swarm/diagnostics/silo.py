"""Whether the folder of a silo's node makes it a member, and for how long."""

import time
from collections.abc import Callable

from swarm.config import Config
from swarm.diagnostics.finding import Finding, ok, problem, warning
from swarm.errors import SwarmError
from swarm.node_folder import NodeFolder
from swarm.records import identity as identities
from swarm.silo.membership import Membership
from swarm.silo.open_silo import check_folder, open_membership

_DAY_S = 86_400.0
_WARN_DAYS = 7


def check_membership(config: Config, clock: Callable[[], float] = time.time) -> Finding:
    """For a configuration with `swarm.silo_owner`. Raises nothing."""
    folder = NodeFolder(config.node.dir, config.node.identity)
    request = f"`swarm silo request --dir {folder.path}` prints what the owner needs for an invitation"
    try:
        check_folder(folder)
        if identities.is_encrypted(folder.identity):
            return ok(
                "silo", f"{folder.path} has a membership; starting the node opens it with the identity's passphrase"
            )
        identity = identities.load(folder.identity)
        membership = open_membership(config.swarm.silo_owner, config.swarm_id, identity, folder, clock)
    except SwarmError as error:
        return problem("silo", str(error), request)
    return _told(membership, identity.peer_id, clock(), request)


def _told(membership: Membership, peer_id: str, now: float, request: str) -> Finding:
    members = membership.roll.members if membership.roll else ()
    entries = [member for member in members if member.peer_id == peer_id]
    ends = [entry.until for entry in (*entries, membership.own_grant) if entry is not None]
    days = (max(ends) - now) / _DAY_S
    roll = (
        f"{len(members)} on the roll of epoch {membership.keys.epoch}" if members else "no roll yet: members bring it"
    )
    said = f"member for {days:.0f} more days; {roll}"
    return (
        ok("silo", said) if days > _WARN_DAYS else warning("silo", said, f"ask the owner for a longer one; {request}")
    )
