"""Chooses before the first step how many tokens go through the model together, and refuses what does not fit into memory.

On the CPU a shortage would not be reported, since the operating system kills the process. So the need is computed: three short
answers are measured, forward and backward, and the need of long ones follows from a polynomial in their length:

    sequences · (linear · L + quadratic · L²), of what is stored, to which the logits of a chunk come, and of the backward pass

On an accelerator the largest micro-batch runs once as well, for memory that kernels use inside.
"""

import bisect
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from swarm.config import RolloutsSection, TrainingSection
from swarm.errors import MemoryBudgetError
from swarm.policy.answer_head import CHUNK_BYTES, CHUNK_COPIES
from swarm.policy.device import available_bytes as free_bytes
from swarm.policy.logprobs import token_logprobs
from swarm.policy.micro_batch_size import DEFAULT_TOKENS, TokenSequence
from swarm.policy.policy import Policy

logger = logging.getLogger(__name__)

_LENGTHS = (32, 64, 96)
"""Tokens of the measured answers, their prompts included."""
_CHUNK_TOKENS = 8
"""Tokens of a chunk of logits while measuring, so that logits hide nothing else."""
_ADAPTER_COPIES = 3
"""Gradient and two moments of AdamW, in float32."""
_KEPT_BYTES_PER_TOKEN = 64
"""An id, a log-prob and the text of a token, as Python objects."""
_SHARE = 0.5
"""Part of the free memory that the chosen micro-batch may need."""
_MOST_TOKENS = {"cpu": DEFAULT_TOKENS}
_MOST_TOKENS_OF_ACCELERATORS = 32_768


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Peak of activations, gradients, moments and caches, in bytes, without weights."""

    training_bytes: int
    """Of a micro-batch of the longest sequences."""
    rollout_bytes: int
    available_bytes: int
    micro_batch_tokens: int
    """Tokens of one forward and backward pass, as the config says or as chosen for this machine."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Bytes of one sequence by its length, and bytes that are needed once."""

    once: float
    linear: float
    quadratic: float

    @classmethod
    def through(cls, first: int, second: int, third: int) -> "Polynomial":
        """The polynomial with these values at `_LENGTHS`, without falling terms."""
        step = _LENGTHS[1] - _LENGTHS[0]
        quadratic = max(0.0, (third - 2 * second + first) / (2 * step**2))
        linear = max(1.0, (third - first) / (2 * step) - quadratic * (_LENGTHS[0] + _LENGTHS[2]))
        return cls(max(0.0, third - linear * _LENGTHS[2] - quadratic * _LENGTHS[2] ** 2), linear, quadratic)

    def of(self, num_sequences: int, length: int) -> float:
        return self.once + num_sequences * (self.linear * length + self.quadratic * length**2)


@dataclass(frozen=True, slots=True)
class StepNeed:
    """Memory of a training step on micro-batches of equal sequences, in bytes."""

    adapter_bytes: int
    """Gradients and moments."""
    logits_bytes: int
    """Logits of one token in float32."""
    stored: Polynomial
    """What the forward pass keeps for the backward pass; the head comes on top of it."""
    backward: Polynomial
    """The peak of the backward pass, with what is still stored."""

    def of(self, num_sequences: int, prompt: int, answer: int) -> int:
        """Bytes of a micro-batch of `num_sequences` sequences of so many tokens."""
        length = prompt + answer
        logits = CHUNK_COPIES * min(CHUNK_BYTES, num_sequences * answer * self.logits_bytes)
        forward = self.stored.of(num_sequences, length) + logits
        return self.adapter_bytes + int(max(forward, self.backward.of(num_sequences, length)))

    def fitting(self, num_bytes: float, prompt: int, answer: int) -> int:
        """Largest number of such sequences that fits into `num_bytes`; 0 where not one does."""
        most = 1
        while self.of(most, prompt, answer) <= num_bytes:
            most *= 2
        return (
            bisect.bisect_right(
                range(most + 1), num_bytes, key=lambda count: self.of(count, prompt, answer) if count else 0
            )
            - 1
        )


