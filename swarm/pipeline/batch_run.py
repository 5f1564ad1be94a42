"""One batch on its way through the crew: every stage works off its list, tensors wait in between.

Each stage has a worker; what an action needs comes from a future that the action before it fills. The first failure
cancels all workers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from swarm.errors import PipelineError, StageReplyError
from swarm.pipeline.orders import Answers, BackwardOrder, ForwardOrder
from swarm.pipeline.proportions import BatchSizes
from swarm.pipeline.schedule import Action, Schedule
from swarm.pipeline.stage_link import StageLink
from swarm.policy.logprobs import TokenLogprobs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """A micro-batch: rows of prompt and answer, padded on the right."""

    token_ids: Tensor  # [B, L]
    answers: Answers


class Call(Protocol):
    """Give an order and wait for the answer, with a deadline; a lost stage becomes StageLostError."""

    def __call__(self, stage: int, what: str, order: Callable[[], Awaitable[T]], /) -> Awaitable[T]: ...


class BatchRun:
    """Forward and backward of all parts by `schedule`."""

    def __init__(
        self,
        batch: int,
        parts: Sequence[ScoredPart],
        schedule: Schedule,
        links: Sequence[StageLink],
        call: Call,
        gradient_of: Callable[[int, TokenLogprobs], Tensor],
    ) -> None:
        self._batch = batch
        self._parts = parts
        self._schedule = schedule
        self._links = links
        self._call = call
        self._gradient_of = gradient_of
        self.sizes = BatchSizes(len(links))
        self._waiting: dict[tuple[Action, int], asyncio.Future[Any]] = {}  # by action and stage that needs it

    async def run(self) -> None:
        """Raises an ExceptionGroup of what went wrong; no action is under way after that."""
        async with asyncio.TaskGroup() as group:
            for stage, actions in enumerate(self._schedule.actions):
                group.create_task(self._work(stage, actions))

    async def _work(self, stage: int, actions: Sequence[Action]) -> None:
        for action in actions:
            station = self._schedule.routes[action.micro_batch].index(stage)
            if action.kind == "forward":
                await self._forward(stage, station, action)
            else:
                await self._backward(stage, station, action)

    async def _forward(self, stage: int, station: int, action: Action) -> None:
        part, route = self._parts[action.micro_batch], self._schedule.routes[action.micro_batch]
        is_last = station == len(route) - 1
        states = part.token_ids if station == 0 else await self._take(action, stage)
        order = ForwardOrder(self._batch, action.micro_batch, states, part.answers if is_last else None)
        result = await self._call(stage, "forward", partial(self._links[stage].forward, order))
        if isinstance(result, TokenLogprobs) != is_last:
            raise PipelineError(
                f"stage {stage} must answer as its place demands, got {type(result).__name__}; replace it"
            )
        if isinstance(result, TokenLogprobs):
            gradient = await asyncio.to_thread(self._gradient_of, action.micro_batch, result)
            self._give(action._replace(kind="backward"), stage, gradient)
        else:
            await asyncio.to_thread(self.sizes.forward, stage, result)
            self._give(action, route[station + 1], result)

    async def _backward(self, stage: int, station: int, action: Action) -> None:
        gradient = await self._take(action, stage)
        order = BackwardOrder(self._batch, action.micro_batch, gradient)
        if station == 0:
            await self._call(stage, "backward", partial(self._links[stage].backward, order))
            await asyncio.to_thread(self.sizes.backward, stage, gradient, None)
            return

        async def passed_on() -> Tensor:
            result = await self._links[stage].backward(order)
            if result is None:
                raise StageReplyError(f"stage {stage} must pass a gradient on, got none")
            return result

        result = await self._call(stage, "backward", passed_on)
        await asyncio.to_thread(self.sizes.backward, stage, gradient, result)
        self._give(action, self._schedule.routes[action.micro_batch][station - 1], result)

    def _place(self, action: Action, stage: int) -> "asyncio.Future[Any]":
        if (action, stage) not in self._waiting:
            self._waiting[action, stage] = asyncio.get_running_loop().create_future()
        return self._waiting[action, stage]

    def _give(self, action: Action, stage: int, tensor: Tensor) -> None:
        self._place(action, stage).set_result(tensor)

    async def _take(self, action: Action, stage: int) -> Tensor:
        tensor = await self._place(action, stage)
        del self._waiting[action, stage]  # taken once; nothing else holds it from here
        return tensor
