"""A checkpoint with the right hashes and with what no learner has written: one error that names file, rule and fix."""

import copy
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.adapters.checkpoint import Checkpoint, CheckpointStore
from swarm.api.saved_policy import load as load_saved_policy
from swarm.config import Config, parse
from swarm.engine.pruning import SuccessHead
from swarm.errors import CheckpointError
from swarm.merging.policy_merging import MergePorts
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import local_backend
from swarm.policy.policy import Policy, load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.tasks.task_mixture import TaskMixture
from tests.unit.memory_pairer import MemoryPairer

NOTHING = object()
ODD = (NOTHING, None, [], {}, "x", -1, 10**30, 0.5, float("nan"), [[1]], {"a": 1})
ZEROS = [3, [0] * 624 + [624], None]
"""Of such random numbers all are 0, and who draws until one is above it draws for ever."""


def config(folder: Path) -> Config:
    return parse(
        {
            "node": {"dir": str(folder)},
            "network": {"backend": "off"},
            "policy": {"lora": {"rank": 2, "targets": ["v_proj"]}},
            "rollouts": {
                "groups_per_round": 2, "group_size": 3, "max_new_tokens": 6, "cache_mib": 64, "over_provision": 2.0
            },
            "training": {"replay_groups": 1},
            "sharing": {"own_groups": 3, "swarm_groups": 0, "publish": False},
            "merging": {"enabled": True, "inner_steps": 1, "gate_tasks": 0, "clip_factor": 1e6},
        }
    )  # fmt: skip


def learner(settings: Config, policy: Policy) -> Learner:
    merge_ports = MergePorts(MemoryPairer(), None, time.time, 1)
    pool, backend = ExperiencePool(":memory:", settings.sharing, time.time), local_backend(settings, policy, "me")
    ports, mixture = SwarmPorts(merge_ports=merge_ports), TaskMixture(settings.tasks)
    return Learner(settings, backend, mixture=mixture, pool=pool, peer_id="me", ports=ports)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Learner, Path, Checkpoint]:
    """(a learner, its folder, what it saved) with open groups, groups to replay, an evaluation and a history of merging."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("node")
    settings = config(folder)
    own = learner(settings, load_policy(settings.policy, device="cpu"))
    while not (own._rollouts.num_open and own._batches.state() and own.policy.version):
        own.run_round()
    own.evaluate("interval")
    store = CheckpointStore(folder / "checkpoints", 1)
    own.save(store)
    saved = store.load_newest()
    assert saved is not None and own.resume(store)
    return own, folder, saved


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """To every field of a state; of each list to the first element alone."""
    inner = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))[:1]
        if isinstance(value, list)
        else []
    )
    for key, child in inner:
        yield (*path, key)
        yield from paths(child, (*path, key))


def changed(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(state)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    if value is NOTHING:
        inner.pop(path[-1])
    else:
        inner[path[-1]] = value
    return copied


class One(CheckpointStore):
    """With this checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def load_newest(self) -> Checkpoint:
        return self._checkpoint


@pytest.mark.essential
def test_whatever_stands_in_a_state_is_one_error(run: tuple[Learner, Path, Checkpoint]) -> None:
    own, _, saved = run
    assert own.resume(One(saved))
    refused = 0
    for path in paths(saved.state):
        for odd in ODD:
            state = changed(saved.state, path, odd)
            try:
                own.resume(One(replace(saved, state=state)))
            except CheckpointError as error:
                refused += 1
                assert "--fresh" in str(error) or "policy.lora" in str(error), error
    assert refused > 500


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rng",), ZEROS),
        (("cursor", "rng"), ZEROS),
        (("cursor", "next_index"), {"chain_sum": "0"}),
        (("difficulty",), {"chain_sum": [0.0, 1.0, 1.0]}),
        (("open_groups", 0, "answers", 0, 0), [10**6]),
        (("replay", 0, "rollouts", 0, "token_ids", 0), 10**6),
        (("replay", 0, "rollouts", 0, "logprobs"), []),
        (("trainer", "adaptive_clip_notch"), 99),
        (("health", "held_out", "evaluations"), 0),
        (("health", "held_out", "evaluations"), "1"),
        (("cursor", "common"), {"seed": 16, "next_index": 0, "due": 1e9}),
        (
            ("common_groups", "tasks"),
            [{"task": ["a", "b", 16, 0], "since": 1, "is_own": True, "rewards": {"me": [2.0]}}],
        ),
    ],
)
def test_what_would_fail_or_hang_in_a_later_round_is_refused(
    run: tuple[Learner, Path, Checkpoint], path: tuple[Any, ...], value: Any
) -> None:
    own, _, saved = run
    with pytest.raises(CheckpointError, match=r"state\.json: .*--fresh"):
        own.resume(One(replace(saved, state=changed(saved.state, path, value))))


@pytest.mark.parametrize("group", ["adapter", "optimizer", "slow_weights", "outer_momentum"])
@pytest.mark.parametrize("what", ["none", "type", "shape", "infinite"])
def test_tensors_that_no_learner_writes_are_one_error(
    run: tuple[Learner, Path, Checkpoint], group: str, what: str
) -> None:
    own, _, saved = run
    tensors = {name: dict(named) for name, named in saved.tensors.items()}
    name = next(name for name in tensors[group] if not name.startswith("step:"))
    value = tensors[group][name]
    odd = {"type": value.to(torch.float8_e4m3fn), "shape": value[:1], "infinite": value / 0}
    if what == "none":
        del tensors[group]
    else:
        tensors[group][name] = odd[what]
    with pytest.raises(CheckpointError):
        own.resume(One(replace(saved, tensors=tensors)))


@pytest.mark.parametrize("moment", [torch.zeros(3), torch.full((16, 8), torch.nan), torch.zeros(16, 8).long()])
def test_moments_of_the_success_head_that_do_not_fit_begin_it_anew(moment: torch.Tensor) -> None:
    head = SuccessHead(8, seed=1)
    head.learn(torch.ones(4, 8), torch.ones(4), torch.ones(4))
    saved = head.state()
    assert SuccessHead(8, seed=2).restore(saved)
    assert not SuccessHead(8, seed=2).restore({**saved, "exp_avg:inner.weight": moment})


def test_commands_that_read_a_checkpoint_end_in_the_same_error(run: tuple[Learner, Path, Checkpoint]) -> None:
    _, folder, saved = run
    state = changed(saved.state, ("policy_version",), "7")
    CheckpointStore(folder / "checkpoints", 1).save(saved.round, saved.tensors, json.loads(json.dumps(state)))
    with pytest.raises(CheckpointError, match=r"state\.json: policy_version: .* got '7'; .*--fresh"):
        load_saved_policy(config(folder))
