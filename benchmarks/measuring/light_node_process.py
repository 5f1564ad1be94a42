"""A light node in a process of its own, on the real transport: libp2p daemon, streams, py-libp2p gossip.

All above the transport is what the simulation runs. Commands come from `node_processes`. Run as a module.
"""

import asyncio
import json
import logging
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TextIO

from measuring.command_loop import reply, take_over_stdout
from swarm.config import NetworkSection, SharingSection
from swarm.network.context import NodeContext
from swarm.network.hivemind.transport import HivemindTransport
from swarm.records.identity import load_or_create
from swarm.sharing.index import EntryValidator
from swarm.simulation.light_node import LightNode, LightRounds
from swarm.simulation.simulation import SWARM_ID
from swarm.types import Header


class LightNodeProcess:
    """Notes when headers came to this node."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        network = NetworkSection.model_validate(settings)
        identity = load_or_create(folder / "identity.key")
        transport = HivemindTransport(network, identity, folder, EntryValidator(SWARM_ID))
        self._arrivals: list[tuple[str, float, float]] = []
        self._num_bodies_before = 0
        self._node = LightNode(
            LightRounds(),
            NodeContext.of(identity, SWARM_ID, transport),
            sharing=SharingSection(swarm_groups=LightRounds().swarm_groups),
            network=network,
            rng=random.Random(identity.peer_id),
            on_header=self._note,
        )

    async def start(self) -> dict[str, Any]:
        await self._node.start()
        return {"addresses": self._node.transport.addresses()}

    async def begin(self) -> dict[str, Any]:
        """Forget what was: the measurement starts."""
        self._arrivals.clear()
        self._num_bodies_before = self._node.totals.num_records_admitted
        return {}

    async def report(self) -> dict[str, Any]:
        """Since `begin`. An exception that ended one of the node's tasks is raised here."""
        self._node.raise_failure()
        return {
            "arrivals": self._arrivals,
            "bodies": self._node.totals.num_records_admitted - self._num_bodies_before,
            "rejected": dict(self._node.rejected),
            "members": self._node.directory.num_members,
        }

    async def stop(self) -> None:
        await self._node.stop()

    def _note(self, node: LightNode, header: Header) -> None:
        name = f"{header.author}/{header.body_hash.hex()[:16]}"
        self._arrivals.append((name, header.created_at, node.transport.now()))


async def _commands() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def _serve(replies: TextIO) -> None:
    node: LightNodeProcess | None = None
    try:
        async for command in _commands():
            name = command["do"]
            if name == "start":
                node = LightNodeProcess(Path(command["folder"]), {"initial_peers": command["initial_peers"]})
                reply(replies, await node.start())
            else:
                assert node is not None, "start comes first"
                reply(replies, await {"begin": node.begin, "report": node.report}[name]())
    finally:
        if node is not None:
            await node.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(take_over_stdout()))
