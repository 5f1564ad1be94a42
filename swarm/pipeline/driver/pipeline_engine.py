"""The sampling engine of a pipeline: the driver chooses the tokens, from logits that its own stage computes.

As in the other engines, the random numbers of an answer depend on (seed, prompt, sibling) alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.engine.engine import (
    AnswerRequest,
    AnswerSlot,
    Completion,
    End,
    SamplingCall,
    generate_in_chunks,
)
from swarm.engine.sampling import Sampling, sample_tokens
from swarm.pipeline.driver.pipeline_policy import PipelineModel, PipelinePolicy


class PipelineEngine:
    """The `Engine` of a pipeline, for the compute thread."""

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
        """See `Engine.generate`. After a lost stage is rebuilt, unfinished answers are sampled again."""
        call = SamplingCall(self._policy, sampling, seed, stop=stop)

        def sample(rows: Sequence[AnswerSlot]) -> list[Completion]:
            chosen = [requests[row.prompt] for row in rows]
            return self._policy.run_on_stages(lambda model: _sample(model, chosen, rows, call=call))

        return generate_in_chunks(requests, self._max_batch_sequences, sample)

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
        """See `Engine.answer_bytes`. 0: keys and values are in the stages, each of which has its own limit."""
        return 0

    answers_wait = False
    """See `Engine.answers_wait`."""

    @property
    def held_bytes(self) -> int:
        """See `answer_bytes`."""
        return 0


async def _sample(
    model: PipelineModel, requests: Sequence[AnswerRequest], rows: Sequence[AnswerSlot], *, call: SamplingCall
) -> list[Completion]:
    """Sample one answer for each row, from its start; `requests` holds the request of each row."""
    logprobs: list[tuple[list[float], list[float]]] = [([], []) for _ in rows]
    uniforms = [call.uniforms(row) for row in rows]

    def choose(logits: Tensor, active: Sequence[int], step: int) -> Tensor:
        noise = torch.tensor([float(uniforms[row][step]) for row in active], dtype=torch.float32)
        tokens, drawn, plain = sample_tokens(logits, call.sampling, noise)
        for row, drawn_logprob, plain_logprob in zip(active, drawn.tolist(), plain.tolist(), strict=True):
            logprobs[row][0].append(drawn_logprob)
            logprobs[row][1].append(plain_logprob)
        return tokens

    def end(row: int, tokens: Sequence[int]) -> End | None:
        return call.end(tokens, rows[row].max_new_tokens)

    answers = await model.generate(
        [request.prompt for request in requests],
        choose,
        max_new_tokens=max(row.max_new_tokens for row in rows),
        has_ended=lambda row, tokens: end(row, tokens) is not None,
    )
    return [
        Completion(tuple(tokens), tuple(drawn), tuple(plain), end=end(row, tokens) or "limit")
        for row, (tokens, (drawn, plain)) in enumerate(zip(answers, logprobs, strict=True))
    ]