def probe_memory(
    policy: Policy,
    rollouts: RolloutsSection,
    training: TrainingSection,
    *,
    answer_bytes: int,
    held_bytes: int = 0,
    answers_wait: bool = False,
    available_bytes: int | None = None,
) -> MemoryNeed:
    """Check that steps and rollouts fit with the longest prompts and answers that the config allows.

    Sets `policy.micro_batch_tokens`. `answer_bytes` is the engine's need for one answer of full length with its prompt,
    `held_bytes` its memory besides. With `answers_wait` the engine lets answers wait for memory, so only one of full length
    must fit into what rollouts may use (`rollout_share`). `available_bytes` defaults to the free memory of the device.
    Weights, gradients and random state stay as they are. Raises MemoryBudgetError with the value that would fit.
    """
    _check_round(rollouts, free_bytes(torch.device("cpu")) if available_bytes is None else available_bytes)
    available = (free_bytes(policy.device) if available_bytes is None else available_bytes) - held_bytes
    longest = policy.config.max_prompt_tokens, rollouts.max_new_tokens
    length = sum(longest)
    step = measure_step(policy)
    wanted = training.micro_batch_tokens or min(
        _MOST_TOKENS.get(policy.device.type, _MOST_TOKENS_OF_ACCELERATORS),
        step.fitting(_SHARE * available, *longest) * length,
    )
    num_sequences = min(max(1, wanted // length), training.micro_batch_sequences)
    cache_bytes = rollouts.cache_bytes
    if cache_bytes is None and answers_wait:
        cache_bytes = rollout_share(available)
    num_answers = fitting_answers(answer_bytes, rollouts.max_batch_sequences, cache_bytes)
    tokens = max(wanted, length)
    need = MemoryNeed(step.of(num_sequences, *longest), answer_bytes * num_answers, available, tokens)
    if need.training_bytes > available:
        raise _step_does_not_fit(need.training_bytes, available, step.fitting(available, *longest), length)
    if need.rollout_bytes > available:
        raise MemoryBudgetError(
            f"{num_answers} answers of full length need {need.rollout_bytes / 1e9:.2f} GB while they are sampled, and "
            f"{available / 1e9:.2f} GB are free; set rollouts.max_batch_sequences = {max(1, available // answer_bytes)}, or "
            "lower policy.max_prompt_tokens or rollouts.max_new_tokens"
        )
    policy.micro_batch_tokens = tokens
    if policy.device.type != "cpu":
        _run(policy, num_sequences, *longest)
    logger.info(
        "micro-batches of %d tokens: training needs %.2f GB, rollouts need %.2f GB, %.2f GB are free",
        tokens, need.training_bytes / 1e9, need.rollout_bytes / 1e9, available / 1e9,
    )  # fmt: skip
    return need


def _check_round(rollouts: RolloutsSection, available: int) -> None:
    """Raise MemoryBudgetError where the answers of one round, which are kept to its end, do not fit at their full length."""
    size = rollouts.largest_group if rollouts.sizes_differ else rollouts.group_size
    num_answers = rollouts.groups_per_round * size
    need = num_answers * rollouts.max_new_tokens * _KEPT_BYTES_PER_TOKEN
    if need > available:
        raise MemoryBudgetError(
            f"the answers of one round must fit into the memory, got {num_answers:,} answers of up to {rollouts.max_new_tokens} "
            f"tokens, which need {need / 1e9:,.0f} GB, and {available / 1e9:.1f} GB are free; lower rollouts.groups_per_round "
            "or rollouts.group_size"
        )


def rollout_share(available_bytes: int) -> int:
    """Return what keys and values may take of the free memory where `rollouts.cache_mib` is not set: half of it."""
    return max(0, available_bytes) // 2


def fitting_answers(answer_bytes: int, wanted: int, cache_bytes: int | None) -> int:
    """Return how many of `wanted` answers can be sampled at once. Raises MemoryBudgetError where not one fits."""
    if cache_bytes is None:
        return wanted
    if answer_bytes and answer_bytes > cache_bytes:
        raise MemoryBudgetError(
            f"keys and values of one answer of full length, its prompt included, must fit into {cache_bytes / 2**20:.1f} MiB, "
            f"got {answer_bytes / 2**20:.1f} MiB; set rollouts.cache_mib = {-(-answer_bytes // 2**20)}, or lower "
            "policy.max_prompt_tokens or rollouts.max_new_tokens"
        )
    return min(wanted, cache_bytes // answer_bytes) if answer_bytes else wanted


def measure_step(policy: Policy) -> StepNeed:
    """Measure three short sequences forward and backward, and compute the need of any others from them."""
    trained = sum(parameter.numel() for parameter in policy.model.parameters() if parameter.requires_grad)
    stored, backward = zip(*(_peak_bytes(policy, length) for length in _LENGTHS), strict=True)
    return StepNeed(
        _ADAPTER_COPIES * 4 * trained, 4 * policy.vocab_size, Polynomial.through(*stored), Polynomial.through(*backward)
    )


def _peak_bytes(policy: Policy, length: int) -> tuple[int, int]:
    """Bytes of tensors that exist after the forward pass of one sequence, and most of them at once in its backward pass."""
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # counted apart
    existing = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(policy.model)}
    sequence = _sequences(policy, 1, length // 2, length - length // 2)
    try:
        with PeakBytes(existing) as peak:
            total = _logprob_sum(policy, sequence, 4 * _CHUNK_TOKENS * policy.vocab_size)
            stored = peak.start_over()
            total.backward()
    finally:
        _forget_gradients(policy)
    return stored, peak.most


def _tensors_of(model: Any) -> list[Tensor]:
    parameters = list(model.parameters())
    return [*parameters, *model.buffers(), *(parameter.grad for parameter in parameters if parameter.grad is not None)]


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators create while this context lasts. The CPU's allocator does not tell."""

    def __init__(self, existing: set[int]) -> None:
        """`existing`: addresses of memory that does not count."""
        super().__init__()
        self.most = 0
        """Most bytes that existed at once."""
        self._existing = existing
        self._now = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def start_over(self) -> int:
        """Forget the peak; return the bytes that exist now."""
        self.most = self._now
        return self._now

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()  # pyright: ignore[reportPrivateUsage]
        if key in self._alive or storage.data_ptr() in self._existing:
            return

        def freed(_: object) -> None:
            self._now -= num_bytes
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, freed)
        self._now += num_bytes
        self.most = max(self.most, self._now)


def _run(policy: Policy, num_sequences: int, prompt: int, answer: int) -> None:
    try:
        _logprob_sum(policy, _sequences(policy, num_sequences, prompt, answer), CHUNK_BYTES).backward()
    except torch.OutOfMemoryError:
        raise MemoryBudgetError(
            f"one micro-batch of the longest sequences must fit into the memory of {policy.device}, got out of memory "
            f"with {num_sequences * (prompt + answer)} tokens; set training.micro_batch_tokens to half of it, or set "
            "policy.gradient_checkpointing = true"
        ) from None
    finally:
        _forget_gradients(policy)
        if policy.device.type == "cuda":
            torch.cuda.empty_cache()


def _sequences(policy: Policy, count: int, prompt: int, answer: int) -> list[TokenSequence]:
    """Sequences of equal tokens, so that a mixture of experts routes all of them alike. Prompts differ: none is shared."""
    token = policy.eos_token_ids[0]
    return [([index % policy.vocab_size, *[token] * (prompt - 1)], [token] * answer) for index in range(count)]


def _logprob_sum(policy: Policy, sequences: Sequence[TokenSequence], chunk_bytes: int) -> Tensor:
    with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
        result = token_logprobs(
            policy.model,
            sequences,
            policy.pad_token_id,
            with_entropy=True,
            recompute_layers=policy.config.gradient_checkpointing,
            chunk_bytes=chunk_bytes,
        )
    return result.logprobs.sum()


def _forget_gradients(policy: Policy) -> None:
    for parameter in policy.model.parameters():
        parameter.grad = None


def _step_does_not_fit(need: int, available: int, fitting: int, length: int) -> MemoryBudgetError:
    fix = (
        f"set training.micro_batch_tokens = {fitting * length}"
        if fitting
        else "set policy.gradient_checkpointing = true, policy.quantization or policy.dtype = bfloat16"
    )
    return MemoryBudgetError(
        f"a training step on sequences of {length} tokens, the longest that may come, needs {need / 1e9:.2f} GB, and "
        f"{available / 1e9:.2f} GB are free; {fix}, or lower policy.max_prompt_tokens or rollouts.max_new_tokens"
    )
