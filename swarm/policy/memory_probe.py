"""Checks before the first step that the longest sequences fit into memory, and says what to lower if they do not.

On an accelerator it runs the worst micro-batch forward and backward. On the CPU a shortage would not be reported, since the
operating system kills the process. There the need is computed: autograd tells exactly what it stores for one group of the
worst batch, and the rest scales with the number of groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.config import RolloutsSection, TrainingSection
from swarm.errors import MemoryBudgetError
from swarm.policy.device import available_bytes as free_bytes
from swarm.policy.logprobs import TokenSequence, token_logprobs
from swarm.policy.policy import Policy

_TEMPORARIES = 1.5
"""Peak memory relative to what autograd stores: gradients and operator outputs exist for a moment."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Estimated peak of activations and caches, in bytes, without weights."""

    training_bytes: int
    rollout_bytes: int
    available_bytes: int


def probe_memory(
    policy: Policy,
    rollouts: RolloutsSection,
    training: TrainingSection,
    num_groups: int,
    *,
    answer_bytes: int,
    held_bytes: int = 0,
    available_bytes: int | None = None,
) -> MemoryNeed:
    """Check a step on `num_groups` groups with the longest prompts and answers that the config allows.

    `answer_bytes` is the engine's need for one answer of full length with its prompt, `held_bytes` its memory besides.
    `available_bytes` defaults to the free memory of the device. Weights, gradients and random state stay as they are.
    Raises MemoryBudgetError with the value that would fit.
    """
    size = training.micro_batch_sequences
    num_prompts = min(num_groups, size)
    answers_per_prompt = math.ceil(size / num_prompts)
    group = _worst_group(policy, answers_per_prompt, rollouts.max_new_tokens)
    num_answers = fitting_answers(answer_bytes, rollouts.max_batch_sequences, rollouts.cache_bytes)
    need = MemoryNeed(
        training_bytes=int(_stored_bytes(policy, group) * num_prompts * _TEMPORARIES),
        rollout_bytes=answer_bytes * num_answers,
        available_bytes=(free_bytes(policy.device) if available_bytes is None else available_bytes) - held_bytes,
    )
    if need.training_bytes > need.available_bytes:
        raise _does_not_fit("training.micro_batch_sequences", size, need.training_bytes, available=need.available_bytes)
    if need.rollout_bytes > need.available_bytes:
        wanted = rollouts.max_batch_sequences
        raise _does_not_fit("rollouts.max_batch_sequences", wanted, need.rollout_bytes, available=need.available_bytes)
    if policy.device.type != "cpu":
        _run_worst_batch(policy, group, num_prompts, size=size)
    return need


def fitting_answers(answer_bytes: int, wanted: int, cache_bytes: int | None) -> int:
    """Return how many of `wanted` answers can be sampled at once. Raises MemoryBudgetError where not one fits."""
    if cache_bytes is None:
        return wanted
    if answer_bytes > cache_bytes:
        raise MemoryBudgetError(
            f"keys and values of one answer of full length, its prompt included, must fit into {cache_bytes / 2**20:.1f} MiB, "
            f"got {answer_bytes / 2**20:.1f} MiB; set rollouts.cache_mib = {-(-answer_bytes // 2**20)}, or lower "
            "policy.max_prompt_tokens or rollouts.max_new_tokens"
        )
    return min(wanted, cache_bytes // answer_bytes)


def _worst_group(policy: Policy, num_answers: int, max_new_tokens: int) -> list[TokenSequence]:
    token = policy.eos_token_ids[0]
    return [([token] * policy.config.max_prompt_tokens, [token] * max_new_tokens) for _ in range(num_answers)]


def _stored_bytes(policy: Policy, group: list[TokenSequence]) -> int:
    """Bytes that autograd stores for the backward pass of one group, each storage counted once, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _logprob_sum(policy, group)
    return sum(storages.values())


def _run_worst_batch(policy: Policy, group: list[TokenSequence], num_prompts: int, size: int) -> None:
    variants = [([i % policy.vocab_size, *prompt[1:]], answer) for i in range(num_prompts) for prompt, answer in group]
    try:
        _logprob_sum(policy, variants[:size]).backward()
    except torch.OutOfMemoryError:
        raise MemoryBudgetError(
            f"one micro-batch of the longest sequences must fit into the memory of {policy.device}, got out of memory "
            f"with training.micro_batch_sequences = {size}; halve it, or set policy.gradient_checkpointing = true"
        ) from None
    finally:
        for parameter in policy.model.parameters():
            parameter.grad = None
        if policy.device.type == "cuda":
            torch.cuda.empty_cache()


def _logprob_sum(policy: Policy, sequences: Sequence[TokenSequence]) -> Tensor:
    checkpointing = policy.config.gradient_checkpointing
    with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
        policy.model.train(checkpointing)  # checkpointing works in train mode only
        result = token_logprobs(policy.model, sequences, policy.pad_token_id, share_prompts=not checkpointing)
        policy.model.eval()
    return result.logprobs.sum()


def _does_not_fit(setting: str, value: int, need: int, available: int) -> MemoryBudgetError:
    fitting = max(1, value * available // need)
    return MemoryBudgetError(
        f"the longest sequences must fit into memory, got a need of {need / 1e9:.2f} GB with {available / 1e9:.2f} GB "
        f"free at {setting} = {value}; set {setting} = {fitting}, or lower policy.max_prompt_tokens or "
        "rollouts.max_new_tokens"
    )
