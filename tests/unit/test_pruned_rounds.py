"""Rounds of a node that prunes: what they report, and that a checkpoint continues them bit for bit."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config
from swarm.engine.pruning import Reliability
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend
from swarm.policy.policy import load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.tasks.task_mixture import TaskMixture

TIMES = ("time/", "rollout/tokens_per_s")


@dataclass
class Node:
    learner: Learner
    store: CheckpointStore


def node(folder: Path, **rollouts: object) -> Node:
    config = Config.model_validate(
        {
            "network": {"backend": "off"},
            "sharing": {"swarm_groups": 0, "publish": False},
            "rollouts": {"groups_per_round": 4, "cache_mib": 256, **rollouts},
        }
    )
    policy = load_policy(config.policy, device="cpu")
    pool = ExperiencePool(":memory:", config.sharing, time.time)
    backend, mixture = local_backend(config, policy, "me"), TaskMixture(config.tasks)
    learner = Learner(config, backend, mixture=mixture, pool=pool, peer_id="me", ports=SwarmPorts())
    return Node(learner, CheckpointStore(folder, keep=2))


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(TIMES)}


def trust_the_head(folder: Path) -> None:
    """Write into a checkpoint that its head has learned from many answers and is right about all of them."""
    store = CheckpointStore(folder, keep=2)
    checkpoint = store.load_newest()
    assert checkpoint is not None
    good = Reliability()
    good.observe([0.1, 0.9], [0.1, 0.9], [1e4, 1e4])
    checkpoint.state["pruning"] = {"num_answers": 1000, "reliability": good.state()}
    store.save(checkpoint.round, checkpoint.tensors, checkpoint.state)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of a node that prunes from its next round on."""
    folder = tmp_path_factory.mktemp("begun")
    first = node(folder, prune=True, prune_interval_tokens=1, prune_certainty=0.51)
    first.learner.run_round()
    first.learner.save(first.store)
    trust_the_head(folder)
    return folder


def test_rounds_tell_what_was_dropped_and_resume_bit_for_bit(begun: Path, tmp_path: Path) -> None:
    whole, cut, resumed = (node(tmp_path, prune=True, prune_interval_tokens=1, prune_certainty=0.51) for _ in range(3))
    begun_store = CheckpointStore(begun, keep=2)
    assert whole.learner.resume(begun_store) and cut.learner.resume(begun_store)
    rows = [whole.learner.run_round() for _ in range(3)]
    cut.learner.run_round()
    cut.learner.save(cut.store)
    assert resumed.learner.resume(cut.store)
    again = [resumed.learner.run_round() for _ in range(2)]
    assert list(map(without_times, again)) == list(map(without_times, rows[1:]))
    assert sum(row["rollout/pruned_answers"] for row in rows) > 0
    assert any(row["rollout/reward_mean"] != row["rollout/surviving_reward_mean"] for row in rows)
    for row in rows:
        assert row["rollout/answers"] + row["rollout/pruned_answers"] == 4 * 8
        assert 0 <= row["rollout/reward_mean"] <= 1
        assert row["rollout/saved_tokens"] >= 0
        assert -1 <= row["rollout/prune_skill"] <= 1 and 0 <= row["rollout/prune_calibration_error"] <= 1
    checkpoints = []
    for name, ended in (("whole", whole), ("resumed", resumed)):
        ended.learner.save(CheckpointStore(tmp_path / name, keep=1))
        checkpoints.append(CheckpointStore(tmp_path / name, keep=1).load_newest())
    left, right = checkpoints
    assert left is not None and right is not None
    assert json.dumps(left.state) == json.dumps(right.state)
    assert left.tensors.keys() == right.tensors.keys() == {"adapter", "optimizer", "pruning"}
    for group, tensors in left.tensors.items():
        assert all(torch.equal(tensor, right.tensors[group][name]) for name, tensor in tensors.items())


def test_off_leaves_no_trace_in_rows_and_checkpoints(begun: Path, tmp_path: Path) -> None:
    off = node(tmp_path)
    assert off.learner.resume(CheckpointStore(begun, keep=2)), "a checkpoint with a head continues without one"
    row = off.learner.run_round()
    assert not [name for name in row if any(word in name for word in ("prune", "saved", "surviving"))]
    off.learner.save(off.store)
    checkpoint = off.store.load_newest()
    assert checkpoint is not None
    assert checkpoint.tensors.keys() == {"adapter", "optimizer"} and "pruning" not in checkpoint.state
