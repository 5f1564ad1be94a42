"""Adapters exchanged over libp2p on loopback, between processes, one of which is killed in the middle."""

import asyncio
import contextlib
import hashlib
import random
from pathlib import Path

import pytest

from swarm.types import Alone, Partner
from tests.e2e.merge_process import MergeNode, MergeProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
NUM_BYTES = 2_200_000
"""A LoRA adapter of rank 16 on q and v of a 0.5B model, in bf16."""
QUIET = {"gossip": "off", "reachability": "public"}


def sha256_of(peer_id: str) -> str:
    return hashlib.sha256(random.Random(peer_id).randbytes(NUM_BYTES)).hexdigest()


@pytest.mark.essential
async def test_four_processes_pair_up_and_have_each_other_s_adapter(tmp_path: Path) -> None:
    async with MergeNode(tmp_path / "own", NUM_BYTES, QUIET) as own, contextlib.AsyncExitStack() as stack:
        others = [
            MergeProcess(tmp_path / str(number), NUM_BYTES, *own.transport.addresses(), **QUIET) for number in range(3)
        ]
        await asyncio.gather(*(stack.enter_async_context(other) for other in others))
        mine, *theirs = await asyncio.gather(own.offer(), *(other.offer() for other in others))
        assert isinstance(mine, Partner)
        partners = {own.peer_id: mine.peer_id}
        for other, outcome in zip(others, theirs, strict=True):
            assert outcome["sha256"] == sha256_of(outcome["peer_id"])
            partners[other.peer_id] = outcome["peer_id"]
        assert hashlib.sha256(mine.snapshot.payload).hexdigest() == sha256_of(mine.peer_id)
        assert all(partners[partners[peer_id]] == peer_id for peer_id in partners)


async def test_partner_killed_in_the_middle_costs_a_solo_step(tmp_path: Path) -> None:
    slow_line = {"upload_bytes_per_peer_per_s": 400_000}
    async with (
        MergeNode(tmp_path / "own", NUM_BYTES, QUIET) as own,
        MergeProcess(tmp_path / "other", NUM_BYTES, *own.transport.addresses(), **QUIET, **slow_line) as other,
    ):
        await other.begin_offer()
        mine = asyncio.create_task(own.offer())
        async with asyncio.timeout(30):
            while own.transport.traffic.bytes_received < 1 << 20:  # its first piece has come, the next one waits
                await asyncio.sleep(0.01)
        assert not mine.done()
        await other.kill()
        outcome = await asyncio.wait_for(mine, own.exchange.time_limit_s(NUM_BYTES))
        assert isinstance(outcome, Alone) and outcome.reason in ("unreachable", "cut", "deadline")
        async with MergeProcess(tmp_path / "newcomer", NUM_BYTES, *own.transport.addresses(), **QUIET) as newcomer:
            again, theirs = await asyncio.gather(own.offer(), newcomer.offer())
            assert isinstance(again, Partner) and again.peer_id == newcomer.peer_id
            assert theirs == {"peer_id": own.peer_id, "sha256": sha256_of(own.peer_id)}
