"""Runs one node as a process: with a locked folder, an identity, logs, crash reports and a watchdog."""

import asyncio
import time

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config, Origin, kept_origin, kept_toml
from swarm.errors import IdentityError
from swarm.machine.memory import keep_heaps_small
from swarm.machine.node_folder import NodeFolder
from swarm.machine.safe_files import close_to_others, replace_file
from swarm.node.crash_report import crash_reports
from swarm.node.node import Node
from swarm.node.watchdog import Watchdog
from swarm.observability.logging_setup import set_up_logging
from swarm.records import identity as identities
from swarm.records.identity import IdentityLock, Unlock


def run_node(
    config: Config,
    origin: Origin | None = None,
    *,
    fresh: bool = False,
    from_best: bool = False,
    unlock: Unlock | None = None,
    end_when_stuck: bool = False,
) -> None:
    """Run one node until `max_rounds` or a signal. Blocks. Raises SwarmError for whatever the user can fix.

    `origin`: where each setting comes from, for people. `fresh`: the earlier run is moved aside. `from_best`: it goes on from
    its best checkpoint.
    `unlock`: opens an identity that is encrypted on disk. `end_when_stuck`: end the process when it makes no progress, as a
    supervisor starts it again.
    """
    keep_heaps_small(computes=True)
    close_to_others()
    folder = NodeFolder(config.node.dir, config.node.identity)
    if not folder.identity.exists():
        if not fresh:
            _check_key_was_not_lost(folder)
        _check_first_start(config)
    folder.create()
    with IdentityLock(folder.path) as lock:
        identity = identities.load_or_create(folder.identity, unlock)
        lock.claim(identity)
        if fresh and (aside := folder.set_aside()):
            print(f"earlier run moved to {aside}")
        if from_best:
            best = CheckpointStore(folder.checkpoints, config.checkpoint.keep).go_back_to_best()
            print(f"going on from round {best.round}, whose held-out reward was {best.reward:.3f}")
        set_up_logging(folder.logs, config.observability.log_level, config.observability.max_log_mib * 2**20)
        origin = kept_origin(origin, folder.config) if origin else None
        replace_file(folder.config, kept_toml(config, origin))
        with crash_reports(folder) as crashes:
            end = crashes.end_stuck if end_when_stuck else None
            watchdog = Watchdog(time.monotonic, stacks=crashes.stacks, end=end)
            asyncio.run(Node(config, folder, identity, watchdog=watchdog, origin=origin).run_until_signal())


def _check_key_was_not_lost(folder: NodeFolder) -> None:
    """Raise IdentityError where a node has run: with another key it would go on as a stranger to those who know it."""
    if any(folder.checkpoints.glob("*")):
        raise IdentityError(
            f"the key of the node that ran in {folder.path} must be at {folder.identity}, got nothing there; restore it from "
            f"your backup, or make a new one, of a node that nobody knows: swarm init {folder.path}"
        )


def _check_first_start(config: Config) -> None:
    """Raise PolicyError for a base or device that cannot be had, before there is an identity or anything else on disk."""
    from swarm.policy.base_folder import check_obtainable

    check_obtainable(config.policy.base, config.policy.revision, config.policy.max_download_gib)
    if config.node.device != "auto":
        from swarm.policy.device import resolve_device  # torch

        resolve_device(config.node.device)
