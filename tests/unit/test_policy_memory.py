"""The memory probe: estimates that follow the need, and an error that names the way out."""

from collections.abc import Callable

import pytest
import torch

from swarm.config import RolloutsSection, TrainingSection
from swarm.engine.slot_engine import SlotEngine
from swarm.errors import MemoryBudgetError
from swarm.policy.memory_probe import MemoryNeed, PeakBytes, measure_step, probe_memory
from swarm.policy.policy import Policy

MakePolicy = Callable[..., Policy]


def need(
    policy: Policy,
    *,
    tokens: int | None = None,
    batch: int = 16,
    available: int | None = None,
    cache_mib: int | None = None,
    max_new_tokens: int = 8,
    micro_batch_sequences: int = 64,
    answers_wait: bool = False,
) -> MemoryNeed:
    rollouts = RolloutsSection(max_new_tokens=max_new_tokens, max_batch_sequences=batch, cache_mib=cache_mib)
    training = TrainingSection(micro_batch_tokens=tokens, micro_batch_sequences=micro_batch_sequences)
    answer_bytes = SlotEngine(policy, batch).answer_bytes(policy.config.max_prompt_tokens + max_new_tokens)
    return probe_memory(
        policy,
        rollouts,
        training,
        answer_bytes=answer_bytes,
        answers_wait=answers_wait,
        available_bytes=available,
    )


def tensors_of(policy: Policy) -> list[torch.Tensor]:
    parameters = list(policy.model.parameters())
    return [*parameters, *policy.model.buffers(), *(one.grad for one in parameters if one.grad is not None)]


def peak_bytes(policy: Policy, num_sequences: int, prompt: int, answer: int) -> int:
    """Bytes that a training step takes at its peak, besides weights and what the optimizer holds."""
    sequences = [([index, *[5] * (prompt - 1)], [7] * answer) for index in range(num_sequences)]
    policy.token_logprobs(sequences[:1]).logprobs.sum().backward()  # gradients exist from here on
    with PeakBytes({tensor.untyped_storage().data_ptr() for tensor in tensors_of(policy)}) as peak:
        policy.token_logprobs(sequences, with_entropy=True).logprobs.sum().backward()
    policy.model.zero_grad()
    return peak.most


def test_the_peak_is_of_tensors_that_exist_at_once():
    weight = torch.ones(1000)
    with PeakBytes({weight.untyped_storage().data_ptr()}) as peak:
        one = weight * 2
        view = one[:500]
        del one  # the view still needs its memory
        other = weight + 1
        assert peak.most == 8000
        del view, other
        torch.zeros(500)
        weight.mul_(3)
    assert peak.most == 8000


def test_cache_bytes_are_exact(make_policy: MakePolicy):
    policy = make_policy(max_prompt_tokens=100)
    # keys and values · layers · key/value heads · head width · tokens · float32, 16 sequences
    assert need(policy).rollout_bytes == 2 * 2 * 2 * 8 * 108 * 4 * 16
    assert need(policy, cache_mib=1).rollout_bytes == 2 * 2 * 2 * 8 * 108 * 4 * 16
    assert need(policy, cache_mib=1, batch=64).rollout_bytes == 2 * 2 * 2 * 8 * 108 * 4 * 37  # as many as 1 MiB holds


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma2", "mistral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_need_of_long_sequences_follows_from_short_ones(make_policy: MakePolicy, name: str, checkpointing: bool):
    policy = make_policy(name, gradient_checkpointing=checkpointing)
    step = measure_step(policy)
    for case in ((1, 50, 350), (4, 250, 50), (16, 40, 80)):
        assert step.of(*case) - step.adapter_bytes == pytest.approx(peak_bytes(policy, *case), rel=0.15), case


def test_the_budget_of_tokens_is_chosen_by_the_free_memory(make_policy: MakePolicy):
    policy = make_policy(max_prompt_tokens=92)  # the longest sequence has 100 tokens
    step = measure_step(policy)
    plenty = need(policy, available=10**11)
    assert plenty.micro_batch_tokens == policy.micro_batch_tokens == 4096
    scarce = need(policy, available=2 * step.of(5, 92, 8))
    assert scarce.micro_batch_tokens == policy.micro_batch_tokens == 500
    assert scarce.training_bytes <= scarce.available_bytes / 2
    assert need(policy, available=step.of(1, 92, 8) + 1).micro_batch_tokens == 100


