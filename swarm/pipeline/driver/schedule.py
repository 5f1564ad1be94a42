"""The order in which the stages work on the micro-batches of a batch (1F1B), and the run of a batch in this order.

    stage 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3        at most s − i micro-batches are in flight at stage i of s,
    stage 1      F0 F1 .. B0 F2 B1 F3 B2 .. B3           where GPipe stores all of them
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3

A micro-batch visits the stages along its *route*; station i of a route admits s − i micro-batches. The schedule is made
before the batch begins, by simulating it with this rule and with backward before forward. It cannot deadlock: of the
micro-batches in flight that wait to go forward, the one furthest along finds its next station free.

`BatchRun` has one worker for each stage. What an action needs comes from a future that the previous action fills. The first
failure cancels all workers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from torch import Tensor

from swarm.errors import PipelineError, StageLostError, StageReplyError
from swarm.pipeline.commands import Answers, BackwardCommand, ForwardCommand, SharedPrompts
from swarm.pipeline.driver.expected_stage import BatchSizes
from swarm.pipeline.stage_link import StageLink
from swarm.policy.logprobs import TokenLogprobs

T = TypeVar("T")


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results in order. The first failure cancels the rest; the error raised names all lost stages."""

    async def wait(call: Awaitable[T]) -> T:
        return await call

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait(call)) for call in calls]
    except BaseExceptionGroup as failures:
        raise first_of(failures) from None
    return [task.result() for task in tasks]


def failed_stages(results: Sequence[object]) -> list[int]:
    """Return the stages whose result is a PipelineError. Any other exception is a bug and is raised."""
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, PipelineError):
            raise result
    return [stage for stage, result in enumerate(results) if isinstance(result, PipelineError)]


def first_of(failures: BaseExceptionGroup) -> BaseException:
    """Choose one failure: a lost stage, with all lost stages in it, before a refusal, which it may have caused."""
    lost = [failure for failure in failures.exceptions if isinstance(failure, StageLostError)]
    if lost:
        return StageLostError(str(lost[0]), tuple(sorted({stage for failure in lost for stage in failure.stages})))
    return failures.exceptions[0]


Route = tuple[int, ...]
"""Stages in the order in which a micro-batch visits them."""


