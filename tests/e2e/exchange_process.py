"""A node without a model in a process of its own: transport, gossip, admission and pool are real, its groups made up.

python -m tests.e2e.exchange_process FOLDER SWARM_ID NETWORK_JSON

Asked over stdin, a word a line, it answers in JSON: `publish` hands out a group, `state` tells what it took and refused.
"""

import asyncio
import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any, Self

import psutil

from swarm.admission.admission import Admission, Vocabulary
from swarm.config import NetworkSection, SharingSection
from swarm.network.context import NodeContext
from swarm.network.hivemind.transport import HivemindTransport
from swarm.network.libp2p.transport import LightTransport
from swarm.network.make_transport import make_transport
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import load_or_create
from swarm.sharing.exchange import Exchange
from swarm.sharing.index import EntryValidator
from tests.swarm_process import ModuleProcess
from tests.unit.experience_factory import EOS, LINEAGE, SWARM_ID, SpellingVerifier, decode, group, sharing_parts

ANSWER_TIMEOUT_S = 30.0


class ExchangeProcess:
    """The side of the test. Use as an async context manager; kills what still runs at the end."""

    def __init__(
        self, folder: Path, backend: str, *initial_peers: str, swarm_id: str = SWARM_ID, **network: object
    ) -> None:
        """`network`: more settings of that section."""
        self.peer_id = ""
        self.addresses: tuple[str, ...] = ()
        self.gossip_addresses: tuple[str, ...] = ()
        network |= {"backend": backend, "initial_peers": initial_peers}
        self._arguments = (str(folder), swarm_id, json.dumps(network))
        self._process: ModuleProcess | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.to_thread(ModuleProcess, __name__, *self._arguments)
        told = await asyncio.to_thread(self._process.answer, ANSWER_TIMEOUT_S)
        self.peer_id, self.addresses = told["peer_id"], tuple(told["addresses"])
        self.gossip_addresses = tuple(told["gossip_addresses"])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()

    async def publish(self) -> None:
        await self._ask("publish")

    async def state(self) -> dict[str, Any]:
        """gossiped, swept: headers by the way that they came first; neighbors: of gossip; rejected, refused: by reason.

        rss_mib: node and daemon together.
        """
        return await self._ask("state")

    async def _ask(self, word: str) -> Any:
        assert self._process is not None
        return await asyncio.to_thread(self._process.ask, word, ANSWER_TIMEOUT_S)


class _Node:
    def __init__(self, folder: Path, swarm_id: str, settings: dict[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        network = NetworkSection.model_validate({"poll_interval_s": 0.3, "request_timeout_s": 2.0, **settings})
        sharing = SharingSection(swarm_groups=100)
        identity = load_or_create(folder / "identity.key")
        transport = make_transport(network, identity, folder, EntryValidator(swarm_id))
        assert isinstance(transport, HivemindTransport | LightTransport)
        self.transport = transport
        context = NodeContext.of(identity, swarm_id, transport)
        vocabulary = Vocabulary(LINEAGE, 64, frozenset({EOS}), decode)
        admission = Admission(sharing, context, verifier=SpellingVerifier(), vocabulary=vocabulary)
        self.pool = ExperiencePool(":memory:", sharing, context.clock)
        self.parts = sharing_parts(sharing, context)
        rng = random.Random(identity.peer_id)
        self.exchange = Exchange(sharing, network, self.parts, admission=admission, pool=self.pool, rng=rng)
        self._indices = itertools.count()

    def publish(self) -> None:
        self.exchange.hand_out([group(index=next(self._indices), author=self.transport.peer_id)])

    def state(self) -> dict[str, Any]:
        process = psutil.Process(os.getpid())
        rss = sum(one.memory_info().rss for one in (process, *process.children()))
        return {
            "admitted": self.exchange.parts.totals.num_groups_admitted,
            "gossiped": self.exchange.parts.totals.num_headers_gossiped,
            "swept": self.exchange.parts.totals.num_headers_swept,
            "neighbors": self.transport.gossip.peers(),
            "rejected": dict(self.exchange.parts.totals.rejected),
            "refused": dict(self.transport.refused),
            "rss_mib": rss / 2**20,
        }


def _fail(error: BaseException | None = None) -> None:
    print(f"a task of the node ended: {error}", file=sys.stderr)
    os._exit(1)


async def _serve(folder: Path, swarm_id: str, settings: dict[str, Any]) -> None:
    node = _Node(folder, swarm_id, settings)
    await node.transport.start()
    tasks = [asyncio.create_task(work) for work in node.exchange.work(lambda: None)]
    for task in tasks:
        task.add_done_callback(lambda task: None if task.cancelled() else _fail(task.exception()))
    print(
        json.dumps(
            {
                "peer_id": node.transport.peer_id,
                "addresses": node.transport.addresses(),
                "gossip_addresses": node.transport.gossip_addresses(),
            }
        ),
        flush=True,
    )
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer = node.publish() if line.strip() == "publish" else node.state()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
