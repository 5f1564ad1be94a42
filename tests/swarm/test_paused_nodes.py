"""Pause, resume and checkpoint of a whole node among others: what stands still, what goes on, and that a stop still works."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config
from swarm.merging.node_merging import WhileSharing
from swarm.network.memory.transport import MemoryNetwork
from swarm.node.node import Node
from swarm.observability.status_file import read_status
from swarm.sharing.totals import SharingPause
from swarm.types import Alone, Outcome, Snapshot
from tests.swarm.test_four_nodes import make_node, node_config

WITHIN_S = 60.0


class WatchedRounds:
    """Rows of rounds of a node, to wait for."""

    def __init__(self, node: Node) -> None:
        self.last: dict[str, Any] = {"round": 0}
        self._changed = threading.Condition()
        self._record = node._report.record
        node._report.record = self._note  # type: ignore[method-assign]

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first row for which it is so."""

        def wait() -> dict[str, Any]:
            with self._changed:
                assert self._changed.wait_for(lambda: condition(self.last), WITHIN_S)
                return self.last

        return await asyncio.to_thread(wait)

    async def more(self, count: int) -> dict[str, Any]:
        wanted = self.last["round"] + count
        return await self.until(lambda row: row["round"] >= wanted)

    def _note(self, row: dict[str, Any]) -> None:
        self._record(row)
        if row["kind"] == "round":
            with self._changed:
                self.last = row
                self._changed.notify_all()


def endless(folder: Path, *, http: bool = True) -> Config:
    config = node_config(folder)
    return config.model_copy(
        update={
            "node": config.node.model_copy(update={"max_rounds": None}),
            "checkpoint": config.checkpoint.model_copy(update={"interval_rounds": 100_000}),
            "rollouts": config.rollouts.model_copy(update={"groups_per_round": 4}),
            "evaluation": config.evaluation.model_copy(update={"tasks_per_source": 0}),
            "observability": config.observability.model_copy(update={"http": http}),
        }
    )


def exchanged(row: dict[str, Any]) -> tuple[int, int]:
    return row["exchange/records_published"], row["exchange/records_admitted"]


def test_a_paused_node_shares_nothing_trains_nothing_saves_when_asked_and_stops_at_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network = MemoryNetwork(random.Random(7), time.time)
    one, other = (make_node(network, endless(tmp_path / name), n) for n, name in enumerate(("a", "b")))
    rounds, others_rounds = WatchedRounds(one), WatchedRounds(other)

    async def main() -> None:
        running, others_running = asyncio.create_task(one.run()), asyncio.create_task(other.run())
        await rounds.until(lambda row: row.get("train/swarm_groups_total", 0) > 0 and exchanged(row)[0] > 0)
        one.controls.act("pause-sharing")
        before = exchanged(await rounds.more(2))  # the loop has heard of it by then
        assert exchanged(await rounds.more(4)) == before
        one.controls.act("resume-sharing")
        await rounds.until(lambda row: all(now > then for now, then in zip(exchanged(row), before, strict=True)))

        one.controls.act("pause-training")
        one.controls.act("checkpoint")
        await others_rounds.more(4)  # many times what one round of this node takes
        stands_at = rounds.last["round"]
        await others_rounds.more(4)
        assert rounds.last["round"] == stands_at == one.controls.state()["saved_round"]
        checkpoint = CheckpointStore(one.folder.checkpoints, 3).load_newest()
        assert checkpoint is not None and checkpoint.state["round"] == stands_at
        async with asyncio.timeout(10):  # it is written every two seconds
            while read_status(one.folder.status).phase != "training paused":
                await asyncio.sleep(0.05)

        one.stop()
        assert await running  # False would say that the compute thread had to be left behind
        other.stop()
        await others_running

    asyncio.run(main())
    assert read_status(one.folder.status).phase == "ended"


def test_a_node_paused_as_it_comes_up_trains_no_round_and_stops(tmp_path: Path) -> None:
    network = MemoryNetwork(random.Random(7), time.time)
    node = make_node(network, endless(tmp_path, http=False), 0)
    node.controls.act("pause-training")
    node.controls.act("pause-sharing")
    waiting = threading.Event()
    between_rounds = node.controls.between_rounds

    def noted(save: Callable[[], int | None]) -> None:
        waiting.set()
        between_rounds(save)

    node.controls.between_rounds = noted  # type: ignore[method-assign]

    async def main() -> None:
        running = asyncio.create_task(node.run())
        assert await asyncio.to_thread(waiting.wait, WITHIN_S)
        node.stop()
        assert await running

    asyncio.run(main())
    assert read_status(node.folder.status).round == 0


def test_no_adapter_is_offered_while_sharing_is_paused() -> None:
    class Exchange:
        def __init__(self) -> None:
            self.offered: list[Snapshot] = []

        def offer(self, snapshot: Snapshot) -> "Future[Outcome]":
            self.offered.append(snapshot)
            return Future()

        def report_unusable(self, peer_id: str) -> None: ...

        def is_known(self, peer_id: str) -> bool:
            return False

    exchange, pause = Exchange(), SharingPause()
    pause.pause()
    pairer = WhileSharing(exchange, pause)
    snapshot = Snapshot("ab" * 16, "bf16", 1, 1, b"x")
    assert pairer.offer(snapshot).result(0) == Alone("paused")
    assert exchange.offered == []
    pause.resume()
    assert not pairer.offer(snapshot).done() and exchange.offered == [snapshot]
