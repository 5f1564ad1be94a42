"""Four whole nodes in one process on a lossy in-memory network: they learn from each other and nothing breaks."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from swarm.config import Config, parse
from swarm.config.node_folder import NodeFolder
from swarm.network.memory.transport import Faults, MemoryNetwork, MemoryTransport
from swarm.network.transport import Transport
from swarm.node.node import Node
from swarm.node.watchdog import Watchdog
from swarm.observability.metrics import read_rows
from swarm.records.identity import Identity
from swarm.sharing.index import EntryValidator

HARMLESS = {
    "no_signal", "unavailable", "replay", "bad_signature", "malformed", "wrong_hash", "wrong_slot", "version",
    "foreign_swarm",
}  # fmt: skip
"""What loss, duplication and flipped bytes may cause; anything else would be an honest node turned away."""

ROUNDS = 10


def node_config(folder: Path, max_rounds: int = ROUNDS, **rollouts: int) -> Config:
    return parse(
        {
            "node": {"dir": str(folder), "max_rounds": max_rounds, "threads": 1},
            "network": {"poll_interval_s": 0.05, "request_timeout_s": 1.0},
            "rollouts": {"groups_per_round": 6, "group_size": 4, "max_new_tokens": 12, **rollouts},
            "sharing": {"own_groups": 3, "swarm_groups": 3},
            "training": {"micro_batch_sequences": 32},
            "evaluation": {"tasks_per_source": 2},
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


async def run_all(nodes: Sequence[Node]) -> list[bool]:
    return await asyncio.gather(*(node.run() for node in nodes))


@pytest.mark.parametrize(
    "faults",
    [Faults(loss=0.1, duplication=0.2, corruption=0.02, delay_s=(0.0, 0.01))],
    ids=["lossy"],
)
def test_four_nodes_learn_from_each_other(tmp_path: Path, faults: Faults) -> None:
    torch.set_num_threads(1)
    network = MemoryNetwork(random.Random(7), time.time, faults)
    nodes = [make_node(network, node_config(tmp_path / str(i), groups_per_round=8 + i % 2), i) for i in range(4)]
    assert asyncio.run(run_all(nodes)) == [True] * 4
    evidence: Counter[str] = Counter()
    for node in nodes:
        rows = list(read_rows(node.folder.metrics))
        rounds = [row for row in rows if row["kind"] == "round"]
        assert [row["round"] for row in rounds] == list(range(1, ROUNDS + 1))
        assert rounds[-1]["policy_version"] > ROUNDS // 2
        assert rounds[-1]["exchange/records_published"] > 5
        assert rounds[-1]["train/swarm_groups_total"] >= 6
        assert set(rounds[-1]["exchange/rejected"]) <= HARMLESS
        assert [row["phase"] for row in rows if row["kind"] == "evaluation"] == ["start", "end"]
        evidence += node.tracker.beacon_evidence
    # how many says the machine's load: rounds of before the first header name no beacon, and there are few
    assert evidence["holds"] > 0 and not evidence["broken"], "tasks follow from records of others"


def test_a_node_alone_in_the_swarm_trains_on_its_own(tmp_path: Path) -> None:
    network = MemoryNetwork(random.Random(7), time.time)
    node = make_node(network, node_config(tmp_path, max_rounds=6), 0)
    assert asyncio.run(node.run())
    last = [row for row in read_rows(node.folder.metrics) if row["kind"] == "round"][-1]
    assert last["train/swarm_groups_total"] == 0
    assert last["train/own_groups_total"] > 10


def test_partition_parts_the_exchange_and_healing_restores_it(tmp_path: Path) -> None:
    network = MemoryNetwork(random.Random(7), time.time)
    nodes = [make_node(network, node_config(tmp_path / str(i), max_rounds=3), i) for i in range(2)]
    network.partition([nodes[0].identity.peer_id], [nodes[1].identity.peer_id])
    asyncio.run(run_all(nodes))
    for node in nodes:
        last = [row for row in read_rows(node.folder.metrics) if row["kind"] == "round"][-1]
        assert last["train/swarm_groups_total"] == 0
    network.heal()
    longer = [make_node(network, node_config(tmp_path / str(i), max_rounds=9), i) for i in range(2)]
    asyncio.run(run_all(longer))
    for node in longer:
        last = [row for row in read_rows(node.folder.metrics) if row["kind"] == "round"][-1]
        assert last["round"] == 9
        assert last["train/swarm_groups_total"] > 0
