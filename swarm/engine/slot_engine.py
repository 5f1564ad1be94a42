"""Continuous batching over a transformers model: a slot whose answer ends takes the next one at once.

    prompts ─▶ rows (prompt, sample) in a queue ─▶ each prompt computed once, its keys and values copied to its rows' slots
            ─▶ one token per active slot and step ─▶ ended? the last slot moves in, and waiting rows follow

No row waits for a longer one, no step copies the cache, and the batch is as full as the queue allows. The engine holds no
weights of its own: it samples from the policy's, the adapter folded in for the duration of a call where that is exact.
"""

import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from swarm.engine.engine import Completion, limits_of, refuse_nan
from swarm.engine.merged_layers import MergedLayers
from swarm.engine.sampling import Sampling, sample_tokens
from swarm.engine.slot_cache import SlotCache, is_plain
from swarm.policy.cached_forward import logits_at
from swarm.policy.counter_noise import uniform
from swarm.policy.policy import Policy

_REFILL_SHARE = 8
"""Slots are refilled once 1/8 of them is free: computing prompts costs about as much for one as for several."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class SlotEngine:
    """Engine over `policy.model` for architectures with a standard cache; see `supports`."""

    def __init__(self, policy: Policy, max_batch_sequences: int) -> None:
        self._policy = policy
        self._max_batch_sequences = max_batch_sequences
        self._merged = MergedLayers(policy)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        max_new_tokens: int | Sequence[int],
        sampling: Sampling,
        seed: int,
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        self._policy.model.eval()
        limits = limits_of(prompts, max_new_tokens)
        rows = [_Row(prompt, sample, limits[prompt]) for prompt in range(len(prompts)) for sample in range(group_size)]
        # Those that may take longest first: what starts last should end soon. Siblings stay together.
        rows.sort(key=lambda row: (-row.max_new_tokens, -len(prompts[row.prompt]), row.prompt))
        run = _Run(self._policy, prompts, rows, min(self._max_batch_sequences, len(rows)), sampling, seed)
        with self._merged:
            while run.is_going():
                run.step()
        refuse_nan(run.completions.values())
        return [[run.completions[prompt, sample] for sample in range(group_size)] for prompt in range(len(prompts))]

    @torch.no_grad()
    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        self._policy.model.eval()
        model = _SlotModel(self._policy)
        logprobs: list[float] = []
        with self._merged:
            prepared, logits = model.prepare([prompt])
            cache = SlotCache(prepared, 1, len(prompt) + len(answer))
            cache.put(0, prepared, 0, len(prompt))
            for step, token in enumerate(answer):
                logprobs.append(logits.float().log_softmax(-1)[0, token].item())
                if step + 1 < len(answer):
                    logits = model.extend(cache, torch.tensor([token], device=logits.device), len(prompt) + step + 1)
        return logprobs


def supports(policy: Policy) -> bool:
    """Whether every layer of the model attends to a cache of all tokens, at positions that it is told."""
    base = policy.model.get_base_model()
    config = base.config.get_text_config()
    return (
        set(getattr(config, "layer_types", None) or ["full_attention"]) <= _LAYER_TYPES
        and is_plain(DynamicCache(config=base.config))
        and getattr(base.config, "_attn_implementation", None) in ("sdpa", "eager")
        and "position_ids" in inspect.signature(base.forward).parameters
    )


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: int
    sample: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A prompt that was computed, kept for as long as rows of it wait."""

    cache: DynamicCache
    row: int
    logits: Tensor


