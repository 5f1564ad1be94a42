"""A fair rate limiter for an event loop: actions above the rate wait without blocking other work.

Addresses take turns: one with a hundred waiting connections is served as often as one with a single connection.
"""

import asyncio
from collections.abc import Callable, Hashable

from swarm.limits.token_bucket import TokenBucket


class FairRateLimiter:
    """Runs actions at once while the burst lasts, then one address after the other. For one event loop."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._turns = TokenBucket(per_second, burst, now=0.0)
        self._waiting: dict[str, dict[Hashable, Callable[[], None]]] = {}
        """Waiting actions by address. The next address comes first, and of each address the oldest action."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self, address: str, who: Hashable, action: Callable[[], None]) -> None:
        """Run the action now, or when its turn comes. `who` waits for one turn at a time."""
        assert who not in self._waiting.get(address, ()), "one turn at a time"
        if not self._waiting and self._turns.try_take(1, _now()):
            action()
        else:
            self._waiting.setdefault(address, {})[who] = action
            self._wait()

    def leave(self, address: str, who: Hashable) -> None:
        """Give up a turn that has not come yet."""
        waiting = self._waiting.get(address, {})
        waiting.pop(who, None)
        if not waiting:
            self._waiting.pop(address, None)

    def _wait(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._turns.wait_s(_now(), 1), self._next)

    def _next(self) -> None:
        self._timer = None
        action: Callable[[], None] | None = None
        if self._waiting and self._turns.try_take(1, _now()):
            address = next(iter(self._waiting))
            waiting = self._waiting.pop(address)
            action = waiting.pop(next(iter(waiting)))
            if waiting:
                self._waiting[address] = waiting
        self._wait()
        if action is not None:
            action()


def _now() -> float:
    return asyncio.get_running_loop().time()
