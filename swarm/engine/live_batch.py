"""Batches that requests join while they run, for a server: each request has its own seed, temperature and stop strings.

    add(request) ─▶ queue ─▶ slots of `SlotRun`, refilled as answers end ─ step() ─▶ one token of every active answer
    drop(number) ─▶ its slots are free for the next ones

A request gets the tokens that `Engine.generate` gives it with the same seed, whichever others run beside it.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from swarm.config import RolloutsSection
from swarm.engine.engine import AnswerRequest, AnswerSlot, Completion, End, SamplingCall
from swarm.engine.pruning import AnswerKey
from swarm.engine.sampling import Sampling, StopStrings, sample_tokens
from swarm.engine.slot_cache import SlotCache
from swarm.engine.slot_engine import FOLD_SHARE, MergedLayers
from swarm.engine.slot_model import SlotModel, supports_slots
from swarm.engine.slot_run import SlotRun
from swarm.engine.transformers_engine import TransformersEngine
from swarm.errors import MemoryBudgetError, TrainingError
from swarm.policy.device import available_bytes
from swarm.policy.memory_probe import rollout_share
from swarm.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A prompt with all that its answers are sampled with."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    num_answers: int
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stop: tuple[str, ...] = ()
    place: int = 0
    """Index of the prompt among those of one call, which `Engine.generate` counts in the same way."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of one answer, as soon as it is sampled."""

    request: int
    """Number that `LiveBatch.add` returned."""
    sample: int
    """Number of the answer among its siblings."""
    token_id: int
    logprob: float
    """Under the plain policy, at temperature 1 and unfiltered."""
    end: End | None = None
    """Why the answer ends with this token; None where it continues."""


class LiveBatch(Protocol):
    """A running batch. It belongs to one thread, within `torch.inference_mode`."""

    max_tokens: int
    """Most tokens of a prompt with its answer. Longer requests must not be added."""

    def add(self, number: int, request: LiveRequest) -> None:
        """Queue a request under a number that no other one of the batch has."""
        ...

    def drop(self, number: int) -> None:
        """Forget a request and free its slots. Does nothing where it has ended."""
        ...

    def step(self) -> list[SampledToken]:
        """Sample at least one token if any answer is open; returns what was sampled, in order."""
        ...


def open_batch(policy: Policy, config: RolloutsSection, max_tokens: int, *, without_adapter: bool = False) -> LiveBatch:
    """Open an empty batch over the policy's weights as they are now, with `without_adapter` over those of its base.

    It holds slots where the architecture allows them. Other models answer one request after the other. Raises
    MemoryBudgetError where the memory holds no keys and values.
    """
    if not supports_slots(policy):
        return _WholeAnswers(policy, config, max_tokens, without_adapter=without_adapter)
    return _LiveSlots(policy, config, max_tokens, without_adapter=without_adapter)


class _LiveRun(SlotRun):
    """A run without an end: requests are added and dropped between steps."""

    def __init__(self, model: SlotModel, cache: SlotCache, max_tokens: int, call: SamplingCall) -> None:
        """`call` stands for the requests to come: nothing is drawn with it."""
        self._calls = {0: call}
        self._places = {0: 0}
        self._new: dict[AnswerKey, SampledToken] = {}
        longest = AnswerRequest((), 1, max_tokens)  # gives the buffers their sizes, and is taken out again
        super().__init__(model, [longest], [AnswerSlot(0, 0, max_tokens)], call=call, cache=cache)
        self.suspend()
        self._forget(0)

    def add(self, number: int, request: LiveRequest, call: SamplingCall) -> None:
        """Queue the answers to a request."""
        self._prompts[number], self._calls[number], self._places[number] = request.prompt, call, request.place
        self.num_missing[number] = request.num_answers
        self._has_stops = self._has_stops or bool(call.stop)
        if request.num_answers > 1 and self._is_worth_sharing(request.prompt):
            self._shared[number] = (number,)
        self._queue.extend(AnswerSlot(number, sample, request.max_new_tokens) for sample in range(request.num_answers))

    def drop(self, number: int) -> None:
        """See `LiveBatch.drop`."""
        self._queue = deque(row for row in self._queue if row.prompt != number)
        for slot in reversed(range(self._num_active)):
            row = self._rows[slot]
            if row is not None and row.prompt == number:
                self._free(slot)
                self._logits[slot] = self._logits[self._num_active]
        self._is_short = False
        self._drop_unread()
        self._forget(number)

    def take_new(self) -> list[SampledToken]:
        """Return the tokens sampled since the last call."""
        new, self._new = self._new, {}
        return list(new.values())

    def _stop_of(self, row: AnswerSlot) -> StopStrings:
        return self._calls[row.prompt].stop

    def _uniforms(self, row: AnswerSlot) -> np.ndarray:
        return self._calls[row.prompt].uniforms(replace(row, prompt=self._places[row.prompt]))

    def _draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw with every row's own distribution, those with the same one together."""
        rows = [row for row in self._rows[: len(logits)] if row is not None]
        alike: dict[Sampling, list[int]] = {}
        for slot, row in enumerate(rows):
            alike.setdefault(self._calls[row.prompt].sampling, []).append(slot)
        parts = [sample_tokens(logits[slots], sampling, uniforms[slots]) for sampling, slots in alike.items()]
        order = torch.tensor([slot for slots in alike.values() for slot in slots], device=logits.device).argsort()
        tokens, drawn, plain = (torch.cat(part)[order] for part in zip(*parts, strict=True))
        for row, token, logprob in zip(rows, tokens.tolist(), plain.tolist(), strict=True):
            self._new[row.prompt, row.sample] = SampledToken(row.prompt, row.sample, token, logprob)
        return tokens, drawn, plain

    def _end(self, key: AnswerKey, completion: Completion) -> None:
        self._new[key] = replace(self._new[key], end=completion.end)
        self.num_missing[key[0]] -= 1
        if not self.num_missing[key[0]]:
            self._forget(key[0])

    def _forget(self, number: int) -> None:
        known: tuple[dict[int, Any], ...] = (self._prompts, self._calls, self._places, self._shared, self.num_missing)
        for by_number in known:
            by_number.pop(number, None)


