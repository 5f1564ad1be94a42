"""One call of the slot engine: the answers that wait, those in the slots, and those that have ended.

queue ─▶ each prompt computed once, its keys and values copied to the slots of its answers
      ─▶ one token per active slot and step ─▶ an answer ends: the last active slot moves in, and waiting answers follow

`SlotPruning` passes the hidden states of the last forward pass to the rule that drops answers.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from swarm.engine.engine import AnswerRequest, AnswerSlot, Completion, End, SamplingCall, capacity_of
from swarm.engine.pruning import PruneCall
from swarm.engine.sampling import sample_tokens
from swarm.engine.slot_model import SlotCache, SlotModel
from swarm.errors import ConfigError
from swarm.policy.policy import Policy


class SlotPruning:
    """A context manager within which it records the input of the output head of `policy.model`."""

    def __init__(self, policy: Policy, call: PruneCall, prompt_lengths: Sequence[int]) -> None:
        self._policy = policy
        self._call = call
        self._lengths = prompt_lengths
        self._hidden: Tensor | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        head = self._policy.model.get_base_model().get_output_embeddings()
        self._hook = head.register_forward_pre_hook(self._record)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._hook.remove()
        self._hidden = None

    def saw_prompts(self, starts: Sequence[tuple[int, int]]) -> None:
        """Report a forward pass over whole prompts [D, P, hidden], padded on the right."""
        prompts = [prompt for prompt, _ in starts]
        last = [self._lengths[prompt] - 1 for prompt in prompts]
        self._call.saw_prompts(prompts, self._states(list(range(len(prompts))), last))

    def slots_to_drop(self, rows: Sequence[AnswerSlot | None], lengths: Sequence[int]) -> list[int]:
        """Ask which slots to drop after a pass over one token of every slot [n, 1, hidden]; ascending.

        `lengths` counts the tokens of prompt and answer so far.
        """
        due = [
            (slot, (row.prompt, row.sample))
            for slot, (row, length) in enumerate(zip(rows, lengths, strict=True))
            if row is not None and self._call.is_due(length - self._lengths[row.prompt])
        ]
        if not due:
            return []
        slots, keys = zip(*due, strict=True)
        decisions = self._call.dropped(keys, self._states(list(slots), [0] * len(slots)))
        return [slot for slot, is_dropped in zip(slots, decisions, strict=True) if is_dropped]

    def _states(self, rows: list[int], columns: list[int]) -> Tensor:
        if self._hidden is None:
            raise ConfigError(
                "rollouts.prune needs a base that calls its output head on the last hidden state, got "
                f"{type(self._policy.model.get_base_model()).__name__}; set rollouts.prune = false"
            )
        return self._hidden[rows, columns].float().cpu()

    def _record(self, _: Any, arguments: tuple[Tensor, ...]) -> None:
        self._hidden = arguments[0]


def hidden_size(policy: Policy) -> int:
    """Width of the input of the output head."""
    return policy.model.get_base_model().get_output_embeddings().in_features


_REFILL_SHARE = 8
"""Slots are refilled once 1/8 of them is free: computing prompts costs about as much for one as for several."""
_PROMPT_TOKENS = 4096
"""Prompt tokens computed at a time, padding included: more is no faster and only takes memory."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A computed prompt, stored while answers to it wait."""

    cache: DynamicCache
    row: int
    logits: Tensor


