"""Bootstrap peers carry headers between nodes that cannot reach each other, each over the connection that it opened."""

import asyncio
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from swarm.config import parse
from tests.e2e.exchange_process import ExchangeProcess
from tests.e2e.test_join import MAX_BOOTSTRAP_MIB, WeighedCommand, memory_mib

pytestmark = pytest.mark.asyncio
SWARM_ID = parse({"swarm": {"name": "homes"}}).swarm_id
DEADLINE_S = 60.0
CLOSED = "/ip4/127.0.0.1/tcp/1"


def bootstrap(folder: Path, *options: str) -> WeighedCommand:
    return WeighedCommand(folder, "bootstrap", "--name", "homes", "--dir", str(folder), *options)


def home(folder: Path, entry: str) -> ExchangeProcess:
    """A node whose gossip nobody gets through to: the port that it tells is closed."""
    return ExchangeProcess(folder, "hivemind", entry, swarm_id=SWARM_ID, gossip_announce=[CLOSED])


async def headers_carried(entry: WeighedCommand) -> int:
    status = entry.status()
    assert status is not None

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{status.http_port}/metrics", timeout=5) as answer:
            return answer.read().decode()

    lines = (await asyncio.to_thread(read)).splitlines()
    return int(float(next(line for line in lines if line.startswith("swarm_gossip_headers_carried")).split()[1]))


async def test_headers_of_two_homes_reach_each_other_by_gossip_through_a_bootstrap_peer(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        entry = stack.enter_context(bootstrap(tmp_path / "entry"))
        address = await asyncio.to_thread(entry.address)
        one = await stack.enter_async_context(home(tmp_path / "one", address))
        two = await stack.enter_async_context(home(tmp_path / "two", address))
        entry_id = address.rpartition("/")[2]
        async with asyncio.timeout(DEADLINE_S):
            while min([(await node.state())["gossiped"] for node in (one, two)]) < 3:
                await asyncio.gather(one.publish(), two.publish())
                await asyncio.sleep(0.3)  # nobody tells when a header arrives
            while await headers_carried(entry) < 6:
                await asyncio.sleep(0.3)
        for node in (one, two):
            state = await node.state()
            assert state["neighbors"] == [entry_id], "no other way than through the bootstrap peer"
            refused = state["refused"].keys() - {"index/not_newer"}  # an entry sent again, as the answer came late
            assert state["admitted"] >= 3 and not refused and not state["rejected"]
        print(f"{memory_mib(entry):.0f} MiB")
        assert memory_mib(entry) < MAX_BOOTSTRAP_MIB


async def test_a_bootstrap_peer_can_be_told_to_carry_nothing(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        entry = stack.enter_context(bootstrap(tmp_path / "entry", "--no-gossip"))
        address = await asyncio.to_thread(entry.address)
        one = await stack.enter_async_context(home(tmp_path / "one", address))
        two = await stack.enter_async_context(home(tmp_path / "two", address))
        async with asyncio.timeout(DEADLINE_S):
            await one.publish()
            while (await two.state())["admitted"] < 1:  # from the index
                await asyncio.sleep(0.1)
        state = await two.state()
        assert (state["gossiped"], state["swept"], state["neighbors"]) == (0, 1, [])
