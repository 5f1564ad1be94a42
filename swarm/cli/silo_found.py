"""The founding of a silo: owner's key, manifest, first roll, first member."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.cli.passphrase import unlock
from swarm.errors import ManifestError, SiloError

if TYPE_CHECKING:
    from swarm.manifest import Manifest

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
) -> "Manifest":
    """Write all of it into `folder`. Raises SwarmError: a folder that has a swarm already, settings that do not hold."""
    from swarm import manifest as manifests
    from swarm.cli.create import checked_config, manifest_content, pinned_revision
    from swarm.manifest_file import write_text
    from swarm.node_folder import NodeFolder
    from swarm.records import identity as identities
    from swarm.records.codec import PROTOCOL_VERSION
    from swarm.silo.grant import make_request, read_request
    from swarm.silo.owner import Owner
    from swarm.silo.seen_rolls import SeenRolls
    from swarm.silo.silo_files import SiloFiles

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
    content = manifest_content(config) | {"bases": bases or [config.policy.base + pinned_revision(config)]}
    content |= {"bootstrap": bootstrap, "description": description, "silo": True}
    now = time.time()
    manifest = manifests.create(owner_key, name, PROTOCOL_VERSION, now, **content)
    text = manifests.dump(manifest, owner_key)
    owner = Owner.found(owner_key, manifest.id, now)
    owner.invite(read_request(make_request(identity)), now + OWN_NODE_S, now, text)
    write_text(files.manifest, text)
    silo_files.write_roll(owner.data)
    seen = SeenRolls(manifest.id, key)
    seen.take(owner.roll, owner.data)
    seen.save()
    return manifest
