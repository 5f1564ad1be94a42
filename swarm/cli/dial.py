"""What only others can tell before a node joins: whether the peers to join through answer, and how large the base is."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swarm.cli.preflight import Finding, Verdict
from swarm.config import NetworkSection, PolicySection
from swarm.errors import SwarmError
from swarm.observability.units import size


def dial_findings(network: NetworkSection) -> Iterator[Finding]:
    """One finding per peer; silent ones are a problem only where no one answers."""
    try:
        answered = asyncio.run(_connected(network))
    except SwarmError as error:
        yield Finding("dial", Verdict.PROBLEM, str(error))
        return
    silent = Verdict.NOTE if answered else Verdict.PROBLEM
    for address in network.initial_peers:
        has_answered = address.rpartition("/p2p/")[2] in answered
        text = f"{address} {'answers' if has_answered else 'does not answer'}"
        yield Finding("dial", Verdict.OK if has_answered else silent, text)


def hub_findings(policy: PolicySection) -> Iterator[Finding]:
    """How large the base is by the list of the hub, unless it is here. Asks the hub."""
    from swarm.policy.base_folder import base_at_hand
    from swarm.policy.hub_download import check_size, download_bytes

    if base_at_hand(policy.base, policy.revision) is not None:
        return
    try:
        num_bytes = download_bytes(policy.base, policy.revision)
        check_size(policy.base, num_bytes, policy.max_download_gib)
    except SwarmError as error:
        yield Finding("hub", Verdict.PROBLEM, str(error))
    else:
        yield Finding("hub", Verdict.OK, f"{policy.base} is a download of {size(num_bytes)}")


async def _connected(network: NetworkSection) -> set[str]:
    """Peer ids that proved to be who the addresses name."""
    from swarm.network.make_transport import make_transport
    from swarm.records.identity import SEED_BYTES, Identity

    wanted = {address.rpartition("/p2p/")[2] for address in network.initial_peers}
    quiet = network.model_copy(
        update={"listen": ("/ip4/127.0.0.1/tcp/0",), "announce": (), "reachability": "private", "gossip": "off"}
    )
    with tempfile.TemporaryDirectory(prefix="swarm-dial-") as folder:
        transport = make_transport(quiet, Identity(os.urandom(SEED_BYTES)), Path(folder))
        assert transport is not None, "a node that joins has a network"
        try:
            await transport.start()
            return wanted & set(await transport.connected_peers())
        finally:
            await transport.stop()
