"""One call of the slot engine: the answers that wait, those in the slots, and those that have ended.

queue ─▶ each prompt computed once, its keys and values copied to the slots of its answers, or read by all of them
      ─▶ one token per active slot and step ─▶ an answer ends: the last active slot moves in, and waiting answers follow
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from swarm.engine.engine import (
    AnswerRequest,
    AnswerSlot,
    Completion,
    End,
    SamplingCall,
    Turns,
    capacity_of,
    with_reply,
)
from swarm.engine.pruning import AnswerKey
from swarm.engine.sampling import StopStrings, sample_tokens
from swarm.engine.slot_cache import CachedAnswer, SharedPrefix, SlotCache, bytes_of, chained
from swarm.engine.slot_model import SlotModel
from swarm.engine.slot_pruning import SlotPruning

_REFILL_SHARE = 8
"""Slots are refilled once 1/8 of them is free: computing prompts costs about as much for one as for several."""
_PROMPT_TOKENS = 2048
"""Most tokens of short prompts that are computed together, padding included: more is no faster and only takes memory."""
_SHARED_TOKENS = 256
"""Prompts of at least this length are held once for all answers. Copies of shorter ones cost less than another part. So do
answers that wait for their environments: shorter ones are computed again, several at once."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A computed prompt, stored while answers to it wait."""

    cache: DynamicCache
    row: int
    logits: Tensor


