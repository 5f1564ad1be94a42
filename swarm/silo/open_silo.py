"""A node's part in a silo, from its folder: membership, keys, and a transport that seals."""

import random
import time
from collections.abc import Callable

from swarm.config import Config
from swarm.config.node_folder import NodeFolder
from swarm.errors import SiloError
from swarm.network.index_entry import IndexValidator
from swarm.network.make_transport import make_transport
from swarm.network.transport import Admits, Transport
from swarm.records.identity import Identity
from swarm.silo.bulletin import Bulletin
from swarm.silo.grant import decode_token
from swarm.silo.membership import Membership
from swarm.silo.silo_files import SeenRolls, SiloFiles
from swarm.silo.silo_transport import SealedIndex, SiloTransport, admits

MakeInner = Callable[[IndexValidator, Admits], Transport | None]
"""(validator of sealed entries, whom to answer) -> the transport beneath, not started; None with the network off."""


def open_membership(
    owner: str, swarm_id: str, identity: Identity, folder: NodeFolder, clock: Callable[[], float] = time.time
) -> Membership:
    """What roll and token on disk make of this node. Raises SiloError where that is no member."""
    check_folder(folder)
    files = SiloFiles(folder.path)
    seen = SeenRolls(swarm_id, folder.identity)
    membership = Membership(swarm_id, owner, identity, clock, seen=seen)
    if (text := files.read_token()) is not None:
        token = decode_token(text)
        membership.take_own_grant(token.grant.data, token.wrapped)
    if (data := files.read_roll()) is not None:
        try:
            membership.take_roll(data)
        except SiloError as error:
            granted = 0 if membership.own_grant is None else membership.own_grant.epoch
            # from before this node was put out and invited again: the invitation is newer than all that was seen
            if error.fault != "old" or granted < seen.newest.epoch:
                raise
    if membership.keys.epoch < seen.newest.epoch and membership.version == 0:
        raise _no_member(folder, f"an invitation from before epoch {seen.newest.epoch}, which it has seen,")
    if membership.keys.epoch == 0 or not membership.is_member(identity.peer_id):
        raise _no_member(folder, f"the roll or an invitation without {identity.peer_name}, or past its end")
    return membership


def check_folder(folder: NodeFolder) -> None:
    """Raises SiloError where the folder has neither a roll nor an invitation, before anybody is asked for a passphrase."""
    if not SiloFiles(folder.path).is_membership:
        raise _no_member(folder, "no invitation")


def _no_member(folder: NodeFolder, what: str) -> SiloError:
    return SiloError(
        f"a silo's node must be a member, got {what} in {folder.path}; send its owner what "
        f"`swarm silo request --dir {folder.path}` prints, then `swarm silo join INVITATION --dir {folder.path}`"
    )


def silo_transport(
    config: Config, identity: Identity, folder: NodeFolder, validator: IndexValidator, make_inner: MakeInner
) -> Transport | None:
    """A transport for the silo of `config`, over one that `make_inner` makes. Raises SiloError, ConfigError."""
    membership = open_membership(config.swarm.silo_owner, config.swarm_id, identity, folder)
    entrances = [address.rpartition("/p2p/")[2] for address in config.network.initial_peers]
    inner = make_inner(SealedIndex(membership, validator), admits(membership, entrances))
    if inner is None:
        return None
    rng = random.Random(f"silo/{identity.peer_id}")
    bulletin = Bulletin(inner, membership, identity, SiloFiles(folder.path), entrances, rng)
    return SiloTransport(inner, membership, bulletin, validator)


def node_transport(
    config: Config, identity: Identity, folder: NodeFolder, validator: IndexValidator
) -> Transport | None:
    """The transport of a node, sealed where its swarm is a silo. Raises SiloError, ConfigError."""

    def make(sealed_validator: IndexValidator, admit: Admits) -> Transport | None:
        return make_transport(config.network, identity, folder.path, sealed_validator, admit)

    if config.swarm.silo_owner and config.network.backend != "off":
        return silo_transport(config, identity, folder, validator, make)
    return make_transport(config.network, identity, folder.path, validator)
