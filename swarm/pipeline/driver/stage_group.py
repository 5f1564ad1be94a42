"""The stage group: all stages of one policy, driven by one node.

    accumulate ─ 1F1B over the links ─▶ close the batch: is every stage complete? ─▶ gradient norm over all stages
         │                                                                   │
         └── a stage is lost or refuses ─▶ drop on all others     commit (every stage, once) or drop

Closing comes before committing, so a batch is applied by all stages or by none; a stage that is lost between the two has to
be rebuilt anyway. The driver should host the last stage itself: log-probs and logits then never leave it.

A stage is not trusted: the driver compares each reply with its command. A stage whose answer no honest stage gives is lost,
and `dishonest_stages` names it.
"""

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from swarm.errors import NetworkError, PipelineError, StageLostError, StageRefusedError, StageReplyError
from swarm.pipeline.commands import (
    BatchGradient,
    CloseBatchCommand,
    CommitCommand,
    DecodeCommand,
    ForwardCommand,
    StageFacts,
    StageState,
)
from swarm.pipeline.driver.expected_stage import BatchSizes, Proportions, StateBounds, check_whole_model
from swarm.pipeline.driver.schedule import (
    BatchRun,
    ScoredPart,
    all_of,
    failed_stages,
    first_of,
    one_forward_one_backward,
)
from swarm.pipeline.driver.stage_relay import StageRelay
from swarm.pipeline.stage_link import StageLink
from swarm.policy.logprobs import TokenLogprobs

logger = logging.getLogger(__name__)

_SECOND_CHANCE_S = 0.5
"""Deadline for telling a stage that did not answer just now that a batch or session is over. It may be back already."""
_LARGEST_NORM_RATIO = 1000.0
"""Largest ratio of one stage's gradient norm to that of all others: with more, clipping would scale theirs to nothing."""
MAX_REFUSALS = 3
"""A stage that refuses so many commands of one kind in a row is lost. Fewer may come from a temporary lack of memory."""
T = TypeVar("T")
GradientOf = Callable[[int, TokenLogprobs], Tensor]
"""(micro-batch, its log-probs [B, T]) → gradient [B, T] of the loss of the whole batch with respect to them."""


@dataclass(frozen=True, slots=True)
class StageGroupSettings:
    """How a stage group works."""

    action_timeout_s: float = 120.0
    """A stage that takes longer for one forward or backward pass, or one decoding step, is lost."""
    commit_attempts: int = 3
    """How often the command to apply a closed batch is sent; a stage that has applied it does nothing more."""
    swap_edges: bool = False
    """Every other micro-batch takes the swapped route (CheckFree+). Only for bases that were trained like this from the start."""


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """The gradient norms of a closed batch, before clipping."""

    norm: float
    """Norm over all stages, each parameter counted once; not finite where some gradient is not."""
    stage_norms: tuple[float, ...]