class _SlotModel:
    """The model's two passes: over whole prompts, and over one token of every active slot."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._base = policy.model.get_base_model()
        config = self._base.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(types)}
        self._adds_mask = self._base.config._attn_implementation == "eager"

    def prepare(self, prompts: Sequence[Sequence[int]]) -> tuple[DynamicCache, Tensor]:
        """Keys and values of the prompts [D, P], right-padded, and the logits [D, V] of the token after each."""
        device = self._policy.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = max(map(len, prompts))
        pad = self._policy.pad_token_id
        token_ids = torch.tensor([[*prompt, *[pad] * (longest - len(prompt))] for prompt in prompts], device=device)
        rows = torch.arange(len(prompts), device=device)
        cache = DynamicCache()  # not made from the config: such a one would drop what is outside a sliding window
        logits = logits_at(
            self._policy.model,
            lambda hidden: hidden[rows, lengths - 1][:, None],
            input_ids=token_ids,
            position_ids=torch.arange(longest, device=device)[None].expand(len(prompts), -1),
            past_key_values=cache,
            use_cache=True,
        )
        return cache, logits[:, 0]

    def extend(self, cache: SlotCache, tokens: Tensor, width: int) -> Tensor:
        """Append one token [n] to each active slot; returns the logits [n, V] of the one after. `width`: columns in use."""
        num_rows = len(tokens)
        cache.width = width
        positions = cache.positions[:num_rows, None]
        logits = self._base(
            input_ids=tokens[:, None],
            attention_mask=self._mask(positions, width),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        cache.positions[:num_rows] += 1
        return logits

    def _mask(self, positions: Tensor, width: int) -> Any:
        """Which columns each row sees [n, 1, 1, width]; by kind of layer where the model has several."""
        columns = torch.arange(width, device=positions.device)
        masks: dict[str, Tensor] = {}
        for kind, window in self._windows.items():
            is_seen = columns <= positions
            if window is not None:
                is_seen &= columns > positions - window
            masks[kind] = is_seen[:, None, None]
        if self._adds_mask:
            dtype = self._policy.dtype
            lowest = torch.finfo(dtype).min
            masks = {kind: torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest)
                     for kind, mask in masks.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


class _Run:
    """One call of `generate`: the queue, the slots and what has ended. Slots 0 to `_num_active` - 1 are in use."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[_Row],
        num_slots: int,
        sampling: Sampling,
        seed: int,
    ) -> None:
        device = policy.device
        longest_answer = max((row.max_new_tokens for row in rows), default=0)
        self.completions: dict[tuple[int, int], Completion] = {}
        self._model = _SlotModel(policy)
        self._prompts = prompts
        self._queue = deque(rows)
        self._sampling = sampling
        self._seed = seed
        self._num_slots = num_slots
        self._num_active = 0
        self._capacity = max((len(prompts[row.prompt]) + row.max_new_tokens for row in rows), default=0)
        self._cache: SlotCache | None = None
        self._prepared: dict[int, _Prepared] = {}
        self._eos = torch.tensor(policy.eos_token_ids, device=device)
        self._slots = torch.arange(num_slots, device=device)
        self._rows: list[_Row | None] = [None] * num_slots
        self._lengths = [0] * num_slots  # tokens in the cache
        self._noise = torch.zeros(num_slots, longest_answer, device=device)
        self._tokens = torch.zeros(num_slots, longest_answer, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(2, num_slots, longest_answer, device=device)  # as drawn, and of the plain policy
        self._steps = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._limits = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._logits = torch.zeros(num_slots, 0, device=device)

    def is_going(self) -> bool:
        """Fill free slots; whether any row is in flight."""
        num_free = self._num_slots - self._num_active
        if self._queue and (not self._num_active or num_free * _REFILL_SHARE >= self._num_slots):
            self._place([self._queue.popleft() for _ in range(min(num_free, len(self._queue)))])
        return self._num_active > 0

    def step(self) -> None:
        """Sample one token in every active slot, take out what has ended, and compute the rest one token further."""
        slots, steps = self._slots[: self._num_active], self._steps[: self._num_active]
        tokens, *logprobs = sample_tokens(self._logits[: self._num_active], self._sampling, self._noise[slots, steps])
        self._tokens[slots, steps] = tokens
        self._logprobs[:, slots, steps] = torch.stack(logprobs)
        steps += 1
        is_end = torch.isin(tokens, self._eos)
        ended = (is_end | (steps >= self._limits[: self._num_active])).nonzero()[:, 0].tolist()
        if ended:
            finished = is_end.tolist()
            for slot in reversed(ended):
                self._take_out(slot, finished[slot])
        if self._num_active:
            slots = self._slots[: self._num_active]
            last = self._tokens[slots, self._steps[: self._num_active] - 1]
            width = max(self._lengths[: self._num_active]) + 1
            assert self._cache is not None
            self._logits[: self._num_active] = self._model.extend(self._cache, last, width).float()
            for slot in range(self._num_active):
                self._lengths[slot] += 1

    def _place(self, rows: Sequence[_Row]) -> None:
        self._prepare(dict.fromkeys(row.prompt for row in rows if row.prompt not in self._prepared))
        for row in rows:
            slot, prepared, length = self._num_active, self._prepared[row.prompt], len(self._prompts[row.prompt])
            if self._cache is None:
                self._cache = SlotCache(prepared.cache, self._num_slots, self._capacity)
                self._logits = prepared.logits.new_zeros(self._num_slots, len(prepared.logits), dtype=torch.float32)
            self._cache.put(slot, prepared.cache, prepared.row, length)
            noise = uniform(row.max_new_tokens, "sample", self._seed, row.prompt, row.sample)
            self._noise[slot, : row.max_new_tokens] = torch.from_numpy(noise).to(self._noise.device)
            self._logits[slot] = prepared.logits
            self._rows[slot], self._lengths[slot] = row, length
            self._steps[slot], self._limits[slot] = 0, row.max_new_tokens
            self._num_active += 1
        waiting = {row.prompt for row in self._queue if row.prompt in self._prepared}
        self._prepared = {prompt: self._prepared[prompt] for prompt in waiting}

    def _prepare(self, prompts: Sequence[int] | dict[int, None]) -> None:
        if not prompts:
            return
        cache, logits = self._model.prepare([self._prompts[prompt] for prompt in prompts])
        for row, prompt in enumerate(prompts):
            self._prepared[prompt] = _Prepared(cache, row, logits[row])

    def _take_out(self, slot: int, is_finished: bool) -> None:
        """Keep the answer of a slot, and let the last active one move in."""
        row, num_tokens = self._rows[slot], int(self._steps[slot])
        assert row is not None and self._cache is not None
        drawn, plain = self._logprobs[:, slot, :num_tokens].tolist()
        tokens = tuple(self._tokens[slot, :num_tokens].tolist())
        self.completions[row.prompt, row.sample] = Completion(tokens, tuple(drawn), tuple(plain), is_finished)
        self._num_active -= 1
        last = self._num_active
        if slot == last:
            return
        self._cache.move(last, slot, self._lengths[last])
        for buffer in (self._noise, self._tokens, self._steps, self._limits):
            buffer[slot] = buffer[last]
        self._logprobs[:, slot] = self._logprobs[:, last]
        self._rows[slot], self._lengths[slot] = self._rows[last], self._lengths[last]
