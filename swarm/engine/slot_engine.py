"""Continuous batching over a transformers model: when an answer ends, its slot takes the next one at once.

No row waits for a longer one, no step copies the cache, and the batch is as full as the queue allows. The engine holds no
weights: it samples from the policy's, with the adapter merged during a call where that is exact.

    adapted layer  W x + s·B(A x)   ── while sampling ──▶   plain layer  (W + s·B·A) x

In a small model, three small products and peft's bookkeeping per layer and token take most of the time. Plain layers replace
the adapted ones for the call and these return unchanged, bit for bit. Only a float32 base is merged; in 16 bits the sum would
round away updates.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import nn

from swarm.engine.engine import (
    AnswerRequest,
    AnswerSlot,
    Completion,
    SamplingCall,
    Turns,
    capacity_of,
    grouped,
    longest_first,
    open_rows,
    refuse_nan,
)
from swarm.engine.pruning import PruneCall
from swarm.engine.sampling import Sampling
from swarm.engine.slot_cache import CachedAnswer, SlotCache
from swarm.engine.slot_model import SlotModel
from swarm.engine.slot_pruning import SlotPruning
from swarm.engine.slot_run import SlotRun
from swarm.policy.device import available_bytes
from swarm.policy.lora import adapted_layers
from swarm.policy.memory_probe import fitting_answers, rollout_share
from swarm.policy.policy import Policy


class MergedLayers:
    """A context manager within which `model`, of peft, runs on merged weights, computed on each entry."""

    def __init__(self, model: Any, max_bytes: int | None = None) -> None:
        """Merges nothing where the plain layers would take more than `max_bytes`."""
        modules = dict(model.base_model.model.named_modules())
        self._places: list[tuple[nn.Module, str, Any, nn.Linear]] = []
        foldable = [(name, layer) for name, layer in adapted_layers(model) if _is_foldable(layer.base_layer)]
        needed = sum(layer.base_layer.weight.nbytes for _, layer in foldable)
        if max_bytes is not None and needed > max_bytes:
            return
        for name, layer in foldable:
            parent, _, child = name.rpartition(".")
            self._places.append((modules[parent], child, layer, _like(layer.base_layer)))

    @property
    def num_layers(self) -> int:
        """Number of adapted layers that can be merged."""
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Memory of the plain layers."""
        return sum(plain.weight.nbytes for _, _, _, plain in self._places)

    def __enter__(self) -> Self:
        self.merge()
        self._put_in_place()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for parent, child, layer, _ in self._places:
            setattr(parent, child, layer)

    def merge(self) -> None:
        """Compute the merged weights from the adapter as it is now."""
        with torch.no_grad():
            for _, _, layer, plain in self._places:
                factor_a, factor_b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                torch.addmm(
                    layer.base_layer.weight, factor_b, factor_a, alpha=layer.scaling["default"], out=plain.weight.data
                )

    @contextmanager
    def as_merged_last(self) -> Iterator[None]:
        """Run on the weights of the last `merge`, for an adapter that has not changed since."""
        try:
            self._put_in_place()
            yield
        finally:
            self.__exit__()

    def _put_in_place(self) -> None:
        for parent, child, _, plain in self._places:
            setattr(parent, child, plain)


def _is_foldable(base: nn.Module) -> bool:
    return type(base) is nn.Linear and base.weight.dtype == torch.float32


def _like(base: nn.Linear) -> nn.Linear:
    plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(torch.empty_like(base.weight), requires_grad=False)
    plain.bias = base.bias
    return plain.eval()


FOLD_SHARE = 4
"""Merged weights may take at most this fraction (1/4) of free memory: a copy of the adapted layers is not worth more."""
_STORED_BYTES = 64 * 2**20
"""Buffers up to this size stay for the next call: new memory would cost a small model a tenth of its time on CPU."""


