"""Node processes with real sockets that merge: with the daemon and without, and with a partner that is killed."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.e2e.node_process import NodeProcess, node_settings, wait_for
from tests.swarm.test_nodes_merge import flat

MERGING = {"enabled": True, "inner_steps": 3, "search_timeout_s": 10.0, "gate_tasks": 0, "clip_factor": 1000.0}


def settings(folder: Path, **network: object) -> dict[str, object]:
    return node_settings(
        folder,
        node={"dir": str(folder), "threads": 1, "duty_cycle": 0.2},  # few rounds go by while adapters travel
        network=network,
        rollouts={"groups_per_round": 3, "max_new_tokens": 8},
        sharing={"own_groups": 3, "swarm_groups": 0, "publish": False},
        checkpoint={"interval_rounds": 1, "keep": 1000},
        merging=MERGING,
    )


def checkpoint(node: NodeProcess, round: int) -> Path:
    return node.folder / "checkpoints" / f"round-{round:06d}"


def adapter_after(node: NodeProcess, round: int) -> Tensor:
    return flat(safetensors.torch.load_file(checkpoint(node, round) / "adapter.safetensors"))


def first_merge(node: NodeProcess) -> int | None:
    """Round that began with the first merge."""
    return next((row["round"] for row in node.rounds if row.get("merge/merges_total", 0) >= 1), None)


def likeness(nodes: tuple[NodeProcess, NodeProcess], rounds: tuple[int, int]) -> float:
    """Cosine of what both have learned by then."""
    first, second = (adapter_after(node, round) for node, round in zip(nodes, rounds, strict=True))
    return torch.nn.functional.cosine_similarity(first, second, dim=0).item()


@pytest.mark.alone
def test_processes_merge_and_a_killed_partner_costs_a_step_alone(tmp_path: Path) -> None:
    with NodeProcess(settings(tmp_path / "a")) as a:
        with NodeProcess(settings(tmp_path / "b", backend="libp2p", initial_peers=[a.address()])) as b:
            for node, other in ((a, b), (b, a)):
                round = wait_for(lambda node=node: first_merge(node), "a merge", a, b, deadline_s=240)
                row = next(row for row in node.rounds if row["round"] == round)
                status = other.status()
                assert status is not None and row["merge/partner"] == status.peer_id
                wait_for(lambda path=checkpoint(node, round): path.exists() or None, "its checkpoint", a, b)
            b.kill_9()
        alone = a.last_round["merge/solo_steps_total"]
        row = wait_for(
            lambda: a.last_round if a.last_round["merge/solo_steps_total"] > alone else None, "step alone", a
        )
        assert set(row["merge/reasons"]) - {"merged", "gate"}
        a.kill_9()
    merged = [wait_for(lambda node=node: first_merge(node), "a merge") for node in (a, b)]
    long_before, before, after = (likeness((a, b), (merged[0] - back, merged[1] - back)) for back in (2, 1, 0))
    print(long_before, before, after, merged)
    assert after - before > 0.08 > before - long_before  # in one round of its own no node comes closer to the other