class SlotRun:
    """The answers of one call, at most `num_slots` at a time. Slots 0 to `_num_active` - 1 are in use."""

    def __init__(
        self,
        model: SlotModel,
        requests: Sequence[AnswerRequest],
        rows: Sequence[AnswerSlot],
        *,
        call: SamplingCall,
        num_slots: int,
        cache: SlotCache | None,
        pruning: SlotPruning | None = None,
    ) -> None:
        """`rows` come in the order in which they start, siblings together. `cache` holds buffers to reuse."""
        device, longest_answer = model.device, max(row.max_new_tokens for row in rows)
        self.completions: dict[tuple[int, int], Completion] = {}
        """Ended answers by (prompt, sample)."""
        self.num_missing = Counter(row.prompt for row in rows)
        """Number of answers that have not ended, by prompt."""
        self.cache = cache
        self._model = model
        self._prompts = [request.prompt for request in requests]
        self._queue = deque(rows)
        self._call = call
        self._eos = torch.tensor(sorted(call.eos_token_ids), device=device)
        self._pruning = pruning
        self._num_slots = num_slots
        self._num_active = 0
        self._capacity = capacity_of(requests)  # tokens of one slot
        self._prepared: dict[tuple[int, int], _Prepared] = {}  # by start
        self._slots = torch.arange(num_slots, device=device)
        self._rows: list[AnswerSlot | None] = [None] * num_slots
        self._lengths = [0] * num_slots  # tokens in the cache
        self._noise = torch.zeros(num_slots, longest_answer, device=device)
        self._tokens = torch.zeros(num_slots, longest_answer, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(
            2, num_slots, longest_answer, device=device
        )  # as drawn, and under the plain policy
        self._steps = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._limits = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._logits = torch.zeros(num_slots, 0, device=device)

    def is_going(self) -> bool:
        """Fill free slots; returns whether any answer is active."""
        num_free = self._num_slots - self._num_active
        if self._queue and (not self._num_active or num_free * _REFILL_SHARE >= self._num_slots):
            self._place([self._queue.popleft() for _ in range(min(num_free, len(self._queue)))])
        return self._num_active > 0

    def suspend(self) -> dict[tuple[int, int], Completion]:
        """Return all answers that have not ended, by (prompt, sample), as far as they got. Nothing is active after this."""
        rest = {(row.prompt, row.sample): row.begun for row in self._queue}
        for slot, row in enumerate(self._rows[: self._num_active]):
            assert row is not None
            rest[row.prompt, row.sample] = self._completion(slot, "open")
        self._queue.clear()
        self._num_active = 0
        return rest

    def step(self) -> None:
        """Sample one token in every active slot, remove ended answers, and compute the next logits of the others."""
        num_active = self._num_active
        slots, steps = self._slots[:num_active], self._steps[:num_active]
        tokens, *logprobs = sample_tokens(self._logits[:num_active], self._call.sampling, self._noise[slots, steps])
        self._tokens[slots, steps] = tokens
        self._logprobs[:, slots, steps] = torch.stack(logprobs)
        steps += 1
        for slot, end in reversed(self._ended(tokens)):
            self._remove(slot, end)
        num_active = self._num_active
        if num_active:
            assert self.cache is not None
            last = self._tokens[self._slots[:num_active], self._steps[:num_active] - 1]
            width = max(self._lengths[:num_active]) + 1
            self._logits[:num_active] = self._model.extend(self.cache, last, width)
            self._lengths[:num_active] = [length + 1 for length in self._lengths[:num_active]]
            if self._pruning is not None:
                self._prune(self._pruning)

    def _prune(self, pruning: SlotPruning) -> None:
        """Remove the answers to drop. The logits of the next token exist already and move with their slots."""
        num_active = self._num_active
        for slot in reversed(pruning.slots_to_drop(self._rows[:num_active], self._lengths[:num_active])):
            self._remove(slot, "pruned")
            self._logits[slot] = self._logits[self._num_active]

    def _ended(self, tokens: Tensor) -> list[tuple[int, End]]:
        """Return the slots whose answer ends with `tokens` [n], ascending."""
        steps = self._steps[: len(tokens)]
        is_eos = torch.isin(tokens, self._eos)
        codes = torch.where(is_eos, 2, (steps >= self._limits[: len(tokens)]).long()).tolist()
        ended: list[tuple[int, End]] = []
        for slot, code in enumerate(codes):
            if code == 2:
                ended.append((slot, "eos"))
            elif self._call.stop and self._call.stop.are_in(self._tokens[slot, : int(steps[slot])].tolist()):
                ended.append((slot, "stop"))
            elif code == 1:
                ended.append((slot, "limit"))
        return ended

    def _place(self, rows: Sequence[AnswerSlot]) -> None:
        """Put rows into free slots. Prompts are computed few at a time, so they take little memory beside the slots."""
        missing = {row.start: self._tokens_before(row) for row in rows if row.start not in self._prepared}
        waiting = deque(rows)
        while waiting and waiting[0].start in self._prepared:
            self._fill_slot(waiting.popleft())
        for chunk in _chunks(missing):
            cache, logits = self._model.prepare(list(chunk.values()))
            if self._pruning is not None:
                self._pruning.saw_prompts(list(chunk))
            self._prepared = {start: _Prepared(cache, row, logits[row]) for row, start in enumerate(chunk)}
            while waiting and waiting[0].start in self._prepared:
                self._fill_slot(waiting.popleft())
        if not self._queue or self._queue[0].start not in self._prepared:
            self._prepared = {}

    def _tokens_before(self, row: AnswerSlot) -> list[int]:
        return [*self._prompts[row.prompt], *row.begun.token_ids]

    def _fill_slot(self, row: AnswerSlot) -> None:
        slot, prepared, num_begun = self._num_active, self._prepared[row.start], len(row.begun.token_ids)
        length = len(self._prompts[row.prompt]) + num_begun
        cache = self._buffers(prepared)
        cache.put(slot, prepared.cache, row=prepared.row, length=length)
        noise = torch.from_numpy(self._call.uniforms(row))
        self._noise[slot, : row.max_new_tokens] = noise.to(self._noise.device)
        self._logits[slot] = prepared.logits
        self._rows[slot], self._lengths[slot] = row, length
        self._steps[slot], self._limits[slot] = num_begun, row.max_new_tokens
        if num_begun:
            device = self._tokens.device
            self._tokens[slot, :num_begun] = torch.tensor(row.begun.token_ids, device=device)
            both = torch.tensor([row.begun.logprobs, row.begun.policy_logprobs], device=device)
            self._logprobs[:, slot, :num_begun] = both
        self._num_active += 1

    def _buffers(self, prepared: _Prepared) -> SlotCache:
        """Return the buffers of this run, made or resized before its first row."""
        if not self._logits.shape[1]:
            self._logits = prepared.logits.new_zeros(self._num_slots, len(prepared.logits), dtype=torch.float32)
            if self.cache is None or not self.cache.resize(self._num_slots, self._capacity):
                self.cache = None  # free the old buffers before making new ones
                self.cache = SlotCache(prepared.cache, self._num_slots, self._capacity)
        assert self.cache is not None
        return self.cache

    def _remove(self, slot: int, end: End) -> None:
        """Store the answer of a slot, and move the last active one there."""
        row = self._rows[slot]
        assert row is not None and self.cache is not None
        self.completions[row.prompt, row.sample] = self._completion(slot, end)
        self.num_missing[row.prompt] -= 1
        self._num_active -= 1
        last = self._num_active
        if slot == last:
            return
        self.cache.move(last, slot, self._lengths[last])
        for buffer in (self._noise, self._tokens, self._steps, self._limits):
            buffer[slot] = buffer[last]
        self._logprobs[:, slot] = self._logprobs[:, last]
        self._rows[slot], self._lengths[slot] = self._rows[last], self._lengths[last]

    def _completion(self, slot: int, end: End) -> Completion:
        num_tokens = int(self._steps[slot])
        drawn, plain = self._logprobs[:, slot, :num_tokens].tolist()
        return Completion(tuple(self._tokens[slot, :num_tokens].tolist()), tuple(drawn), tuple(plain), end=end)


def _chunks(sequences: Mapping[tuple[int, int], list[int]]) -> Iterator[dict[tuple[int, int], list[int]]]:
    """Yield groups of prompts of at most _PROMPT_TOKENS tokens, padding included."""
    chunk: dict[tuple[int, int], list[int]] = {}
    for start, tokens in sequences.items():
        longest = max(map(len, (*chunk.values(), tokens)))
        if chunk and longest * (len(chunk) + 1) > _PROMPT_TOKENS:
            yield chunk
            chunk = {}
        chunk[start] = tokens
    if chunk:
        yield chunk
