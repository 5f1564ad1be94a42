"""Whether the peers to join through answer: connect under a name of no meaning, look, hang up."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swarm.cli.preflight import Finding, Verdict
from swarm.config import NetworkSection
from swarm.errors import SwarmError


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
