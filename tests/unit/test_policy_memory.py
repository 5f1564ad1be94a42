"""The memory probe: estimates that follow the need, and an error that names the way out."""

from collections.abc import Callable

import pytest
import torch

from swarm.config import RolloutsSection, TrainingSection
from swarm.engine.slot_engine import SlotEngine
from swarm.errors import MemoryBudgetError
from swarm.policy.memory_probe import MemoryNeed, probe_memory
from swarm.policy.policy import Policy

MakePolicy = Callable[..., Policy]


def need(
    policy: Policy,
    *,
    micro_batch: int = 16,
    batch: int = 16,
    groups: int = 4,
    available: int | None = None,
    cache_mib: int | None = None,
) -> MemoryNeed:
    rollouts = RolloutsSection(max_new_tokens=8, max_batch_sequences=batch, cache_mib=cache_mib)
    training = TrainingSection(micro_batch_sequences=micro_batch)
    answer_bytes = SlotEngine(policy, batch).answer_bytes(policy.config.max_prompt_tokens + 8)
    return probe_memory(policy, rollouts, training, groups, answer_bytes=answer_bytes, available_bytes=available)


def test_cache_bytes_are_exact(make_policy: MakePolicy):
    policy = make_policy(max_prompt_tokens=100)
    # keys and values · layers · key/value heads · head width · tokens · float32, 16 sequences
    assert need(policy).rollout_bytes == 2 * 2 * 2 * 8 * 108 * 4 * 16
    assert need(policy, cache_mib=1).rollout_bytes == 2 * 2 * 2 * 8 * 108 * 4 * 16
    assert need(policy, cache_mib=1, batch=64).rollout_bytes == 2 * 2 * 2 * 8 * 108 * 4 * 37  # as many as 1 MiB holds


def test_longer_prompts_and_larger_batches_need_more(make_policy: MakePolicy):
    short, long = make_policy(max_prompt_tokens=50), make_policy(max_prompt_tokens=400)
    assert need(long).training_bytes > 4 * need(short).training_bytes
    assert need(short, micro_batch=64).training_bytes > need(short, micro_batch=16).training_bytes


def test_gradient_checkpointing_needs_less(make_policy: MakePolicy):
    plain, checkpointed = make_policy(), make_policy(gradient_checkpointing=True)
    one_prompt_each = {"micro_batch": 4, "groups": 4}  # with nothing to share, activations are all that differs
    assert need(checkpointed, **one_prompt_each).training_bytes < need(plain, **one_prompt_each).training_bytes / 3


def test_what_does_not_fit_is_refused_with_the_number_that_would(make_policy: MakePolicy):
    policy = make_policy()
    whole = need(policy, micro_batch=16).training_bytes
    with pytest.raises(
        MemoryBudgetError, match=r"at training\.micro_batch_sequences = 16; set training\.micro_batch_sequences = 8,"
    ):
        need(policy, micro_batch=16, available=whole // 2 + 16)


def test_a_cache_that_does_not_fit_names_its_own_setting(make_policy: MakePolicy):
    policy = make_policy()
    enough_for_training = need(policy, micro_batch=1, groups=1).training_bytes
    with pytest.raises(MemoryBudgetError, match=r"set rollouts\.max_batch_sequences = \d+"):
        need(policy, micro_batch=1, groups=1, batch=4096, available=enough_for_training)


def test_a_cache_that_does_not_hold_one_answer_is_refused_with_the_size_that_would(make_policy: MakePolicy):
    policy = make_policy(max_prompt_tokens=5000)
    with pytest.raises(MemoryBudgetError, match=r"must fit into 1\.0 MiB, got 1\.2 MiB; set rollouts\.cache_mib = 2,"):
        need(policy, cache_mib=1, batch=1, micro_batch=1, groups=1)


def test_what_the_engine_holds_is_not_free(make_policy: MakePolicy):
    policy, training = make_policy(), TrainingSection(micro_batch_sequences=1)
    rollouts = RolloutsSection(max_new_tokens=8, max_batch_sequences=1)
    probe = probe_memory(policy, rollouts, training, 1, answer_bytes=1, held_bytes=300, available_bytes=10**9)
    assert probe.available_bytes == 10**9 - 300


def test_probing_leaves_no_trace(make_policy: MakePolicy):
    policy = make_policy(gradient_checkpointing=True)
    random_state = torch.random.get_rng_state()
    need(policy)
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert not policy.model.training
