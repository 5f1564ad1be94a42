"""Sampling through the crew: the driver chooses the tokens, from logits that its own stage gives it.

The numbers that tokens are drawn with are those of the other engines: (seed, prompt, sibling) name them.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from swarm.engine.engine import (
    AnswerRequest,
    AnswerSlot,
    Completion,
    End,
    grouped,
    longest_first,
    open_rows,
    refuse_nan,
)
from swarm.engine.sampling import Sampling, StopStrings, sample_tokens
from swarm.pipeline.driver.pipeline_policy import PipelineModel, PipelinePolicy
from swarm.policy.counter_noise import uniform


class PipelineEngine:
    """See `Engine`; for the compute thread."""

    def __init__(self, policy: PipelinePolicy, max_batch_sequences: int) -> None:
        self._policy = policy
        self._max_batch_sequences = max_batch_sequences

    def generate(
        self,
        requests: Sequence[AnswerRequest],
        sampling: Sampling,
        *,
        seed: int,
        stop: Sequence[str] = (),
    ) -> list[list[Completion]]:
        """See `Engine.generate`. A stage that is lost is rebuilt, and the answers under way are sampled again."""
        rows = longest_first(requests, open_rows(requests))
        answers: dict[tuple[int, int], Completion] = {}
        for start in range(0, len(rows), self._max_batch_sequences):
            chunk = rows[start : start + self._max_batch_sequences]
            keys = [(row.prompt, row.sample) for row in chunk]
            sampled = self._policy.run_on_stages(partial(self._sample, requests, chunk, sampling, seed, stop))
            answers.update(zip(keys, sampled, strict=True))
        refuse_nan(answers.values())
        return grouped(requests, answers)

    async def _sample(
        self,
        requests: Sequence[AnswerRequest],
        rows: Sequence[AnswerSlot],
        sampling: Sampling,
        seed: int,
        stop: Sequence[str],
        pipeline_model: PipelineModel,
    ) -> list[Completion]:
        stop_strings = StopStrings(self._policy.decode, stop)
        return await _Batch(requests, rows, sampling, seed, stop_strings, self._policy.eos_token_ids).decode(
            pipeline_model
        )

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """See `Engine.score`."""

        async def follow(pipeline_model: PipelineModel) -> list[float]:
            logprobs: list[float] = []

            def choose(logits: Tensor, rows: Sequence[int], step: int) -> Tensor:
                logprobs.append(logits.float().log_softmax(-1)[0, answer[step]].item())
                return torch.tensor([answer[step]])

            await pipeline_model.generate([prompt], choose, max_new_tokens=len(answer))
            return logprobs

        return self._policy.run_on_stages(follow)

    def answer_bytes(self, num_tokens: int) -> int:
        """Keys and values are in the stages, each of which bounds its own."""
        return 0

    @property
    def held_bytes(self) -> int:
        """See `answer_bytes`."""
        return 0


class _Batch:
    """Rows that are decoded together."""

    def __init__(
        self,
        requests: Sequence[AnswerRequest],
        rows: Sequence[AnswerSlot],
        sampling: Sampling,
        seed: int,
        stop: StopStrings,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._prompts = [list(requests[row.prompt].prompt) for row in rows]
        self._limits = [row.max_new_tokens for row in rows]
        self._noise = [uniform(row.max_new_tokens, "sample", seed, row.prompt, row.sample) for row in rows]
        self._sampling = sampling
        self._stop = stop
        self._eos_token_ids = frozenset(eos_token_ids)
        self._logprobs: list[tuple[list[float], list[float]]] = [([], []) for _ in rows]

    async def decode(self, pipeline_model: PipelineModel) -> list[Completion]:
        """One answer per row."""
        answers = await pipeline_model.generate(
            self._prompts, self._choose, max_new_tokens=max(self._limits), has_ended=self._has_ended
        )
        return [
            Completion(tuple(tokens), tuple(drawn), tuple(plain), self._end(row, tokens))
            for row, (tokens, (drawn, plain)) in enumerate(zip(answers, self._logprobs, strict=True))
        ]

    def _choose(self, logits: Tensor, rows: Sequence[int], step: int) -> Tensor:
        noise = torch.tensor([float(self._noise[row][step]) for row in rows], dtype=torch.float32)
        tokens, drawn, plain = sample_tokens(logits, self._sampling, noise)
        for row, one, other in zip(rows, drawn.tolist(), plain.tolist(), strict=True):
            self._logprobs[row][0].append(one)
            self._logprobs[row][1].append(other)
        return tokens

    def _has_ended(self, row: int, tokens: Sequence[int]) -> bool:
        at_limit = len(tokens) == self._limits[row]
        return at_limit or tokens[-1] in self._eos_token_ids or self._stop.are_in(tokens)

    def _end(self, row: int, tokens: Sequence[int]) -> End:
        if tokens[-1] in self._eos_token_ids:
            return "eos"
        return "stop" if self._stop.are_in(tokens) else "limit"
