"""The crew as a policy: log-probs of answers, gradients of them, and sampled answers, as from a single model.

The loss stays with the caller. It gets the log-probs of one micro-batch and returns the gradient with respect to them, a
[B, T] tensor; everything before that, back to the embedding, is the crew's. So any loss of `swarm.training` works on a
pipelined policy as it is.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from swarm.pipeline.batch_run import ScoredPart
from swarm.pipeline.crew import Crew, Gradient
from swarm.pipeline.gathering import all_of
from swarm.pipeline.orders import Answers
from swarm.policy.logprobs import TokenLogprobs, TokenSequence

LossOf = Callable[[int, TokenLogprobs], Tensor]
"""(micro-batch, log-probs that require grad) → its share of the loss of the batch, a scalar."""
HasEnded = Callable[[int, Sequence[int]], bool]
"""(number of the prompt, answer so far) → whether it is complete."""
Choose = Callable[[Tensor, Sequence[int], int], Tensor]
"""(logits [n, V], number [n] of the prompt of each row, step) → token ids [n]."""


class PipelinedPolicy:
    """What rollouts and training need of a policy, over the stages of `crew`."""

    def __init__(self, crew: Crew, pad_token_id: int) -> None:
        self._crew = crew
        self._pad_token_id = pad_token_id

    async def token_logprobs(
        self,
        parts: Sequence[Sequence[TokenSequence]],
        temperature: float = 1.0,
        with_entropy: bool = False,
        *,
        without_adapter: bool = False,
    ) -> list[TokenLogprobs]:
        """As `swarm.policy.logprobs.token_logprobs`, for several micro-batches at once, without gradients.

        `without_adapter`: of the frozen base.
        """
        scored = [self._scored(part, temperature, with_entropy) for part in parts]
        return await self._crew.logprobs(scored, without_adapter=without_adapter)

    async def accumulate(
        self,
        parts: Sequence[Sequence[TokenSequence]],
        loss_of: LossOf,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> Gradient:
        """Gradient of the sum of losses of all parts, gathered in the stages until `commit` or `drop` of the crew.

        Raises StageLostError and PipelineError; the batch is then dropped.
        """

        def gradient_of(micro_batch: int, result: TokenLogprobs) -> Tensor:
            leaf = result.logprobs.detach().requires_grad_()
            loss = loss_of(micro_batch, TokenLogprobs(leaf, result.mask, result.entropy))
            (gradient,) = torch.autograd.grad(loss, leaf)
            return gradient

        scored = [self._scored(part, temperature, with_entropy) for part in parts]
        return await self._crew.accumulate(scored, gradient_of)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        choose: Choose,
        *,
        max_new_tokens: int,
        eos_token_ids: Collection[int] = (),
        has_ended: HasEnded | None = None,
        num_sessions: int | None = None,
    ) -> list[list[int]]:
        """One answer for each prompt, EOS included where it was chosen; rows that ended are taken out of the batch.

        Equal prompts of one session are computed once. `has_ended`: what ends an answer, in place of `eos_token_ids`.

        While one session is in one stage, another can be in the next: prompts are dealt to `num_sessions` sessions, as many
        as there are stages by default. Raises StageLostError and PipelineError; all sessions are then ended.
        """
        ended = has_ended or (lambda row, answer: answer[-1] in eos_token_ids)
        count = min(num_sessions or self._crew.num_stages, len(prompts))
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # like lengths together: less padding
        share = -(-len(prompts) // max(count, 1))
        chunks = [by_length[i : i + share] for i in range(0, len(prompts), max(share, 1))]
        answers: list[list[int]] = [[] for _ in prompts]
        sessions = [self._crew.new_session() for _ in chunks]
        try:
            await all_of(
                self._session(session, prompts, chunk, answers, choose, max_new_tokens, ended)
                for session, chunk in zip(sessions, chunks, strict=True)
            )
        finally:  # here and not in the sessions, which a failure of another may cut off at any point
            await all_of(self._crew.end(session) for session in sessions)
        return answers

    async def _session(
        self,
        session: int,
        prompts: Sequence[Sequence[int]],
        rows: list[int],
        answers: list[list[int]],
        choose: Choose,
        max_new_tokens: int,
        has_ended: HasEnded,
    ) -> None:
        distinct = list(dict.fromkeys(tuple(prompts[row]) for row in rows))
        longest = max(map(len, distinct))
        padding = tuple(longest - len(prompt) for prompt in distinct)
        padded = [[self._pad_token_id] * pad + list(prompt) for prompt, pad in zip(distinct, padding, strict=True)]
        logits = await self._crew.begin(session, torch.tensor(padded), padding)
        if len(distinct) < len(rows):
            prompt_of = [distinct.index(tuple(prompts[row])) for row in rows]
            await self._crew.select(session, prompt_of)
            logits = logits[prompt_of]
        for step in range(max_new_tokens):
            tokens = choose(logits, rows, step).tolist()
            for row, token in zip(rows, tokens, strict=True):
                answers[row].append(token)
            going = [i for i, row in enumerate(rows) if not has_ended(row, answers[row])]
            if not going or step + 1 == max_new_tokens:
                return
            if len(going) < len(rows):
                await self._crew.select(session, going)
                rows = [rows[i] for i in going]
            logits = await self._crew.extend(session, torch.tensor([[tokens[i]] for i in going]))

    def _scored(self, sequences: Sequence[TokenSequence], temperature: float, with_entropy: bool) -> ScoredPart:
        """Rows of prompt and answer; the last token of an answer predicts nothing and is left out."""
        full = [[*prompt, *answer[:-1]] for prompt, answer in sequences]
        longest = max(len(row) for row in full)
        token_ids = torch.tensor([row + [self._pad_token_id] * (longest - len(row)) for row in full])
        starts = tuple(len(prompt) - 1 for prompt, _ in sequences)
        answers = tuple(tuple(answer) for _, answer in sequences)
        return ScoredPart(token_ids, Answers(starts, answers, temperature, with_entropy))


def greedy(logits: Tensor, rows: Sequence[int], step: int) -> Tensor:
    """The likeliest token of each row."""
    return logits.argmax(-1)
