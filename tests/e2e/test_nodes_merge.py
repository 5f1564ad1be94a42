"""Node processes with real sockets that merge: with the daemon and without, and with a partner that is killed."""

from pathlib import Path

import pytest
import torch

from swarm.adapters.checkpoint import CheckpointStore
from tests.e2e.node_process import NodeProcess, node_settings, wait_for
from tests.swarm.test_nodes_merge import flat

MERGING = {"enabled": True, "inner_steps": 3, "search_s": 3.0, "gate_tasks": 0, "clip_factor": 1000.0}


def settings(folder: Path, **network: object) -> dict[str, object]:
    return node_settings(
        folder,
        network=network,
        rollouts={"groups_per_round": 3, "max_new_tokens": 8},
        sharing={"own_groups": 3, "swarm_groups": 0, "publish": False},
        checkpoint={"interval_rounds": 1},
        merging=MERGING,
    )


@pytest.mark.alone
def test_processes_merge_and_a_killed_partner_costs_a_step_alone(tmp_path: Path) -> None:
    with NodeProcess(settings(tmp_path / "a")) as a:
        with NodeProcess(settings(tmp_path / "b", backend="libp2p", initial_peers=[a.address()])) as b:
            for node, other in ((a, b), (b, a)):
                row = wait_for(
                    lambda node=node: node.last_round if node.last_round.get("merge/merges_total", 0) >= 1 else None,
                    "a merge",
                    a,
                    b,
                )
                status = other.status()
                assert status is not None and row["merge/partner"] == status.peer_id
            b.kill_9()
        alone = a.last_round["merge/solo_steps_total"]
        row = wait_for(
            lambda: a.last_round if a.last_round["merge/solo_steps_total"] > alone else None, "step alone", a
        )
        assert set(row["merge/reasons"]) - {"merged", "gate"}
        a.kill_9()
    saved = [CheckpointStore(node.folder / "checkpoints", 3).load_newest() for node in (a, b)]
    first, second = (checkpoint.tensors["adapter"] for checkpoint in saved if checkpoint)
    likeness = torch.nn.functional.cosine_similarity(flat(first), flat(second), dim=0).item()
    assert likeness > 0.1  # of all that both have learned, before and since; silos have .04
