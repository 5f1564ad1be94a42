"""A group of long answers over real sockets: from a node with the daemon to one without it."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from swarm.config import NetworkSection, SharingSection
from swarm.network.context import NodeContext
from swarm.network.make_transport import make_transport
from swarm.pool.experience_pool import ExperiencePool
from swarm.records.identity import Identity
from swarm.sharing.exchange import Exchange
from swarm.sharing.index import EntryValidator
from tests.unit.experience_factory import ALICE, READER, SWARM_ID, admission, long_group, sharing_parts

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TOKENS, CHARS = 16_384, 65_536
DEADLINE_S = 60.0


class Node:
    """The sharing of one node, without a policy."""

    def __init__(self, folder: Path, identity: Identity, backend: str, peers: tuple[str, ...] = ()) -> None:
        folder.mkdir()
        network = NetworkSection.model_validate(
            {"backend": backend, "initial_peers": peers, "reachability": "public", "poll_interval_s": 0.3}
        )
        sharing = SharingSection(max_answer_tokens=TOKENS)
        transport = make_transport(network, identity, folder, EntryValidator(SWARM_ID))
        assert transport is not None
        self.transport = transport
        context = NodeContext.of(identity, SWARM_ID, self.transport)
        self.pool = ExperiencePool(":memory:", sharing, context.clock)
        admits = admission(context, max_answer_tokens=TOKENS)
        self.parts = sharing_parts(sharing, context)
        rng = random.Random(identity.peer_id)
        self.exchange = Exchange(sharing, network, self.parts, admission=admits, pool=self.pool, rng=rng)
        self._work: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Node":
        await self.transport.start()
        self._work = [asyncio.create_task(work) for work in self.exchange.work(lambda: None)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self.transport.stop()

    async def admitted(self, count: int) -> None:
        """Wait until so many groups were admitted. Raises AssertionError with what was rejected."""
        until = time.monotonic() + DEADLINE_S
        while self.parts.totals.num_groups_admitted < count:
            assert time.monotonic() < until, dict(self.parts.totals.rejected)
            await asyncio.sleep(0.1)  # between two looks at what a daemon brings


async def test_long_answers_cross_both_real_transports(tmp_path: Path) -> None:
    async with Node(tmp_path / "author", ALICE, "hivemind") as author:
        peers = author.transport.addresses()
        async with Node(tmp_path / "reader", READER, "libp2p", peers) as reader:
            author.exchange.hand_out([long_group(TOKENS, CHARS)])
            await reader.admitted(1)
            (drawn,) = reader.pool.draw(9, random.Random(0))
            assert [(len(one.token_ids), len(one.text)) for one in drawn.rollouts[:-1]] == [(TOKENS, CHARS)] * 8