class SlotEngine:
    """Engine over `policy.model` for architectures with a standard cache; see `supports_slots`."""

    def __init__(self, policy: Policy, max_batch_sequences: int, cache_bytes: int | None = None) -> None:
        """Samples at most `max_batch_sequences` answers at a time, fewer where their tokens so far exceed `cache_bytes`.

        Without `cache_bytes` keys and values may take half of the memory that is free at the time of a call.
        """
        self._policy = policy
        self._max_batch_sequences = max_batch_sequences
        self._cache_bytes = cache_bytes
        self._model = SlotModel(policy)
        self._merged = MergedLayers(policy.model, max_bytes=available_bytes(policy.device) // FOLD_SHARE)
        self._cache: SlotCache | None = None  # of the last call

    @torch.inference_mode()  # a twelfth faster than no_grad for a small model
    def generate(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        rows = longest_first(requests, open_rows(requests))
        return grouped(requests, self._run(requests, rows, self._call(sampling, seed, stop)))

    @torch.inference_mode()
    def generate_and_prune(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        pruning: PruneCall,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """See `PruningEngine.generate_and_prune`."""
        rows = longest_first(requests, open_rows(requests))
        slot_pruning = SlotPruning(self._policy, pruning, [len(request.prompt) for request in requests])
        return grouped(requests, self._run(requests, rows, self._call(sampling, seed, stop), pruning=slot_pruning))

    @torch.inference_mode()
    def converse(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        turns: Turns,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """See `ConversingEngine.converse`."""
        rows = longest_first(requests, open_rows(requests))
        return grouped(requests, self._run(requests, rows, self._call(sampling, seed, stop), turns=turns))

    @torch.inference_mode()
    def resume(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        *,
        enough: int,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """See `ResumingEngine.resume`."""
        return grouped(
            requests, self._run(requests, open_rows(requests), self._call(sampling, seed, stop), enough=enough)
        )

    def _run(
        self,
        requests: Sequence[AnswerRequest],
        rows: Sequence[AnswerSlot],
        call: SamplingCall,
        *,
        enough: int | None = None,
        pruning: SlotPruning | None = None,
        turns: Turns | None = None,
    ) -> dict[tuple[int, int], Completion]:
        """Run until `enough` requests, by default all, have no open row. Returns all rows by (request, sample)."""
        if not rows:
            return {}
        enough = len(requests) if enough is None else enough
        self._policy.model.eval()
        max_places = self._max_places(capacity_of(requests))
        num_slots = min(len(rows), self._max_batch_sequences)
        cache, self._cache = self._cache, None  # a call that fails midway must leave nothing behind
        if cache is None:
            cache = self._model.cache(num_slots, max_places)
        else:
            cache.resize(num_slots, max_places)
        run = SlotRun(self._model, requests, rows, call=call, cache=cache, pruning=pruning, turns=turns)
        num_ended = len(requests) - len(run.num_missing)  # requests whose answers had all ended before
        with self._merged, pruning or nullcontext():
            while num_ended + sum(not num for num in run.num_missing.values()) < enough and run.is_going():
                run.step()
        completions = run.completions | run.suspend()
        refuse_nan(completions.values())
        if cache.num_bytes() <= _STORED_BYTES:
            self._cache = cache
        return completions

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        self._policy.model.eval()
        logprobs: list[float] = []
        with self._merged:
            prepared, logits = self._model.prepare([prompt])
            cache = self._model.cache(1, len(prompt) + len(answer))
            cache.add([CachedAnswer(len(prompt), len(prompt) + len(answer))])
            cache.fill(0, prepared, row=0, start=0)
            for step, token in enumerate(answer):
                logprobs.append(logits.float().log_softmax(-1)[0, token].item())
                if step + 1 < len(answer):
                    last = torch.tensor([token], device=logits.device)
                    cache.widen()
                    logits = self._model.extend(cache, last)
        return logprobs

    @torch.no_grad()
    def answer_bytes(self, num_tokens: int) -> int:
        """See `Engine.answer_bytes`."""
        return self._model.token_bytes * num_tokens

    answers_wait = True
    """See `Engine.answers_wait`."""

    @property
    def held_bytes(self) -> int:
        """See `Engine.held_bytes`."""
        return self._merged.num_bytes

    def _call(self, sampling: Sampling, seed: int, stop: Sequence[str]) -> SamplingCall:
        return SamplingCall(self._policy, sampling, seed, stop=stop)

    def _max_places(self, capacity: int) -> int:
        """Return for how many tokens there may be keys and values. Raises MemoryBudgetError if not for one answer."""
        held = 0 if self._cache is None else self._cache.num_bytes()
        budget = self._cache_bytes
        if budget is None:
            budget = max(held, rollout_share(available_bytes(self._policy.device) + held))
        fitting_answers(self.answer_bytes(capacity), 1, budget)
        return budget // self._model.token_bytes