def test_what_the_config_says_is_the_budget(make_policy: MakePolicy):
    policy = make_policy(max_prompt_tokens=92)
    assert need(policy, tokens=800, available=10**10).micro_batch_tokens == policy.micro_batch_tokens == 800
    assert need(policy, tokens=800).training_bytes == measure_step(policy).of(8, 92, 8)
    assert need(policy, tokens=800, micro_batch_sequences=3).training_bytes == measure_step(policy).of(3, 92, 8)


def test_probing_takes_little_memory_whatever_the_vocabulary(make_policy: MakePolicy):
    """What the probe itself allocates does not depend on the batch, or on how long sequences may be."""
    policy = make_policy(max_prompt_tokens=5000)
    with PeakBytes({tensor.untyped_storage().data_ptr() for tensor in tensors_of(policy)}) as peak:
        whole = need(policy, tokens=10**6, available=10**12, max_new_tokens=5000)
    assert peak.most < whole.training_bytes / 100


def test_gradient_checkpointing_needs_less(make_policy: MakePolicy):
    plain, checkpointed = make_policy(), make_policy(gradient_checkpointing=True)
    assert measure_step(checkpointed).stored.linear < measure_step(plain).stored.linear / 3


def test_a_step_that_does_not_fit_is_refused_with_the_budget_that_would(make_policy: MakePolicy):
    policy = make_policy(max_prompt_tokens=92)
    step = measure_step(policy)
    with pytest.raises(
        MemoryBudgetError,
        match=r"sequences of 100 tokens.* GB are free; set training\.micro_batch_tokens = 400, or lower",
    ):
        need(policy, tokens=1600, available=step.of(4, 92, 8) + 1)
    assert policy.micro_batch_tokens == 4096  # as before
    with pytest.raises(
        MemoryBudgetError, match=r"free; set policy\.gradient_checkpointing = true, policy\.quantization or"
    ):
        need(policy, available=step.of(1, 92, 8) - 1)


def test_rollouts_that_do_not_fit_name_their_own_setting(make_policy: MakePolicy):
    policy = make_policy()
    enough_for_training = measure_step(policy).of(1, policy.config.max_prompt_tokens, 8)
    with pytest.raises(MemoryBudgetError, match=r"set rollouts\.max_batch_sequences = \d+"):
        need(policy, batch=65536, available=enough_for_training)


def test_a_round_whose_answers_do_not_fit_is_refused_with_an_estimate(make_policy: MakePolicy):
    rollouts = RolloutsSection(groups_per_round=10**6, group_size=1000, max_new_tokens=1000)
    told = r"got 1,000,000,000 answers of up to 1000 tokens, which need 64,000 GB, .* lower rollouts\.groups_per_round"
    with pytest.raises(MemoryBudgetError, match=told):
        probe_memory(make_policy(), rollouts, TrainingSection(), answer_bytes=1)


def test_answers_that_wait_for_memory_need_half_of_it_and_room_for_one(make_policy: MakePolicy):
    policy = make_policy()
    length = policy.config.max_prompt_tokens + 8
    one_answer, training = SlotEngine(policy, 1).answer_bytes(length), measure_step(policy).of(1, length - 8, 8)
    available = max(training, 7 * one_answer)
    found = need(policy, batch=65536, available=available, answers_wait=True)
    assert found.rollout_bytes == available // 2 // one_answer * one_answer
    with pytest.raises(MemoryBudgetError, match=r"must fit into .* set rollouts\.cache_mib = \d+"):
        need(make_policy(max_prompt_tokens=10**6), tokens=1, available=2 * 10**8, answers_wait=True)


def test_a_cache_that_does_not_hold_one_answer_is_refused_with_the_size_that_would(make_policy: MakePolicy):
    policy = make_policy(max_prompt_tokens=5000)
    with pytest.raises(MemoryBudgetError, match=r"must fit into 1\.0 MiB, got 1\.2 MiB; set rollouts\.cache_mib = 2,"):
        need(policy, cache_mib=1, batch=1)


def test_what_the_engine_holds_is_not_free(make_policy: MakePolicy):
    policy, training = make_policy(), TrainingSection()
    rollouts = RolloutsSection(max_new_tokens=8, max_batch_sequences=1)
    probe = probe_memory(policy, rollouts, training, answer_bytes=1, held_bytes=300, available_bytes=10**9)
    assert probe.available_bytes == 10**9 - 300


def test_probing_leaves_no_trace(make_policy: MakePolicy):
    policy = make_policy(gradient_checkpointing=True)
    random_state = torch.random.get_rng_state()
    need(policy)
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert not policy.model.training
