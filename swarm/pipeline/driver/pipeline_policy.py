"""A pipeline as the policy of a learner: log-probs, gradients and sampled answers, as from a single model.

The loss stays with the caller. It gets the log-probs of one micro-batch and returns the gradient with respect to them, a
[B, T] tensor; the stages compute everything before that, back to the embedding. Any loss of `swarm.training` therefore works
on a pipeline.

`PipelineModel` runs on the event loop that drives the stages. `PipelinePolicy` and `PipelineOptimizer` are called by the
compute thread and wait for that loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from swarm.adapters.adapter_state import check_adapter
from swarm.config import PolicySection, TrainingSection
from swarm.errors import CheckpointError, PipelineError, StageLostError, TrainingError
from swarm.pipeline.commands import Answers, SharedPrompts, StageState
from swarm.pipeline.driver.pipeline_supervisor import PipelineSupervisor
from swarm.pipeline.driver.schedule import ScoredPart, all_of
from swarm.pipeline.driver.stage_group import GradientNorms, StageGroup
from swarm.pipeline.model_shape import adapter_targets, model_shape
from swarm.pipeline.stage.stage_host import BaseModel
from swarm.pipeline.stage.stage_model import MAX_SHARING
from swarm.policy.base_model import folder_eos_ids, load_tokenizer
from swarm.policy.lineage import compute_lineage
from swarm.policy.logprobs import TokenLogprobs, TokenSequence
from swarm.policy.micro_batch_size import DEFAULT_TOKENS, Extent
from swarm.policy.policy import TextPolicy

LossOf = Callable[[int, TokenLogprobs], Tensor]
"""(micro-batch, log-probs that require grad) → its share of the loss of the batch, a scalar."""
HasEnded = Callable[[int, Sequence[int]], bool]
"""(number of the prompt, answer so far) → whether the answer is complete."""
Choose = Callable[[Tensor, Sequence[int], int], Tensor]
"""(logits [n, V], number [n] of the prompt of each row, step) → token ids [n]."""


class PipelineModel:
    """Computes log-probs, gradients and answers over the stages of a stage group, as a single model would."""

    def __init__(self, stage_group: StageGroup, pad_token_id: int) -> None:
        self._stage_group = stage_group
        self._pad_token_id = pad_token_id

    async def token_logprobs(
        self,
        parts: Sequence[Sequence[TokenSequence]],
        temperature: float = 1.0,
        with_entropy: bool = False,
        *,
        without_adapter: bool = False,
    ) -> list[TokenLogprobs]:
        """As `swarm.policy.logprobs.token_logprobs`, for several micro-batches at once and without gradients.

        `without_adapter` gives the log-probs of the frozen base.
        """
        scored = [self._scored(part, temperature, with_entropy) for part in parts]
        return await self._stage_group.logprobs(scored, without_adapter=without_adapter)

    async def accumulate(
        self,
        parts: Sequence[Sequence[TokenSequence]],
        loss_of: LossOf,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> GradientNorms:
        """Compute the gradient of the summed losses of all parts. The stages store it until the stage group's commit or drop.

        Raises StageLostError and PipelineError; the batch is then dropped.
        """

        def gradient_of(micro_batch: int, result: TokenLogprobs) -> Tensor:
            leaf = result.logprobs.detach().requires_grad_()
            loss = loss_of(micro_batch, TokenLogprobs(leaf, result.mask, result.entropy))
            (gradient,) = torch.autograd.grad(loss, leaf)
            return gradient

        scored = [self._scored(part, temperature, with_entropy) for part in parts]
        return await self._stage_group.accumulate(scored, gradient_of)

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
        """Sample one answer for each prompt, with EOS where it was chosen. Rows leave the batch when they end.

        Prompts are divided among `num_sessions` sessions, by default as many as there are stages, so that all stages work at
        once. Equal prompts of one session are computed once. `has_ended` replaces `eos_token_ids` as the end of an answer.
        Raises StageLostError and PipelineError; all sessions are then ended.
        """
        ended = has_ended or (lambda row, answer: answer[-1] in eos_token_ids)
        count = min(num_sessions or self._stage_group.num_stages, len(prompts))
        by_length = sorted(
            range(len(prompts)), key=lambda i: len(prompts[i])
        )  # similar lengths together need less padding
        share = -(-len(prompts) // max(count, 1))
        chunks = [by_length[i : i + share] for i in range(0, len(prompts), max(share, 1))]
        answers: list[list[int]] = [[] for _ in prompts]
        sessions = [self._stage_group.new_session() for _ in chunks]
        try:
            await all_of(
                self._session(
                    session,
                    prompts,
                    chunk,
                    answers=answers,
                    choose=choose,
                    max_new_tokens=max_new_tokens,
                    has_ended=ended,
                )
                for session, chunk in zip(sessions, chunks, strict=True)
            )
        finally:  # not in the sessions, which a failure of another one may cancel at any point
            await all_of(self._stage_group.end(session) for session in sessions)
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
        logits = await self._stage_group.begin(session, torch.tensor(padded), padding)
        kept: list[int] | None = None  # rows of the session that go on, where these are not all
        if len(distinct) < len(rows):
            kept = [distinct.index(tuple(prompts[row])) for row in rows]
            logits = logits[kept]

        def continued(step: int) -> list[int]:
            """Choose a token for each row; returns the places in `rows` of answers that go on."""
            for row, token in zip(rows, choose(logits, rows, step).tolist(), strict=True):
                answers[row].append(token)
            return [i for i, row in enumerate(rows) if not has_ended(row, answers[row])]

        for step in range(max_new_tokens):
            going = await asyncio.to_thread(continued, step)  # the loop passes on what other sessions wait for
            if not going or step + 1 == max_new_tokens:
                return
            if len(going) < len(rows):
                kept = going if kept is None else [kept[i] for i in going]
                rows = [rows[i] for i in going]
            tokens = torch.tensor([[answers[row][-1]] for row in rows])
            logits, kept = await self._stage_group.extend(session, tokens, kept), None

    def _scored(self, sequences: Sequence[TokenSequence], temperature: float, with_entropy: bool) -> ScoredPart:
        """Build rows of prompt and answer without the last answer token, which predicts nothing.

        Where that saves enough, it is one row in which equal prompts are there once, as in `token_logprobs`.
        """
        if Extent.of(sequences).shares_prompts:
            return self._sharing(sequences, temperature, with_entropy)
        full = [[*prompt, *answer[:-1]] for prompt, answer in sequences]
        longest = max(len(row) for row in full)
        token_ids = torch.tensor([row + [self._pad_token_id] * (longest - len(row)) for row in full])
        starts = tuple(len(prompt) - 1 for prompt, _ in sequences)
        answers = tuple(tuple(answer) for _, answer in sequences)
        return ScoredPart(token_ids, Answers(starts, answers, temperature, with_entropy=with_entropy))

    def _sharing(self, sequences: Sequence[TokenSequence], temperature: float, with_entropy: bool) -> ScoredPart:
        distinct = dict.fromkeys(tuple(prompt) for prompt, _ in sequences)
        prompts = {prompt: number for number, prompt in enumerate(distinct)}
        longest, pad = max(map(len, prompts)), [self._pad_token_id]
        columns = max(1, max(len(answer) for _, answer in sequences) - 1)
        row = [token for prompt in prompts for token in pad * (longest - len(prompt)) + list(prompt)]
        for _, answer in sequences:
            row += [*answer[:-1], *pad * (columns - len(answer) + 1)]
        prompt_of = tuple(prompts[tuple(prompt)] for prompt, _ in sequences)
        shared = SharedPrompts(tuple(longest - len(prompt) for prompt in prompts), prompt_of, longest)
        starts = tuple((number + 1) * longest - 1 for number in prompt_of)
        answers = Answers(starts, tuple(tuple(a) for _, a in sequences), temperature, with_entropy=with_entropy)
        return ScoredPart(torch.tensor([row]), answers, shared)


def greedy(logits: Tensor, rows: Sequence[int], step: int) -> Tensor:
    """Choose the likeliest token of each row."""
    return logits.argmax(-1)


T = TypeVar("T")
Tensors = dict[str, dict[str, torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class PipelinePolicy(TextPolicy):
    """A policy whose weights are in the stages. `PipelineOptimizer` computes gradients; `token_logprobs` gives none."""

    supervisor: PipelineSupervisor
    loop: asyncio.AbstractEventLoop
    """The loop that drives the stages. Methods must be called from other threads."""

    def token_logprobs(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float = 1.0,
        with_entropy: bool = False,
        *,
        without_adapter: bool = False,
    ) -> TokenLogprobs:
        """See `TextPolicy`."""

        async def score(pipeline_model: PipelineModel) -> TokenLogprobs:
            (result,) = await pipeline_model.token_logprobs(
                [sequences], temperature, with_entropy, without_adapter=without_adapter
            )
            return result

        return self.run_on_stages(score)

    def run_on_stages(self, call: Callable[[PipelineModel], Awaitable[T]]) -> T:
        """Return the result of `call`, which must change nothing: it is repeated after a stage was lost and rebuilt."""
        return self.wait_for(self.supervisor.persist(lambda: call(self.pipeline_model)))

    @property
    def pipeline_model(self) -> PipelineModel:
        """The model over the current stage group."""
        return PipelineModel(self.supervisor.stage_group, self.pad_token_id)

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


class PipelineOptimizer:
    """The `PolicyOptimizer` of a pipeline.

    A batch during which a stage is lost is dropped. The error is raised once the stage is rebuilt.
    """

    def __init__(self, config: TrainingSection, policy: PipelinePolicy) -> None:
        self._max_grad_norm = config.max_grad_norm
        self._policy = policy
        self._norm: float | None = None  # of a batch that is neither applied nor dropped

    def accumulate(self, parts: Sequence[Sequence[TokenSequence]], loss_of: LossOf, temperature: float) -> float:
        """See `PolicyOptimizer`."""

        async def work() -> float:
            try:
                gradient = await self._policy.pipeline_model.accumulate(parts, loss_of, temperature, with_entropy=True)
                return gradient.norm
            except StageLostError as lost:
                await self._policy.supervisor.recover(lost)
                raise

        self._norm = self._policy.wait_for(work())
        return self._norm

    def apply(self, lr: float) -> None:
        """See `PolicyOptimizer`."""
        norm, self._norm = self._norm, None
        if not norm:
            raise TrainingError(
                f"a step with advantages and lr > 0 must move the adapter, got no gradient at lr {lr:g}; "
                "check that nothing froze or detached the adapter"
            )
        self._policy.version = self._policy.wait_for(self._policy.supervisor.commit(lr, self._max_grad_norm))

    def drop(self) -> None:
        """See `PolicyOptimizer`."""
        if self._norm is not None:
            self._norm = None
            self._policy.wait_for(self._policy.supervisor.stage_group.drop())

    def adapter_norm(self) -> None:
        """See `PolicyOptimizer`. None, since reading it would cost as much as a checkpoint."""
        return

    def read(self) -> dict[str, torch.Tensor]:
        """See `PolicyOptimizer`. It transfers the moments too, so it costs as much as a checkpoint."""
        return self.state()["adapter"]

    def write(self, weights: Mapping[str, torch.Tensor], turned: Iterable[str] = ()) -> None:
        """See `PolicyOptimizer`. It transfers the moments in both directions."""
        odd = set(turned)

        def change(state: StageState) -> StageState:
            tensors, rest = state
            adapter = {name: weights[name] for name in tensors["adapter"]}
            moments = {key: t for key, t in tensors["optimizer"].items() if key.partition(":")[2] not in odd}
            return {"adapter": adapter, "optimizer": moments}, rest

        self._policy.wait_for(self._policy.supervisor.rewrite(change))

    def state(self) -> Tensors:
        """See `PolicyOptimizer`. The state of a single process, plus `lr_factors` where a rebuilt stage has another one.

        Raises CheckpointError where the adapter is not complete and finite.
        """
        merged: Tensors = {"adapter": {}, "optimizer": {}}
        factors: dict[str, torch.Tensor] = {}
        for tensors, rest in self._policy.wait_for(self._policy.supervisor.states()):
            for kind, group in tensors.items():
                merged[kind] |= group
            if rest["lr_factor"] != 1:
                factors |= {name: torch.tensor(float(rest["lr_factor"])) for name in tensors["adapter"]}
        shapes = {
            name: torch.Size(s)
            for facts in self._policy.supervisor.stage_group.facts
            for name, s in facts.shapes.items()
        }
        check_adapter(
            merged["adapter"], shapes
        )  # checked again, since the next start depends on what is written to disk
        return {**merged, "lr_factors": factors} if factors else merged

    def restore(self, tensors: Tensors, version: int) -> None:
        """See `PolicyOptimizer`."""
        try:
            self._policy.wait_for(self._policy.supervisor.restore(tensors, version))
        except StageLostError:
            raise
        except PipelineError as error:
            raise CheckpointError(f"a checkpoint must fit the pipeline, got: {error}") from None
        self._policy.version = version


def pipeline_policy(
    config: PolicySection,
    base: BaseModel,
    supervisor: PipelineSupervisor,
    loop: asyncio.AbstractEventLoop,
    hash_cache: Any,
    *,
    micro_batch_tokens: int = DEFAULT_TOKENS,
) -> PipelinePolicy:
    """Make the policy from tokenizer, lineage and EOS ids of the base, without weights. Raises PolicyError."""
    tokenizer = load_tokenizer(base.folder)
    lineage = compute_lineage(
        base.folder, tokenizer, config.lora, adapted=adapter_targets(base.folder, config.lora), cache=hash_cache
    )
    return PipelinePolicy(
        tokenizer=tokenizer, config=config, device=torch.device("cpu"), dtype=base.dtype, lineage=lineage,
        base_folder=base.folder, eos_token_ids=folder_eos_ids(base.folder, tokenizer),
        vocab_size=model_shape(base.folder).vocab, supervisor=supervisor, loop=loop,
        micro_batch_tokens=micro_batch_tokens, max_separate_tokens=MAX_SHARING * config.pipeline.max_states,
    )  # fmt: skip
