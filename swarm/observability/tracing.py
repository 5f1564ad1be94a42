"""Spans with the start, the duration and a few facts of operations of a node, for one tracer per process.

    @traced("publish", lambda _, self, groups: {"groups": len(groups)})
    async def _announce(self, groups): …

Traced code does not depend on the tracer. Without a tracer, a traced function costs one additional check.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Facts = Mapping[str, str | bool | int | float]


class Tracer(Protocol):
    def span(self, name: str) -> AbstractContextManager[Callable[[Facts], Any]]:
        """Spans begun inside it on the same thread or task are its children. What it gives takes facts; errors pass through."""
        ...


_tracer: Tracer | None = None


def watch(tracer: Tracer | None) -> None:
    """Report every span that begins from now on to `tracer`; None: to nobody."""
    global _tracer
    _tracer = tracer


def traced(name: str, describe: Callable[..., Facts] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a span of every call. `describe(result, *arguments)` gives its facts where the call did not raise."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        call: Any = function
        follow: Any = _follow_async if inspect.iscoroutinefunction(function) else _follow

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if _tracer is None:
                return call(*args, **kwargs)
            return follow(_tracer, name, describe, function, args, kwargs)

        return called

    return decorate


def _follow(tracer: Tracer, name: str, describe: Any, function: Any, args: Any, kwargs: Any) -> Any:
    with tracer.span(name) as tell:
        result = function(*args, **kwargs)
        if describe is not None:
            tell(describe(result, *args))
        return result


async def _follow_async(tracer: Tracer, name: str, describe: Any, function: Any, args: Any, kwargs: Any) -> Any:
    with tracer.span(name) as tell:
        result = await function(*args, **kwargs)
        if describe is not None:
            tell(describe(result, *args))
        return result
