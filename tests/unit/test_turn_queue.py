"""Turns at an event loop on a virtual clock: when each comes, and in which order."""

import asyncio
from collections.abc import Awaitable, Callable

from swarm.limits.turn_queue import FairRateLimiter
from swarm.network.memory.virtual_clock import run

Turns = list[tuple[str, float]]


def turns_of(scenario: Callable[[FairRateLimiter, Callable[[str, int], None]], Awaitable[None]]) -> Turns:
    """(address, second) of each turn that `scenario` got, at eight turns per second and two at once."""
    turns: Turns = []

    async def main() -> None:
        limiter, now = FairRateLimiter(per_second=8.0, burst=2), asyncio.get_running_loop().time
        await asyncio.sleep(128)

        def ask(address: str, who: int) -> None:
            limiter.take(address, who, lambda: turns.append((address, now() - 128)))

        await scenario(limiter, ask)

    run(main())
    return turns


def test_a_burst_comes_at_once_and_the_rest_at_the_rate() -> None:
    async def scenario(limiter: FairRateLimiter, ask: Callable[[str, int], None]) -> None:
        for who in range(4):
            ask("a", who)
        await asyncio.sleep(0.4375)
        ask("a", 4)  # one and a half turns have come back since the last one
        ask("a", 5)
        await asyncio.sleep(1)

    assert turns_of(scenario) == [("a", 0), ("a", 0), ("a", 0.125), ("a", 0.25), ("a", 0.4375), ("a", 0.5)]


def test_a_limiter_rests_once_nobody_waits() -> None:
    async def scenario(limiter: FairRateLimiter, ask: Callable[[str, int], None]) -> None:
        for who in range(3):
            ask("a", who)
        limiter.leave("a", 2)
        await asyncio.sleep(1)
        assert limiter._timer is None
        ask("a", 3)

    assert turns_of(scenario) == [("a", 0), ("a", 0), ("a", 1)]


def test_addresses_take_turns_and_a_turn_given_up_is_not_taken() -> None:
    async def scenario(limiter: FairRateLimiter, ask: Callable[[str, int], None]) -> None:
        for who in range(6):
            ask("a", who)
        ask("b", 0)
        ask("c", 0)
        limiter.leave("c", 0)
        limiter.leave("c", 1)  # was not waiting
        await asyncio.sleep(1)

    assert [address for address, _ in turns_of(scenario)] == ["a", "a", "a", "b", "a", "a", "a"]