class StageGroup:
    """The stages in order. Call `start` first. It works on one batch at a time, on the driver's event loop."""

    def __init__(
        self, links: Sequence[StageLink], settings: StageGroupSettings, bounds: StateBounds | None = None
    ) -> None:
        """`bounds` limits the weights and moments that stages return; without it, any that have the right shapes pass."""
        self._links = list(links)
        self._settings = settings
        self._bounds = bounds
        self._facts: list[StageFacts] = []
        self._unanswered: set[int] = set()  # stages that did not answer the last command
        self._dishonest: set[int] = set()
        self._proportions = Proportions()
        self._refusals: Counter[tuple[int, str]] = Counter()  # in a row, by stage and kind of command
        self._holders: dict[str, list[int]] = {}
        self._batch = 0
        self._gradients: list[BatchGradient] | None = None
        self._norm = 0.0
        self._sessions = itertools.count(1)
        self.stage_norms: tuple[float, ...] = ()
        """Norm of each stage in the last closed batch with finite gradients, before clipping: the weights of CheckFree."""
        self.version = 0
        self.relay: StageRelay | None = None
        """Passes states through all stages but the last one, where they are on several machines."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self._links)

    @property
    def links(self) -> tuple[StageLink, ...]:
        """The links to the stages, in order."""
        return tuple(self._links)

    @property
    def facts(self) -> tuple[StageFacts, ...]:
        """What each stage reported about itself."""
        return tuple(self._facts)

    @property
    def dishonest_stages(self) -> frozenset[int]:
        """Stages whose machine gave an answer that no honest stage gives."""
        return frozenset(self._dishonest)

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that hold a parameter, for parameters of several stages."""
        return {name: tuple(stages) for name, stages in self._holders.items()}

    async def start(self) -> None:
        """Ask all stages what they hold. Raises StageLostError, and PipelineError unless they form one whole model."""
        self._facts = await all_of(self._described(stage, link) for stage, link in enumerate(self._links))
        check_whole_model(self._facts)
        holders: dict[str, list[int]] = {}
        for stage, facts in enumerate(self._facts):
            for name in facts.shapes:
                holders.setdefault(name, []).append(stage)
        self._holders = {name: stages for name, stages in holders.items() if len(stages) > 1}
        self.version = self._facts[-1].version  # the last stage is the driver's own where it has one
        self._gradients = None

    async def replace(self, stage: int, link: StageLink) -> None:
        """Continue with another machine for `stage`, whose weights are rebuilt and at the version of the group.

        Raises PipelineError, and changes nothing, unless the machine holds the same layers of the same base.
        """
        self._dishonest.discard(stage)
        facts, wanted = await self._described(stage, link), self._facts[stage]
        if (facts.part, facts.content_hash) != (wanted.part, wanted.content_hash):
            raise PipelineError(
                f"stage {stage} must hold {wanted.part} of the base {wanted.content_hash[:16]}, got {facts.part} of "
                f"{facts.content_hash[:16]}; fetch the same model"
            )
        if (facts.shapes, facts.version) != (wanted.shapes, self.version):
            raise PipelineError(
                f"stage {stage} must be at version {self.version}, got {facts.version}; rebuild it first"
            )
        self._links[stage], self._facts[stage] = link, facts
        self._unanswered.discard(stage)
        self._proportions.forget(stage)
        self._refusals = Counter({key: count for key, count in self._refusals.items() if key[0] != stage})
        self._gradients = None

    async def accumulate(self, parts: Sequence[ScoredPart], gradient_of: GradientOf) -> GradientNorms:
        """Send a batch of micro-batches forward and backward; call `commit` or `drop` after it.

        `gradient_of` runs on another thread, one call at a time. Raises StageLostError for lost stages, PipelineError if a
        stage refuses, and whatever `gradient_of` raises. The batch is then dropped on all stages that answer.
        """
        self._batch += 1
        self._gradients = None
        batch = self._batch
        try:
            schedule = one_forward_one_backward(self.num_stages, len(parts), swap_edges=self._settings.swap_edges)
            run = BatchRun(batch, parts, schedule=schedule, links=self._links, call=self._call, gradient_of=gradient_of)
            await run.run()
            gradients = await all_of(self._close_batch(stage, len(parts)) for stage in range(self.num_stages))
            self._norm = self._total_norm(gradients)
        except BaseExceptionGroup as failures:
            raise await self._given_up(batch, first_of(failures)) from None
        except PipelineError as failure:
            raise await self._given_up(batch, failure) from None
        norms = tuple(math.sqrt(one.own_norm_squared) for one in gradients)
        try:
            self._check_norms(norms, run.sizes)
        except StageLostError as failure:
            raise await self._given_up(batch, failure) from None
        self._gradients = gradients
        if all(map(math.isfinite, norms)):
            self.stage_norms = norms
        return GradientNorms(self._norm, norms)

    async def commit(self, *, lr: float, max_grad_norm: float) -> int:
        """Apply the closed batch on all stages and return the new version.

        Raises StageLostError with `applied` for stages that do not confirm: the others have applied it, and the lost ones
        must be rebuilt for the new version. Raises PipelineError without a closed batch or where its norm is not finite.
        """
        gradients, self._gradients = self._gradients, None
        if gradients is None or not self._norm < float("inf"):
            raise PipelineError(f"a batch must be closed and finite to be applied, got norm {self._norm}; drop it")
        scale = min(1.0, max_grad_norm / (self._norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        totals = {name: self._total(name, gradients) for name in self._holders}
        calls: list[Awaitable[int]] = []
        if self._bounds is not None:
            self._bounds.stepped(lr, max_grad_norm)
        for stage in range(self.num_stages):
            own = {name: totals[name] for name, stages in self._holders.items() if stage in stages}
            calls.append(self._commit_on(stage, CommitCommand(self._batch, lr, scale, shared_gradients=own)))
        results = await asyncio.gather(*calls, return_exceptions=True)
        lost = failed_stages(results)
        self.version += 1
        if lost:
            raise StageLostError(
                f"stages {lost} must confirm a batch that the others have applied, got {results[lost[0]]}; rebuild them "
                f"for version {self.version}",
                tuple(lost),
                applied=True,
            )
        return self.version

    async def drop(self) -> None:
        """Drop the batch on all stages. Stages that do not answer forget it when the next batch begins."""
        self._gradients = None
        await self._drop_everywhere(self._batch)

    async def logprobs(self, parts: Sequence[ScoredPart], *, without_adapter: bool = False) -> list[TokenLogprobs]:
        """Compute log-probs [B, T] of each part without gradients, several parts at once. Raises as `accumulate`."""
        places = asyncio.Semaphore(self.num_stages)

        async def one(part: ScoredPart) -> TokenLogprobs:
            async with places:
                whole = ForwardCommand(0, 0, part.token_ids, without_adapter=without_adapter, shared=part.shared)
                states: Tensor | TokenLogprobs = part.token_ids
                first = 0
                if self.relay is not None and self.relay.is_on:
                    states, first = await self.relay.compute(whole), self.num_stages - 1
                for stage, link in list(enumerate(self._links))[first:]:
                    answers = part.answers if stage == self.num_stages - 1 else None
                    command = replace(whole, states=_tensor(states), answers=answers)
                    states = await self._call(stage, "compute", partial(link.forward, command))
                assert isinstance(states, TokenLogprobs), "a link checks that the reply fits the command"
                return states

        return await all_of(one(part) for part in parts)

    def new_session(self) -> int:
        """Return a number for `begin`. Call `end` with it in every case."""
        return next(self._sessions)

    async def begin(self, session: int, token_ids: Tensor, left_padding: tuple[int, ...]) -> Tensor:
        """Begin a session with prompts [B, P] padded on the left; returns logits [B, V] after their last column."""
        return await self._decode(DecodeCommand(session, token_ids, left_padding))

    async def extend(self, session: int, token_ids: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Append one column [B, 1] and return logits [B, V] after it. Row i continues row `rows[i]`, by default row i."""
        return await self._decode(DecodeCommand(session, token_ids, rows=None if rows is None else tuple(rows)))

    async def end(self, session: int) -> None:
        """End a session. Stages that do not answer forget it after some time."""
        calls = [self._call(i, "end", self._brief(i, partial(link.end, session))) for i, link in enumerate(self._links)]
        failed_stages(await asyncio.gather(*calls, return_exceptions=True))

    async def state(self, stage: int) -> StageState:
        """Return weights and optimizer of a stage. Raises StageLostError."""

        async def checked() -> StageState:
            state = await self._links[stage].state()
            if state[1]["policy_version"] != self.version:
                raise StageReplyError(
                    f"the state of stage {stage} must be of version {self.version}, got {state[1]['policy_version']}"
                )
            if self._bounds is not None:
                self._bounds.check(state)
            return state

        return await self._call(stage, "state", checked)

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raises StageReplyError for weights that the steps so far cannot have produced."""
        if self._bounds is not None:
            self._bounds.check(({"adapter": dict(weights), "optimizer": {}}, {}))

    async def restore(self, stage: int, state: StageState) -> None:
        """Write weights and optimizer into a stage; call `start` after the last one. Raises StageLostError, PipelineError."""
        if self._bounds is not None:
            self._bounds.given(state)
        await self._call(stage, "restore", partial(self._links[stage].restore, *state))

    async def recover(self, stage: int, link: StageLink, weights: Mapping[str, Tensor]) -> None:
        """Write weights into the machine behind `link`, which replaces `stage`, and continue with it.

        Raises what the link and `replace` raise.
        """
        moments = await self._shared_moments(stage)
        if self._bounds is not None:
            self._bounds.given(({"adapter": dict(weights), "optimizer": moments}, {}))
        async with asyncio.timeout(self._settings.action_timeout_s):
            await link.recover(weights, self.version, moments)
        await self.replace(stage, link)

    async def _shared_moments(self, stage: int) -> dict[str, Tensor]:
        """Return the optimizer state of parameters that a lost stage shared with others, from the first of these."""
        found: dict[str, Tensor] = {}
        for name, stages in self._holders.items():
            others = [other for other in stages if other != stage]
            if stage in stages:
                tensors, _ = await self.state(others[0])
                found |= {key: value for key, value in tensors["optimizer"].items() if key.partition(":")[2] == name}
        return found

    async def _described(self, stage: int, link: StageLink) -> StageFacts:
        async def checked() -> StageFacts:
            facts = await link.describe()
            if facts.last_batch > self._batch:
                raise StageReplyError(
                    f"stage {stage} must know batches up to {self._batch}, the last one begun, got {facts.last_batch}"
                )
            return facts

        return await self._call(stage, "describe", checked)

    async def _decode(self, command: DecodeCommand) -> Tensor:
        first = 0
        if self.relay is not None and self.relay.is_on:
            command, first = replace(command, states=await self.relay.decode(command)), self.num_stages - 1
        for stage, link in list(enumerate(self._links))[first:]:
            command = replace(command, is_last=stage == self.num_stages - 1)
            command = replace(command, states=await self._call(stage, "decode", partial(link.decode, command)))
        return command.states

    async def _close_batch(self, stage: int, num_micro_batches: int) -> BatchGradient:
        shared = tuple(sorted(name for name, stages in self._holders.items() if stage in stages))
        command = CloseBatchCommand(self._batch, num_micro_batches, shared)
        return await self._call(stage, "settle", partial(self._links[stage].close_batch, command))

    async def _commit_on(self, stage: int, command: CommitCommand) -> int:
        wanted = self.version + 1

        async def checked() -> int:
            version = await self._links[stage].commit(command)
            if version != wanted:
                raise StageReplyError(f"stage {stage} must be at version {wanted} after the batch, got {version}")
            return version

        for attempt in range(self._settings.commit_attempts):
            try:
                return await self._call(stage, "commit", checked)
            except StageLostError:
                if attempt + 1 == self._settings.commit_attempts:
                    raise
        raise PipelineError("commit_attempts must be at least 1; raise it")

    async def _call(self, stage: int, what: str, send: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._settings.action_timeout_s):
                result = await send()
            self._unanswered.discard(stage)
            self._refusals.pop((stage, what), None)
            return result
        except TimeoutError:
            reason = f"no answer within {self._settings.action_timeout_s:g} s"
        except NetworkError as error:
            reason = str(error)
        except StageReplyError as error:
            reason = str(error)
            self._dishonest.add(stage)
        except StageRefusedError as error:
            reason = f"a refusal: {error}"
            self._refusals[stage, what] += 1
            if self._refusals[stage, what] < MAX_REFUSALS:
                raise StageRefusedError(
                    f"stage {stage} must carry out commands, got {reason} (command: {what})"
                ) from None
        self._unanswered.add(stage)
        raise StageLostError(f"stage {stage} must answer to {what}, got {reason}; rebuild it elsewhere", (stage,))

    async def _given_up(self, batch: int, failure: BaseException) -> BaseException:
        """Drop the batch on all stages; returns the error to raise, which names all lost stages."""
        also = await self._drop_everywhere(batch)
        if isinstance(failure, StageLostError):
            lost = tuple(sorted({*failure.stages, *also}))
            return StageLostError(str(failure), lost)
        return failure

    async def _drop_everywhere(self, batch: int) -> list[int]:
        calls = [
            self._call(stage, "drop", self._brief(stage, partial(link.drop, batch)))
            for stage, link in enumerate(self._links)
        ]
        lost = failed_stages(await asyncio.gather(*calls, return_exceptions=True))
        if lost:
            logger.warning(
                "stages %s did not confirm that batch %d is dropped; they forget it when the next one begins",
                lost,
                batch,
            )
        return lost

    def _brief(self, stage: int, send: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        """Return `send`, with a short deadline for a stage that did not answer last: its loss is known already."""
        if stage not in self._unanswered:
            return send

        async def hurried() -> T:
            async with asyncio.timeout(_SECOND_CHANCE_S):
                return await send()

        return hurried

    def _total(self, name: str, gradients: Sequence[BatchGradient]) -> Tensor:
        """Return the gradient of a shared parameter, summed in the order of the stages."""
        return torch.stack([gradients[stage].shared_gradients[name] for stage in self._holders[name]]).sum(0)

    def _total_norm(self, gradients: Sequence[BatchGradient]) -> float:
        shared = sum(self._total(name, gradients).float().norm().double().square().item() for name in self._holders)
        return math.sqrt(sum(one.own_norm_squared for one in gradients) + shared)

    def _check_norms(self, norms: Sequence[float], sizes: BatchSizes) -> None:
        """Check the norms of a closed batch. A batch in which one norm exceeds all others by far is not applied.

        Raises StageLostError for a stage that spoiled several batches in a row. The last stage is the driver's own.
        """
        stage = max(range(len(norms)), key=lambda one: norms[one])
        others = math.sqrt(sum(norm * norm for one, norm in enumerate(norms) if one != stage))
        if others > 0 and norms[stage] > others * _LARGEST_NORM_RATIO:
            self._norm = math.inf
        if math.isfinite(self._norm):
            self._proportions.observe(sizes, norms)
            return
        odd, is_to_go = self._proportions.ruined(sizes, norms)
        cause = "no stage is out of proportion" if odd is None else f"stage {odd} is out of proportion"
        logger.warning("the batch is not applied, with gradient norms of %s: %s", norms, cause)
        if odd is not None and is_to_go and odd < self.num_stages - 1:
            self._dishonest.add(odd)
            self._unanswered.add(odd)
            raise StageLostError(f"stage {odd} spoiled several batches in a row; rebuild it elsewhere", (odd,))


def _tensor(states: Tensor | TokenLogprobs) -> Tensor:
    if isinstance(states, TokenLogprobs):
        raise PipelineError("only the last stage may answer with log-probs, got them earlier; replace that stage")
    return states
