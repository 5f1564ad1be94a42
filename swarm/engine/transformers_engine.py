"""Sampling in whole batches with any cache of transformers, also recurrent ones, which cannot be divided into slots.

    prompts ─▶ rows (prompt, sample), long limits first ─▶ chunks of max_batch_sequences
            ─▶ each prompt computed once, its cache repeated for its rows ─▶ one token per row and step, ended rows
            dropped

The engine holds no weights. It runs the policy's own model, so no copy can be outdated.
"""

from collections.abc import Iterable, Sequence

import torch

from swarm.engine.engine import (
    AnswerRequest,
    AnswerSlot,
    Completion,
    End,
    SamplingCall,
    capacity_of,
    generate_in_chunks,
    grouped,
    open_rows,
)
from swarm.engine.sampling import Sampling, sample_tokens
from swarm.policy.logprobs import PromptCache
from swarm.policy.memory_probe import fitting_answers
from swarm.policy.policy import Policy

_DROP_SHARE = 8
"""Ended rows leave the batch once they are 1/8 of it: dropping them costs about as much as one step copies."""


class TransformersEngine:
    """An engine over `policy.model`, with the adapter unmerged."""

    def __init__(self, policy: Policy, max_batch_sequences: int, cache_bytes: int | None = None) -> None:
        """Samples at most `max_batch_sequences` answers at a time, fewer where their caches exceed `cache_bytes`."""
        self._policy = policy
        self._max_batch_sequences = max_batch_sequences
        self._cache_bytes = cache_bytes

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        if not open_rows(requests):
            return grouped(requests, {})
        self._policy.model.eval()
        call = SamplingCall(self._policy, sampling, seed, stop=stop)
        size = self._chunk_size(capacity_of(requests))
        return generate_in_chunks(requests, size, lambda rows: _Batch(self._policy, requests, rows, call=call).decode())

    @torch.no_grad()
    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        self._policy.model.eval()
        cache = PromptCache(self._policy.model, self._policy.pad_token_id)
        logits = cache.start([prompt], self._policy.device)
        logprobs: list[float] = []
        for step, token in enumerate(answer):
            logprobs.append(logits.float().log_softmax(-1)[0, token].item())
            if step + 1 < len(answer):
                logits = cache.extend(torch.tensor([[token]], device=self._policy.device))[:, -1]
        return logprobs

    @torch.no_grad()
    def answer_bytes(self, num_tokens: int) -> int:
        """See `Engine.answer_bytes`."""
        cache = PromptCache(self._policy.model, self._policy.pad_token_id)
        cache.start([[self._policy.pad_token_id] * num_tokens], self._policy.device)
        return 2 * cache.num_bytes()  # the cache is copied as it grows

    answers_wait = False
    """See `Engine.answers_wait`."""

    @property
    def held_bytes(self) -> int:
        """See `Engine.held_bytes`."""
        return 0

    def _chunk_size(self, capacity: int) -> int:
        if self._cache_bytes is None:
            return self._max_batch_sequences
        return fitting_answers(self.answer_bytes(capacity), self._max_batch_sequences, self._cache_bytes)


class _Batch:
    """Rows that are decoded together until the last one has ended."""

    def __init__(
        self, policy: Policy, requests: Sequence[AnswerRequest], rows: Sequence[AnswerSlot], *, call: SamplingCall
    ) -> None:
        self._policy = policy
        self._prompts = [tuple(requests[row.prompt].prompt) for row in rows]
        self._call = call
        self._limits = [row.max_new_tokens for row in rows]
        longest = max(self._limits)
        self._noise = torch.zeros(len(rows), longest, device=policy.device)
        for index, row in enumerate(rows):
            self._noise[index, : row.max_new_tokens] = torch.from_numpy(call.uniforms(row)).to(policy.device)
        self._tokens: list[list[int]] = [[] for _ in rows]
        self._logprobs: list[tuple[list[float], list[float]]] = [([], []) for _ in rows]
        self._ends: list[End | None] = [None] * len(rows)

    def decode(self) -> list[Completion]:
        """Sample one answer for each row; equal prompts are computed once."""
        device = self._policy.device
        distinct = list(dict.fromkeys(self._prompts))
        index = {prompt: i for i, prompt in enumerate(distinct)}
        prompt_of = torch.tensor([index[prompt] for prompt in self._prompts], device=device)
        cache = PromptCache(self._policy.model, self._policy.pad_token_id)
        logits = cache.start(distinct, device)[prompt_of]
        cache.select(prompt_of)
        active = list(range(len(self._prompts)))  # rows of the batch that are still decoded
        for step in range(max(self._limits)):
            chosen, drawn, plain = sample_tokens(logits, self._call.sampling, self._noise[active, step])
            self._note(active, zip(chosen.tolist(), drawn.tolist(), plain.tolist(), strict=True))
            going = [place for place, row in enumerate(active) if self._ends[row] is None]
            if not going:
                break
            if (len(active) - len(going)) * _DROP_SHARE >= len(active):
                keep = torch.tensor(going, device=device)
                cache.select(keep)
                active, chosen = [active[place] for place in going], chosen[keep]
            logits = cache.extend(chosen[:, None])[:, -1]
        return [
            Completion(tuple(tokens), tuple(drawn), tuple(plain), end=end)
            for tokens, (drawn, plain), end in zip(self._tokens, self._logprobs, self._ends, strict=True)
            if end is not None
        ]

    def _note(self, active: Sequence[int], drawn_tokens: Iterable[tuple[int, float, float]]) -> None:
        """Add (token, its log-prob as drawn, its plain log-prob) to every active row that has not ended."""
        for row, (token, drawn_logprob, plain_logprob) in zip(active, drawn_tokens, strict=True):
            if self._ends[row] is not None:
                continue
            tokens = self._tokens[row]
            tokens.append(token)
            self._logprobs[row][0].append(drawn_logprob)
            self._logprobs[row][1].append(plain_logprob)
            self._ends[row] = self._call.end(tokens, self._limits[row])
