"""Sampling with a transformers model: own decode loop over its key/value cache.

    prompts ─▶ rows (prompt, sample), short prompts first ─▶ chunks of max_batch_sequences
            ─▶ each prompt computed once, its cache repeated for its rows ─▶ one token per row and step, ended rows
            dropped

The engine holds no weights: it runs the policy's own model, so there is no copy that could be stale.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swarm.engine.engine import Completion
from swarm.engine.sampling import sample_tokens
from swarm.errors import TrainingError
from swarm.policy.cached_forward import PromptCache
from swarm.policy.counter_noise import uniform
from swarm.policy.policy import Policy

_DROP_SHARE = 8
"""Ended rows leave the batch once they are 1/8 of it: dropping costs about as much as one step copies anyway."""

Row = tuple[int, int]
"""(prompt index, sample index)."""


class TransformersEngine:
    """Engine over `policy.model`, adapter unmerged."""

    def __init__(self, policy: Policy, max_batch_sequences: int) -> None:
        self._policy = policy
        self._max_batch_sequences = max_batch_sequences

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], group_size: int, *, max_new_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        self._policy.model.eval()
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        rows = [(prompt, sample) for prompt in by_length for sample in range(group_size)]
        answers: dict[Row, Completion] = {}
        for start in range(0, len(rows), self._max_batch_sequences):
            chunk = rows[start : start + self._max_batch_sequences]
            noise = np.stack([uniform(max_new_tokens, "sample", seed, *row) for row in chunk])
            completions = self._decode([prompts[row[0]] for row in chunk], torch.from_numpy(noise), temperature)
            answers.update(zip(chunk, completions, strict=True))
        return [[answers[prompt, sample] for sample in range(group_size)] for prompt in range(len(prompts))]

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

    def _decode(self, prompts: Sequence[Sequence[int]], noise: Tensor, temperature: float) -> list[Completion]:
        """One answer per entry of `prompts`, equal neighbours computed once; noise [B, max_new_tokens]."""
        device = self._policy.device
        noise = noise.to(device)
        eos = torch.tensor(self._policy.eos_token_ids, device=device)
        tokens = torch.zeros(noise.shape, dtype=torch.long, device=device)  # [B, T]
        logprobs = torch.zeros(noise.shape, device=device)  # [B, T]
        lengths = torch.full(noise.shape[:1], noise.shape[1], device=device)  # [B] tokens up to and with EOS
        ended = torch.zeros_like(lengths, dtype=torch.bool)

        distinct = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
        index = {prompt: i for i, prompt in enumerate(distinct)}
        prompt_of = torch.tensor([index[tuple(prompt)] for prompt in prompts], device=device)
        cache = PromptCache(self._policy.model, self._policy.pad_token_id)
        logits = cache.start(distinct, device)[prompt_of]
        cache.select(prompt_of)
        active = torch.arange(len(prompts), device=device)  # rows of the batch that is still decoded

        for step in range(noise.shape[1]):
            chosen, chosen_logprobs = sample_tokens(logits, temperature, noise[active, step])
            tokens[active, step], logprobs[active, step] = chosen, chosen_logprobs
            ends_now = torch.isin(chosen, eos) & ~ended[active]
            lengths[active[ends_now]] = step + 1
            ended[active[ends_now]] = True
            going = ~ended[active]
            num_going = int(going.sum())
            if num_going == 0 or step + 1 == noise.shape[1]:
                break
            if (len(active) - num_going) * _DROP_SHARE >= len(active):
                keep = going.nonzero()[:, 0]
                cache.select(keep)
                active, chosen = active[keep], chosen[keep]
            logits = cache.extend(chosen[:, None])[:, -1]
        return _completions(tokens, logprobs, lengths, ended)


def _completions(tokens: Tensor, logprobs: Tensor, lengths: Tensor, ended: Tensor) -> list[Completion]:
    rows = zip(tokens.tolist(), logprobs.tolist(), lengths.tolist(), ended.tolist(), strict=True)
    completions = [Completion(tuple(t[:length]), tuple(p[:length]), end) for t, p, length, end in rows]
    if not all(np.isfinite(completion.logprobs).all() for completion in completions):
        raise TrainingError(
            "the policy must give finite probabilities, got NaN or infinity while sampling; "
            "lower training.lr, or set policy.dtype = float32, and resume from an earlier checkpoint"
        )
    return completions
