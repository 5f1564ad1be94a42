"""From tasks to groups, with verifiers that fail and prompts that do not fit."""

import hashlib
import logging
from collections.abc import Callable

import pytest

from swarm.config import RolloutsSection
from swarm.engine.transformers_engine import TransformersEngine
from swarm.policy.policy import Policy
from swarm.rollouts.worker import RolloutWorker
from swarm.types import Task, TaskRef

MakePolicy = Callable[..., Policy]


def share_of_letters(text: str) -> float:
    return sum(character.isalpha() for character in text) / max(len(text), 1)


def broken(text: str) -> float:
    raise ZeroDivisionError(text)


def task(
    index: int, *, source: str = "letters", prompt: str = "Write.", verify: Callable[[str], float] = share_of_letters
) -> Task:
    return Task(TaskRef(source, "0" * 16, 16, index), prompt, verify)


def worker_of(policy: Policy, group_size: int = 4) -> RolloutWorker:
    config = RolloutsSection(group_size=group_size, max_new_tokens=6)
    return RolloutWorker(config, policy, TransformersEngine(policy, 16), author="me")


def test_groups_carry_what_a_reader_needs(make_policy: MakePolicy):
    policy = make_policy()
    policy.version = 7
    batch = worker_of(policy).rollout([task(0), task(1, prompt="Writé two.")], seed=1)
    assert [group.task.index for group in batch.groups] == [0, 1]
    for group, prompt in zip(batch.groups, ("Write.", "Writé two."), strict=True):
        assert group.prompt_digest == hashlib.sha256(prompt.encode()).hexdigest()[:16]
        assert (group.author, group.lineage, group.policy_version) == ("me", policy.lineage, 7)
        assert len(group.rollouts) == 4
        for rollout in group.rollouts:
            assert rollout.text == policy.decode(rollout.token_ids)
            assert rollout.reward == share_of_letters(rollout.text)
            assert len(rollout.logprobs) == len(rollout.token_ids)
            assert rollout.finished == (rollout.token_ids[-1] in policy.eos_token_ids)
    assert batch.num_tokens == sum(len(r.token_ids) for g in batch.groups for r in g.rollouts)
    assert batch.failures == {} and batch.too_long == {}


def test_a_failing_verifier_costs_its_group_and_is_counted(make_policy: MakePolicy):
    tasks = [task(0), task(1, source="broken", verify=broken), task(2, source="wild", verify=lambda _: 7.0), task(3)]
    batch = worker_of(make_policy()).rollout(tasks, seed=1)
    assert [group.task.index for group in batch.groups] == [0, 3]
    assert batch.failures == {"broken": 1, "wild": 1}


def test_too_long_a_prompt_costs_its_task_and_is_counted(make_policy: MakePolicy):
    policy = make_policy(max_prompt_tokens=10)
    batch = worker_of(policy).rollout([task(0, prompt="x" * 10), task(1, prompt="x" * 11)], seed=1)
    assert [group.task.index for group in batch.groups] == [0]
    assert batch.too_long == {"letters": 1}


def test_nothing_left_to_roll_out_is_an_empty_batch(make_policy: MakePolicy):
    batch = worker_of(make_policy(max_prompt_tokens=3)).rollout([task(0)], seed=1)
    assert batch.groups == [] and batch.num_tokens == 0


def test_the_seed_decides_the_groups(make_policy: MakePolicy):
    worker = worker_of(make_policy())
    assert worker.rollout([task(0)], seed=1) == worker.rollout([task(0)], seed=1)
    assert worker.rollout([task(0)], seed=1) != worker.rollout([task(0)], seed=2)


def test_evaluation_scores_one_greedy_answer_per_task(make_policy: MakePolicy):
    policy = make_policy(max_prompt_tokens=10)
    tasks = [task(0), task(1, prompt="x" * 11), task(2, source="broken", verify=broken), task(3, source="other")]
    rewards = worker_of(policy).evaluate(tasks, temperature=0.0, seed=5)
    assert set(rewards) == {"letters", "other"}
    assert [len(values) for values in rewards.values()] == [1, 1]
    assert rewards["letters"] == rewards["other"]  # the same prompt, decoded greedily


def test_a_small_group_is_warned_about(make_policy: MakePolicy, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        worker_of(make_policy(), group_size=3)
    assert "below 4 the advantage is noisy" in caplog.text
