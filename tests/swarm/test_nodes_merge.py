"""Whole nodes in one process that merge their adapters over the in-memory network, and those that cannot."""

import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config, parse
from swarm.network.memory.transport import MemoryNetwork
from swarm.node.node import Node
from tests.swarm.whole_nodes import RunningNodes, last_round, make_node, run_all

SILO = {"swarm_groups": 0, "publish": False}
"""Nothing but adapters is exchanged, so that what replicas have in common comes from merging."""


def merging_config(
    folder: Path, max_rounds: int | None = None, lora: Mapping[str, Any] | None = None, **merging: Any
) -> Config:
    """Rounds of a tenth of a second, one tiny adapter, a partner trusted and not clipped unless `merging` says so."""
    return parse(
        {
            "node": {"dir": str(folder), "threads": 1} | ({"max_rounds": max_rounds} if max_rounds else {}),
            "network": {"poll_interval_s": 0.05, "request_timeout_s": 1.0},
            "policy": {"lora": dict(lora or {})},
            "rollouts": {"groups_per_round": 3, "group_size": 4, "max_new_tokens": 8},
            "sharing": {"own_groups": 3, **SILO},
            "training": {"micro_batch_sequences": 32},
            "merging": {
                "enabled": True,
                "inner_steps": 3,
                "search_timeout_s": 2.0,
                "gate_tasks": 0,
                "clip_factor": 100.0,
                "strangers_factor": 100.0,
            }
            | merging,
            "checkpoint": {"interval_rounds": 1},
            "evaluation": {"tasks_per_source": 0},
            "observability": {"http": False},
        }
    )


def saved(node: Node, group: str = "adapter") -> dict[str, Tensor]:
    checkpoint = CheckpointStore(node.folder.checkpoints, 3).load_newest()
    assert checkpoint is not None
    return checkpoint.tensors[group]


def flat(adapter: Mapping[str, Tensor], part: str = "lora_B") -> Tensor:
    """B begins at zero, so it is what training has added."""
    return torch.cat([adapter[name].flatten() for name in sorted(adapter) if name.endswith(part)])


def unlikeness(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Squared distance over what both have moved: 1 where they went their own ways, 0 where they are the same."""
    first, second = flat(one), flat(other)
    return ((first - second).square().sum() / (first.square().sum() + second.square().sum())).item()


def test_nodes_of_one_lineage_merge_and_come_closer_and_a_stranger_steps_alone(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network = MemoryNetwork(random.Random(7), time.time)
    configs = [merging_config(tmp_path / "a"), merging_config(tmp_path / "b")]
    configs.append(merging_config(tmp_path / "c", lora={"init_seed": 1}))
    nodes = [make_node(network, config, number) for number, config in enumerate(configs)]
    pair, stranger = nodes[:2], nodes[2]

    def have_merged() -> bool:
        merges = [last_round(node).get("merge/merges_total", 0) for node in pair]
        return min(merges) >= 2 and last_round(stranger).get("merge/outer_steps", 0) >= 1

    async def main() -> None:
        async with RunningNodes(nodes) as running:
            await running.until(have_merged)

    asyncio.run(main())
    for node, partner in (pair, pair[::-1]):
        row = last_round(node)
        assert row["merge/partner"] == partner.identity.peer_id and 0 < row["merge/partner_share"] <= 0.5
    assert last_round(stranger)["merge/merges_total"] == 0
    assert set(last_round(stranger)["merge/reasons"]) == {"nobody"}
    silos = [
        make_node(network, merging_config(tmp_path / f"silo-{i}", last_round(node)["round"], enabled=False), i)
        for i, node in enumerate(pair)
    ]
    assert asyncio.run(run_all(silos)) == [True, True]
    apart = unlikeness(*(saved(node) for node in silos))
    assert unlikeness(*(saved(node) for node in pair)) < 0.7 * apart


@pytest.mark.essential
def test_newcomer_begins_where_three_donors_are(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network = MemoryNetwork(random.Random(7), time.time)
    donors = [make_node(network, merging_config(tmp_path / str(i), search_timeout_s=0.5), i) for i in range(3)]
    newcomer = make_node(network, merging_config(tmp_path / "new", 1), 9)

    async def main() -> None:
        async with RunningNodes(donors) as running:
            await running.until(lambda: all(last_round(node).get("merge/outer_steps", 0) >= 2 for node in donors))
            assert await newcomer.run()
            await running.until(lambda: all(last_round(node)["merge/newcomers_served"] == 1 for node in donors))

    asyncio.run(main())
    assert last_round(newcomer)["merge/outer_steps"] >= 1
    assert flat(saved(newcomer, "slow_weights")).abs().max() > 0


def test_merging_off_leaves_no_trace(tmp_path: Path) -> None:
    network = MemoryNetwork(random.Random(7), time.time)
    node = make_node(network, merging_config(tmp_path / "a", 2, enabled=False), 0)
    assert asyncio.run(node.run())
    assert not [name for name in last_round(node) if name.startswith("merge/")]
    checkpoint = CheckpointStore(node.folder.checkpoints, 3).load_newest()
    assert checkpoint is not None and set(checkpoint.tensors) == {"adapter", "optimizer"}
    assert "merging" not in checkpoint.state
