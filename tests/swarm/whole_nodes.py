"""Whole nodes in one process over the network in memory: how a test makes them, runs them and waits for their rows."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from swarm.config import Config, parse
from swarm.machine.node_folder import NodeFolder
from swarm.network.memory.transport import MemoryNetwork, MemoryTransport
from swarm.network.transport import Transport
from swarm.node import node as node_module
from swarm.node.node import Node
from swarm.node.watchdog import Watchdog
from swarm.observability.metrics import read_rows
from swarm.records.identity import Identity
from swarm.sharing.index import EntryValidator

WITHIN_S = 150.0
"""A test fails when what it waits for has not happened by then: many times what a loaded machine needs."""


def node_config(folder: Path, max_rounds: int | None = None, **rollouts: int | str) -> Config:
    """Rounds of a few tenths of a second, without an end where `max_rounds` is None."""
    return parse(
        {
            "node": {"dir": str(folder), "threads": 1, "duty_cycle": 0.4}
            | ({"max_rounds": max_rounds} if max_rounds else {}),
            "network": {"poll_interval_s": 0.05, "request_timeout_s": 1.0},
            "rollouts": {"groups_per_round": 6, "group_size": 4, "max_new_tokens": 12, **rollouts},
            "sharing": {"own_groups": 3, "swarm_groups": 3},
            "training": {"micro_batch_sequences": 32},
            "evaluation": {"tasks_per_source": 0},
            "observability": {"http": False},
        }
    )


def make_node(network: MemoryNetwork, config: Config, number: int) -> Node:
    folder = NodeFolder(config.node.dir)
    folder.create()

    def transport(config: Config, identity: Identity, folder: NodeFolder, validator: EntryValidator) -> Transport:
        return MemoryTransport(network, identity.peer_id, validator, request_timeout_s=1.0)

    identity = Identity(bytes([number + 1]) * 32)
    return Node(config, folder, identity, watchdog=Watchdog(time.monotonic), make_transport=transport)


def rounds_of(node: Node) -> list[dict[str, Any]]:
    """The rows of the node's rounds so far, also of an earlier run in the same folder."""
    return [row for row in read_rows(node.folder.metrics) if row["kind"] == "round"]


def last_round(node: Node) -> dict[str, Any]:
    """The newest of `rounds_of`; empty before the first round."""
    rows = rounds_of(node)
    return rows[-1] if rows else {}


async def run_all(nodes: Sequence[Node]) -> list[bool]:
    return await asyncio.gather(*(node.run() for node in nodes))


class RunningNodes:
    """Runs nodes as a context on the running loop, and stops them at its end, when the round in flight is over.

    `until` is woken by each row that a node records, and fails where a node ends by itself.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.have_computed: list[bool] = []
        """What each node's `run` returned, after the end: whether its computation had ended, too."""
        self._nodes = nodes
        self._has_news = asyncio.Event()
        self._running: list[asyncio.Task[bool]] = []

    async def __aenter__(self) -> "RunningNodes":
        loop = asyncio.get_running_loop()
        for node in self._nodes:
            self._watch(node, loop)
            self._running.append(asyncio.create_task(node.run()))
        return self

    async def __aexit__(self, *error: object) -> None:
        with mock.patch.object(
            node_module, "_STOP_GRACE_S", WITHIN_S
        ):  # a thread left behind would disturb later tests
            for node in self._nodes:
                node.stop()
            self.have_computed = await asyncio.gather(*self._running)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        """Wait until `is_reached` holds. It is asked now and after every row."""
        async with asyncio.timeout(WITHIN_S):
            while not is_reached():
                news = asyncio.create_task(self._has_news.wait())
                done, _ = await asyncio.wait([news, *self._running], return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                for task in done - {news}:
                    raise AssertionError("a node ended by itself") from task.exception()
                self._has_news.clear()

    def _watch(self, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        record = node._report.record

        def note(row: dict[str, Any]) -> None:
            record(row)
            loop.call_soon_threadsafe(self._has_news.set)

        node._report.record = note  # type: ignore[method-assign]