class _LiveSlots:
    """A `LiveBatch` over `SlotRun`."""

    def __init__(self, policy: Policy, config: RolloutsSection, max_tokens: int, *, without_adapter: bool) -> None:
        self._policy = policy
        policy.model.eval()
        self._layers: Callable[[], AbstractContextManager[Any]]
        if without_adapter:
            self._layers = lambda: _disabled_adapter(policy)
        else:
            merged = MergedLayers(policy.model, max_bytes=available_bytes(policy.device) // FOLD_SHARE)
            merged.merge()
            self._layers = merged.as_merged_last
        with torch.inference_mode(), self._layers():
            model = SlotModel(policy)
            budget = config.cache_bytes or rollout_share(available_bytes(policy.device))
            num_places = budget // model.token_bytes
            if num_places < 2:
                raise MemoryBudgetError(
                    f"keys and values must fit into {budget / 2**20:.1f} MiB, got more for two tokens; "
                    "set rollouts.cache_mib, or free memory"
                )
            self.max_tokens = min(max_tokens, num_places)
            cache = model.cache(config.max_batch_sequences, num_places)
            self._run = _LiveRun(model, cache, self.max_tokens, SamplingCall(policy, Sampling(), 0, stop=()))

    def add(self, number: int, request: LiveRequest) -> None:
        call = SamplingCall(self._policy, request.sampling, request.seed, stop=request.stop)
        self._run.add(number, request, call)

    def drop(self, number: int) -> None:
        self._run.drop(number)

    def step(self) -> list[SampledToken]:
        with self._layers():
            if self._run.is_going():
                self._run.step()
        return _finite(self._run.take_new())


class _WholeAnswers:
    """A `LiveBatch` for models without slots: a step samples all answers to the oldest request."""

    def __init__(self, policy: Policy, config: RolloutsSection, max_tokens: int, *, without_adapter: bool) -> None:
        self._policy = policy
        self._engine = TransformersEngine(policy, config.max_batch_sequences, config.cache_bytes)
        self._without_adapter = without_adapter
        self._queue: dict[int, LiveRequest] = {}
        self.max_tokens = max_tokens

    def add(self, number: int, request: LiveRequest) -> None:
        self._queue[number] = request

    def drop(self, number: int) -> None:
        self._queue.pop(number, None)

    def step(self) -> list[SampledToken]:
        if not self._queue:
            return []
        number, request = next(iter(self._queue.items()))
        del self._queue[number]
        asked = AnswerRequest(request.prompt, request.num_answers, request.max_new_tokens)
        with self._policy.model.disable_adapter() if self._without_adapter else torch.inference_mode():
            (answers,) = self._engine.generate([asked], request.sampling, seed=request.seed, stop=request.stop)
        return [
            SampledToken(number, sample, token, logprob, end=answer.end if place == len(answer.token_ids) - 1 else None)
            for sample, answer in enumerate(answers)
            for place, (token, logprob) in enumerate(zip(answer.token_ids, answer.policy_logprobs, strict=True))
        ]


@contextmanager
def _disabled_adapter(policy: Policy) -> Iterator[None]:
    """Run on the base alone. peft's own context manager looks through all weights each time."""
    layers = policy.model.base_model
    try:
        layers.disable_adapter_layers()
        yield
    finally:
        layers.enable_adapter_layers()


def _finite(tokens: list[SampledToken]) -> list[SampledToken]:
    """Raises TrainingError where the policy gives no finite probabilities."""
    if not all(math.isfinite(one.logprob) for one in tokens):
        raise TrainingError(
            "the policy must give finite probabilities, got NaN or infinity while sampling; use an earlier checkpoint"
        )
    return tokens
