"""A node without a model in a process of its own, whose adapters are made up: transport and exchange of adapters are real.

python -m tests.e2e.merge_process FOLDER NUM_BYTES NETWORK_JSON

Told `offer` over stdin it offers an adapter, and answers with the outcome in JSON when there is one.
"""

import asyncio
import contextlib
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any, Self

from swarm.config import NetworkSection
from swarm.merging.exchange.merge_exchange import MergeExchange
from swarm.merging.exchange.recent_partners import MergeTimeouts
from swarm.network.context import NodeContext
from swarm.network.make_transport import make_transport
from swarm.network.transport import Transport
from swarm.records.identity import load_or_create
from swarm.sharing.index import EntryValidator
from swarm.types import Outcome, Partner, Snapshot
from tests.swarm_process import ModuleProcess
from tests.unit.experience_factory import LINEAGE, SWARM_ID

ANSWER_TIMEOUT_S = 60.0
TIMEOUTS = MergeTimeouts(search_s=20.0, request_timeout_s=3.0)


class MergeNode:
    """In the process of the caller."""

    def __init__(self, folder: Path, num_bytes: int, network: dict[str, Any]) -> None:
        folder.mkdir()
        identity = load_or_create(folder / "identity.key")
        transport = make_transport(NetworkSection.model_validate(network), identity, folder, EntryValidator(SWARM_ID))
        assert transport is not None
        self.transport: Transport = transport
        self.exchange = MergeExchange(
            TIMEOUTS, NodeContext.of(identity, SWARM_ID, transport), rng=random.Random(identity.peer_id)
        )
        self.payload = random.Random(identity.peer_id).randbytes(num_bytes)
        self._work: asyncio.Task[None] | None = None

    @property
    def peer_id(self) -> str:
        return self.transport.peer_id

    async def __aenter__(self) -> Self:
        await self.transport.start()
        self._work = asyncio.create_task(self.exchange.work())
        await asyncio.sleep(0)  # it begins
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._work is not None
        self._work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._work
        await self.transport.stop()

    async def offer(self) -> Outcome:
        return await asyncio.wrap_future(self.exchange.offer(Snapshot(LINEAGE.policy, "bf16", 0, 0, self.payload)))


class MergeProcess:
    """The side of the test of a node in a process of its own. Killed at the end if it still runs."""

    def __init__(self, folder: Path, num_bytes: int, *initial_peers: str, **network: object) -> None:
        """`network`: more settings of that section."""
        self.peer_id = ""
        self._arguments = (str(folder), str(num_bytes), json.dumps(network | {"initial_peers": initial_peers}))
        self._process: ModuleProcess | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.to_thread(ModuleProcess, __name__, *self._arguments)
        self.peer_id = (await self._answer())["peer_id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    async def begin_offer(self) -> None:
        assert self._process is not None
        self._process.tell("offer")

    async def offer(self) -> dict[str, Any]:
        """peer_id and sha256 of the partner, or the reason that there is none."""
        await self.begin_offer()
        return await self._answer()

    async def _answer(self) -> Any:
        assert self._process is not None
        return await asyncio.to_thread(self._process.answer, ANSWER_TIMEOUT_S)


def told(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Partner):
        return {"peer_id": outcome.peer_id, "sha256": hashlib.sha256(outcome.snapshot.payload).hexdigest()}
    return {"reason": outcome.reason}


async def _serve(folder: Path, num_bytes: int, network: dict[str, Any]) -> None:
    async with MergeNode(folder, num_bytes, network) as node:
        print(json.dumps({"peer_id": node.peer_id}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(told(await node.offer())), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
