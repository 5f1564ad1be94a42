"""From tasks to groups, with verifiers that fail and prompts that do not fit."""

import hashlib
import logging
from collections.abc import Callable

import pytest
import torch

from swarm.config import RolloutsSection
from swarm.engine.slot_engine import SlotEngine
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


def worker_of(policy: Policy, group_size: int = 4, **settings: object) -> RolloutWorker:
    config = RolloutsSection.model_validate({"group_size": group_size, "max_new_tokens": 6, **settings})
    return RolloutWorker(config, policy, SlotEngine(policy, 16), author="me")


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


def test_rollouts_carry_the_log_probs_they_were_drawn_at_and_likelihoods_those_of_the_policy(make_policy: MakePolicy):
    policy = make_policy()
    worker = worker_of(policy, temperature=0.7, top_k=5, top_p=0.9, min_p=0.05)
    batch = worker.rollout([task(0), task(1, source="broken", verify=broken)], seed=1)
    (group,) = batch.groups
    assert len(batch.likelihoods) == 4  # none of a group that was dropped
    for rollout, likelihood in zip(group.rollouts, batch.likelihoods, strict=True):
        ids = policy.encode_prompt("Write.")
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([[*ids, *rollout.token_ids]])).logits[0, len(ids) - 1 : -1]
        chosen = torch.tensor(rollout.token_ids)[:, None]
        assert likelihood == pytest.approx(logits.log_softmax(-1).gather(-1, chosen)[:, 0].tolist(), abs=1e-4)
        tempered = (logits / 0.7).log_softmax(-1).gather(-1, chosen)[:, 0]
        # what is left after the cut is scaled up: drawn at more than the tempered policy would
        assert all(
            drawn >= of_policy - 1e-5 for drawn, of_policy in zip(rollout.logprobs, tempered.tolist(), strict=True)
        )
        assert (logits.topk(5).indices == chosen).any(-1).all()


def test_a_stop_string_ends_an_answer_without_finishing_it(make_policy: MakePolicy):
    policy = make_policy()
    settings = {"stop": ["e", "7"], "max_new_tokens": 30}
    (group,) = worker_of(policy, group_size=16, **settings).rollout([task(0)], seed=1).groups
    stopped = [rollout for rollout in group.rollouts if rollout.text.endswith(("e", "7"))]
    assert stopped
    assert not any(rollout.finished for rollout in stopped)  # records mean EOS
    assert all(sum(rollout.text.count(stop) for stop in ("e", "7")) <= 1 for rollout in group.rollouts)
    assert all(rollout.text == policy.decode(rollout.token_ids) for rollout in group.rollouts)
    rewards = worker_of(policy, **settings).evaluate([task(0)], temperature=1.0, seed=1)
    assert len(rewards["letters"]) == 1


def test_a_small_group_is_warned_about(make_policy: MakePolicy, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        worker_of(make_policy(), group_size=3)
    assert "below 4 the advantage is noisy" in caplog.text
