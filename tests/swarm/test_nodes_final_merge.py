"""Whole nodes in one process that end with a final merge over the in-memory network."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config
from swarm.network.memory.transport import MemoryNetwork
from swarm.node.node import Node
from swarm.observability.metrics import read_rows
from swarm.sharing.index import Shard, adapter_key
from tests.swarm.test_nodes_merge import flat, merging_config, saved
from tests.swarm.whole_nodes import make_node, run_all

INTERVAL_S = 2.0
WITHIN_S = 120.0
FINAL = {"final": True, "final_interval_s": INTERVAL_S, "final_window_s": 30.0, "inner_steps": 1000}


class HeldClock:
    """Swarm time that stands still just after a boundary until it is let go: whoever is how fast, all are in one merge."""

    def __init__(self) -> None:
        self._base_s = (time.time() // INTERVAL_S + 1) * INTERVAL_S + 0.5
        self._let_go_at: float | None = None

    def __call__(self) -> float:
        return self._base_s + (0.0 if self._let_go_at is None else time.monotonic() - self._let_go_at)

    def let_go(self) -> None:
        self._let_go_at = time.monotonic()


def config_of(folder: Path, **merging: Any) -> Config:
    return merging_config(folder, 3, **(FINAL | merging))


def final_row(node: Node) -> dict[str, Any]:
    (row,) = [row for row in read_rows(node.folder.metrics) if row["kind"] == "final_merge"]
    return row


async def end_together(nodes: Sequence[Node], clock: HeldClock) -> list[bool]:
    async def let_go_when_all_are_listed() -> None:
        while any(node._report.phase != "merging" for node in nodes):
            await asyncio.sleep(0.05)  # between two looks at their phase
        checkpoint, transport = CheckpointStore(nodes[0].folder.checkpoints, 3).load_newest(), nodes[0].transport
        assert checkpoint is not None and transport is not None
        lineage = checkpoint.state["lineage"]["policy"]
        key = adapter_key(nodes[0].config.swarm_id, "final", lineage, Shard(0, 0))
        while len(await transport.load(key)) < len(nodes):
            await asyncio.sleep(0.05)  # between two looks at the list
        clock.let_go()

    async with asyncio.timeout(WITHIN_S):
        _, ended = await asyncio.gather(let_go_when_all_are_listed(), run_all(nodes))
    return ended


def mean_of(adapters: Sequence[Mapping[str, Tensor]]) -> Tensor:
    return torch.stack([flat(adapter) for adapter in adapters]).mean(0)


def test_four_nodes_end_with_the_mean_of_what_each_has_learned(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    clock = HeldClock()
    network = MemoryNetwork(random.Random(7), clock)
    configs = [config_of(tmp_path / str(i), final_export=i == 0) for i in range(4)]
    nodes = [make_node(network, config, number) for number, config in enumerate(configs)]
    assert asyncio.run(end_together(nodes, clock)) == [True] * 4
    silos = [make_node(network, config_of(tmp_path / f"silo-{i}", final=False), i) for i in range(4)]
    assert asyncio.run(run_all(silos)) == [True] * 4
    wanted = mean_of([saved(silo) for silo in silos])
    apart = min((flat(saved(silo)) - wanted).norm().item() for silo in silos)
    for node in nodes:
        row = final_row(node)
        assert (row["final/places"], row["final/replicas"], row["final/is_taken"]) == (4, 4, 1)
        assert (flat(saved(node)) - wanted).norm().item() < 0.02 * apart  # bf16 on the wire
        assert torch.equal(flat(saved(node)), flat(saved(node, "slow_weights")))
    (exported,) = (nodes[0].folder.final_adapters / "round-000003").glob("adapter_model.safetensors")
    written = {name.removesuffix(".weight"): tensor for name, tensor in safetensors.torch.load_file(exported).items()}
    torch.testing.assert_close(flat(written), flat(saved(nodes[0])))
    again = make_node(network, configs[0], 0)
    assert asyncio.run(again.run())  # ended already: merges nothing more
    final_row(again)


def test_node_alone_keeps_what_it_has_and_ends_by_the_clock(tmp_path: Path) -> None:
    network = MemoryNetwork(random.Random(7), time.time)
    node = make_node(network, config_of(tmp_path, final_at=1.0, final_interval_s=1.0, final_tries=1), 0)
    assert asyncio.run(node.run())
    row = final_row(node)
    assert (row["round"], row["final/places"], row["final/reasons"]) == (0, 1, {"nobody": 1})
    assert [row["reason"] for row in read_rows(node.folder.metrics) if row["kind"] == "end"] == ["final_at"]
    assert flat(saved(node)).abs().max() == 0
