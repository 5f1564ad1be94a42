"""Waiting for several stages at once, and making one failure of many."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from swarm.errors import PipelineError, StageLostError

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
