"""Which micro-batch a stage works on next: one forward, one backward (1F1B), as a list made before the batch begins.

    stage 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3        at most s − i micro-batches are in flight at stage i of s,
    stage 1      F0 F1 .. B0 F2 B1 F3 B2 .. B3           where GPipe keeps all of them
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3

A micro-batch visits the stages by its *route*; the i-th station of a route lets s − i micro-batches in. The list is made by
playing the batch through with that rule, backward before forward. It cannot lock up: of the micro-batches in
flight that wait to go forward, the one that is furthest finds its next station empty.

Waiting for several stages at once, and making one failure of many.

One batch on its way through the crew: every stage works off its list, tensors wait in between.

Each stage has a worker; what an action needs comes from a future that the action before it fills. The first failure
cancels all workers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from torch import Tensor

from swarm.errors import PipelineError, StageLostError, StageReplyError
from swarm.pipeline.commands import Answers, BackwardCommand, ForwardCommand
from swarm.pipeline.driver.expected_stage import BatchSizes
from swarm.pipeline.stage_link import StageLink
from swarm.policy.logprobs import TokenLogprobs

T = TypeVar("T")


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order. The first failure cancels the rest and is raised, lost stages of all failures together."""

    async def wait(call: Awaitable[T]) -> T:
        return await call

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait(call)) for call in calls]
    except BaseExceptionGroup as failures:
        raise first_of(failures) from None
    return [task.result() for task in tasks]


def failed_stages(results: Sequence[object]) -> list[int]:
    """Stages that failed as stages may; anything else is a bug and raised."""
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, PipelineError):
            raise result
    return [stage for stage, result in enumerate(results) if isinstance(result, PipelineError)]


def first_of(failures: BaseExceptionGroup) -> BaseException:
    """One failure for all: a lost stage before a refusal (others may refuse because of it), with all lost stages in it."""
    lost = [failure for failure in failures.exceptions if isinstance(failure, StageLostError)]
    if lost:
        return StageLostError(str(lost[0]), tuple(sorted({stage for failure in lost for stage in failure.stages})))
    return failures.exceptions[0]


Route = tuple[int, ...]
"""Stages in the order a micro-batch visits them."""


class Action(NamedTuple):
    """One thing that a stage does."""

    kind: Literal["forward", "backward"]
    micro_batch: int


class Schedule(NamedTuple):
    """The plan of one batch."""

    routes: tuple[Route, ...]  # by micro-batch
    actions: tuple[tuple[Action, ...], ...]  # by stage, in order
    num_ticks: int
    """Length where every action takes one tick."""

    @property
    def bubble_fraction(self) -> float:
        """Share of the stages' time that is idle where every action takes one tick."""
        busy = sum(len(actions) for actions in self.actions)
        return 1 - busy / (self.num_ticks * len(self.actions))


def straight_route(num_stages: int) -> Route:
    """First to last."""
    return tuple(range(num_stages))


def swapped_route(num_stages: int) -> Route:
    """The two edge stages changed places with their neighbours (CheckFree+, 2506.15461); needs four stages.

    With three, the middle one would be the twin of both.
    """
    if num_stages < 4:
        raise PipelineError(f"edge stages can swap in a crew of at least 4 stages, got {num_stages}; switch it off")
    return (1, 0, *range(2, num_stages - 2), num_stages - 1, num_stages - 2)


def one_forward_one_backward(num_stages: int, num_micro_batches: int, *, swap_edges: bool = False) -> Schedule:
    """The plan for one batch; with `swap_edges` every other micro-batch takes the swapped route.

    Raises PipelineError for an empty batch or crew.
    """
    if num_stages < 1 or num_micro_batches < 1:
        raise PipelineError(
            f"a batch must have a stage and a micro-batch, got {num_stages} and {num_micro_batches}; send more"
        )
    kinds = (straight_route(num_stages), swapped_route(num_stages) if swap_edges else straight_route(num_stages))
    return _played([kinds[micro_batch % 2] for micro_batch in range(num_micro_batches)], num_stages)


def ideal_bubble_fraction(num_stages: int, num_micro_batches: int) -> float:
    """(s − 1) / (m + s − 1): what 1F1B leaves idle where all actions take equally long."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


class _Play:
    """A batch played through in ticks."""

    def __init__(self, routes: Sequence[Route], num_stages: int) -> None:
        self.routes = routes
        self.num_stages = num_stages
        self.forth = [0] * len(routes)  # stations that a micro-batch has passed
        self.back = [0] * len(routes)  # and passed again on its way back
        self.held = [0] * num_stages  # micro-batches in flight at or behind each station

    def tick(self) -> list[Action | None]:
        """What each stage does next; what a tick makes is ready in the one after."""
        before = (list(self.forth), list(self.back))
        return [self._take(stage, *before) for stage in range(self.num_stages)]

    def _take(self, stage: int, forth: list[int], back: list[int]) -> Action | None:
        last = self.num_stages - 1
        for micro_batch, route in enumerate(self.routes):
            station = last - back[micro_batch]
            if forth[micro_batch] > last and station >= 0 and route[station] == stage:
                self.back[micro_batch] += 1
                self.held[station] -= 1
                return Action("backward", micro_batch)
        for micro_batch, route in enumerate(self.routes):
            station = forth[micro_batch]
            has_place = station <= last and self.held[station] < self.num_stages - station
            if has_place and route[station] == stage:
                self.forth[micro_batch] += 1
                self.held[station] += 1
                return Action("forward", micro_batch)
        return None


def _played(routes: Sequence[Route], num_stages: int) -> Schedule:
    play = _Play(routes, num_stages)
    actions: list[list[Action]] = [[] for _ in range(num_stages)]
    num_ticks = 0
    while min(play.back) < num_stages:
        for stage, action in enumerate(play.tick()):
            if action is not None:
                actions[stage].append(action)
        num_ticks += 1
    return Schedule(tuple(routes), tuple(tuple(one) for one in actions), num_ticks)


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """A micro-batch: rows of prompt and answer, padded on the right."""

    token_ids: Tensor  # [B, L]
    answers: Answers


class Call(Protocol):
    """Give an order and wait for the answer, with a deadline; a lost stage becomes StageLostError."""

    def __call__(self, stage: int, what: str, command: Callable[[], Awaitable[T]], /) -> Awaitable[T]: ...


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
        command = ForwardCommand(self._batch, action.micro_batch, states, part.answers if is_last else None)
        result = await self._call(stage, "forward", partial(self._links[stage].forward, command))
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
        command = BackwardCommand(self._batch, action.micro_batch, gradient)
        if station == 0:
            await self._call(stage, "backward", partial(self._links[stage].backward, command))
            await asyncio.to_thread(self.sizes.backward, stage, gradient, None)
            return

        async def passed_on() -> Tensor:
            result = await self._links[stage].backward(command)
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
