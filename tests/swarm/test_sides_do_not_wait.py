"""Neither side of a node waits for the other: a stuck round leaves exchange and admission going, a stuck loop the rounds."""

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from swarm.config import SharingSection
from swarm.machine.node_folder import NodeFolder
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.node.node import Node
from swarm.node.watchdog import Watchdog
from swarm.observability.metrics import read_rows
from swarm.pool.experience_pool import ExperiencePool, PooledGroup
from swarm.records.identity import Identity
from swarm.types import RolloutGroup
from tests.swarm.whole_nodes import node_config
from tests.unit.experience_factory import NOW, Clock, group

WITHIN_S = 60.0


class WatchedPool(ExperiencePool):
    """Tells when groups of others have come in."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.filled = threading.Event()

    def add(self, body_hash: bytes, expires_at: float, created_at: float, groups: Sequence[RolloutGroup]) -> int:
        num_new = super().add(body_hash, expires_at, created_at, groups)
        if num_new:
            self.filled.set()
        return num_new


class WatchedNode(Node):
    """Its compute thread tells of every round, and stops within the first one where it is `held`."""

    pool: WatchedPool

    def __init__(self, network: MemoryNetwork, folder: Path, number: int, *, held: bool = False) -> None:
        config = node_config(folder, groups_per_round=8)  # the first round has a floor under answers of others
        place = NodeFolder(config.node.dir)
        place.create()
        super().__init__(
            config, place, Identity(bytes([number]) * 32), watchdog=Watchdog(time.monotonic),
            make_transport=lambda config, identity, folder, validator: MemoryTransport(network, identity.peer_id, validator),
        )  # fmt: skip
        self.pool.close()
        self.pool = WatchedPool(place.pool, config.sharing, self._clock)
        self.num_rounds = 0
        self.wanted_rounds = 1
        self.has_rounds = threading.Event()
        self.released = threading.Event()
        if not held:
            self.released.set()
        self._page.rollouts.own = self._hold  # type: ignore[method-assign]

    def _hold(self, groups: Sequence[RolloutGroup]) -> None:
        """Called by the compute thread once the groups of a round are published."""
        self.num_rounds += 1
        if self.num_rounds >= self.wanted_rounds:
            self.has_rounds.set()
        assert self.released.wait(WITHIN_S)

    def round_rows(self) -> int:
        return sum(row["kind"] == "round" for row in read_rows(self.folder.metrics))


def test_exchange_and_admission_go_on_while_the_compute_thread_is_stuck_in_a_round(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network = MemoryNetwork(random.Random(7), time.time)
    stuck, other = WatchedNode(network, tmp_path / "a", 1, held=True), WatchedNode(network, tmp_path / "b", 2)

    async def main() -> None:
        running = asyncio.gather(stuck.run(), other.run())
        assert await asyncio.to_thread(stuck.has_rounds.wait, WITHIN_S)
        assert await asyncio.to_thread(
            other.pool.filled.wait, WITHIN_S
        )  # the stuck node published, and served the body
        assert await asyncio.to_thread(stuck.pool.filled.wait, WITHIN_S)  # ... and admitted what the other one did
        assert stuck.num_rounds == 1 and stuck.round_rows() == 0
        assert stuck.pool.num_fresh() > 0
        stuck.has_rounds.clear()
        stuck.wanted_rounds = 3
        stuck.released.set()
        assert await asyncio.to_thread(stuck.has_rounds.wait, WITHIN_S)
        stuck.stop()
        other.stop()
        await running

    asyncio.run(main())
    rows = [row for row in read_rows(stuck.folder.metrics) if row["kind"] == "round"]
    assert rows[0]["train/swarm_groups"] > 0  # trained on what came in while it was stuck


def test_rounds_go_on_while_the_network_loop_is_stuck(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network = MemoryNetwork(random.Random(7), time.time)
    node = WatchedNode(network, tmp_path / "a", 1)

    async def main() -> None:
        running = asyncio.create_task(node.run())
        assert await asyncio.to_thread(node.has_rounds.wait, WITHIN_S)
        node.has_rounds.clear()
        node.wanted_rounds = node.num_rounds + 12  # more than the outbox holds
        assert node.has_rounds.wait(
            WITHIN_S
        )  # blocks the loop itself, which serves, admits and publishes nothing meanwhile
        assert node.round_rows() >= 11
        node.stop()
        await running
        assert (
            node.sharing is not None and node.sharing.totals.num_rounds_not_published > 0
        )  # the oldest, not the newest

    asyncio.run(main())


@pytest.mark.parametrize("name", ["add", "num_fresh", "knows_body"])
def test_the_pool_takes_calls_while_a_draw_is_choosing(name: str) -> None:
    pool = ExperiencePool(":memory:", SharingSection(), Clock())
    pool.add(b"1" * 32, NOW + 600, NOW, [group(index=1)])
    is_choosing, go_on = threading.Event(), threading.Event()

    def weigh(pooled: PooledGroup) -> float:
        is_choosing.set()
        assert go_on.wait(WITHIN_S)
        return 1.0

    drawn: list[RolloutGroup] = []
    draw = threading.Thread(target=lambda: drawn.extend(pool.draw(4, random.Random(0), weigh)))
    draw.start()
    assert is_choosing.wait(WITHIN_S)
    calls = {
        "add": lambda: pool.add(b"2" * 32, NOW + 600, NOW, [group(index=2)]),
        "num_fresh": pool.num_fresh,
        "knows_body": lambda: pool.knows_body(b"1" * 32),
    }
    answered = threading.Event()
    caller = threading.Thread(target=lambda: (calls[name](), answered.set()))
    caller.start()
    assert answered.wait(WITHIN_S)
    go_on.set()
    draw.join()
    caller.join()
    assert [one.task.index for one in drawn] == [1]
