"""Continuous batching over a transformers model: a slot whose answer ends takes the next one at once.

No row waits for a longer one, no step copies the cache, and the batch is as full as the queue allows. The engine holds no
weights of its own: it samples from the policy's, the adapter folded in for the duration of a call where that is exact.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from swarm.engine.engine import (
    AnswerRequest,
    Completion,
    Row,
    capacity_of,
    grouped,
    longest_first,
    open_rows,
    refuse_nan,
)
from swarm.engine.merged_layers import MergedLayers
from swarm.engine.pruning import PruneCall
from swarm.engine.sampling import Sampling
from swarm.engine.slot_cache import SlotCache
from swarm.engine.slot_model import SlotModel
from swarm.engine.slot_pruning import SlotPruning
from swarm.engine.slot_run import SlotRun
from swarm.engine.stop_strings import StopStrings
from swarm.policy.free_memory import available_bytes
from swarm.policy.memory_probe import fitting_answers
from swarm.policy.policy import Policy

_FOLD_SHARE = 4
"""Folded weights may take this part of free memory: a copy of the adapted layers is not worth more."""
_CACHE_SHARE = 2
"""So much of free memory keys and values may take where no number is set."""
_KEPT_BYTES = 64 * 2**20
"""Buffers up to this size stay for the next call: new memory would cost a small model a tenth of its time on CPU."""


class SlotEngine:
    """Engine over `policy.model` for architectures with a standard cache; see `supports_slots`."""

    def __init__(self, policy: Policy, max_batch_sequences: int, cache_bytes: int | None = None) -> None:
        """At most `max_batch_sequences` slots, fewer where their keys and values need more than `cache_bytes`.

        Without `cache_bytes` they may take half of the memory that is free at the time of a call.
        """
        self._policy = policy
        self._max_batch_sequences = max_batch_sequences
        self._cache_bytes = cache_bytes
        self._model = SlotModel(policy)
        self._merged = MergedLayers(policy, max_bytes=available_bytes(policy.device) // _FOLD_SHARE)
        self._cache: SlotCache | None = None  # of the last call
        self._token_bytes = 0

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
        return grouped(requests, self._run(requests, rows, len(requests), sampling, seed, stop))

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
        return grouped(requests, self._run(requests, rows, len(requests), sampling, seed, stop, slot_pruning))

    @torch.no_grad()
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
        return grouped(requests, self._run(requests, open_rows(requests), enough, sampling, seed, stop))

    def _run(
        self,
        requests: Sequence[AnswerRequest],
        rows: Sequence[Row],
        enough: int,
        sampling: Sampling,
        seed: int,
        stop: Sequence[str],
        pruning: SlotPruning | None = None,
    ) -> dict[tuple[int, int], Completion]:
        """All rows, by (request, sample), once `enough` requests have no row left that is open."""
        if not rows:
            return {}
        self._policy.model.eval()
        capacity = capacity_of(requests)
        num_slots = self._num_slots(len(rows), capacity)
        eos = torch.tensor(self._policy.eos_token_ids, device=self._policy.device)
        cache, self._cache = self._cache, None  # what fails midway leaves nothing behind
        run = SlotRun(
            self._model, requests, rows, num_slots, capacity,
            sampling=sampling, seed=seed, eos=eos, stop=StopStrings(self._policy.decode, stop), cache=cache,
            pruning=pruning,
        )  # fmt: skip
        num_ended = len(requests) - len(run.num_missing)  # those whose answers had all ended before
        with self._merged, pruning or nullcontext():
            while num_ended + sum(not num for num in run.num_missing.values()) < enough and run.is_going():
                run.step()
        completions = run.completions | run.suspend()
        refuse_nan(completions.values())
        if run.cache is not None and run.cache.num_bytes() <= _KEPT_BYTES:
            self._cache = run.cache
        return completions

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        self._policy.model.eval()
        logprobs: list[float] = []
        with self._merged:
            prepared, logits = self._model.prepare([prompt])
            cache = SlotCache(prepared, 1, len(prompt) + len(answer))
            cache.put(0, prepared, 0, len(prompt))
            for step, token in enumerate(answer):
                logprobs.append(logits.float().log_softmax(-1)[0, token].item())
                if step + 1 < len(answer):
                    last = torch.tensor([token], device=logits.device)
                    logits = self._model.extend(cache, last, len(prompt) + step + 1)
        return logprobs

    @torch.no_grad()
    def answer_bytes(self, num_tokens: int) -> int:
        """See `Engine.answer_bytes`."""
        if not self._token_bytes:
            cache, _ = self._model.prepare([[self._policy.pad_token_id]])
            self._token_bytes = SlotCache(cache, 1, 1).num_bytes()
        return self._token_bytes * num_tokens

    @property
    def held_bytes(self) -> int:
        """See `Engine.held_bytes`."""
        return self._merged.num_bytes

    def _num_slots(self, wanted: int, capacity: int) -> int:
        """As many as are wanted, allowed and fit. Raises MemoryBudgetError where not one does."""
        each = self.answer_bytes(capacity)
        held = 0 if self._cache is None else self._cache.num_bytes()
        budget = self._cache_bytes
        if budget is None:
            budget = max(held, (available_bytes(self._policy.device) + held) // _CACHE_SHARE)
        return fitting_answers(each, min(wanted, self._max_batch_sequences), budget)
