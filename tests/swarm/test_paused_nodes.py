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
from tests.swarm.whole_nodes import WITHIN_S, RunningNodes, last_round, make_node, node_config


def endless(folder: Path, *, http: bool = True) -> Config:
    config = node_config(folder)
    return config.model_copy(
        update={
            "checkpoint": config.checkpoint.model_copy(update={"interval_rounds": 100_000}),
            "rollouts": config.rollouts.model_copy(update={"groups_per_round": 4}),
            "evaluation": config.evaluation.model_copy(update={"tasks_per_source": 0}),
            "observability": config.observability.model_copy(update={"http": http}),
        }
    )


def exchanged(row: dict[str, Any]) -> tuple[int, int]:
    return row["exchange/records_published"], row["exchange/records_admitted"]


def has_traded(row: dict[str, Any]) -> bool:
    return row.get("train/swarm_groups_total", 0) > 0 and row["exchange/records_published"] > 0


def test_a_paused_node_shares_nothing_trains_nothing_saves_when_asked_and_stops_at_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network = MemoryNetwork(random.Random(7), time.time)
    one, other = (make_node(network, endless(tmp_path / name), n) for n, name in enumerate(("a", "b")))

    async def main() -> None:
        async with RunningNodes([one, other]) as running:

            async def more_rounds(node: Node, count: int) -> dict[str, Any]:
                wanted = last_round(node)["round"] + count
                await running.until(lambda: last_round(node)["round"] >= wanted)
                return last_round(node)

            await running.until(lambda: has_traded(last_round(one)))
            one.controls.act("pause-sharing")
            before = exchanged(await more_rounds(one, 2))  # the loop has heard of it by then
            assert exchanged(await more_rounds(one, 4)) == before
            one.controls.act("resume-sharing")
            await running.until(
                lambda: all(now > then for now, then in zip(exchanged(last_round(one)), before, strict=True))
            )

            one.controls.act("pause-training")
            one.controls.act("checkpoint")
            await running.until(lambda: one.controls.state()["saved_round"] is not None)
            stands_at = last_round(one)["round"]
            await more_rounds(other, 4)
            assert last_round(one)["round"] == stands_at == one.controls.state()["saved_round"]
            checkpoint = CheckpointStore(one.folder.checkpoints, 3).load_newest()
            assert checkpoint is not None and checkpoint.state["round"] == stands_at
            await running.until(lambda: read_status(one.folder.status).phase == "training paused")
        assert running.have_computed[0], "nothing had to be left behind"

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
