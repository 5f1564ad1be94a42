"""Sampling of the next round beside training: the process that samples, and what a learner makes of it."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from swarm.adapters.adapter_state import read_adapter, write_adapter
from swarm.adapters.checkpoint import CheckpointStore
from swarm.config import Config, PolicySection, RolloutsSection, parse
from swarm.engine.make_engine import make_engine
from swarm.engine.sampling import Sampling
from swarm.engine.slot_engine import SlotEngine
from swarm.errors import ConfigError, PolicyError, SwarmError
from swarm.node.learner import Learner, SwarmPorts
from swarm.node.policy_backend import PolicyBackend
from swarm.policy.policy import Policy, load_policy
from swarm.pool.experience_pool import ExperiencePool
from swarm.rollouts.engine_process import EngineProcess
from swarm.rollouts.worker import RolloutBatch
from swarm.tasks.task_mixture import TaskMixture
from swarm.training.policy_optimizer import LocalOptimizer
from swarm.types import RolloutGroup
from tests.unit.experience_factory import Clock
from tests.unit.tiny_models import perturb, requests

PROMPTS = ("What is 2 + 3?", "Spell table backward.")


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    engine = EngineProcess(PolicySection(), RolloutsSection(cache_mib=64), device="cpu", num_threads=1)
    yield engine
    engine.close()


def test_a_process_gives_the_answers_of_an_engine_in_this_one_with_the_weights_it_was_given(
    process: EngineProcess,
) -> None:
    torch.set_num_threads(1)
    policy = load_policy(PolicySection(), device="cpu")
    own = make_engine(policy, RolloutsSection(cache_mib=64))
    asked = requests([policy.encode_prompt(prompt) for prompt in PROMPTS], 3, 10)
    for _ in range(2):
        process.load(read_adapter(policy.model))
        before = process.generate(asked, Sampling(), seed=7, stop=["9"])
        assert before == own.generate(asked, Sampling(), seed=7, stop=["9"])
        perturb(policy)
        assert process.generate(asked, Sampling(), seed=7, stop=["9"]) == before, "training does not reach it"
    assert process.answer_bytes(10) == own.answer_bytes(10)
    prompt, answer = asked[0].prompt, before[0][0].token_ids
    assert process.score(prompt, answer) != own.score(prompt, answer)


def test_what_is_wrong_in_the_process_is_the_error_of_this_one(process: EngineProcess) -> None:
    with pytest.raises(RuntimeError, match=r"in the process that samples:\nTraceback"):
        process.generate([None], Sampling(), seed=1)  # type: ignore[list-item]
    assert process.generate([], Sampling(), seed=1) == [], "and it serves the next call"
    absent = EngineProcess(PolicySection(base="./no-such-base"), RolloutsSection(), device="cpu")
    with pytest.raises(PolicyError, match="no-such-base"):
        absent.wait_until_ready()
    absent.close()


def test_a_process_that_was_killed_ends_the_node_with_one_line() -> None:
    engine = EngineProcess(PolicySection(), RolloutsSection(), device="cpu")
    engine._process.kill()
    with pytest.raises(SwarmError, match=r"got its end by signal 9; free memory, or set rollouts\.overlap = false"):
        engine.wait_until_ready()
    with pytest.raises(SwarmError, match="signal 9"):
        engine.load({})
    engine.close()


def test_a_close_ends_the_call_of_another_thread() -> None:
    engine = EngineProcess(PolicySection(), RolloutsSection(), device="cpu")
    errors: list[SwarmError] = []

    def wait() -> None:
        try:
            engine.wait_until_ready()
        except SwarmError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    engine.close()
    thread.join(30)
    assert not thread.is_alive() and len(errors) == 1


STARTS_ONE = """
import time
from swarm.config import PolicySection, RolloutsSection
from swarm.rollouts.engine_process import EngineProcess
engine = EngineProcess(PolicySection(), RolloutsSection(), device="cpu")
print(engine._process.pid, flush=True)
time.sleep(600)
"""


def test_the_process_ends_with_a_node_that_was_killed() -> None:
    node = subprocess.Popen([sys.executable, "-c", STARTS_ONE], stdout=subprocess.PIPE)
    assert node.stdout is not None
    child = psutil.Process(int(node.stdout.readline()))
    os.kill(node.pid, signal.SIGKILL)
    node.stdout.close()
    node.wait(10)
    child.wait(60)


class Twin:
    """An engine over a second policy in this process."""

    def __init__(self, config: Config) -> None:
        self._policy = load_policy(config.policy, device="cpu")
        self._engine = SlotEngine(self._policy, 64, 64 << 20)
        self.loaded: list[Mapping[str, Tensor]] = []
        self.may_sample = threading.Event()
        self.may_sample.set()
        self.is_closed = False

    def load(self, weights: Mapping[str, Tensor]) -> None:
        assert self.may_sample.wait(10)
        self.loaded.append(weights)
        write_adapter(self._policy.model, weights)

    def wait_until_ready(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def config_of(**rollouts: Any) -> Config:
    torch.set_num_threads(1)
    return parse(
        {
            "rollouts": {"groups_per_round": 6, "group_size": 4, "max_new_tokens": 12, "cache_mib": 64, **rollouts},
            "sharing": {"own_groups": 6, "swarm_groups": 0},
        }
    )


class Run:
    def __init__(self, config: Config) -> None:
        self.groups: list[RolloutGroup] = []
        self.rounds: list[int] = []
        self.twin = Twin(config)
        self.policy: Policy = load_policy(config.policy, device="cpu")
        backend = PolicyBackend(
            self.policy, make_engine(self.policy, config.rollouts), LocalOptimizer(config.training, self.policy),
            lambda: None, ahead=self.twin,  # type: ignore[arg-type]
        )  # fmt: skip
        self.learner = Learner(
            config,
            backend,
            mixture=TaskMixture(config.tasks),
            pool=ExperiencePool(":memory:", config.sharing, Clock()),
            peer_id="me",
            ports=SwarmPorts(publish=self._publish),
        )

    def _publish(self, groups: Sequence[RolloutGroup]) -> None:
        self.groups += groups
        self.rounds += [self.learner.round] * len(groups)


def under_way(run: Run) -> "Future[RolloutBatch]":
    ahead = run.learner._ahead
    assert ahead is not None and ahead._begun is not None
    return ahead._begun


def versions(run: Run) -> list[tuple[int, int]]:
    return sorted({(number, group.policy_version) for number, group in zip(run.rounds, run.groups, strict=True)})


def test_a_round_is_sampled_with_the_weights_of_one_round_ago_and_its_groups_say_so() -> None:
    run = Run(config_of())
    began_at, weights = [0], [read_adapter(run.policy.model)] * 2
    for _ in range(3):
        began_at.append(run.policy.version)
        run.learner.run_round()
        weights.append(read_adapter(run.policy.model))
    under_way(run).result(60)
    run.learner.close()
    assert began_at[-1] >= 2, "training moved the policy"
    assert versions(run) == list(enumerate(began_at[:3])), "the second round was sampled before the first step"
    for loaded, expected in zip(run.twin.loaded, weights, strict=False):
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert len(run.twin.loaded) == 4 and run.twin.is_closed


def test_training_does_not_wait_for_the_next_round_and_a_checkpoint_holds_what_was_before_it() -> None:
    run = Run(config_of())
    run.learner.run_round()
    under_way(run).result(60)
    run.twin.may_sample.clear()
    assert run.learner.run_round()["round"] == 2
    assert not under_way(run).done()
    saved = run.learner.state()[1]
    run.twin.may_sample.set()
    under_way(run).result(60)
    assert run.learner.state()[1] == saved
    assert run.learner._cursor.state() != saved["cursor"], "the tasks of the round under way are drawn"
    run.learner.close()


def test_a_resumed_run_samples_the_round_again_that_was_under_way(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    whole, again = Run(config_of()), Run(config_of())
    for _ in range(2):
        whole.learner.run_round()
    whole.learner.save(store)
    saved_at = whole.policy.version
    assert again.learner.resume(store)
    whole.learner.run_round()
    again.learner.run_round()
    whole.learner.close()
    again.learner.close()

    def tasks(run: Run) -> list[Any]:
        return [group.task for group, number in zip(run.groups, run.rounds, strict=True) if number == 2]

    assert tasks(again) == tasks(whole) != [], "no task is skipped or asked twice"
    assert {group.policy_version for group in again.groups} == {saved_at}, "with the weights of the checkpoint"
    assert all(group.policy_version < saved_at for group in whole.groups[-len(again.groups) :])


def test_equal_runs_are_equal_to_the_last_bit() -> None:
    runs = [Run(config_of()) for _ in range(2)]
    for run in runs:
        for _ in range(3):
            run.learner.run_round()
        run.learner.close()
    one, other = (read_adapter(run.policy.model) for run in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert runs[0].groups == runs[1].groups


def test_the_last_round_begins_no_further_one() -> None:
    config = config_of()
    run = Run(config.model_copy(update={"node": config.node.model_copy(update={"max_rounds": 2})}))
    for _ in range(2):
        run.learner.run_round()
    assert len(run.twin.loaded) == 2 and not run.learner._ahead.is_begun  # type: ignore[union-attr]
    run.learner.close()


def test_a_copy_for_a_checkpoint_is_not_changed_by_later_rounds() -> None:
    run = Run(config_of())
    run.learner.run_round()
    tensors, state = run.learner.state()
    copies = {group: {name: one.clone() for name, one in named.items()} for group, named in tensors.items()}
    text = json.dumps(state)
    run.learner.run_round()
    run.learner.close()
    assert json.dumps(state) == text
    for group, named in copies.items():
        assert all(torch.equal(tensors[group][name], one) for name, one in named.items())


@pytest.mark.parametrize(("name", "value"), [("prune", True), ("engine", "vllm")])
def test_what_cannot_overlap_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="overlap goes without prune and without vLLM"):
        parse({"rollouts": {"overlap": True, name: value}})