class Action(NamedTuple):
    """One forward or backward pass of a micro-batch in one stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int


class Schedule(NamedTuple):
    """The plan of one batch."""

    routes: tuple[Route, ...]  # by micro-batch
    actions: tuple[tuple[Action, ...], ...]  # by stage, in order


def straight_route(num_stages: int) -> Route:
    """The route from first to last stage."""
    return tuple(range(num_stages))


def swapped_route(num_stages: int) -> Route:
    """The route in which both edge stages swap places with their neighbours (CheckFree+, 2506.15461).

    It needs four stages: of three, the middle one would replace both edges.
    """
    if num_stages < 4:
        raise PipelineError(f"swapping edge stages needs at least 4 stages, got {num_stages}; switch it off")
    return (1, 0, *range(2, num_stages - 2), num_stages - 1, num_stages - 2)


def one_forward_one_backward(num_stages: int, num_micro_batches: int, *, swap_edges: bool = False) -> Schedule:
    """Plan one batch; with `swap_edges` every other micro-batch takes the swapped route.

    Raises PipelineError without stages or micro-batches.
    """
    if num_stages < 1 or num_micro_batches < 1:
        raise PipelineError(
            f"a batch must have a stage and a micro-batch, got {num_stages} and {num_micro_batches}; send more"
        )
    kinds = (straight_route(num_stages), swapped_route(num_stages) if swap_edges else straight_route(num_stages))
    return _simulated([kinds[micro_batch % 2] for micro_batch in range(num_micro_batches)], num_stages)


class _BatchSimulation:
    """Simulates a batch in ticks."""

    def __init__(self, routes: Sequence[Route], num_stages: int) -> None:
        self.routes = routes
        self.num_stages = num_stages
        self.passed_forward = [0] * len(routes)  # stations that each micro-batch has passed forward
        self.passed_backward = [0] * len(routes)  # stations that it has passed backward
        self.in_flight = [0] * num_stages  # micro-batches in flight at or behind each station

    def tick(self) -> list[Action | None]:
        """Return the next action of each stage. What one tick produces is ready in the next."""
        before = (list(self.passed_forward), list(self.passed_backward))
        return [self._take(stage, *before) for stage in range(self.num_stages)]

    def _take(self, stage: int, passed_forward: list[int], passed_backward: list[int]) -> Action | None:
        last = self.num_stages - 1
        for micro_batch, route in enumerate(self.routes):
            station = last - passed_backward[micro_batch]
            if passed_forward[micro_batch] > last and station >= 0 and route[station] == stage:
                self.passed_backward[micro_batch] += 1
                self.in_flight[station] -= 1
                return Action("backward", micro_batch)
        for micro_batch, route in enumerate(self.routes):
            station = passed_forward[micro_batch]
            has_place = station <= last and self.in_flight[station] < self.num_stages - station
            if has_place and route[station] == stage:
                self.passed_forward[micro_batch] += 1
                self.in_flight[station] += 1
                return Action("forward", micro_batch)
        return None


def _simulated(routes: Sequence[Route], num_stages: int) -> Schedule:
    simulation = _BatchSimulation(routes, num_stages)
    actions: list[list[Action]] = [[] for _ in range(num_stages)]
    while min(simulation.passed_backward) < num_stages:
        for stage, action in enumerate(simulation.tick()):
            if action is not None:
                actions[stage].append(action)
    return Schedule(tuple(routes), tuple(tuple(one) for one in actions))


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """A micro-batch: rows of prompt and answer, padded on the right."""

    token_ids: Tensor  # [B, L]
    answers: Answers
    shared: SharedPrompts | None = None
    """Set where `token_ids` is one row of prompts and answers."""


class Call(Protocol):
    """Sends a command to a stage and waits for the reply until a deadline. A lost stage raises StageLostError."""

    def __call__(self, stage: int, what: str, send: Callable[[], Awaitable[T]], /) -> Awaitable[T]: ...


class BatchRun:
    """Runs all parts of one batch forward and backward by `schedule`."""

    def __init__(
        self,
        batch: int,
        parts: Sequence[ScoredPart],
        *,
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
        """Run the batch. Raises an ExceptionGroup of all failures; no action is running after that."""
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
        answers = part.answers if is_last else None
        command = ForwardCommand(self._batch, action.micro_batch, states, answers=answers, shared=part.shared)
        result = await self._call(stage, "forward", partial(self._links[stage].forward, command))
        if isinstance(result, TokenLogprobs) != is_last:
            raise PipelineError(
                f"stage {stage} must return what its place in the route demands, got {type(result).__name__}; replace it"
            )
        if isinstance(result, TokenLogprobs):
            gradient = await asyncio.to_thread(self._gradient_of, action.micro_batch, result)
            self._set(action._replace(kind="backward"), stage, gradient)
        else:
            await asyncio.to_thread(self.sizes.forward, stage, result)
            self._set(action, route[station + 1], result)

    async def _backward(self, stage: int, station: int, action: Action) -> None:
        gradient = await self._take(action, stage)
        command = BackwardCommand(self._batch, action.micro_batch, gradient)
        if station == 0:
            await self._call(stage, "backward", partial(self._links[stage].backward, command))
            await asyncio.to_thread(self.sizes.backward, stage, gradient, None)
            return

        async def gradient_before() -> Tensor:
            result = await self._links[stage].backward(command)
            if result is None:
                raise StageReplyError(f"stage {stage} must pass a gradient on, got none")
            return result

        result = await self._call(stage, "backward", gradient_before)
        await asyncio.to_thread(self.sizes.backward, stage, gradient, result)
        self._set(action, self._schedule.routes[action.micro_batch][station - 1], result)

    def _place(self, action: Action, stage: int) -> "asyncio.Future[Any]":
        if (action, stage) not in self._waiting:
            self._waiting[action, stage] = asyncio.get_running_loop().create_future()
        return self._waiting[action, stage]

    def _set(self, action: Action, stage: int, tensor: Tensor) -> None:
        self._place(action, stage).set_result(tensor)

    async def _take(self, action: Action, stage: int) -> Tensor:
        tensor = await self._place(action, stage)
        del self._waiting[action, stage]  # read once; releases the tensor
        return tensor