class SlotRun:
    """The answers of one call. Slots 0 to `_num_active` - 1 are in use.

    Where the tokens in use outgrow the cache's `max_places`, the answers that are least far wait: they go back to the queue
    with their tokens, and are computed again, as a prompt is, once another one has ended.
    """

    def __init__(
        self,
        model: SlotModel,
        requests: Sequence[AnswerRequest],
        rows: Sequence[AnswerSlot],
        *,
        call: SamplingCall,
        cache: SlotCache,
        pruning: SlotPruning | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`rows` come in the order in which they start, siblings together. `cache` is empty and holds one answer at least."""
        device, longest_answer = model.device, max(row.max_new_tokens for row in rows)
        num_slots = len(cache.slots)
        self.completions: dict[tuple[int, int], Completion] = {}
        """Ended answers by (prompt, sample)."""
        self.num_missing = Counter(row.prompt for row in rows)
        """Number of answers that have not ended, by prompt."""
        self.cache = cache
        self._model = model
        self._prompts = {number: request.prompt for number, request in enumerate(requests)}
        self._queue = deque(rows)
        self._call = call
        self._has_stops = bool(call.stop)  # any answer
        self._eos = torch.tensor(sorted(call.eos_token_ids), device=device)
        self._pruning = pruning
        self._turns = turns
        self._waiting: dict[AnswerKey, AnswerSlot] = {}  # for their environments, as far as they got
        self._kept: dict[AnswerKey, DynamicCache] = {}  # keys and values of waiting answers, oldest first
        self._num_slots = num_slots
        self._prepared: dict[tuple[int, int], _Prepared] = {}  # by start
        self._shared = self._find_shared(rows, model, by_request=pruning is not None)
        self._prefixes: dict[tuple[int, ...], SharedPrefix] = {}  # by prompt
        self._always_fits = num_slots * capacity_of(requests) <= cache.max_places
        self._is_short = False  # of memory, until an answer ends
        self._rows: list[AnswerSlot | None] = [None] * num_slots
        self._noise = torch.zeros(num_slots, longest_answer, device=device)
        self._tokens = torch.zeros(num_slots, longest_answer, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(
            2, num_slots, longest_answer, device=device
        )  # as drawn, and under the plain policy
        self._steps = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._limits = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._logits = torch.zeros(num_slots, 0, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values, with those of prompts whose answers wait."""
        prepared = {id(one.cache): one.cache for one in self._prepared.values()}
        read = {id(answer.prefix) for answer in self.cache.answers}
        unread = [prefix.cache for prefix in self._prefixes.values() if id(prefix) not in read and prefix.cache]
        return self.cache.num_bytes() + sum(
            bytes_of(cache) for cache in (*prepared.values(), *unread, *self._kept.values())
        )

    @property
    def num_used_places(self) -> int:
        """Tokens in use: those of active answers, and of each shared prompt once."""
        prefixes = {id(answer.prefix): answer.prefix.length for answer in self.cache.answers if answer.prefix}
        return sum(prefixes.values()) + sum(answer.length for answer in self.cache.answers)

    @property
    def num_queued(self) -> int:
        """Number of answers that wait for a slot."""
        return len(self._queue)

    @property
    def _num_active(self) -> int:
        return len(self.cache.answers)

    def _find_shared(
        self, rows: Sequence[AnswerSlot], model: SlotModel, *, by_request: bool
    ) -> dict[int, tuple[int, ...]]:
        """Return a key of each long prompt that several answers have, by request.

        Equal prompts of several requests have one key, unless `by_request`: pruning wants the hidden states of each.
        """
        long = {row.prompt for row in rows if len(self._prompts[row.prompt]) >= _SHARED_TOKENS}
        if not long or not model.splits_attention:
            return {}
        prompts = {prompt: (prompt,) if by_request else tuple(self._prompts[prompt]) for prompt in long}
        counts = Counter(prompts[row.prompt] for row in rows if row.prompt in long)
        return {prompt: tokens for prompt, tokens in prompts.items() if counts[tokens] > 1}

    def _is_worth_sharing(self, prompt: Sequence[int]) -> bool:
        """Whether several answers to a prompt should read its keys and values, in place of a copy each."""
        return len(prompt) >= _SHARED_TOKENS and self._model.splits_attention

    def is_going(self) -> bool:
        """Make room for the next tokens and fill free slots; returns whether any answer is active.

        Where all answers that have not ended wait for their environments, it waits with them.
        """
        self._take_replies()
        self._make_room()
        is_loose = (self._num_slots - self._num_active) * _REFILL_SHARE >= self._num_slots
        if self._queue and (not self._num_active or (is_loose and not self._is_short)):
            self._place(self._admitted())
        return self._num_active > 0

    def suspend(self) -> dict[tuple[int, int], Completion]:
        """Return all answers that have not ended, by (prompt, sample), as far as they got. Nothing is active after this."""
        rest = {(row.prompt, row.sample): row.begun for row in (*self._queue, *self._waiting.values())}
        for slot, row in enumerate(self._rows[: self._num_active]):
            assert row is not None
            rest[row.prompt, row.sample] = self._completion(slot, "open")
        self._queue.clear()
        self.cache.clear()
        return rest

    def step(self) -> None:
        """Sample one token in every active slot, remove ended answers, and compute the next logits of the others."""
        num_active = self._num_active
        slots, steps = self.cache.slots[:num_active], self._steps[:num_active]
        tokens, *logprobs = self._draw(self._logits[:num_active], self._noise[slots, steps])
        self._tokens[slots, steps] = tokens
        self._logprobs[:, slots, steps] = torch.stack(logprobs)
        steps += 1
        for slot, end in reversed(self._ended(tokens)):
            self._remove(slot, end)
        num_active = self._num_active
        if num_active:
            last = self._tokens[self.cache.slots[:num_active], self._steps[:num_active] - 1]
            self._logits[:num_active] = self._model.extend(self.cache, last)
            if self._pruning is not None:
                self._prune(self._pruning)

    def _draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a token for every active slot; returns what `sample_tokens` does."""
        return sample_tokens(logits, self._call.sampling, uniforms)

    def _stop_of(self, row: AnswerSlot) -> StopStrings:
        """Return the strings that end an answer."""
        return self._call.stop

    def _uniforms(self, row: AnswerSlot) -> np.ndarray:
        """Return the uniform numbers [max_new_tokens] of an answer's tokens."""
        return self._call.uniforms(row)

    def _prune(self, pruning: SlotPruning) -> None:
        """Remove the answers to drop. The logits of the next token exist already and move with their slots."""
        num_active = self._num_active
        lengths = self.cache.positions[:num_active].tolist()
        for slot in reversed(pruning.slots_to_drop(self._rows[:num_active], lengths)):
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
            elif self._has_stops and self._has_stop(slot):
                ended.append((slot, "stop"))
            elif code == 1:
                ended.append((slot, "limit"))
        return ended

    def _has_stop(self, slot: int) -> bool:
        row = self._rows[slot]
        assert row is not None
        stop = self._stop_of(row)
        return bool(stop) and stop.are_in(self._tokens[slot, row.turn_start : int(self._steps[slot])].tolist())

    def _take_replies(self) -> None:
        """Queue the answers whose environments have replied, before those that have not begun."""
        while self._turns is not None and self._waiting:
            must_wait = not self._num_active and not self._queue
            for key, token_ids in self._turns.replies(wait=must_wait):
                row = self._waiting.pop(key)
                if token_ids:
                    begun = with_reply(row.begun, token_ids)
                    self._queue.appendleft(replace(row, begun=begun, turn_start=len(begun.token_ids)))
                else:
                    self._kept.pop(key, None)
                    self._end(key, row.begun)
            if self._queue or not must_wait:
                break

    def _make_room(self) -> None:
        """Give every active answer a column for its next token, and let the shortest ones wait where memory is short."""
        if not self._queue and not self._always_fits:
            self.cache.shrink()  # it copies what stays: not worth the time where memory was never short
        if not self.cache.full_buckets():
            return
        while self._num_active > 1 and not self._always_fits and self.cache.places() > self.cache.max_places:
            steps = self._steps[: self._num_active].tolist()
            slot = steps.index(min(steps))
            row = self._rows[slot]
            assert row is not None
            self._queue.appendleft(replace(row, begun=self._completion(slot, "open")))
            self._free(slot)
            self._logits[slot] = self._logits[self._num_active]
            self._is_short = True
            self._drop_unread()
        self.cache.widen()
        self._trim_kept()

    def _trim_kept(self, more: Sequence[CachedAnswer] = ()) -> None:
        """Drop keys and values of waiting answers, oldest first, as far as active ones, and `more`, need the memory."""
        while self._kept and not self._has_room(more):
            del self._kept[next(iter(self._kept))]

    def _has_room(self, more: Sequence[CachedAnswer]) -> bool:
        kept = sum(cache.get_seq_length() for cache in self._kept.values())
        return self.cache.places(more) + kept <= self.cache.max_places

    def _admitted(self) -> list[AnswerSlot]:
        """Take rows from the queue, as many as free slots and memory allow; one where nothing is active."""
        rows: list[AnswerSlot] = []
        answers: list[CachedAnswer] = []
        while self._queue and self._num_active + len(rows) < self._num_slots:
            answers.append(self._cached(self._queue[0]))
            self._trim_kept(answers)
            if not self._always_fits and self._num_active + len(rows):
                self._is_short = self.cache.places(answers) > self.cache.max_places
                if self._is_short:
                    break
            rows.append(self._queue.popleft())
        return rows

    def _cached(self, row: AnswerSlot) -> CachedAnswer:
        prompt, num_begun = len(self._prompts[row.prompt]), len(row.begun.token_ids)
        shared = self._shared.get(row.prompt)
        if shared is None:
            return CachedAnswer(prompt + num_begun, prompt + row.max_new_tokens)
        prefix = self._prefixes.setdefault(shared, SharedPrefix(prompt))
        return CachedAnswer(num_begun, row.max_new_tokens, prefix)

    def _place(self, rows: Sequence[AnswerSlot]) -> None:
        """Put rows into free slots. Prompts are computed few at a time, so they take little memory beside the slots."""
        first = self._num_active
        self.cache.add([self._cached(row) for row in rows])
        waiting: dict[int, AnswerSlot] = {}
        for slot, row in enumerate(rows, first):
            prefix = self.cache.answers[slot].prefix
            kept = self._kept.pop((row.prompt, row.sample), None)
            if kept is not None:
                self._fill_kept(slot, row, kept, prefix)
            elif prefix is None:
                waiting[slot] = row
            else:
                self._fill_after(slot, row, prefix)
        missing = {row.start: self._tokens_before(row) for row in waiting.values() if row.start not in self._prepared}
        self._fill_prepared(waiting)
        for chunk in _chunks(missing):
            cache, logits = self._prepare(list(chunk.values()), list(chunk))
            self._prepared = {start: _Prepared(cache, row, logits[row]) for row, start in enumerate(chunk)}
            self._fill_prepared(waiting)
        # A prompt may be of use to the next row. What an answer had begun with is not: it has more tokens when it comes again.
        prompts = {start: one for start, one in self._prepared.items() if start[1] < 0}
        self._prepared = prompts if self._queue and self._queue[0].start in prompts else {}
        self._drop_unread()

    def _tokens_before(self, row: AnswerSlot) -> list[int]:
        return [*self._prompts[row.prompt], *row.begun.token_ids]

    def _prepare(
        self, token_ids: Sequence[Sequence[int]], starts: Sequence[tuple[int, int]], prefix: DynamicCache | None = None
    ) -> tuple[DynamicCache, Tensor]:
        pruning = self._pruning
        saw = None if pruning is None else lambda column: pruning.saw_piece(starts, column)
        return self._model.prepare(token_ids, prefix, saw_piece=saw)

    def _fill_after(self, slot: int, row: AnswerSlot, prefix: SharedPrefix) -> None:
        """Begin an answer that reads a shared prompt, computed here if it is the first."""
        self._compute_prefix(row, prefix)
        logits = prefix.logits
        if row.begun.token_ids:
            cache, (logits,) = self._prepare([row.begun.token_ids], [row.start], prefix.cache)
            self.cache.fill(slot, cache, row=0, start=prefix.length)
        assert logits is not None
        self._begin(slot, row, logits)

    def _fill_kept(self, slot: int, row: AnswerSlot, kept: DynamicCache, prefix: SharedPrefix | None) -> None:
        """Continue an answer whose keys and values were kept while its environment took its turn."""
        num_shared = 0
        if prefix is not None:
            self._compute_prefix(row, prefix)
            num_shared = prefix.length
        before = chained(prefix.cache if prefix else None, kept)
        rest = self._tokens_before(row)[before.get_seq_length() :]
        cache, (logits,) = self._prepare([rest], [row.start], before)
        self.cache.fill(slot, cache, row=0, start=num_shared)
        self._begin(slot, row, logits)

    def _compute_prefix(self, row: AnswerSlot, prefix: SharedPrefix) -> None:
        if prefix.cache is None:
            prefix.cache, (prefix.logits,) = self._prepare([self._prompts[row.prompt]], [(row.prompt, -1)])

    def _fill_prepared(self, waiting: Mapping[int, AnswerSlot]) -> None:
        """Begin the answers, by slot, whose prompts were computed last."""
        for slot, row in waiting.items():
            if row.start in self._prepared:
                prepared = self._prepared[row.start]
                self.cache.fill(slot, prepared.cache, row=prepared.row, start=0)
                self._begin(slot, row, prepared.logits)

    def _begin(self, slot: int, row: AnswerSlot, logits: Tensor) -> None:
        """Set everything of a slot but keys and values."""
        if not self._logits.shape[1]:
            self._logits = logits.new_zeros(self._num_slots, len(logits), dtype=torch.float32)
        num_begun, device = len(row.begun.token_ids), self._tokens.device
        self._noise[slot, : row.max_new_tokens] = torch.from_numpy(self._uniforms(row)).to(device)
        self._logits[slot] = logits
        self._rows[slot] = row
        self._steps[slot], self._limits[slot] = num_begun, row.max_new_tokens
        if num_begun:
            self._tokens[slot, :num_begun] = torch.tensor(row.begun.token_ids, device=device)
            both = torch.tensor([row.begun.logprobs, row.begun.policy_logprobs], device=device)
            self._logprobs[:, slot, :num_begun] = both

    def _remove(self, slot: int, end: End) -> None:
        """Store the answer of a slot, unless its environment may reply, and move the last active one there."""
        row = self._rows[slot]
        assert row is not None
        key, completion = (row.prompt, row.sample), self._completion(slot, end)
        if self._turns is not None and self._turns.ended(key, completion):
            self._waiting[key] = replace(row, begun=completion)
            if self.cache.answers[slot].length >= _SHARED_TOKENS:
                self._kept[key] = self.cache.copy(slot)
        else:
            self._end(key, completion)
        self._is_short = False
        self._free(slot)
        self._drop_unread()

    def _end(self, key: AnswerKey, completion: Completion) -> None:
        self.completions[key] = completion
        self.num_missing[key[0]] -= 1

    def _free(self, slot: int) -> None:
        """Move the last active answer to a slot."""
        self.cache.remove(slot)
        last = self._num_active
        if slot != last:
            for buffer in (self._noise, self._tokens, self._steps, self._limits):
                buffer[slot] = buffer[last]
            self._logprobs[:, slot] = self._logprobs[:, last]
            self._rows[slot] = self._rows[last]

    def _drop_unread(self) -> None:
        """Forget shared prompts that neither an active answer nor the next one reads."""
        if self._prefixes:
            read = {id(answer.prefix) for answer in self.cache.answers}
            rows = [*self._waiting.values(), *itertools.islice(self._queue, 1)]
            coming = {self._shared.get(row.prompt) for row in rows}
            self._prefixes = {
                prompt: prefix
                for prompt, prefix in self._prefixes.items()
                if id(prefix) in read or (prompt in coming and prefix.cache is not None and not self._is_short)
            }

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
