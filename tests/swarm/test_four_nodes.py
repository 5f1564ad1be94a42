"""Whole nodes in one process on an in-memory network, lossy or parted: they learn from each other and nothing breaks."""

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from swarm.network.memory.transport import Faults, MemoryNetwork
from swarm.observability.metrics import read_rows
from tests.swarm.whole_nodes import RunningNodes, last_round, make_node, node_config, rounds_of
from tests.unit.experience_factory import REASONS_OF_FLIPPED_BYTES

HARMLESS = REASONS_OF_FLIPPED_BYTES | {"no_signal", "unavailable", "replay", "wrong_hash"}
"""What loss, duplication and flipped bytes may cause; anything else would be an honest node turned away."""
LOSSY = Faults(loss=0.1, duplication=0.2, corruption=0.02, delay_s=(0.0, 0.01))


@pytest.mark.essential
def test_four_nodes_learn_from_each_other_on_a_lossy_network(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network = MemoryNetwork(random.Random(7), time.time, LOSSY)
    nodes = [make_node(network, node_config(tmp_path / str(i), groups_per_round=8 + i % 2), i) for i in range(4)]

    def evidence() -> Counter[str]:
        return sum((node.tracker.beacon_evidence for node in nodes), Counter())

    def have_learned() -> bool:
        newest = [last_round(node) for node in nodes]
        return evidence()["holds"] > 0 and all(
            row.get("train/swarm_groups_total", 0) >= 6
            and row["policy_version"] > 5
            and row["exchange/records_published"] > 5
            for row in newest
        )

    async def main() -> None:
        async with RunningNodes(nodes) as running:
            await running.until(have_learned)

    asyncio.run(main())
    for node in nodes:
        rounds = rounds_of(node)
        assert [row["round"] for row in rounds] == list(range(1, len(rounds) + 1))
        assert set(rounds[-1]["exchange/rejected"]) <= HARMLESS
    assert not evidence()["broken"], "tasks follow from records of others"


def test_a_node_alone_in_the_swarm_trains_on_its_own(tmp_path: Path) -> None:
    network = MemoryNetwork(random.Random(7), time.time)
    config = node_config(tmp_path, max_rounds=6)
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"tasks_per_source": 2})})
    node = make_node(network, config, 0)
    assert asyncio.run(node.run())
    last = last_round(node)
    assert last["round"] == 6
    assert last["train/swarm_groups_total"] == 0
    assert last["train/own_groups_total"] > 10
    rows = read_rows(node.folder.metrics)
    assert [row["phase"] for row in rows if row["kind"] == "evaluation"] == ["start", "end"]


def test_partition_parts_the_exchange_and_healing_restores_it(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network = MemoryNetwork(random.Random(7), time.time)
    nodes = [make_node(network, node_config(tmp_path / str(i)), i) for i in range(2)]
    network.partition([nodes[0].identity.peer_id], [nodes[1].identity.peer_id])

    async def main() -> None:
        async with RunningNodes(nodes) as running:
            await running.until(
                lambda: all(last_round(node).get("exchange/records_published", 0) >= 3 for node in nodes)
            )
            for node in nodes:
                last = last_round(node)
                assert last["exchange/headers_gossiped"] == last["exchange/headers_swept"] == 0
                assert last["train/swarm_groups_total"] == 0
            network.heal()
            await running.until(lambda: all(last_round(node)["train/swarm_groups_total"] > 0 for node in nodes))

    asyncio.run(main())
